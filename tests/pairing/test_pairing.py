"""Both ends of the pair stream against each other over a real gRPC connection."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import psutil
import pytest

from epd.engine.kv_layout import KvLayout
from epd.errors import LayoutMismatchError, NotFoundError, UnavailableError
from epd.rpc.discovery import Discovery, Member
from epd.rpc.status import abort
from epd.transfer.base import AgentDescriptor
from epd.v1 import decode_pb2, decode_pb2_grpc
from epd.wire.kv_layout import layout_to_proto
from epd.wire.transfer import agent_to_proto
from services.decode import pairing
from services.prefill import peer_link
from services.prefill.config import PairingConfig
from services.prefill.decode_peers import DecodePeers
from tests.support.kept_port import kept_port

LAYOUT = KvLayout(
    model_digest="aa", layer_count=2, kv_head_count=2, head_dim=8, dtype="float32", block_size=16
)


def agent(instance_id: str, transport: str = "local") -> AgentDescriptor:
    return AgentDescriptor(instance_id, f"name.{instance_id}", transport, b"")


class DecodeEnd(decode_pb2_grpc.DecodeServiceServicer):
    """A decode worker that only pairs, and keeps a log of who came and went."""

    def __init__(
        self, instance_id: str, layout: KvLayout, silence_s: float, transports: Sequence[str]
    ) -> None:
        self.log: list[str] = []
        self.silent = False
        agents = [agent(instance_id, transport) for transport in transports]
        terms = pairing.PairingTerms(agents, layout, 0.02, silence_s, max_reserves=4)
        self.pairings = pairing.Pairings(terms, self._join, self._leave, self.reserve)

    async def reserve(self, instance_id: str, _: decode_pb2.Reserve) -> decode_pb2.Reserved:
        raise AssertionError(f"{instance_id} reserves nothing in these tests")

    async def _join(self, peer: AgentDescriptor) -> None:
        self.log.append(f"+{peer.instance_id}")

    async def _leave(self, peer: AgentDescriptor) -> None:
        self.log.append(f"-{peer.instance_id}")

    async def Pair(self, _: object, context: pairing.PairContext) -> None:
        try:
            await self.pairings.serve(context)
        except (LayoutMismatchError, UnavailableError) as error:
            await abort(context, error, "")


@asynccontextmanager
async def decode_end(
    instance_id: str,
    *,
    port: int = 0,
    layout: KvLayout = LAYOUT,
    silence_s: float = 20.0,
    transports: Sequence[str] = ("local",),
) -> AsyncIterator[tuple[int, DecodeEnd]]:
    end = DecodeEnd(instance_id, layout, silence_s, transports)
    server = grpc.aio.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(end, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port, end
    finally:
        await server.stop(0)


class PrefillEnd:
    """A prefill worker that only pairs."""

    def __init__(
        self,
        decodes: str,
        *,
        heartbeat_s: float = 0.02,
        silence_s: float = 20.0,
        backoff_s: float = 0.02,
        pair_wait_s: float = 60.0,
        discovery: Discovery | None = None,
    ) -> None:
        self.log: list[str] = []
        self.channels: dict[str, grpc.aio.Channel] = {}
        config = PairingConfig(
            decodes=(),
            pair_heartbeat_s=heartbeat_s,
            pair_silence_s=silence_s,
            pair_backoff_s=backoff_s,
            pair_max_backoff_s=5 * backoff_s,
        )
        self._terms = peer_link.PairingTerms([agent("p1")], LAYOUT, config)
        discovery = discovery or Discovery([decodes] if decodes else [])
        self.peers = DecodePeers(discovery, self._link, pair_wait_s, self._close)

    def _link(self, address: str) -> peer_link.PeerLink:
        channel = grpc.aio.insecure_channel(address)
        self.channels[address] = channel
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        return peer_link.PeerLink(address, stub, self._terms, self._join, self._leave)

    async def _close(self, address: str) -> None:
        await self.channels.pop(address).close(None)

    async def _join(self, peer: peer_link.DecodePeer) -> None:
        self.log.append(f"+{peer.instance_id}")

    async def _leave(self, peer: peer_link.DecodePeer) -> None:
        self.log.append(f"-{peer.instance_id}")

    async def __aenter__(self) -> "PrefillEnd":
        self._task = asyncio.create_task(self.peers.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for channel in self.channels.values():
            await channel.close(None)


async def until(log: list[str], wanted: str) -> None:
    async with asyncio.timeout(30):
        while wanted not in log:
            await asyncio.sleep(0.01)


async def test_a_member_is_paired_ahead_of_traffic() -> None:
    async with decode_end("d1") as (port, end):
        async with PrefillEnd(f"127.0.0.1:{port}") as prefill:
            peer = await prefill.peers.find(f"127.0.0.1:{port}", "d1")
            assert peer.target.layout == LAYOUT
            assert end.pairings.peer("p1") == agent("p1")
            await asyncio.sleep(0.2)
            assert (prefill.log, end.log) == (["+d1"], ["+p1"])
        await until(end.log, "-p1")


async def test_a_worker_whose_pairing_fails_in_an_unforeseen_way_costs_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is told once, tried again, and paired when it can be."""
    broken = True

    class Prefill(PrefillEnd):
        async def _join(self, peer: peer_link.DecodePeer) -> None:
            await super()._join(peer)
            if peer.instance_id == "bad" and broken:
                raise ValueError("what is that")

    async with decode_end("bad") as (bad, _), decode_end("good") as (good, _):
        addresses = [f"127.0.0.1:{port}" for port in (bad, good)]
        async with Prefill("", discovery=Discovery(addresses), pair_wait_s=0.05) as prefill:
            async with asyncio.timeout(60):
                while prefill.log.count("-bad") < 3:
                    await asyncio.sleep(0.01)
                await until(prefill.log, "+good")
                with pytest.raises(UnavailableError, match="what is that") as caught:
                    await prefill.peers.find(addresses[0], "bad")
                assert caught.value.reason == "PAIRING_FAILED"
                assert not prefill._task.done()
                assert "-good" not in prefill.log
                told = [one for one in caplog.records if "what is that" in one.getMessage()]
                assert len(told) == 1
                assert told[0].exc_info
                broken = False
                while any(link.peer is None for link in prefill.peers.links()):
                    await asyncio.sleep(0.01)


async def test_an_address_outside_the_discovery_set_is_never_dialled() -> None:
    async with decode_end("d1") as (port, end), PrefillEnd("", pair_wait_s=0.5) as prefill:
        with pytest.raises(NotFoundError) as refusal:
            await prefill.peers.find(f"127.0.0.1:{port}", "d1")
        assert refusal.value.reason == "NOT_A_MEMBER"
        assert end.log == []


async def test_a_process_restarted_at_its_address_is_a_new_peer_five_times() -> None:
    with kept_port() as port:
        async with PrefillEnd(f"127.0.0.1:{port}") as prefill:
            expected: list[str] = []
            for instance in ("d1", "d2", "d3", "d4", "d5"):
                async with decode_end(instance, port=port):
                    peer = await prefill.peers.find(f"127.0.0.1:{port}", instance)
                    assert peer.instance_id == instance
                    if instance != "d1":
                        with pytest.raises(NotFoundError) as refusal:
                            await prefill.peers.find(f"127.0.0.1:{port}", "d1")
                        assert refusal.value.reason == "EARLIER_INSTANCE"
                await until(prefill.log, f"-{instance}")
                expected += [f"+{instance}", f"-{instance}"]
            assert prefill.log == expected


@pytest.mark.parametrize(
    ("field", "here", "there"),
    [
        ("block_size", 32, 16),
        ("dtype", "bfloat16", "float32"),
        ("model_digest", "bb", "aa"),
        ("layer_count", 3, 2),
        ("kv_head_count", 4, 2),  # F22: another degree of tensor parallelism
        ("head_dim", 16, 8),
    ],
)
async def test_a_layout_mismatch_is_refused_at_first_contact_naming_both_values(
    field: str, here: object, there: object
) -> None:
    other = dataclasses.replace(LAYOUT, **{field: here})  # type: ignore[arg-type]
    async with (
        decode_end("d1", layout=other) as (port, end),
        PrefillEnd(f"127.0.0.1:{port}") as prefill,
    ):
        with pytest.raises(LayoutMismatchError, match=f"{field}: {here} here, {there} there"):
            await prefill.peers.find(f"127.0.0.1:{port}", "d1")
        assert (prefill.log, end.log) == ([], [])


async def test_a_pair_without_a_common_transport_is_refused_naming_both_lists() -> None:
    async with (
        decode_end("d1", transports=("collective", "mooncake")) as (port, end),
        PrefillEnd(f"127.0.0.1:{port}") as prefill,
    ):
        with pytest.raises(LayoutMismatchError, match=r"local on .*, collective, mooncake") as no:
            await prefill.peers.find(f"127.0.0.1:{port}", "d1")
        assert no.value.reason == "TRANSPORT_MISMATCH"
        assert (prefill.log, end.log) == ([], [])


async def test_each_side_of_a_pair_connects_over_the_transport_that_both_have() -> None:
    async with (
        decode_end("d1", transports=("nixl", "mooncake", "local")) as (port, end),
        PrefillEnd(f"127.0.0.1:{port}") as prefill,
    ):
        peer = await prefill.peers.find(f"127.0.0.1:{port}", "d1")
        assert peer.target.agent.transport == "local"
        assert end.pairings.peer("p1").transport == "local"


async def test_a_silent_prefill_is_taken_for_gone_by_decode() -> None:
    async with (
        decode_end("d1", silence_s=2.0) as (port, end),
        # It does not pair again before anybody has looked.
        PrefillEnd(f"127.0.0.1:{port}", heartbeat_s=60.0, backoff_s=60.0) as prefill,
    ):
        await prefill.peers.find(f"127.0.0.1:{port}", "d1")
        await until(end.log, "-p1")
        with pytest.raises(NotFoundError):
            end.pairings.peer("p1")
        await until(prefill.log, "-d1")


async def test_a_prefill_that_pairs_again_replaces_its_former_stream() -> None:
    async with decode_end("d1", silence_s=30.0) as (port, end):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Pair()
            hello = decode_pb2.PairRequest()
            async with PrefillEnd(f"127.0.0.1:{port}") as prefill:
                await prefill.peers.find(f"127.0.0.1:{port}", "d1")
                hello.agents.append(agent_to_proto(agent("p1")))
                hello.kv_layout.CopyFrom(layout_to_proto(LAYOUT))
                await call.write(hello)
                answer = await call.read()
                assert isinstance(answer, decode_pb2.PairResponse)
                await until(prefill.log, "-d1")
            call.cancel()
        await until(end.log[2:], "+p1")
        assert end.log[:3] == ["+p1", "-p1", "+p1"]


class Changing(Discovery):
    """A set that a test changes."""

    def __init__(self) -> None:
        super().__init__([])
        self.changes: asyncio.Queue[Member] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[Member]:
        while True:
            yield await self.changes.get()


async def test_f24_descriptors_and_channels_grow_with_live_members_only() -> None:
    discovery = Changing()
    own = psutil.Process()
    early = 0
    async with PrefillEnd("", discovery=discovery) as prefill:
        for number in range(40):
            async with decode_end(f"d{number}") as (port, _):
                address = f"127.0.0.1:{port}"
                discovery.changes.put_nowait(Member(address, joined=True))
                await prefill.peers.find(address, f"d{number}")
                assert list(prefill.channels) == [address]
                discovery.changes.put_nowait(Member(address, joined=False))
                await until(prefill.log, f"-d{number}")
                async with asyncio.timeout(30):
                    while prefill.channels:
                        await asyncio.sleep(0.01)
            if number < 20:
                early = max(early, own.num_fds())
        assert prefill.peers.links() == ()
        async with asyncio.timeout(60):  # gRPC closes what it does not need in its own time
            while own.num_fds() > early + 3:
                await asyncio.sleep(0.05)
