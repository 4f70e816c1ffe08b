"""The front object of image encoding, for the encoder service and for workers that encode locally.

The way of an image: digest checked, cache asked → header read, place planned, memory granted (for
all images of the call or for none) → **planned** → queue → preprocessing process → vision tower,
straight into the registered memory → **ready**. Calls that want the same image share one way.
"""

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from epd.encoding.embedding import EmbeddingSpec
from epd.encoding.embedding_cache import CacheEntry, EmbeddingCache, EntryState
from epd.encoding.embedding_leases import EmbeddingLeases
from epd.encoding.embedding_maker import EmbeddingMaker
from epd.encoding.encode_batcher import Vision, embedding_tensor
from epd.encoding.encode_events import (
    EmbeddingHandle,
    EncodeEvent,
    ImageInput,
    ImagePlanned,
    ImageReady,
)
from epd.encoding.encoder_stats import EncoderStats
from epd.encoding.encoding_config import EncodingConfig
from epd.encoding.eviction_policy import make_policy
from epd.encoding.image_examiner import ImageExaminer
from epd.encoding.image_header import ImageHeader
from epd.encoding.production import Production
from epd.encoding.productions import Productions
from epd.engine.families.base import ModelFamily
from epd.errors import (
    InternalError,
    InvalidRequestError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from epd.transfer.arena import Arena
from epd.transfer.base import Segment
from epd.transfer.buffer import HostBuffer

logger = logging.getLogger(__name__)

EXPIRY_PERIOD_S = 0.05


@dataclass(frozen=True)
class _Granted:
    """One image of a call with its pin."""

    image: ImageInput
    entry: CacheEntry
    handle_id: str
    production: Production | None

    @property
    def cache_hit(self) -> bool:
        """Whether the embedding was ready when the call asked."""
        return self.production is None


class Encoder:
    """Encodes images and keeps their embeddings. Lives on one event loop.

    Args:
        family: The model's family; it must accept images.
        vision: Its vision half.
        model_digest: Digest of configuration and weights, part of every image's digest.
        config: Bounds and sizes; the registered memory is allocated here.
        dtype: Element type of the embeddings.
        threads: Torch threads of the vision half.
        on_fatal: Called when the encoder can never work again.
    """

    def __init__(
        self,
        family: ModelFamily,
        vision: Vision,
        model_digest: str,
        config: EncodingConfig,
        *,
        dtype: str = "float32",
        threads: int = 1,
        on_fatal: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._family = family
        self._config = config
        self._dtype = dtype
        self._watchers: list[Callable[[], None]] = []
        self._buffer = HostBuffer(config.arena_bytes)
        self._cache = EmbeddingCache(
            Arena(config.arena_bytes),
            config.embedding_cache_bytes,
            make_policy(config.embedding_policy, config.embedding_cache_bytes),
            lambda entry: self._productions.abandon(entry),
        )
        self._leases = EmbeddingLeases(
            self._cache, config.embedding_lease_s, config.embedding_hold_s, time.monotonic
        )
        self._examiner = ImageExaminer(model_digest, config.processor_digest(family), config.limits)
        self._maker = EmbeddingMaker(family, vision, config, threads, on_fatal)
        self._productions = Productions(
            self._maker, self._cache, self._view, config.encode_timeout_s, self._changed
        )
        self._expiry: asyncio.Task[None] | None = None
        self._stopping = False
        self._queries = 0
        self._hits = 0

    @property
    def memory(self) -> Segment:
        """All memory that handles point into, to be registered once."""
        return self._buffer.segment

    @property
    def readable(self) -> bool:
        """Whether a peer may READ some embedding now."""
        return self._leases.readable

    def watch(self, callback: Callable[[], None]) -> None:
        """Calls back on the event loop whenever load or leases have changed; must be quick."""
        self._watchers.append(callback)

    async def start(self) -> None:
        """Starts processes and thread. Raises UnavailableError when a process does not come up."""
        await self._maker.start()
        self._expiry = asyncio.create_task(self._expire())

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Fails what is left and ends processes and thread."""
        self._stopping = True
        if self._expiry is not None:
            self._expiry.cancel()
        self._productions.close()
        if not await self._maker.stop(timeout_s):
            logger.error("the vision tower still runs after %g s", timeout_s)
        await self._productions.stop()
        self._examiner.stop()

    async def encode(
        self, images: Sequence[ImageInput], attempt_id: str = ""
    ) -> AsyncGenerator[EncodeEvent, None]:
        """Encodes the images of one call: all are planned in order, then each gets ready.

        Close the iterator (``contextlib.aclosing``) to give up: memory that has no reader is free
        at once, the rest is quarantined. After the last event the leases begin to run.

        Raises:
            InvalidRequestError: an image is not acceptable; the field is ``images[image_index]``.
            ResourceExhaustedError: too many images are pending or memory is short. Nothing is held.
            UnavailableError: the encoder has stopped.
            DeadlineExceededError, InternalError: an image failed; the first failure ends the call.
        """
        if self._stopping:
            raise UnavailableError("the encoder has stopped", reason="ENCODER_STOPPED")
        called_ns = time.monotonic_ns()
        granted = await self._grant(images)
        self._leases.assign(attempt_id, [one.handle_id for one in granted])
        shown: set[str] = set()
        ended_well = False
        try:
            for one in granted:
                yield ImagePlanned(one.image.image_index, self._handle(one), one.cache_hit)
            finished = _finished(granted)
            for _ in granted:
                one = await finished.get()
                if one.production is not None:
                    one.production.check(one.image.image_index)
                shown.add(one.handle_id)
                stages = one.production.stages_since(called_ns) if one.production else ()
                yield ImageReady(one.image.image_index, stages)
            ended_well = True
        finally:
            if ended_well:
                self._leases.run(shown)
            else:
                self._leases.release([one.handle_id for one in granted], settled=False)
            self._changed()

    def renew(self, handle_ids: Iterable[str], *, reading: bool = False) -> list[str]:
        """Starts leases anew; returns the ids that are unknown. See EmbeddingLeases.renew."""
        return self._leases.renew(handle_ids, reading=reading)

    def release(
        self, handle_ids: Iterable[str], *, settled: bool, attempt_id: str = ""
    ) -> list[str]:
        """Gives leases back, those of an attempt too; returns the ids that are unknown.

        See EmbeddingLeases.release.
        """
        unknown = self._leases.release(handle_ids, settled=settled)
        self._leases.release(self._leases.of_attempt(attempt_id), settled=settled)
        self._changed()
        return unknown

    def embedding(self, handle_id: str) -> torch.Tensor:
        """The embedding of a handle, [tokens, features]; valid until its release.

        Raises:
            NotFoundError: there is no such lease, or nothing ready behind it.
        """
        entry = self._leases.find(handle_id)
        if entry is None or entry.state is not EntryState.READY:
            raise NotFoundError(f"no embedding under handle {handle_id}", reason="HANDLE_UNKNOWN")
        return embedding_tensor(self._view(entry), entry.spec)

    def stats(self) -> EncoderStats:
        """The numbers now; may be called from any thread."""
        cache, batcher = self._cache, self._maker.batcher
        running = batcher.running_images
        return EncoderStats(
            running_images=running,
            waiting_images=max(0, len(self._productions) - running),
            waiting_patches=self._productions.patches,
            total_bytes=cache.total_bytes,
            free_bytes=cache.free_bytes + cache.idle_bytes,
            used_bytes=cache.in_use_bytes + cache.idle_bytes,
            cached_bytes=cache.idle_bytes,
            in_use_bytes=cache.in_use_bytes,
            quarantined_bytes=cache.quarantined_bytes,
            open_leases=self._leases.open_count,
            cache_queries=self._queries,
            cache_hits=self._hits,
            evictions=cache.evictions,
            forwards=batcher.forwards,
            encoded_images=batcher.encoded_images,
            encoded_patches=batcher.encoded_patches,
            expired_leases=self._leases.expired,
            unknown_renewals=self._leases.unknown_renewals,
            preprocess_restarts=self._maker.pool.restarts,
        )

    def check_integrity(self) -> None:
        """Asserts that memory, pins and productions add up; for tests and idle moments."""
        self._cache.check_integrity()

    async def _grant(self, images: Sequence[ImageInput]) -> list[_Granted]:
        """Pins an entry for each image: found ones, and new ones for all others or for none."""
        granted: dict[int, _Granted] = {}
        try:
            for position, image in enumerate(images):
                entry = self._cache.find(image.digest)
                if entry is not None:  # pinned, so that it is still there after the examination
                    granted[position] = self._pin(image, entry)
            headers = await self._examiner.examine(
                images,
                [n not in granted or not granted[n].cache_hit for n in range(len(images))],
            )
            self._claim(images, headers, granted)
        except BaseException:
            self._leases.release([one.handle_id for one in granted.values()], settled=True)
            raise
        self._queries += len(images)
        self._hits += sum(one.cache_hit for one in granted.values())
        self._changed()
        return [granted[position] for position in range(len(images))]

    def _claim(
        self,
        images: Sequence[ImageInput],
        headers: Sequence[ImageHeader | None],
        granted: dict[int, _Granted],
    ) -> None:
        """Adds to ``granted`` what is missing. Does not wait: nothing may change in between."""
        wanted: dict[bytes, tuple[ImageInput, EmbeddingSpec]] = {}
        for position, image in enumerate(images):
            if position in granted and granted[position].entry.state is not EntryState.WITHDRAWN:
                continue
            if self._cache.find(image.digest) is None:
                header = headers[position]
                assert header is not None
                wanted[image.digest] = image, self._spec(image, header)
        if len(self._productions) + len(wanted) > self._config.max_pending_images:
            raise ResourceExhaustedError(
                f"{len(self._productions)} images are pending and {len(wanted)} more wanted, "
                f"the limit is {self._config.max_pending_images}",
                reason="QUEUE_FULL",
                retry_after_s=0.25,
            )
        entries = self._cache.claim([(digest, spec) for digest, (_, spec) in wanted.items()])
        for entry in entries:
            self._productions.start(entry, wanted[entry.digest][0].data)
        for position, image in enumerate(images):
            if position not in granted or granted[position].entry.state is EntryState.WITHDRAWN:
                found = self._cache.find(image.digest)
                assert found is not None
                replaced = granted.pop(position, None)
                granted[position] = self._pin(image, found)
                if replaced is not None:
                    self._leases.release([replaced.handle_id], settled=True)

    def _pin(self, image: ImageInput, entry: CacheEntry) -> _Granted:
        expected = (entry.spec.plan.embedding_tokens, self._family.hidden_size)
        if entry.spec.shape != expected or entry.spec.byte_count != entry.memory.length:
            raise InternalError(
                f"cached as {entry.spec.shape} in {entry.memory.length} bytes, expected {expected}"
            )
        production = None if entry.state is EntryState.READY else self._productions[entry]
        return _Granted(image, entry, self._leases.grant(entry), production)

    def _spec(self, image: ImageInput, header: ImageHeader) -> EmbeddingSpec:
        try:
            plan = self._family.plan_from_size(header.width, header.height)
        except InvalidRequestError as error:
            field = f"images[{image.image_index}]"
            raise InvalidRequestError(
                f"{field}: {error.message}", field=field, reason=error.reason
            ) from error
        shape = (plan.embedding_tokens, self._family.hidden_size)
        return EmbeddingSpec(plan, shape, self._dtype)

    def _handle(self, one: _Granted) -> EmbeddingHandle:
        memory = one.entry.memory
        return EmbeddingHandle(
            one.handle_id,
            one.entry.digest,
            self._buffer.part(memory.offset, memory.length),
            one.entry.spec,
            self._leases.lease_s,
        )

    def _view(self, entry: CacheEntry) -> npt.NDArray[np.uint8]:
        return self._buffer.view(entry.memory.offset, entry.memory.length)

    def _changed(self) -> None:
        for callback in self._watchers:
            callback()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_PERIOD_S)
            if self._leases.expire():
                self._changed()


def _finished(granted: Sequence[_Granted]) -> "asyncio.Queue[_Granted]":
    """A queue that gets each image as soon as its embedding is there or has failed."""
    finished: asyncio.Queue[_Granted] = asyncio.Queue()
    for one in granted:
        if one.production is None:
            finished.put_nowait(one)
        else:
            one.production.when_finished(functools.partial(finished.put_nowait, one))
    return finished
