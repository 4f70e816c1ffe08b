"""One step after another: schedule, run, post results. Lives on the engine thread."""

import logging
import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

import torch

from epd.engine.block_pool import BlockPool
from epd.engine.drawn_token import DrawnToken
from epd.engine.early_gate import EarlyGate, LateError
from epd.engine.engine_config import EngineConfig
from epd.engine.inbox import Inbox, Mail
from epd.engine.language_runner import LanguageRunner, TokenRun
from epd.engine.requests import (
    Admitted,
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    LayerProgress,
    NewTokens,
    Preempted,
    PrefillDone,
    RequestMode,
)
from epd.engine.sampler import Draw, sample
from epd.engine.scheduler import ScheduledRun, Scheduler, StepPlan
from epd.engine.sequence import Sequence, SequenceState
from epd.errors import EpdError, InternalError, InvalidRequestError, RequestCancelledError
from epd.thread_slices import yield_core

logger = logging.getLogger(__name__)

#: Gets the events of a step, on the engine thread; must be quick and not raise.
Deliver = Callable[[list[tuple[str, EngineEvent]]], None]
#: Told after each layer of a step which KV of PREFILL_ONLY requests is final, on the engine thread
#: or, on a GPU, on one that it waits for before the step is over.
LayerHook = Callable[[int, Items[LayerProgress]], None]


class EngineCore:
    """Turns mail into tokens. Not thread-safe: everything but ``stats`` is the engine thread's."""

    def __init__(
        self,
        runner: LanguageRunner,
        pool: BlockPool,
        inbox: Inbox,
        config: EngineConfig,
        max_context: int,
        layer_hook: LayerHook | None,
        deliver: Deliver,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._inbox = inbox
        self._scheduler = Scheduler(pool, config)
        self._end_token_ids = runner.family.end_token_ids
        self._max_context = max_context
        self._layer_hook = layer_hook
        self._deliver = deliver
        self._events: list[tuple[str, EngineEvent]] = []
        self._steps = self._prompt_tokens = self._output_tokens = 0
        self._early_steps = self._early_committed = self._early_late = 0
        #: As of the last step; replaced, never changed.
        self.stats = self._snapshot()

    @property
    def decode_step_s(self) -> float:
        """How long a step without prompts takes; 0 before the first. Any thread."""
        return self._scheduler.chunk_limit.decode_s

    def step(self, mail: Mail) -> bool:
        """Schedule, run, post results; False when there was nothing to compute."""
        self._sort_mail(mail)
        plan = self._scheduler.schedule()
        now = time.monotonic_ns()
        for sequence in plan.admitted:
            self._inbox.dequeued(sequence)
            self._post_admitted(sequence, now)
        for sequence in plan.preempted:
            self._post(sequence, Preempted())
        if plan.admitted or plan.preempted:
            self._flush()  # not as late as the step's tokens: waits end here
        if plan.runs or plan.early:
            # Counted before: posting a sequence's first token makes it a decoding one.
            lengths = [run.end - run.start for run in plan.runs if run.sequence.is_prefilling]
            drawn = self._run(plan, now)
            seconds = (time.monotonic_ns() - now) / 1e9
            if plan.runs:  # an early run alone has perhaps waited
                self._scheduler.chunk_limit.observe(
                    len(plan.runs) - len(lengths), sum(lengths), seconds
                )
            self._post_results(plan.runs, drawn)
        self._flush()
        return bool(plan.runs or plan.early)

    def _sort_mail(self, mail: Mail) -> None:
        for sequence in mail.submitted:
            self._scheduler.add(sequence)
            first = sequence.request.first_token
            self._follow_grammar(sequence, [] if first is None else [first])
        for request_id in mail.sealed:
            self._take_sealed(request_id)
        for request_id in (*mail.cancelled, *mail.released):
            live = self._inbox.live(request_id)
            if live is not None and live.state < SequenceState.HELD:
                self._end(live, Failed(RequestCancelledError("the request was cancelled")))
        for request_id in mail.released:
            held = self._inbox.live(request_id)
            if held is not None:
                self._scheduler.release(held)
                self._inbox.forget(held)

    def _take_sealed(self, request_id: str) -> None:
        """An arriving sequence becomes one as any other; what it has drawn early is now true."""
        sequence = self._inbox.live(request_id)
        assert sequence is not None, "only its owner ends an arriving request"
        token, now = sequence.early_token, time.monotonic_ns()
        self._scheduler.sealed(sequence)
        if token is None:
            return
        sequence.early_token = None
        self._early_committed += 1
        self._inbox.dequeued(sequence)
        self._post_admitted(sequence, now)
        run = ScheduledRun(sequence, sequence.computed_len, len(sequence.token_ids))
        self._scheduler.advance(run)
        self._post_token(sequence, token, now)
        self._flush()  # not as late as the next step's tokens

    def _post_admitted(self, sequence: Sequence, now: int) -> None:
        sequence.admitted_ns = now
        admitted = Admitted(now - sequence.arrived_ns, sequence.cached_len, sequence.early)
        self._post(sequence, admitted)

    def _follow_grammar(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Goes on over tokens and notes what may follow; ends the sequence when nothing may."""
        matcher = sequence.request.matcher
        if matcher is None:
            return
        try:
            matcher.take(token_ids)
            sequence.allowed = matcher.allowed()
        except InvalidRequestError as error:
            self._end(sequence, Failed(error))

    @torch.inference_mode()
    def _run(self, plan: StepPlan, planned_ns: int) -> list[DrawnToken]:
        """The device's part of a step: one drawn token per run that reaches its sequence's end.
        Those of early runs stay with their sequences.
        """
        runs = plan.runs
        for run in runs:
            if run.sequence.is_prefilling and not run.sequence.prefill_started_ns:
                # Waiting ended with the plan: what comes between is part of the step.
                run.sequence.prefill_started_ns = planned_ns
        if plan.early:
            return self._run_early(plan)
        logits = self._runner.run(
            [self._token_run(run) for run in runs], self._layer_callback(runs)
        )
        draws = [self._draw(run.sequence) for run in runs if self._reaches_end(run)]
        return sample(logits, draws) if draws else []

    def _run_early(self, plan: StepPlan) -> list[DrawnToken]:
        """A step with early runs; their rows come first."""
        early = [run.sequence for run in plan.early]
        patience_s = 0.0 if plan.runs or len(early) > 1 else self.decode_step_s
        gate = EarlyGate(early, patience_s, lambda: self._inbox.has_work)
        runs = [*plan.early, *plan.runs]
        self._early_steps += len(early)
        for sequence in early:
            sequence.early = False
        try:
            logits = self._runner.run(
                [self._token_run(run) for run in runs],
                self._layer_callback(plan.runs),
                gate.before_layer,
            )
        except LateError:
            self._early_late += 1
            self._runner.finish()  # its blocks may be another's at once
            return []
        self._early_late += len(gate.late)
        drawing = [run.sequence for run in runs if self._reaches_end(run)]
        kept = [row for row, sequence in enumerate(drawing) if sequence not in gate.late]
        if not kept:
            self._runner.finish()
            return []
        drawn = sample(logits[kept], [self._draw(drawing[row]) for row in kept])
        in_time = [sequence for sequence in early if sequence not in gate.late]
        for sequence, token in zip(in_time, drawn, strict=False):
            if math.isnan(token.logprob):  # the step to come says so, if it is so
                self._early_late += 1
            else:
                sequence.early, sequence.early_token = True, token
        return drawn[len(in_time) :]

    def _post_results(self, runs: Items[ScheduledRun], drawn: Iterable[DrawnToken]) -> None:
        self._steps += 1
        tokens = iter(drawn)
        now = time.monotonic_ns()
        for run in runs:
            if run.sequence.is_prefilling:
                self._prompt_tokens += run.end - run.start
            self._scheduler.advance(run)
            if self._reaches_end(run):
                self._post_token(run.sequence, next(tokens), now)

    def _post_token(self, sequence: Sequence, token: DrawnToken, now: int) -> None:
        if math.isnan(token.logprob):
            # Whoever found this KV would fail too, and a prefix in demand is never evicted.
            self._pool.unpublish(sequence.block_ids)
            self._end(sequence, Failed(InternalError("the model's output is not a number")))
            return
        self._output_tokens += 1
        sequence.token_ids.append(token.token_id)
        sequence.drop_embeddings()
        sequence.prefill_ended_ns = sequence.prefill_ended_ns or now
        reason = sequence.finish_reason(self._end_token_ids, self._max_context)
        if sequence.mode is RequestMode.PREFILL_ONLY:
            done = PrefillDone(
                token_id=token.token_id,
                logprob=token.logprob,
                finish_reason=reason,
                cached_tokens=sequence.cached_len,
                forward_ns=now - sequence.prefill_started_ns,
                forward_ended_ns=now,
                block_ids=tuple(sequence.block_ids),
                top_logprobs=token.top,
            )
            self._end(sequence, done)
            return
        top = () if token.top is None else (token.top,)
        self._post(sequence, NewTokens((token.token_id,), (token.logprob,), top))
        if reason is None:
            self._follow_grammar(sequence, [token.token_id])
        else:
            decode_from = sequence.prefill_ended_ns
            prefill_ns = decode_from - sequence.prefill_started_ns
            if sequence.mode is RequestMode.PREFILLED:
                decode_from, prefill_ns = sequence.admitted_ns, 0
            finished = Finished(
                reason=reason,
                completion_tokens=sequence.output_len,
                cached_tokens=sequence.cached_len,
                prefill_ns=prefill_ns,
                decode_ns=now - decode_from,
            )
            self._end(sequence, finished)

    def _end(self, sequence: Sequence, last: EngineEvent) -> None:
        """The one place where a request ends: frees what may be freed and posts its last event."""
        self._scheduler.end(sequence)
        self._post(sequence, last)

    def _post(self, sequence: Sequence, event: EngineEvent) -> None:
        self._events.append((sequence.request_id, event))
        if sequence.state is SequenceState.ENDED:
            self._inbox.forget(sequence)

    def _flush(self) -> None:
        # Accounts first: who has seen a request's last event finds its blocks free.
        self.stats = self._snapshot()
        events, self._events = self._events, []
        if events:
            self._deliver(events)
            yield_core()

    def fail_all(self, error: EpdError) -> None:
        """Ends every live request with ``error``; the last thing that is called."""
        mail = self._inbox.take(wait=False)
        for sequence in mail.submitted:
            self._scheduler.add(sequence)
        for sequence in self._inbox.all_live():
            if sequence.state < SequenceState.HELD:
                try:
                    if sequence.request_id in mail.sealed:
                        self._scheduler.sealed(sequence)  # its blocks are to be freed here
                    self._scheduler.end(sequence)
                except Exception:  # whatever broke before: everybody must still be told
                    logger.exception("the accounts of %s are lost", sequence.request_id)
                self._post(sequence, Failed(error))
        self._flush()

    def _token_run(self, run: ScheduledRun) -> TokenRun:
        sequence, request = run.sequence, run.sequence.request
        images = request.images
        touches_images = bool(images) and run.start < images[-1].offset + images[-1].length
        return TokenRun(
            token_ids=sequence.token_ids,
            start=run.start,
            end=run.end,
            block_ids=sequence.block_ids,
            sample=self._reaches_end(run),
            images=images if touches_images else (),
            embeddings=request.embeddings if touches_images else (),
            position_delta=request.position_delta,
        )

    def _draw(self, sequence: Sequence) -> Draw:
        sampling = sequence.request.sampling
        early = sequence.output_len < sampling.min_tokens
        return Draw(
            sampling=sampling,
            position=len(sequence.token_ids),
            suppressed=sequence.ending_tokens(self._end_token_ids) if early else frozenset(),
            history=sequence.history(),
            allowed=sequence.allowed,
        )

    def _layer_callback(self, runs: Items[ScheduledRun]) -> Callable[[int], None] | None:
        hook = self._layer_hook
        progress = [
            LayerProgress(
                request_id=sequence.request_id,
                block_ids=tuple(sequence.block_ids),
                computed_before=start,
                computed_after=end,
                prompt_len=sequence.prompt_len,
                cached_tokens=sequence.cached_len,
            )
            for sequence, start, end in runs
            if sequence.mode is RequestMode.PREFILL_ONLY
        ]
        if hook is None or not progress:
            return None
        return lambda layer: hook(layer, progress)

    @staticmethod
    def _reaches_end(run: ScheduledRun) -> bool:
        """Whether the run's last token is the last known, so that the next one can be drawn."""
        return run.end == len(run.sequence.token_ids)

    def _snapshot(self) -> EngineStats:
        return EngineStats(
            running_requests=self._scheduler.running_count,
            waiting_requests=self._inbox.queued_count,
            held_requests=self._scheduler.held_count,
            waiting_tokens=self._scheduler.pending_tokens,
            total_blocks=self._pool.num_blocks,
            free_blocks=self._pool.num_free,
            quarantined_blocks=self._pool.num_quarantined,
            prefix_cache_queries=self._scheduler.prefix_cache_queries,
            prefix_cache_hits=self._scheduler.prefix_cache_hits,
            preemptions=self._scheduler.preemptions,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            early_steps=self._early_steps,
            early_committed=self._early_committed,
            early_late=self._early_late,
            headroom_blocks=self._scheduler.headroom,
        )
