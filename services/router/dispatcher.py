"""Runs one attempt of a request: on a unified worker alone, or on a pair."""

from opentelemetry.trace import Tracer

from services.router.anchor_tokens import AnchorTokens
from services.router.attempt import Outcome, Work
from services.router.disaggregation import Way
from services.router.dispatch_stage import DispatchStage
from services.router.encode_stage import EncodedImages
from services.router.expansion import text_only
from services.router.handles import HandleSet
from services.router.local_attempt import LocalAttempt
from services.router.overload import least_ttft_s
from services.router.pair_dispatch import PairDispatch, PairParts
from services.router.placement import LocalPlacement, hashed_prompt
from services.router.registry import WorkerRegistry
from services.router.way_chooser import WayChooser
from services.router.worker_requests import local_request
from services.router.workers import Role


class Dispatcher:
    """Sends attempts of requests to workers.

    Args:
        registry: The workers.
        parts: Of attempts on pairs.
        chooser: Decides where both ways are possible.
        anchor_tokens: What stands for images and videos in a rendered prompt, for unified workers.
        tracer: The router's.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        parts: PairParts,
        chooser: WayChooser,
        anchor_tokens: AnchorTokens,
        tracer: Tracer,
    ) -> None:
        self._registry = registry
        self._parts = parts
        self._routes = parts.routes
        self._chooser = chooser
        self._anchor_tokens = anchor_tokens
        self._tracer = tracer

    async def expected_ttft_s(self, work: Work) -> tuple[float, bool]:
        """The soonest first token to be expected, and whether something is ahead of the request.

        0 where no prefill worker is measured: in null mode, or while there is none.

        Raises:
            InvalidRequestError: the prompt is too long, and need not wait to be told.
        """
        self._parts.expander.check_length(text_only(work))
        prefills = self._registry.available(Role.PREFILL) if self._routes.disaggregates else []
        encoders = self._registry.available(Role.ENCODER)
        images = len(work.prompt.images)
        hashes = () if images else (await hashed_prompt(work, text_only(work), prefills)).hashes
        tokens = self._parts.expander.expected_tokens(work)
        seconds = least_ttft_s(tokens, hashes, images, encoders, prefills)
        queued = bool(prefills) and all(worker.account.waiting_prompts for worker in prefills)
        return seconds, queued

    async def attempt(self, work: Work) -> Outcome:
        """One attempt from the encoders on.

        Raises:
            LegFailedError: a worker failed.
            EpdError: no workers for the request, or it does not fit.
        """
        dispatch = DispatchStage(work.path, self._tracer)
        alone = await self._alone(work)
        if alone is None:
            return await PairDispatch(work, self._parts, dispatch).run()
        request = local_request(work, self._anchor_tokens)
        return await LocalAttempt(work, alone, request, dispatch).run()

    async def count_tokens(self, work: Work) -> int:
        """Prompt tokens with placeholders; images are planned, not encoded.

        Raises:
            LegFailedError: an encoder failed.
        """
        parts = self._parts
        handles = HandleSet(parts.cleanup, parts.timings.control_timeout_s)
        encoded = EncodedImages(len(work.prompt.images))
        try:
            if work.prompt.images:
                await parts.images.encode(work, handles, encoded, until_ready=False)
            return len(parts.expander.expand(work, encoded).token_ids)
        finally:
            handles.release(settled=True)

    async def _alone(self, work: Work) -> LocalPlacement | None:
        """The unified worker that shall serve the request alone; None when a pair shall.

        Images are not weighed: where there are encoders, their cache is shared by all.
        """
        placer, routes, text = self._parts.placer, self._routes, text_only(work)
        if not routes.disaggregates:
            unified = await routes.unified_soon(work)
            # Without the images' places the hashes would be others.
            known = () if work.prompt.images else unified
            return placer.place_alone(await hashed_prompt(work, text, known), unified)
        if not routes.has_both_ways or work.prompt.images:
            return None
        self._parts.expander.check_length(text)
        prompt = await hashed_prompt(work, text, routes.unified(work))
        if not routes.has_both_ways:  # a worker has gone meanwhile
            return await self._alone(work)
        alone = placer.place_alone(prompt, routes.unified(work))
        pair = placer.place(prompt, *routes.pair(work))
        if self._chooser.choose(alone, pair) is Way.REMOTE:
            return None
        work.prompt_tokens = len(text.token_ids)
        return alone
