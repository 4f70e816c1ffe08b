"""The way that is not preferred is tried now and then, at a bounded price."""

import pytest

from services.router.disaggregation import Costs, Hysteresis, Way
from services.router.exploration import Exploration

SIZE = 8
HALF_LIFE_S = 60.0


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def requests_until_a_try(exploration: Exploration, costs: Costs, most: int = 10_000) -> int:
    return next(n for n in range(1, most) if exploration.due(Way.REMOTE, costs, SIZE))


@pytest.mark.parametrize("dearer", [0.9, 1.0, 3.0, 50.0])
def test_tries_cost_a_bounded_part_of_what_all_wait(dearer: float) -> None:
    exploration = Exploration(every=32, clock=Clock())
    costs = Costs(remote_s=0.01, local_s=0.01 * dearer)
    waits = [
        costs.of(Way.LOCAL if exploration.due(Way.REMOTE, costs, SIZE) else Way.REMOTE)
        for _ in range(5000)
    ]
    assert max(waits) == costs.local_s or dearer < 1
    assert sum(waits) <= 5000 * costs.remote_s * (1 + 1 / 32)


def test_a_wild_measurement_keeps_a_way_untried_for_minutes_only() -> None:
    clock = Clock()
    exploration = Exploration(every=32, half_life_s=HALF_LIFE_S, clock=clock)
    wild = Costs(remote_s=0.001, local_s=10.0)
    tried = 0
    for _ in range(600):  # ten minutes of four requests a second
        for _ in range(4):
            tried += exploration.due(Way.REMOTE, wild, SIZE)
        clock.now_s += 1.0
    assert 1 <= tried <= 2


def test_sizes_are_tried_by_themselves_and_a_way_that_is_taken_needs_no_try() -> None:
    exploration = Exploration(every=32, clock=Clock())
    costs = Costs(1.0, 2.0)
    first = requests_until_a_try(exploration, costs)
    for _ in range(first - 1):
        assert not exploration.due(Way.REMOTE, costs, SIZE)
        assert not exploration.due(Way.REMOTE, costs, SIZE + 1)
    assert not exploration.due(Way.LOCAL, costs, SIZE)
    assert requests_until_a_try(exploration, costs) == first
    assert exploration.due(Way.REMOTE, costs, SIZE + 1)


def test_a_wrong_first_measurement_of_the_better_way_is_overcome() -> None:
    """Believed: 20 times as dear. True: half the price. Each try is measured."""
    hysteresis, exploration = Hysteresis(), Exploration(every=32, clock=Clock())
    believed_s, true_s, remote_s = 0.2, 0.005, 0.01
    for _ in range(20_000):
        costs = Costs(remote_s, believed_s)
        way = hysteresis.choose(costs, SIZE)
        if way is Way.LOCAL:
            return
        if exploration.due(way, costs, SIZE):
            believed_s += 0.5 * (true_s - believed_s)
    pytest.fail("the better way is never preferred")
