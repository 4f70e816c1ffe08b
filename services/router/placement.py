"""Where a request with all its embeddings goes: a prefill worker and a decode worker that fit."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from epd.block_hashes import block_hashes
from epd.errors import LayoutMismatchError
from services.router.attempt import Work
from services.router.disaggregation import local_cost_s
from services.router.pick import cheapest, pairing_partners, uncached_tokens
from services.router.placeholders import ExpandedPrompt
from services.router.popular_prefixes import PopularPrefixes
from services.router.speed import MeasuredLine
from services.router.workers import Worker

#: A prompt of more tokens is hashed on another thread: it would hold up the event loop.
_LOOP_TOKENS = 4096


@dataclass(frozen=True)
class HashedRun:
    """An image's placeholders, as block hashes cover them."""

    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True)
class HashedPrompt:
    """A prompt as caches see it: its length and the hashes of its full blocks."""

    tokens: int
    hashes: Sequence[bytes]
    is_replay: bool


@dataclass(frozen=True)
class Placement:
    """A chosen pair.

    Args:
        prefill: Computes the prompt.
        decode: Takes its KV.
        prompt: Replayed tokens included.
        uncached_tokens: Those that the prefill worker probably has to compute.
        ttft_s: Predicted time to the first token, queue included.
        tpot_s: Predicted time per further token.
        transfer_s: Predicted time from the first token to the start of decode.
    """

    prefill: Worker
    decode: Worker
    prompt: HashedPrompt
    uncached_tokens: int
    ttft_s: float
    tpot_s: float
    transfer_s: float

    @property
    def blocks(self) -> int:
        """KV blocks that the request will take at once on the decode worker."""
        return _blocks(self.prompt.tokens, self.decode)


@dataclass(frozen=True)
class LocalPlacement:
    """A chosen unified worker, and the predicted cost of serving the request there alone."""

    worker: Worker
    prompt: HashedPrompt
    uncached_tokens: int
    cost_s: float


class Placer:
    """Chooses pairs by what each worker would probably make of the request.

    Args:
        rng: Breaks ties.
        transfer: Measured times of hand-overs.
        by_chance: Takes any prefill worker, to compare with.
    """

    def __init__(
        self, rng: random.Random, transfer: MeasuredLine, *, by_chance: bool = False
    ) -> None:
        self._rng = rng
        self._by_chance = by_chance
        self._transfer = transfer
        self._popular = PopularPrefixes()

    def notice(self, prompt: HashedPrompt) -> None:
        """Counts a prompt that is about to be placed; a replay has been counted before."""
        if not prompt.is_replay:
            self._popular.add(prompt.hashes)

    def place(
        self, prompt: HashedPrompt, prefills: Sequence[Worker], decodes: Sequence[Worker]
    ) -> Placement:
        """The pair for a request.

        Raises:
            LayoutMismatchError: no prefill worker fits any decode worker.
        """
        fitting = [prefill for prefill in prefills if pairing_partners(prefill, decodes)]
        if not fitting:
            raise LayoutMismatchError(
                f"no prefill worker fits a decode worker: {prefills[0].info.pairing} and "
                f"{decodes[0].info.pairing}"
            )
        hashes, tokens = prompt.hashes, prompt.tokens
        prefill = self._prefill(fitting, hashes, tokens)
        decode = self._decode(pairing_partners(prefill, decodes), tokens)
        uncached = uncached_tokens(tokens, prefill.held.leading(hashes), prefill.block_size)
        return Placement(
            prefill,
            decode,
            prompt,
            uncached,
            ttft_s=predicted_ttft_s(prefill, uncached),
            tpot_s=predicted_tpot_s(decode),
            transfer_s=self._transfer.seconds(moved_tokens(prompt, decode)),
        )

    def place_alone(self, prompt: HashedPrompt, unified: Sequence[Worker]) -> LocalPlacement:
        """The unified worker that serves a request at the least cost to it and to others."""
        placements = [_alone(prompt, worker) for worker in unified]
        costs = [placement.cost_s for placement in placements]
        return placements[cheapest(costs, [worker.load for worker in unified], self._rng)]

    def _prefill(self, workers: Sequence[Worker], hashes: Sequence[bytes], tokens: int) -> Worker:
        """The one where the request costs least; popular prefixes favour nobody."""
        if self._by_chance:
            return self._rng.choice(workers)
        popular = self._popular.leading(hashes, len(workers))
        costs = [
            _prefill_cost_s(
                worker,
                uncached_tokens(
                    tokens, max(popular, worker.held.leading(hashes)), worker.block_size
                ),
            )
            for worker in workers
        ]
        return workers[cheapest(costs, [worker.load for worker in workers], self._rng)]

    def _decode(self, workers: Sequence[Worker], tokens: int) -> Worker:
        """The one with the least predicted TPOT among those that have room now."""
        roomy = [worker for worker in workers if _has_room(worker, tokens)] or workers
        costs = [predicted_tpot_s(worker) for worker in roomy]
        return roomy[cheapest(costs, [worker.load for worker in roomy], self._rng)]


def moved_tokens(prompt: HashedPrompt, decode: Worker) -> int:
    """Tokens whose KV the decode worker does not hold yet."""
    return uncached_tokens(prompt.tokens, decode.held.leading(prompt.hashes), decode.block_size)


def predicted_ttft_s(prefill: Worker, uncached: int) -> float:
    """Time until a prompt sent now has its first token: what waits there, then the prompt."""
    account = prefill.account
    waiting_s = prefill.speed.seconds(account.waiting_tokens, account.waiting_prompts)
    return waiting_s + prefill.speed.seconds(uncached)


def _prefill_cost_s(prefill: Worker, uncached: int) -> float:
    """The request's own predicted TTFT, and the time that others lose to its computation.

    Without the second part a prompt leaves the worker that holds it for any wait longer than its
    computation; the copy then drives out what other prompts there need, and all compute more.
    """
    return predicted_ttft_s(prefill, uncached) + prefill.speed.seconds(uncached)


def predicted_tpot_s(decode: Worker) -> float:
    """Time per token once one more request is in the running batch."""
    return decode.speed.seconds(decode.load + 1)


def _alone(prompt: HashedPrompt, worker: Worker) -> LocalPlacement:
    uncached = moved_tokens(prompt, worker)
    account, speed = worker.account, worker.local_speed
    waiting_s = speed.seconds(account.waiting_tokens, account.waiting_prompts)
    cost_s = local_cost_s(waiting_s, speed.seconds(uncached), worker.load)
    return LocalPlacement(worker, prompt, uncached, cost_s)


def _has_room(decode: Worker, tokens: int) -> bool:
    free = decode.account.free_blocks
    return free is None or free >= _blocks(tokens, decode)


def _blocks(tokens: int, worker: Worker) -> int:
    """Blocks for a prompt and the first tokens of its answer."""
    return tokens // worker.block_size + 1


async def hashed_prompt(
    work: Work, expanded: ExpandedPrompt, workers: Sequence[Worker]
) -> HashedPrompt:
    """Prompt and replayed tokens, hashed in the block size of these workers."""
    tokens = [*expanded.token_ids, *work.emitted]
    replay = bool(work.emitted)
    if not workers:
        return HashedPrompt(len(tokens), (), replay)
    images = [
        HashedRun(image.offset, image.length, work.prompt.images[image.plan.index].digest)
        for image in expanded.images
    ]
    size = workers[0].block_size
    if len(tokens) <= _LOOP_TOKENS:
        return HashedPrompt(len(tokens), block_hashes(tokens, images, size), replay)
    hashes = await asyncio.to_thread(block_hashes, tokens, images, size)
    return HashedPrompt(len(tokens), hashes, replay)
