"""A table of transfer peers holds one process per address and never two at once."""

from concurrent.futures import Future

import pytest

from epd.errors import TransferFailedError, UnavailableError
from epd.handover.peers import PeerTable
from epd.transfer.base import AgentDescriptor


class RecordingAgent:
    """Notes the order of calls."""

    def __init__(self):
        self.calls = []
        self.error = None

    def connect(self, peer):
        return self._note("connect", peer)

    def reconnect(self, peer):
        return self._note("reconnect", peer)

    def _note(self, call, peer):
        self.calls.append((call, peer.agent_name))
        done: Future[None] = Future()
        if self.error:
            done.set_exception(self.error)
        else:
            done.set_result(None)
        return done

    def disconnect(self, agent_name):
        self.calls.append(("disconnect", agent_name))


def process(name):
    return AgentDescriptor(name, name, "nixl", b"")


@pytest.fixture
def agent():
    return RecordingAgent()


async def use(table, address, name):
    async with table.use(address, process(name)) as agent_name:
        assert agent_name == name


async def test_a_restarted_process_replaces_the_old_one_which_goes_first(agent):
    """F16, F17."""
    table = PeerTable(agent)
    for name in ("a1", "a1", "a2"):
        await use(table, "a:1", name)
    assert agent.calls == [("connect", "a1"), ("disconnect", "a1"), ("connect", "a2")]


async def test_least_recently_used_go_beyond_the_limit_but_never_one_in_use(agent):
    """F24."""
    table = PeerTable(agent, limit=2)
    async with table.use("a:1", process("a")):
        await use(table, "b:1", "b")
        await use(table, "c:1", "c")
        assert ("disconnect", "b") in agent.calls
        async with table.use("c:1", process("c")):
            with pytest.raises(UnavailableError):
                await use(table, "d:1", "d")
    assert ("disconnect", "a") not in agent.calls
    assert len(table) == 2


async def test_a_suspect_connection_is_made_anew_before_its_next_use_though_others_use_it(agent):
    """Under load there are always others; the agent waits for their READs."""
    table = PeerTable(agent)
    async with table.use("a:1", process("a")):
        table.suspect("a:1")
        await use(table, "a:1", "a")
        await use(table, "a:1", "a")
    await use(table, "a:1", "a")
    assert agent.calls == [("connect", "a"), ("reconnect", "a")]


async def test_a_connection_that_could_not_be_made_anew_stays_suspect(agent):
    table = PeerTable(agent)
    await use(table, "a:1", "a")
    table.suspect("a:1")
    agent.error = TransferFailedError("refused")
    with pytest.raises(TransferFailedError):
        await use(table, "a:1", "a")
    agent.error = None
    await use(table, "a:1", "a")
    await use(table, "a:1", "a")
    assert agent.calls == [("connect", "a"), ("reconnect", "a"), ("reconnect", "a")]


async def test_a_failed_connect_is_tried_again_by_the_next_use(agent):
    table = PeerTable(agent)
    agent.error = TransferFailedError("refused")
    with pytest.raises(TransferFailedError):
        await use(table, "a:1", "a")
    agent.error = None
    await use(table, "a:1", "a")
