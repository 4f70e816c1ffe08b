"""The life of one attempt on a prefill and a decode worker, from the encoders on."""

import asyncio
from dataclasses import dataclass

from opentelemetry.metrics import Counter

from epd.cleanup import CleanupTasks, cancel_and_wait
from epd.rpc.request_context import new_id
from services.router.attempt import Outcome, Work
from services.router.beside import beside
from services.router.dispatch_stage import DispatchStage
from services.router.encode_stage import EncodedImages
from services.router.expansion import Expander, text_only
from services.router.handles import HandleSet
from services.router.image_dispatch import ImageDispatch
from services.router.leg import LegFailedError
from services.router.pair_attempt import PairAttempt
from services.router.placeholders import ExpandedPrompt
from services.router.placement import Placement, Placer, hashed_prompt
from services.router.routes import Routes
from services.router.speed import MeasuredLine
from services.router.workers import Role


@dataclass(frozen=True)
class DispatchTimings:
    """Bounds within an attempt, in seconds.

    Args:
        culprit_grace_s: How long a failed decode leg waits for prefill to tell the cause.
        linger_s: How long a prefill call may take to report after the answer is complete.
        control_timeout_s: Bound of each call that renews or releases handles.
    """

    culprit_grace_s: float
    linger_s: float
    control_timeout_s: float


@dataclass(frozen=True)
class PairParts:
    """What all attempts on pairs share.

    Args:
        routes: Candidates.
        images: Has images encoded.
        expander: Puts placeholders into prompts.
        placer: Chooses the pair.
        transfer: Learns how long hand-overs take.
        cleanup: Runs what must outlive a request.
        timings: Bounds.
        overlapped: Counts requests that an idle prefill worker is sent while their images are
            still encoded; None where that is not to be done.
    """

    routes: Routes
    images: ImageDispatch
    expander: Expander
    placer: Placer
    transfer: MeasuredLine
    cleanup: CleanupTasks
    timings: DispatchTimings
    overlapped: Counter | None


class PairDispatch:
    """One attempt: has its images encoded, chooses the pair when they are, runs it there."""

    def __init__(self, work: Work, parts: PairParts, dispatch: DispatchStage) -> None:
        self._work = work
        self._dispatch = dispatch
        self._parts = parts
        self._handles = HandleSet(parts.cleanup, parts.timings.control_timeout_s)
        self._encoded = EncodedImages(len(work.prompt.images))
        self._encoding: asyncio.Task[None] | None = None

    async def run(self) -> Outcome:
        """Runs until the answer or the attempt has ended.

        Raises:
            LegFailedError: a worker failed.
            EpdError: no workers for the request, or it does not fit.
        """
        settled = True
        try:
            self._parts.expander.check_length(text_only(self._work))
            if self._work.prompt.images:
                self._encoding = asyncio.create_task(
                    self._parts.images.encode(self._work, self._handles, self._encoded)
                )
                await self._until_computable(self._encoding)
                self._dispatch.begin()
            expanded, placement = await self._place()
            self._account_encoding()
            # Once Prefill is called a READ may be on its way, so only that worker can settle.
            settled = False
            return await self._run_on(expanded, placement)
        finally:
            if self._encoding is not None:
                await cancel_and_wait(self._encoding)
            self._handles.release(settled=settled)

    @property
    def _still_encoding(self) -> "asyncio.Task[None] | None":
        encoding = self._encoding
        return encoding if encoding is not None and not encoding.done() else None

    async def _until_computable(self, encoding: "asyncio.Task[None]") -> None:
        """Waits until all images are encoded, or planned where prefill may begin with that."""
        if self._parts.overlapped is not None:
            planned = asyncio.create_task(self._encoded.planned.wait())
            try:
                await asyncio.wait({encoding, planned}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_and_wait(planned)
            if not encoding.done() and self._encoded.pending:
                return
        await encoding

    async def _place(self) -> tuple[ExpandedPrompt, Placement]:
        expanded, placement = await self._place_now()
        if (encoding := self._still_encoding) is not None and placement.prefill.load:
            # It would hold a place and memory there while others could compute.
            await encoding
            self._dispatch.begin()
            expanded, placement = await self._place_now()
        if self._encoding is not None and self._encoding.done():
            self._encoding.result()  # it may have failed while workers were waited for
        return expanded, placement

    async def _place_now(self) -> tuple[ExpandedPrompt, Placement]:
        parts, work = self._parts, self._work
        expanded = parts.expander.expand(work, self._encoded)
        parts.expander.check_length(expanded)
        await parts.routes.pair_comes(work)
        # Hashed first: between the choice and the booking nothing must come in between.
        prompt = await hashed_prompt(work, expanded, parts.routes.prompt_workers())
        parts.placer.notice(prompt)
        return expanded, parts.placer.place(prompt, *parts.routes.pair(work))

    async def _run_on(self, expanded: ExpandedPrompt, placement: Placement) -> Outcome:
        parts, timings = self._parts, self._parts.timings
        pair = PairAttempt(
            self._work,
            expanded,
            placement,
            new_id(),
            parts.transfer,
            self._dispatch,
            self._handles.forget,
        )
        run = pair.run(
            parts.cleanup, culprit_grace_s=timings.culprit_grace_s, linger_s=timings.linger_s
        )
        try:
            if (encoding := self._still_encoding) is None or parts.overlapped is None:
                return await run
            parts.overlapped.add(1)
            return await beside(encoding, run, timings.culprit_grace_s)
        except LegFailedError as failure:
            if failure.worker.role is not Role.ENCODER:
                # What one of them reports may be the other's trouble.
                pair_ids = {placement.prefill.info.instance_id, placement.decode.info.instance_id}
                self._work.avoid |= pair_ids
            raise

    def _account_encoding(self) -> None:
        """Ends where dispatch began; what was not encoded by then is part of later stages' time."""
        encoded, path = self._encoded, self._work.path
        if not encoded.image_count:
            return
        until_dispatch_ns = self._dispatch.started_ns - encoded.started_ns
        if encoded.wall_ns and encoded.wall_ns <= until_dispatch_ns:
            path.add_window("encoder", encoded.timings_ns, encoded.service_ns, encoded.wall_ns)
        else:
            path.add("encoder.plan", until_dispatch_ns)
