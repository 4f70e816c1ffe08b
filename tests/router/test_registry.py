"""Workers come and go with a DNS name."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from epd.errors import UnavailableError
from epd.rpc.channels import ChannelPool
from epd.rpc.discovery import Discovery
from epd.rpc.request_context import new_id
from epd.telemetry.setup import start_telemetry
from epd.v1 import worker_pb2
from services.router.registry import WorkerRegistry
from services.router.worker_maker import BreakerBounds, CacheView, WorkerMaker
from services.router.worker_watch import WatchTimings, WorkerWatch
from services.router.workers import Role
from tests.router.fake_workers import FakeDecode
from tests.router.harness import eventually, running

#: Bound on states that must come, on a machine that is busy elsewhere.
WITHIN_S = 15.0
TIMINGS = WatchTimings(silence_s=2.0, backoff_s=0.02, max_backoff_s=0.1, leave_grace_s=5.0)


class Names:
    """A name server that the test changes."""

    def __init__(self) -> None:
        self.records: set[str] = set()

    async def resolve(self, host: str) -> frozenset[str]:
        assert host == "decode"
        return frozenset(self.records)


MAKER = WorkerMaker(
    CacheView(events=True, blocks=100, bridge_s=1.0, assumed_s=1.0), BreakerBounds(5, 1.0)
)


@contextlib.asynccontextmanager
async def registry(names: Names, port: int, digest: str = "") -> AsyncIterator[WorkerRegistry]:
    telemetry = start_telemetry("router", new_id())
    pool = ChannelPool(telemetry)
    discovery = Discovery([f"dns:decode:{port}"], period_s=0.02, resolve=names.resolve)
    found = WorkerRegistry(
        {Role.DECODE: discovery},
        {Role.DECODE: pool},
        TIMINGS,
        MAKER,
        model_name="m",
        model_digest=digest,
    )
    task = asyncio.create_task(found.run())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait([task])
        await pool.close_all()
        telemetry.close()


async def test_how_images_are_read_is_known_while_no_encoder_is_there() -> None:
    """Else a request that comes meanwhile meets the next encoder with a digest that is not its."""
    reader = FakeDecode(host="127.0.0.1")
    await reader.start()
    port = int(reader.address.rpartition(":")[2])
    other = FakeDecode(host="127.0.0.2", port=port, processor_digest="", max_images=0)
    await other.start()
    names = Names()
    names.records = {"127.0.0.2"}
    async with registry(names, port) as found:
        assert await found.wait_until(lambda: len(found.available(Role.DECODE)) == 1, WITHIN_S)
        assert found.model().processor_digest == ""
        names.records = {"127.0.0.1", "127.0.0.2"}
        assert await found.wait_until(lambda: len(found.available(Role.DECODE)) == 2, WITHIN_S)
        assert found.model().processor_digest == "p1"
        names.records = {"127.0.0.2"}
        assert await found.wait_until(lambda: len(found.available(Role.DECODE)) == 1, WITHIN_S)
        assert found.model().processor_digest == "p1"
    await asyncio.gather(reader.stop(), other.stop())


async def two_workers() -> tuple[FakeDecode, FakeDecode]:
    """At two addresses and one port, as the tasks of a scaled service."""
    first = FakeDecode(host="127.0.0.1")
    await first.start()
    second = FakeDecode(host="127.0.0.2", port=int(first.address.rpartition(":")[2]))
    await second.start()
    return first, second


async def test_every_address_of_a_name_is_a_worker_and_leaves_with_its_record() -> None:
    first, second = await two_workers()
    names = Names()
    port = int(first.address.rpartition(":")[2])
    async with registry(names, port) as found:
        with pytest.raises(UnavailableError):
            found.model()
        names.records = {"127.0.0.1"}
        assert await found.wait_until(lambda: len(found.available(Role.DECODE)) == 1, WITHIN_S)
        (worker,) = found.available(Role.DECODE)
        names.records = {"127.0.0.1", "127.0.0.2"}
        assert await found.wait_until(lambda: len(found.available(Role.DECODE)) == 2, WITHIN_S)
        names.records = {"127.0.0.2"}
        assert await found.wait_until(lambda: len(found.available(Role.DECODE)) == 1, WITHIN_S)
        assert found.available(Role.DECODE)[0].info.instance_id == second.instance_id
        # What runs there may still finish: leaving the set is not dying.
        assert not worker.gone.is_set()
        assert [state.address for state in found.states()] == [second.address]
    await first.stop()
    await second.stop()


async def test_a_silent_worker_is_gone_for_good_and_comes_back_as_another() -> None:
    worker = FakeDecode()
    names = Names()
    names.records = {"127.0.0.1"}
    async with running(worker):
        port = int(worker.address.rpartition(":")[2])
        async with registry(names, port) as found:
            assert await found.wait_until(lambda: bool(found.available(Role.DECODE)), WITHIN_S)
            (seen,) = found.available(Role.DECODE)
            worker.alive.clear()
            await asyncio.wait_for(seen.gone.wait(), WITHIN_S)
            assert not found.available(Role.DECODE)
            assert "silent" in found.states()[0].reason
            worker.alive.set()
            assert await found.wait_until(lambda: bool(found.available(Role.DECODE)), WITHIN_S)
            assert found.available(Role.DECODE)[0] is not seen
            assert seen.gone.is_set()


async def test_a_process_of_another_role_is_not_used() -> None:
    worker = FakeDecode()
    worker.info.role = worker_pb2.WORKER_ROLE_PREFILL
    names = Names()
    names.records = {"127.0.0.1"}
    await worker.start()
    async with registry(names, int(worker.address.rpartition(":")[2])) as found:
        await eventually(lambda: any("no decode" in state.reason for state in found.states()))
        assert not found.available(Role.DECODE)
    await worker.stop()


async def test_the_first_model_found_is_served_until_none_of_its_workers_is_left() -> None:
    first, second = await two_workers()
    second.info.model_digest = "d2"
    names = Names()
    names.records = {"127.0.0.1"}
    async with registry(names, int(first.address.rpartition(":")[2])) as found:
        assert await found.wait_until(lambda: bool(found.available(Role.DECODE)), WITHIN_S)
        names.records = {"127.0.0.1", "127.0.0.2"}
        await eventually(lambda: any("d2" in state.reason for state in found.states()))
        assert found.model().digest == "d1"
        await first.stop()
        assert await found.wait_until(lambda: found.model_digest == "d2", WITHIN_S)
        assert found.model().digest == "d2"
    await second.stop()


@pytest.mark.parametrize("turns", range(6))
async def test_a_watch_that_is_cancelled_while_its_worker_dies_ends(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet that stops at once, as containers do, is just that."""
    worker = FakeDecode()
    dying = asyncio.Event()

    async def dies(watch: WorkerWatch) -> None:
        watch._serving.set()
        await dying.wait()
        raise UnavailableError("gone")

    monkeypatch.setattr(WorkerWatch, "_watch_health", dies)
    telemetry = start_telemetry("router", new_id())
    pool = ChannelPool(telemetry)
    async with running(worker):
        watch = WorkerWatch(
            Role.DECODE,
            worker.address,
            pool.get(worker.address),
            TIMINGS,
            MAKER,
            lambda met: "",
            lambda: None,
        )
        task = asyncio.create_task(watch.run())
        await eventually(lambda: bool(watch.worker))
        dying.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=WITHIN_S)
        assert task.cancelled()
        await pool.close_all()
    telemetry.close()
