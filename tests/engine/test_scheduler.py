"""The scheduler alone, without a model: bounds, fairness and accounts under random load."""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.engine.block_pool import BlockPool
from epd.engine.engine_config import EngineConfig
from epd.engine.image_gate import ImageGate
from epd.engine.kv_arrival import KvArrival
from epd.engine.requests import EngineRequest, PromptImage, RequestMode, SamplingParams
from epd.engine.scheduler import Scheduler, StepPlan
from epd.engine.sequence import Sequence, SequenceState
from epd.errors import InvalidRequestError

CONFIG = EngineConfig(block_size=4, num_blocks=32, max_running=4, token_budget=12)


def sequence(name: str, length: int, mode: RequestMode = RequestMode.FULL) -> Sequence:
    tokens = [ord(name[0])] * length  # names of one initial share their prefix
    return Sequence(EngineRequest(name, tokens, SamplingParams(), mode), arrived_ns=0)


def arrived(name: str, length: int, pool: BlockPool) -> Sequence:
    blocks = pool.allocate(-(-length // pool.block_size))
    assert blocks is not None
    made = EngineRequest(
        name,
        [ord(name[0])] * length,
        SamplingParams(),
        RequestMode.PREFILLED,
        block_ids=tuple(blocks),
        first_token=1,
    )
    return Sequence(made, arrived_ns=0)


def finish_step(scheduler: Scheduler, plan: StepPlan) -> None:
    for run in plan.runs:
        scheduler.advance(run)
        if run.end == len(run.sequence.token_ids):
            run.sequence.token_ids.append(1)
            if not run.sequence.grows:
                scheduler.end(run.sequence)


def make(**changes: Any) -> tuple[Scheduler, BlockPool]:
    config = dataclasses.replace(CONFIG, **changes)
    pool = BlockPool(config.num_blocks, config.block_size, config.prefix_cache)
    return Scheduler(pool, config), pool


def lengths(plan: StepPlan) -> dict[str, int]:
    return {run.sequence.request_id: run.end - run.start for run in plan.runs}


def test_a_long_prompt_is_cut_at_block_borders_and_decode_goes_first() -> None:
    scheduler, _ = make()
    scheduler.add(sequence("short", 3))
    scheduler.add(sequence("long", 30))
    first = scheduler.schedule()
    assert lengths(first) == {"short": 3, "long": 8}, "9 tokens are left, 8 are whole blocks"
    finish_step(scheduler, first)
    second = scheduler.schedule()
    assert lengths(second) == {"short": 1, "long": 8}
    assert second.runs[0].sequence.request_id == "short"


def test_a_prompt_that_lacks_images_takes_only_steps_that_no_other_wants() -> None:
    scheduler, _ = make(num_blocks=64)
    image = PromptImage(40, 4, b"i" * 32)
    gate = ImageGate((image,), {0})
    early = EngineRequest(
        "early", [ord("e")] * 48, SamplingParams(), RequestMode.PREFILL_ONLY, images=(image,)
    )
    scheduler.add(Sequence(dataclasses.replace(early, gate=gate), arrived_ns=0))
    steps: list[dict[str, int]] = []

    def step() -> None:
        steps.append(lengths(plan := scheduler.schedule()))
        finish_step(scheduler, plan)

    step()
    scheduler.add(sequence("text", 30, RequestMode.PREFILL_ONLY))
    for _ in range(5):
        step()
    assert steps == [
        {"early": 12},
        {"text": 12},
        {"text": 12},
        {"text": 6},
        {"early": 12},
        {"early": 12},
    ]
    scheduler.add(sequence("other", 30, RequestMode.PREFILL_ONLY))
    gate.open(0)
    step()
    assert steps[-1] == {"early": 12}, "with its images it has the place that it came at"


def test_admission_is_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    scheduler, pool = make(num_blocks=8, token_budget=64)
    held = pool.allocate(4)
    assert held is not None
    scheduler.add(sequence("big", 20))
    scheduler.add(sequence("small", 2))
    assert scheduler.schedule().runs == []
    pool.free(held)
    assert list(lengths(scheduler.schedule())) == ["big", "small"]


def test_headroom_is_left_for_what_runs() -> None:
    scheduler, pool = make(num_blocks=4, headroom_blocks=1)
    scheduler.add(sequence("first", 8))
    scheduler.add(sequence("second", 5))
    finish_step(scheduler, plan := scheduler.schedule())
    assert [s.request_id for s in plan.admitted] == ["first"]
    assert pool.num_free == 2, "two blocks would do for the second but not leave one"


def test_the_youngest_loses_its_blocks_and_the_oldest_never() -> None:
    scheduler, pool = make(num_blocks=6, headroom_blocks=0, prefix_cache=False)
    old, young = sequence("old", 8), sequence("young", 12)
    scheduler.add(old)
    scheduler.add(young)
    preempted: list[Sequence] = []
    for _ in range(14):
        plan = scheduler.schedule()
        preempted += plan.preempted
        finish_step(scheduler, plan)
    assert preempted == [young]
    assert young.state is SequenceState.ENDED
    assert len(old.token_ids) > 16
    pool.check_integrity()


def test_the_oldest_waits_where_others_hold_the_memory() -> None:
    scheduler, pool = make(num_blocks=4, token_budget=16)
    old = sequence("old", 8)
    scheduler.add(old)
    finish_step(scheduler, scheduler.schedule())
    reserved = pool.allocate(2)
    assert reserved is not None
    plan = scheduler.schedule()
    assert (plan.runs, plan.preempted) == ([], [])
    pool.free(reserved)
    assert lengths(scheduler.schedule()) == {"old": 1}


def test_arrived_requests_join_before_the_queue_and_are_preempted_while_they_wait() -> None:
    scheduler, pool = make(num_blocks=4, max_running=1, token_budget=16)
    scheduler.add(first := arrived("a", 8, pool))
    scheduler.add(second := arrived("b", 8, pool))
    plan = scheduler.schedule()
    assert plan.admitted == [first]
    assert plan.preempted == [second], "the first needs a third block for its next token"
    assert lengths(plan) == {"a": 1}


def arriving(name: str, length: int, pool: BlockPool, written: int) -> Sequence:
    """A layer takes a second to come and ``written`` of eight are there."""
    clock = [0]
    arrival = KvArrival(8, lambda: clock[0])
    for layer in range(written):
        clock[0] += 10**9
        arrival.note(range(layer, layer + 1))
    arrival.expect(1)
    request = dataclasses.replace(arrived(name, length, pool).request, arrival=arrival)
    return Sequence(request, arrived_ns=0)


def test_who_may_have_to_wait_for_its_kv_begins_early_only_when_alone() -> None:
    scheduler, pool = make()
    for _ in range(2):
        scheduler.chunk_limit.observe(1, 0, 4.2)
    for name, written in (("waits", 4), ("here", 8)):
        scheduler.add(arriving(name, 6, pool, written))
    for name in ("here", "waits"):
        plan = scheduler.schedule()
        assert [run.sequence.request_id for run in plan.early] == [name]
        plan.early[0].sequence.early = False  # tried
    assert not scheduler.schedule().early


def test_a_known_prefix_is_computed_once_but_for_the_last_token() -> None:
    scheduler, pool = make()
    first, second = sequence("x", 8), sequence("x", 8)
    scheduler.add(first)
    finish_step(scheduler, scheduler.schedule())
    scheduler.end(first)
    scheduler.add(second)
    run = scheduler.schedule().runs[0]
    assert (run.start, run.end) == (4, 8)
    assert second.cached_len == 4
    assert (scheduler.prefix_cache_queries, scheduler.prefix_cache_hits) == (16, 4)
    scheduler.end(second)
    assert pool.num_free == pool.num_blocks


def test_a_failed_admission_gives_the_matched_prefix_back() -> None:
    scheduler, pool = make(num_blocks=4)
    scheduler.add(first := sequence("x", 8))
    finish_step(scheduler, scheduler.schedule())
    scheduler.end(first)
    held = pool.allocate(2)
    scheduler.add(sequence("x", 16))
    assert scheduler.schedule().runs == []
    assert held is not None
    pool.free(held)
    assert pool.num_free == 4


def steps_until_computed(
    scheduler: Scheduler, awaited: Sequence, arrivals: Iterator[Sequence]
) -> int:
    """Steps until a prompt is computed while another one arrives before each of them."""
    for step in range(1, 1000):
        scheduler.add(next(arrivals))
        plan = scheduler.schedule()
        assert sum(lengths(plan).values()) <= CONFIG.token_budget
        finish_step(scheduler, plan)
        for run in plan.runs:
            scheduler.release(run.sequence)
        if awaited.computed_len >= awaited.prompt_len:
            return step
    raise AssertionError("starved")


def prompts_of(length: int) -> Iterator[Sequence]:
    for number in itertools.count():
        yield sequence(f"{number} is new", length, RequestMode.PREFILL_ONLY)


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    """Half of each step of 12 tokens is the long one's: 4 in whole blocks, beside any load."""
    scheduler, pool = make(num_blocks=64, prefix_cache=False)
    long = sequence("long", 120, RequestMode.PREFILL_ONLY)
    scheduler.add(long)
    arrivals = prompts_of(6)
    for _ in range(40):  # more than it leaves room for
        scheduler.add(next(arrivals))
    assert steps_until_computed(scheduler, long, arrivals) <= 120 // 4
    pool.check_integrity()


@pytest.mark.parametrize("length", [40, 120])
def test_a_stream_of_long_prompts_does_not_starve_a_short_one(length: int) -> None:
    """It overtakes those that wait, in the half of the step that the oldest leaves."""
    scheduler, pool = make(num_blocks=400, max_running=8, prefix_cache=False)
    arrivals = prompts_of(length)
    for _ in range(3):
        scheduler.add(next(arrivals))
        finish_step(scheduler, scheduler.schedule())
    short = sequence("short", 5, RequestMode.PREFILL_ONLY)
    scheduler.add(short)
    assert steps_until_computed(scheduler, short, arrivals) <= 2
    pool.check_integrity()


def test_a_short_prompt_does_not_sit_out_a_long_one() -> None:
    scheduler, _ = make(num_blocks=200, prefix_cache=False)
    long, short = (sequence(n, s, RequestMode.PREFILL_ONLY) for n, s in (("l", 600), ("s", 5)))
    scheduler.add(long)
    finish_step(scheduler, scheduler.schedule())
    scheduler.add(short)
    plan = scheduler.schedule()
    assert lengths(plan) == {"s": 5, "l": 4}
    finish_step(scheduler, plan)
    assert lengths(scheduler.schedule()) == {"l": 12}, "alone again it has the whole step"


def test_a_prompt_of_several_steps_does_not_sit_out_a_far_longer_one() -> None:
    """With half of each step, 4 tokens in whole blocks, and those of the other half go on."""
    scheduler, pool = make(num_blocks=400, prefix_cache=False)
    long, short = (sequence(n, s, RequestMode.PREFILL_ONLY) for n, s in (("l", 1200), ("s", 40)))
    scheduler.add(long)
    finish_step(scheduler, scheduler.schedule())
    scheduler.add(short)
    for _ in range(10):
        plan = scheduler.schedule()
        assert lengths(plan)["l"] >= 4
        assert sum(lengths(plan).values()) <= CONFIG.token_budget
        finish_step(scheduler, plan)
    assert short.computed_len == 40
    pool.check_integrity()


def test_a_long_prompt_that_has_begun_beside_the_oldest_takes_only_what_that_leaves() -> None:
    scheduler, _ = make(num_blocks=400, token_budget=15, prefix_cache=False)
    first, second = (sequence(n, 400, RequestMode.PREFILL_ONLY) for n in "ab")
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(20):
        finish_step(scheduler, plan := scheduler.schedule())
        assert lengths(plan)["a"] == 12
    assert second.computed_len < first.computed_len // 2


def test_long_prompts_of_one_prefix_follow_each_other_and_compute_it_once() -> None:
    scheduler, _ = make(num_blocks=200)
    prompts = [sequence(f"same {number}", 100, RequestMode.PREFILL_ONLY) for number in range(3)]
    for one in prompts:
        scheduler.add(one)
    computed = 0
    while any(one.computed_len < one.prompt_len for one in prompts):
        plan = scheduler.schedule()
        computed += sum(lengths(plan).values())
        finish_step(scheduler, plan)
    assert computed < 100 + 2 * 12


def test_who_overtakes_takes_no_memory_that_the_head_of_the_queue_needs() -> None:
    """30 blocks: the running prompt has 20, the head needs 8, so 2 are left for two overtakers."""
    scheduler, pool = make(num_blocks=30, headroom_blocks=0, max_running=8, prefix_cache=False)
    running, head, *short = (
        sequence(name, length, RequestMode.PREFILL_ONLY)
        for name, length in (("r", 80), ("head", 32), ("x", 2), ("y", 2), ("z", 2))
    )
    scheduler.add(running)
    finish_step(scheduler, scheduler.schedule())
    for one in (head, *short):
        scheduler.add(one)
    finish_step(scheduler, plan := scheduler.schedule())
    assert plan.admitted == short[:2]
    assert head.state is SequenceState.WAITING
    assert pool.num_free == 8


def test_running_requests_get_a_token_in_every_step_of_a_long_prompt() -> None:
    """Unified: decode waits for a chunk at most, never for a prompt."""
    scheduler, pool = make(num_blocks=200, prefix_cache=False)
    decoding = [sequence(name, 3) for name in ("a", "b")]
    for one in decoding:
        scheduler.add(one)
    finish_step(scheduler, scheduler.schedule())
    scheduler.add(long := sequence("long", 300))
    steps = 0
    while long.computed_len < long.prompt_len:
        plan = scheduler.schedule()
        found = lengths(plan)
        assert (found["a"], found["b"]) == (1, 1)
        assert sum(found.values()) <= CONFIG.token_budget
        finish_step(scheduler, plan)
        steps += 1
    assert steps == -(-300 // 8), "8 of the 10 tokens that decode leaves are whole blocks"
    pool.check_integrity()


@pytest.mark.parametrize(
    "changes", [{"token_budget": 4}, {"block_size": 0}, {"num_blocks": 0}, {"max_running": 0}]
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        dataclasses.replace(CONFIG, **changes).validate()


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_random_load_keeps_every_promise(seed: int) -> None:
    rng = random.Random(seed)
    scheduler, pool = make(num_blocks=rng.randint(6, 20), prefix_cache=rng.random() < 0.5)
    live: list[Sequence] = []
    for number in range(40):
        kind = rng.random()
        length = rng.randint(1, 20)
        if kind < 0.3:
            live.append(sequence(rng.choice("xyz") + "!" * number, length))
            scheduler.add(live[-1])
        elif kind < 0.4:
            prefill_only = sequence(f"p{number}", length, RequestMode.PREFILL_ONLY)
            live.append(prefill_only)
            scheduler.add(prefill_only)
        elif kind < 0.5 and pool.num_free * 4 >= length:
            live.append(arrived(f"d{number}", length, pool))
            scheduler.add(live[-1])
        elif kind < 0.6 and live:
            scheduler.end(rng.choice(live))
        oldest = scheduler._running[:1]
        plan = scheduler.schedule()
        assert sum(lengths(plan).values()) <= CONFIG.token_budget
        assert scheduler.running_count <= CONFIG.max_running
        assert not set(oldest) & set(plan.preempted)
        singles = [run.end - run.start == 1 for run in plan.runs]
        assert singles == sorted(singles, reverse=True)
        for run in plan.runs:
            assert run.start == run.sequence.computed_len < run.end
            assert run.sequence.state is SequenceState.RUNNING
            assert len(run.sequence.block_ids) * 4 >= run.end
        finish_step(scheduler, plan)
        for ended in [s for s in live if s.output_len > 12 or rng.random() < 0.02]:
            scheduler.end(ended)
        pool.check_integrity()
    for rest in live:
        scheduler.end(rest)
        scheduler.release(rest)
    assert pool.num_free == pool.num_blocks
    assert (scheduler.held_count, scheduler.running_count, scheduler.pending_tokens) == (0, 0, 0)
