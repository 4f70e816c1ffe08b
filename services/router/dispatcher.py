"""Runs one attempt of a request: chooses workers now and sends the request to them."""

import asyncio
import functools
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Literal

from opentelemetry.metrics import Counter

from epd.cleanup import CleanupTasks, cancel_and_wait
from epd.errors import InvalidRequestError, UnavailableError
from epd.rpc.request_context import new_id
from services.router.anchor_tokens import AnchorTokens
from services.router.attempt import Outcome, Work
from services.router.beside import beside
from services.router.disaggregation import Way
from services.router.encode_stage import EncodedImages, encode
from services.router.encoder_placement import EncoderPlacement
from services.router.handles import HandleSet
from services.router.leg import LegFailedError
from services.router.local_attempt import LocalAttempt
from services.router.overload import least_ttft_s
from services.router.pair_attempt import PairAttempt
from services.router.pick import closed, without
from services.router.placeholders import ExpandedPrompt, expand
from services.router.placement import LocalPlacement, Placement, Placer, hashed_prompt
from services.router.registry import WorkerRegistry
from services.router.way_chooser import WayChooser
from services.router.worker_requests import local_request
from services.router.workers import Role, Worker

#: ``always``: prefill and decode apart; ``null``: unified workers alone; ``auto``: what probably
#: costs less, where there are workers for both.
DisaggregationMode = Literal["auto", "always", "null"]


_FADE = 0.1


@dataclass(frozen=True)
class DispatchTimings:
    """Bounds within an attempt, in seconds.

    Args:
        culprit_grace_s: How long a failed decode leg waits for prefill to tell the cause.
        linger_s: How long a prefill call may take to report after the answer is complete.
        control_timeout_s: Bound of each call that renews or releases handles.
        worker_patience_s: How long an attempt waits for a worker where there is none.
    """

    culprit_grace_s: float
    linger_s: float
    control_timeout_s: float
    worker_patience_s: float


class Dispatcher:
    """Sends attempts of requests to workers.

    Args:
        registry: The workers.
        cleanup: Runs what must outlive a request.
        mode: Whether prefill and decode run on different workers.
        timings: Bounds.
        anchor_tokens: What stands for images and videos in a rendered prompt, for ``null`` mode.
        placement: Chooses encoders.
        affinity_hits: Counts images that went to the encoder that holds them.
        overlapped: Counts requests that an idle prefill worker is sent while their images are
            still encoded; None where that is not to be done.
        chooser: Decides where both ways are possible.
        placer: Chooses language workers.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        cleanup: CleanupTasks,
        mode: DisaggregationMode,
        timings: DispatchTimings,
        anchor_tokens: AnchorTokens,
        placement: EncoderPlacement,
        affinity_hits: Counter,
        overlapped: Counter | None,
        chooser: WayChooser,
        placer: Placer,
    ) -> None:
        self._registry = registry
        self._cleanup = cleanup
        self._mode = mode
        self._timings = timings
        self._anchor_tokens = anchor_tokens
        self._placement = placement
        self._affinity_hits = affinity_hits
        self._overlapped = overlapped
        self._chooser = chooser
        self._transfer = registry.maker.transfer_line
        self._placer = placer
        self._tokens_per_image = 0.0

    def disaggregates(self) -> bool:
        """Whether prefill and decode run apart now."""
        if self._mode == "auto":
            return bool(self._registry.available(Role.PREFILL)) or not self._unified()
        return self._mode == "always"

    def has_route(self) -> bool:
        """Whether the workers that are there suffice for any request."""
        if not self.disaggregates():
            return bool(self._unified())
        roles = [Role.PREFILL, Role.DECODE]
        workers = [self._registry.available(role) for role in roles]
        if all(workers) and self._registry.model().accepts_images:
            workers.append(self._registry.available(Role.ENCODER))
        return all(workers)

    def has_alternatives(self, role: Role, avoid: Set[str]) -> bool:
        """Whether a request that failed at a worker of this role can go where it has not been."""
        roles = [Role.ENCODER] if role is Role.ENCODER else [Role.PREFILL, Role.DECODE]
        workers = [worker for found in roles for worker in self._registry.available(found)]
        return any(worker.info.instance_id not in avoid for worker in workers)

    def prefill_workers(self) -> int:
        """How many workers compute prompts now."""
        workers = (
            self._registry.available(Role.PREFILL) if self.disaggregates() else self._unified()
        )
        return len(workers)

    async def expected_ttft_s(self, work: Work) -> tuple[float, bool]:
        """The soonest first token to be expected, and whether something is ahead of the request.

        0 where no prefill worker is measured: in null mode, or while there is none.
        """
        prefills = self._registry.available(Role.PREFILL) if self.disaggregates() else []
        encoders = self._registry.available(Role.ENCODER)
        text = ExpandedPrompt(work.prompt.token_ids, (), 0)
        images = len(work.prompt.images)
        hashes = () if images else (await hashed_prompt(work, text, prefills)).hashes
        tokens = len(text.token_ids) + int(images * self._tokens_per_image)
        seconds = least_ttft_s(tokens, hashes, images, encoders, prefills)
        queued = bool(prefills) and all(worker.account.waiting_prompts for worker in prefills)
        return seconds, queued

    async def attempt(self, work: Work) -> Outcome:
        """One attempt from the encoders on.

        Raises:
            LegFailedError: a worker failed.
            EpdError: no workers for the request, or it does not fit.
        """
        alone = await self._alone(work)
        if alone is not None:
            request = local_request(work, self._anchor_tokens)
            return await LocalAttempt(work, alone, request).run()
        handles = HandleSet(self._cleanup, self._timings.control_timeout_s)
        settled = True
        encoded = EncodedImages(len(work.prompt.images))
        encoding: asyncio.Task[None] | None = None
        try:
            self._check_length(len(work.prompt.token_ids))
            if work.prompt.images:
                encoding = asyncio.create_task(self._encode(work, handles, encoded))
                await self._until_computable(encoding, encoded)
            expanded = self._expanded(work, encoded)
            self._check_length(len(expanded.token_ids))
            placement = await self._place(work, expanded)
            if encoding is not None and not encoding.done() and placement.prefill.load:
                # It would hold a place and memory there while others could compute.
                await encoding
                expanded = self._expanded(work, encoded)
                placement = await self._place(work, expanded)
            self._account_encoding(work, encoded)
            settled = False
            pair = PairAttempt(work, expanded, placement, new_id(), self._transfer, handles.forget)
            run = pair.run(
                self._cleanup,
                culprit_grace_s=self._timings.culprit_grace_s,
                linger_s=self._timings.linger_s,
            )
            try:
                if encoding is None or encoding.done() or self._overlapped is None:
                    return await run
                self._overlapped.add(1)
                return await beside(encoding, run, self._timings.culprit_grace_s)
            except LegFailedError as failure:
                if failure.worker.role is Role.ENCODER:
                    raise
                # What one of them reports may be the other's trouble.
                work.avoid |= {
                    placement.prefill.info.instance_id,
                    placement.decode.info.instance_id,
                }
                raise
        finally:
            if encoding is not None:
                await cancel_and_wait(encoding)
            # Once Prefill is called a READ may be on its way, so only that worker can settle.
            handles.release(settled=settled)

    async def count_tokens(self, work: Work) -> int:
        """Prompt tokens with placeholders; images are planned, not encoded.

        Raises:
            LegFailedError: an encoder failed.
        """
        handles = HandleSet(self._cleanup, self._timings.control_timeout_s)
        try:
            encoded = EncodedImages(len(work.prompt.images))
            if work.prompt.images:
                await self._encode(work, handles, encoded, until_ready=False)
            return len(self._expanded(work, encoded).token_ids)
        finally:
            handles.release(settled=True)

    async def _encode(
        self, work: Work, handles: HandleSet, encoded: EncodedImages, *, until_ready: bool = True
    ) -> None:
        images = work.prompt.images

        # The fleet may have changed its image processor since the images were hashed.
        def fitting() -> list[Worker]:
            return [
                encoder
                for encoder in self._registry.available(Role.ENCODER)
                if encoder.info.processor_digest == work.prompt.processor_digest
            ]

        await self._come(fitting, work)
        encoders = self._pool(fitting(), work, "encoder")
        groups, first_choices = self._placement.place(images, encoders)
        self._affinity_hits.add(first_choices)
        await encode(
            work.request_id,
            [(worker, group) for worker, group in zip(encoders, groups, strict=True) if group],
            handles,
            work.deadline,
            encoded,
            until_ready=until_ready,
        )

    async def _until_computable(
        self, encoding: "asyncio.Task[None]", encoded: EncodedImages
    ) -> None:
        """Waits until all images are encoded, or planned where prefill may begin with that."""
        if self._overlapped is not None:
            planned = asyncio.create_task(encoded.planned.wait())
            try:
                await asyncio.wait({encoding, planned}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_and_wait(planned)
            if not encoding.done() and encoded.pending:
                return
        await encoding

    def _expanded(self, work: Work, encoded: EncodedImages) -> ExpandedPrompt:
        plans = encoded.in_order()
        expanded = expand(work.prompt.token_ids, plans, encoded.pending)
        if plans:
            self._tokens_per_image += _FADE * (
                expanded.image_tokens / len(plans) - self._tokens_per_image
            )
        work.prompt_tokens = len(expanded.token_ids)
        work.image_tokens = expanded.image_tokens
        return expanded

    def _account_encoding(self, work: Work, encoded: EncodedImages) -> None:
        """What is not encoded yet is part of prefill's time."""
        if encoded.wall_ns:
            window = (encoded.timings_ns, encoded.service_ns, encoded.wall_ns)
            work.path.add_window("encoder", *window)
        elif encoded.image_count:
            work.path.add("encoder.plan", time.monotonic_ns() - encoded.started_ns)

    async def _place(self, work: Work, expanded: ExpandedPrompt) -> Placement:
        for role in (Role.PREFILL, Role.DECODE):
            await self._come(functools.partial(self._registry.available, role), work)
        # Hashed first: between the choice and the booking nothing must come in between.
        prompt = await hashed_prompt(work, expanded, self._registry.available(Role.PREFILL))
        self._placer.notice(prompt)
        return self._placer.place(prompt, *self._pair_pools(work))

    def _pair_pools(self, work: Work) -> tuple[list[Worker], list[Worker]]:
        prefills = self._pool(self._registry.available(Role.PREFILL), work, "prefill")
        decodes = self._pool(self._registry.available(Role.DECODE), work, "decode")
        # Prefill workers need not be paired with unified ones.
        return prefills, [worker for worker in decodes if not worker.info.unified] or decodes

    async def _alone(self, work: Work) -> LocalPlacement | None:
        """The unified worker that shall serve the request alone; None when a pair shall.

        Images are not weighed: where there are encoders, their cache is shared by all.
        """
        text = ExpandedPrompt(work.prompt.token_ids, (), 0)
        if not self.disaggregates():
            await self._come(self._unified, work)
            unified = self._pool(self._unified(), work, "unified")
            # Without the images' places the hashes would be others.
            known = () if work.prompt.images else unified
            return self._placer.place_alone(await hashed_prompt(work, text, known), unified)
        if self._mode != "auto" or work.prompt.images or not self._unified():
            return None
        self._check_length(len(text.token_ids))
        prompt = await hashed_prompt(work, text, self._unified())
        alone = self._placer.place_alone(prompt, self._pool(self._unified(), work, "unified"))
        pair = self._placer.place(prompt, *self._pair_pools(work))
        if self._chooser.choose(alone, pair) is Way.REMOTE:
            return None
        work.prompt_tokens = len(text.token_ids)
        return alone

    async def _come(self, workers: Callable[[], list[Worker]], work: Work) -> None:
        """Waits for a worker where there is none: one that restarts is back in a moment."""
        patience_s = min(self._timings.worker_patience_s, work.deadline.remaining_s())
        await self._registry.wait_until(lambda: bool(workers()), patience_s)

    def _pool(self, workers: list[Worker], work: Work, kind: str) -> list[Worker]:
        if not workers:
            raise UnavailableError(
                f"no {kind} worker takes requests", reason=f"NO_{kind.upper()}_WORKER"
            )
        return list(closed(without(workers, frozenset(work.avoid))))

    def _unified(self) -> list[Worker]:
        return [worker for worker in self._registry.available(Role.DECODE) if worker.info.unified]

    def _check_length(self, prompt_tokens: int) -> None:
        context_length = self._registry.model().context_length
        if prompt_tokens >= context_length:
            raise InvalidRequestError(
                f"the prompt has {prompt_tokens} tokens and the context {context_length}, of which "
                "at least one must be left for the answer",
                field="input",
                reason="PROMPT_TOO_LONG",
                metadata={
                    "promptTokens": str(prompt_tokens),
                    "contextLength": str(context_length),
                },
            )
