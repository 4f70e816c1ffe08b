"""Decides what each step computes. Plain Python, no torch.

A request passes these queues:

* ``waiting``: FULL and PREFILL_ONLY, first come, first served; holds nothing;
* ``arriving``: PREFILLED, the KV still on its way; may take one step early (``_schedule_early``);
* ``arrived``: PREFILLED; holds the blocks its KV was written to, so it never waits for memory;
* ``running``: in order of admission; holds blocks for all its tokens;
* held: a PREFILL_ONLY request that has ended keeps its blocks until its owner releases them.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from epd.block_hashes import block_hashes
from epd.engine.block_pool import BlockPool
from epd.engine.chunk_limit import ChunkLimit
from epd.engine.engine_config import EngineConfig
from epd.engine.requests import RequestMode
from epd.engine.sequence import Sequence, SequenceState

#: A prompt that is shorter by this factor than what is left of the oldest may overtake it.
_FAR_FEWER = 8


class ScheduledRun(NamedTuple):
    """Tokens ``start`` to ``end`` of a sequence are computed in this step."""

    sequence: Sequence
    start: int
    end: int


@dataclass
class StepPlan:
    """One step: its runs, single tokens first; who joined; who lost its blocks.

    ``early`` are runs of one token whose KV is predicted to be there when the step needs it.
    """

    runs: list[ScheduledRun] = field(default_factory=list)
    early: list[ScheduledRun] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching with chunked prefill. Driven by one thread.

    Decode goes first, so that a long prompt delays a token by at most one chunk. The oldest running
    request is never preempted, so that some request always gets on.
    """

    def __init__(self, pool: BlockPool, config: EngineConfig) -> None:
        self._pool = pool
        self._config = config
        self.chunk_limit = ChunkLimit(config.step_target_s, config.block_size)
        self._arriving: list[Sequence] = []
        self._arrived: deque[Sequence] = deque()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.preemptions = 0
        self.held_count = 0

    @property
    def running_count(self) -> int:
        """Requests in the running set."""
        return len(self._running)

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens without KV, of waiting and running requests."""
        return sum(
            max(sequence.prompt_len - sequence.computed_len, 0)
            for sequence in (*self._waiting, *self._running)
        )

    @property
    def headroom(self) -> int:
        """Blocks to keep free for the growth of what runs."""
        return self._config.headroom_blocks * sum(s.grows for s in self._running)

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence."""
        if sequence.arriving:
            self._arriving.append(sequence)
            return
        arrived = sequence.mode is RequestMode.PREFILLED
        (self._arrived if arrived else self._waiting).append(sequence)

    def sealed(self, sequence: Sequence) -> None:
        """The KV of an arriving sequence is complete: its blocks are the engine's from now on. One
        that has drawn a token joins the running set, the others wait for the next step.
        """
        self._arriving.remove(sequence)
        sequence.arriving = False
        if sequence.early_token is None:
            self._arrived.append(sequence)
        else:
            self._join(sequence)

    def schedule(self) -> StepPlan:
        """Chooses the runs of the next step and makes sure of their blocks."""
        plan = StepPlan()
        while self._arrived and self._places_taken < self._config.max_running:
            self._admit(self._arrived.popleft(), plan)
        budget = self._config.token_budget
        decodes = self._schedule_decodes(plan, budget)
        budget -= decodes
        if decodes:
            budget = self.chunk_limit.tokens(budget)
        self._schedule_prompts(plan, budget)
        if self._arriving:
            self._schedule_early(plan)
        plan.runs.sort(key=lambda run: run.end - run.start > 1)
        return plan

    def advance(self, run: ScheduledRun) -> None:
        """Notes that a run is computed; its full blocks become findable."""
        sequence = run.sequence
        before = sequence.computed_len // self._pool.block_size
        sequence.computed_len = run.end
        self._publish(sequence, before)

    def end(self, sequence: Sequence) -> None:
        """Takes a sequence out, whatever its state, and frees what may be freed. Idempotent."""
        if sequence.state >= SequenceState.HELD:
            return
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        elif sequence.arriving:
            self._arriving.remove(sequence)
        elif sequence.mode is RequestMode.PREFILLED:
            self._arrived.remove(sequence)
        else:
            self._waiting.remove(sequence)
        if sequence.mode is RequestMode.PREFILL_ONLY and sequence.block_ids:
            # A transfer may read them: they stay until their owner says that it has ended.
            sequence.state = SequenceState.HELD
            self.held_count += 1
        else:
            self._free(sequence)

    def release(self, sequence: Sequence) -> None:
        """No transfer reads the blocks of a held sequence any more. Fine if it is not held."""
        if sequence.state is SequenceState.HELD:
            self.held_count -= 1
            self._free(sequence)

    @property
    def _places_taken(self) -> int:
        """Of the running set, those included that have drawn a token early and will join."""
        return len(self._running) + sum(one.early_token is not None for one in self._arriving)

    def _schedule_early(self, plan: StepPlan) -> None:
        """First steps of sequences whose KV is still on its way, behind everybody else.

        Those that are predicted to wait at no layer. Where there is nobody at all, one that is
        predicted to wait for less than a step: alone, since in company nobody waits for it.
        """
        step_s = self.chunk_limit.decode_s
        untried = [
            (sequence, sequence.request.arrival)
            for sequence in self._arriving
            if sequence.early is None and sequence.request.arrival is not None
        ]
        ready = [sequence for sequence, arrival in untried if arrival.in_time(step_s)]
        if not ready and not plan.runs:
            ready = [sequence for sequence, arrival in untried if arrival.due_within(step_s)][:1]
        budget = self._config.token_budget - sum(run.end - run.start for run in plan.runs)
        places = min(budget, self._config.max_running - self._places_taken)
        for sequence in ready:
            if len(plan.early) < places and self._has_slot(sequence):
                run = ScheduledRun(sequence, sequence.computed_len, len(sequence.token_ids))
                plan.early.append(run)

    def _has_slot(self, sequence: Sequence) -> bool:
        """Whether an early sequence's next token has one, taken from nobody."""
        if len(sequence.token_ids) > len(sequence.block_ids) * self._pool.block_size:
            blocks = self._pool.allocate(1, keep_free=self.headroom)
            sequence.block_ids += blocks or []
            return blocks is not None
        return True

    def _schedule_decodes(self, plan: StepPlan, budget: int) -> int:
        spent = 0
        for sequence in list(self._running):
            if sequence.is_prefilling or sequence.state is not SequenceState.RUNNING:
                continue  # the latter was preempted in this very loop
            if spent < budget and self._make_room(sequence, plan):
                plan.runs.append(
                    ScheduledRun(sequence, sequence.computed_len, len(sequence.token_ids))
                )
                spent += 1
        return spent

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Sees to a slot for the next token; False when the sequence has to sit this step out."""
        while len(sequence.token_ids) > len(sequence.block_ids) * self._pool.block_size:
            if blocks := self._pool.allocate(1):
                sequence.block_ids += blocks
                continue
            victim = self._youngest()
            if victim is None:
                return False
            self.end(victim)
            self.preemptions += 1
            plan.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _youngest(self) -> Sequence | None:
        """The last request to join that may lose its blocks; never the oldest running one."""
        if self._arrived:
            return self._arrived[-1]
        return next((s for s in reversed(self._running[1:]) if s.grows), None)

    def _schedule_prompts(self, plan: StepPlan, budget: int) -> None:
        """Prompts in order of admission; those that lack images get steps that no other wants.

        Such a prompt has begun early and cannot end yet, so nobody waits for it longer than the
        one step that it may be in when others come.
        """
        prompts: list[Sequence] = []
        early: list[Sequence] = []
        for sequence in self._running:
            if sequence.is_prefilling:
                (early if sequence.lacks_images else prompts).append(sequence)
        left = budget
        if prompts and prompts[0].remaining_len > left:
            half, oldest = left // 2, prompts[0]
            ahead = [s for s in prompts[1:] if _overtakes(s.remaining_len, oldest, half)]
            spent = self._schedule_chunks(ahead, plan, half)
            left -= spent + self._schedule_overtakers(plan, half - spent, oldest)
            prompts = [sequence for sequence in prompts if sequence not in ahead]
        left -= self._schedule_chunks(prompts, plan, left)
        while left > 0 and self._admit_waiting(plan):
            admitted = self._running[-1]
            if admitted.lacks_images:
                early.append(admitted)
            else:
                left -= self._schedule_chunk(admitted, plan, left)
        if left == budget:
            self._schedule_chunks(early, plan, budget)

    def _schedule_overtakers(self, plan: StepPlan, budget: int, oldest: Sequence) -> int:
        """Waiting prompts that are done in this step, or in far fewer than the oldest, so that they
        do not sit out a long one.

        Only these: long prompts one after another find each other's prefix, side by side they
        compute it twice. The head of the queue loses neither memory nor its place to them.
        """
        spent = 0
        for sequence in list(self._waiting):
            if spent >= budget or self._places_taken + 1 >= self._config.max_running:
                break
            if _overtakes(sequence.prompt_len, oldest, budget - spent):
                head = self._waiting[0]
                kept = 0 if head is sequence else self._blocks_of(head)
                if not self._try_admit(sequence, plan, self.headroom + kept):
                    break
                spent += self._schedule_chunk(sequence, plan, budget - spent)
        return spent

    def _schedule_chunks(self, prompts: list[Sequence], plan: StepPlan, budget: int) -> int:
        spent = 0
        for sequence in prompts:
            if spent < budget:
                spent += self._schedule_chunk(sequence, plan, budget - spent)
        return spent

    def _schedule_chunk(self, sequence: Sequence, plan: StepPlan, budget: int) -> int:
        start = sequence.computed_len
        wanted = end = min(len(sequence.token_ids), start + budget)
        if sequence.request.gate is not None:
            end = sequence.request.gate.end(start, wanted)
        if end < len(sequence.token_ids):
            # Whole blocks: a block that two chunks share would be pushed twice.
            aligned = end - end % self._pool.block_size
            if aligned <= start and end < wanted:
                return 0  # it will be more once the next image is there
            end = aligned if aligned > start else end
        plan.runs.append(ScheduledRun(sequence, start, end))
        return end - start

    def _admit_waiting(self, plan: StepPlan) -> bool:
        """Admits the head of the queue; False when there is none or it has to go on waiting."""
        if not self._waiting or self._places_taken >= self._config.max_running:
            return False
        return self._try_admit(self._waiting[0], plan, self.headroom)

    def _try_admit(self, sequence: Sequence, plan: StepPlan, keep_free: int) -> bool:
        """Admits a waiting sequence unless fewer than ``keep_free`` blocks would remain."""
        block_size = self._pool.block_size
        cached: list[int] = []
        if self._pool.enable_prefix_cache:
            self._hash(sequence, sequence.prompt_len)
            # The last token is always computed: its logits are needed.
            usable = sequence.hashes[: (sequence.prompt_len - 1) // block_size]
            cached = self._pool.match_prefix(usable)
        fresh = self._pool.allocate(self._blocks_of(sequence) - len(cached), keep_free=keep_free)
        if fresh is None:
            self._pool.free(cached)
            return False
        if self._pool.enable_prefix_cache:
            self.prefix_cache_queries += sequence.prompt_len
            self.prefix_cache_hits += len(cached) * block_size
        sequence.block_ids = cached + fresh
        sequence.computed_len = sequence.cached_len = len(cached) * block_size
        self._waiting.remove(sequence)
        self._admit(sequence, plan)
        return True

    def _blocks_of(self, sequence: Sequence) -> int:
        return -(-sequence.prompt_len // self._pool.block_size)

    def _admit(self, sequence: Sequence, plan: StepPlan) -> None:
        self._join(sequence)
        plan.admitted.append(sequence)

    def _join(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        self._running.append(sequence)
        if sequence.mode is RequestMode.PREFILLED:
            self._publish(sequence, 0)

    def _publish(self, sequence: Sequence, first_block: int) -> None:
        full = sequence.computed_len // self._pool.block_size
        if full > first_block and self._pool.enable_prefix_cache:
            self._hash(sequence, sequence.computed_len)
            for index in range(first_block, full):
                self._pool.publish(sequence.block_ids[index], sequence.hashes[index])

    def _hash(self, sequence: Sequence, token_count: int) -> None:
        """Extends the sequence's hashes over its first ``token_count`` tokens."""
        block_size = self._pool.block_size
        if len(sequence.hashes) < token_count // block_size:
            tokens = sequence.token_ids[:token_count]
            images = sequence.request.images
            sequence.hashes = block_hashes(tokens, images, block_size, sequence.hashes)

    def _free(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.ENDED
        self._pool.free(sequence.own_blocks)
        sequence.block_ids = []


def _overtakes(remaining_len: int, oldest: Sequence, budget: int) -> bool:
    """Whether a prompt needs one step, or far fewer than the oldest, to be done."""
    return remaining_len <= max(budget, oldest.remaining_len // _FAR_FEWER)
