"""What a decode worker must be told is kept until it knows."""

from epd.handover.control import PushTarget
from epd.handover.settlements import Settlements
from epd.transfer.base import AgentDescriptor
from tests.handover.sides import SHAPE


def target(name, control=None):
    return PushTarget(AgentDescriptor(name, name, "nixl", b""), SHAPE, control)


def test_due_until_done():
    settlements = Settlements(10)
    there = target("d")
    settlements.add(there, "a")
    settlements.add(there, "b")
    assert settlements.due() == [(there, ["a", "b"])]
    settlements.done(there, ["a"])
    assert settlements.due() == [(there, ["b"])]
    settlements.done(there, ["b"])
    assert settlements.due() == []
    assert len(settlements) == 0


def test_a_lost_connection_pauses_delivery_and_forgets_nothing():
    settlements = Settlements(10)
    settlements.add(target("d"), "before")
    settlements.lost(target("d"))
    settlements.add(target("d"), "after")
    assert settlements.due() == []
    again = target("d", control=object())
    settlements.connected(again)
    assert settlements.due() == [(again, ["before", "after"])]


def test_what_is_through_later_only_is_told_later_wherever_the_connection_is_then():
    clock = [100.0]
    settlements = Settlements(10, clock=lambda: clock[0])
    there = target("d")
    settlements.add(there, "later", in_s=30)
    settlements.add(there, "now")
    settlements.lost(there)
    settlements.connected(there)
    assert settlements.due() == [(there, ["now"])]
    assert settlements.owed(there, ["later", "now"]) == ["now"]
    settlements.done(there, ["now"])
    assert (settlements.due(), len(settlements)) == ([], 1)
    clock[0] += 30
    assert settlements.due() == [(there, ["later"])]
    assert settlements.owed(there, ["later"]) == ["later"]


def test_another_process_start_is_told_nothing_of_the_old_ones_transfers():
    settlements = Settlements(10)
    settlements.add(target("d"), "a")
    settlements.lost(target("d"))
    settlements.connected(target("d again"))
    assert settlements.due() == []


def test_memory_is_bounded_per_process_and_in_lost_processes():
    settlements = Settlements(limit=3, max_lost=2)
    for number in range(5):
        settlements.add(target("d"), str(number))
    assert settlements.due()[0][1] == ["2", "3", "4"]
    for name in ("x", "y", "z"):
        settlements.add(target(name), "a")
        settlements.lost(target(name))
    settlements.connected(target("x"))
    settlements.connected(target("z"))
    assert [one.instance_id for one, _ in settlements.due()] == ["d", "z"]
