"""Where a prompt is computed: the cost of either way, hysteresis, and what is told of it."""

import asyncio
from pathlib import Path

import pytest

from epd.telemetry import semconv
from epd.telemetry.prometheus import scrape
from services.router.disaggregation import Costs, Hysteresis, Way, local_cost_s, remote_cost_s
from tests.router.conftest import Fleet
from tests.router.fake_workers import FakeDecode, FakePrefill
from tests.router.harness import answer_of, load_is_read, request, router, running
from tests.router.test_telemetry import record, spans_by_name
from tests.support.answer import collect


def test_a_computation_on_the_decode_worker_costs_every_running_answer_as_much() -> None:
    assert local_cost_s(waiting_s=0.5, compute_s=0.1, running=0) == pytest.approx(0.6)
    assert local_cost_s(waiting_s=0.0, compute_s=0.1, running=9) == pytest.approx(1.0)
    assert remote_cost_s(ttft_s=0.3, transfer_s=0.2) == pytest.approx(0.5)


def test_sides_change_only_for_a_clear_gain_and_per_size_of_prompt() -> None:
    choice = Hysteresis(margin=0.2)
    near = [Costs(1.0, 0.9), Costs(1.0, 1.1)] * 5
    assert {choice.choose(costs, 100) for costs in near} == {Way.REMOTE}
    assert choice.choose(Costs(1.0, 0.7), 100) is Way.LOCAL
    assert {choice.choose(costs, 100) for costs in near} == {Way.LOCAL}
    assert choice.choose(Costs(1.0, 0.9), 1000) is Way.REMOTE
    assert choice.choose(Costs(0.7, 1.0), 100) is Way.REMOTE


@pytest.mark.parametrize(
    ("mode", "running_answers", "way"),
    [("auto", 0, Way.LOCAL), ("auto", 50, Way.REMOTE), ("always", 0, Way.REMOTE)],
)
async def test_an_idle_decode_worker_prefills_by_itself_and_a_busy_one_is_spared(
    model: Path, mode: str, running_answers: int, way: Way
) -> None:
    prefill = FakePrefill()
    decode = FakeDecode(prefill.fabric, unified=True)
    decode.load.running_requests = running_answers
    workers = [prefill, decode]
    for worker in workers:
        worker.info.accepts_images = False
    settings = {"disaggregation_mode": mode, "metrics_port": "0"}
    async with running(*workers), router(model, workers, **settings) as served:
        exporter = record(served)
        await load_is_read(decode)
        answer = await collect(served.stub.Generate(request("a prompt", seed=3)))
        assert answer.token_ids == answer_of(3, 8)
        attributes = dict((await spans_by_name(exporter))[f"chat {model.name}"].attributes or {})
        scraped = await asyncio.to_thread(scrape, served.telemetry.metrics_address)
    assert prefill.calls["Prefill"] == (way is Way.REMOTE)
    if mode == "auto":
        assert attributes[semconv.EPD_ROUTE_WAY] == way.value
        local, remote = (
            attributes[semconv.EPD_ROUTE_COST_LOCAL_S],
            attributes[semconv.EPD_ROUTE_COST_REMOTE_S],
        )
        assert (local < remote) == (way is Way.LOCAL)  # type: ignore[operator]
        assert scraped.total("epd_route_decision_total", way=way.value) == 1
        assert scraped.total("epd_route_predicted_cost_seconds_total", way="local") > 0


async def test_images_go_to_the_encoders_that_all_share(model: Path, fleet: Fleet) -> None:
    decode = FakeDecode(fleet.fabric, unified=True)
    workers = [fleet.encoder, fleet.prefill, decode]
    async with running(*workers), router(model, workers) as served:
        await collect(served.stub.Generate(request("look", [b"image"])))
    assert fleet.encoder.calls["Encode"] == 1
    assert fleet.prefill.calls["Prefill"] == 1


async def test_what_a_lost_local_worker_began_goes_on_elsewhere(model: Path) -> None:
    prefill = FakePrefill()
    unified = FakeDecode(prefill.fabric, unified=True)
    apart = FakeDecode(prefill.fabric)
    unified.die_at = 4
    workers = [prefill, unified, apart]
    for worker in workers:
        worker.info.accepts_images = False
    async with running(*workers), router(model, workers) as served:
        answer = await collect(served.stub.Generate(request(seed=5, max_tokens=12)))
    assert answer.token_ids == answer_of(5, 12)
    assert answer.completion.attempt_count == 2


async def test_a_way_is_not_overlooked_because_its_worker_answers_late_at_the_start(
    model: Path,
) -> None:
    prefill = FakePrefill()
    decode = FakeDecode(prefill.fabric, unified=True)
    workers = [prefill, decode]
    for worker in workers:
        worker.info.accepts_images = False
    prefill.alive.clear()  # it does not say who it is, as while it is starved
    asyncio.get_running_loop().call_later(0.5, prefill.alive.set)
    async with running(*workers), router(model, workers, metrics_port="0") as served:
        await collect(served.stub.Generate(request(seed=1)))
        scraped = await asyncio.to_thread(scrape, served.telemetry.metrics_address)
    assert scraped.total("epd_route_decision_total") == 1


async def test_the_start_does_not_wait_for_a_worker_that_is_away(model: Path) -> None:
    away = FakePrefill()
    decode = FakeDecode(away.fabric, unified=True)
    decode.info.accepts_images = False
    async with running(away):
        pass  # its address is free again
    settings = {"worker_wait_s": "60"}
    async with (
        asyncio.timeout(30),
        running(decode),
        router(model, [away, decode], **settings) as it,
    ):
        answer = await collect(it.stub.Generate(request(seed=1)))
    assert answer.token_ids == answer_of(1, 8)
