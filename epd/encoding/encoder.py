"""The front object of image encoding, for the encoder service and for workers that encode locally.

The way of an image: digest checked, cache asked → header read, place planned, memory granted (for
all images of the call or for none) → **planned** → disk tier asked, if there is one → queue →
preprocessing process → vision tower, straight into the registered memory → **ready**. Calls that
want the same image share one way.
"""

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

import torch

from epd.encoding.disk_tier import DiskTier
from epd.encoding.embedding import EmbeddingSpec
from epd.encoding.embedding_cache import EntryState
from epd.encoding.embedding_maker import EmbeddingMaker
from epd.encoding.embedding_source import EmbeddingSource
from epd.encoding.embedding_store import EmbeddingStore
from epd.encoding.encode_batcher import Vision
from epd.encoding.encode_events import EncodeEvent, ImageInput, ImagePlanned, ImageReady, Stage
from epd.encoding.encoder_stats import EncoderStats
from epd.encoding.encoding_config import EncodingConfig
from epd.encoding.image_examiner import ImageExaminer, MediaHeader
from epd.encoding.image_grants import Grant, ImageGrants
from epd.encoding.productions import Productions
from epd.encoding.video_header import VideoHeader
from epd.engine.families.base import ModelFamily
from epd.errors import InvalidRequestError, UnavailableError
from epd.telemetry import semconv
from epd.transfer.base import Segment

logger = logging.getLogger(__name__)


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
        self._dtype = dtype
        self._watchers: list[Callable[[], None]] = []
        self._store = EmbeddingStore(config, lambda entry: self._productions.abandon(entry))
        self._maker = EmbeddingMaker(family, vision, config, threads, on_fatal)
        self._disk = DiskTier(config.disk_tier) if config.disk_tier is not None else None
        self._productions = Productions(
            EmbeddingSource(self._maker, self._disk, self._store),
            self._store.cache,
            config.encode_timeout_s,
            self._changed,
        )
        self._examiner = ImageExaminer(model_digest, config.processor_digest(family), config.limits)
        self._grants = ImageGrants(
            self._store,
            self._productions,
            self._examiner,
            self._spec,
            family.embedding_features,
            config.max_pending_images,
        )
        self._expiry: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def memory(self) -> Segment:
        """All memory that handles point into, to be registered once."""
        return self._store.segment

    @property
    def readable(self) -> bool:
        """Whether a peer may READ some embedding now."""
        return self._store.leases.readable

    def watch(self, callback: Callable[[], None]) -> None:
        """Calls back on the event loop whenever load or leases have changed; must be quick."""
        self._watchers.append(callback)

    async def start(self) -> None:
        """Starts processes and threads.

        Raises:
            UnavailableError: a process does not come up, or the disk tier is not to be had.
        """
        if self._disk is not None:
            await self._disk.open()
        await self._maker.start()
        self._expiry = asyncio.create_task(self._store.expire(self._changed))

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Fails what is left and ends processes and threads."""
        self._stopping = True
        if self._expiry is not None:
            self._expiry.cancel()
        self._productions.close()
        if not await self._maker.stop(timeout_s):
            logger.error("the vision tower still runs after %g s", timeout_s)
        await self._productions.stop()
        if self._disk is not None:
            await self._disk.close()
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
        granted = await self._grants.grant(images)
        planned = Stage(semconv.STAGE_PLAN, called_ns, time.monotonic_ns())
        self._changed()
        leases = self._store.leases
        leases.assign(attempt_id, [one.handle_id for one in granted])
        shown: set[str] = set()
        ended_well = False
        try:
            for one in granted:
                handle = self._store.handle(one.handle_id, one.entry)
                yield ImagePlanned(one.image.image_index, handle, one.cache_hit)
            finished = _finished(granted)
            for _ in granted:
                one = await finished.get()
                if one.production is not None:
                    one.production.check(f"images[{one.image.image_index}]")
                shown.add(one.handle_id)
                made = one.production.stages_since(planned.end_ns) if one.production else ()
                yield ImageReady(one.image.image_index, (planned, *made))
            ended_well = True
        finally:
            if ended_well:
                leases.run(shown)
            else:
                leases.release([one.handle_id for one in granted], settled=False)
            self._changed()

    async def await_ready(self, handle_id: str) -> None:
        """Returns once the embedding of a handle is in place.

        Raises:
            NotFoundError: there is no such lease (any more).
            EpdError: why the image could not be encoded.
        """
        entry = self._store.leases.find(handle_id)
        if entry is not None and entry.state is EntryState.FILLING:
            production = self._productions[entry]
            await production.wait()
            production.check(f"handle {handle_id}")
        self._store.embedding(handle_id)

    def renew(self, handle_ids: Iterable[str], *, reading: bool = False) -> list[str]:
        """Starts leases anew; returns the ids that are unknown. See EmbeddingLeases.renew."""
        return self._store.leases.renew(handle_ids, reading=reading)

    def release(
        self, handle_ids: Iterable[str], *, settled: bool, attempt_id: str = ""
    ) -> list[str]:
        """Gives leases back, those of an attempt too; returns the ids that are unknown.

        See EmbeddingLeases.release.
        """
        leases = self._store.leases
        unknown = leases.release(handle_ids, settled=settled)
        leases.release(leases.of_attempt(attempt_id), settled=settled)
        self._changed()
        return unknown

    def embedding(self, handle_id: str) -> torch.Tensor:
        """The embedding of a handle, [tokens, features]; valid until its release.

        Raises:
            NotFoundError: there is no such lease, or nothing ready behind it.
        """
        return self._store.embedding(handle_id)

    def stats(self) -> EncoderStats:
        """The numbers now; may be called from any thread."""
        return EncoderStats.of(
            self._store, self._grants, self._productions, self._maker, self._disk
        )

    def check_integrity(self) -> None:
        """Asserts that memory, pins and productions add up; for tests and idle moments."""
        self._store.cache.check_integrity()

    def _spec(self, image: ImageInput, header: MediaHeader) -> EmbeddingSpec:
        try:
            if isinstance(header, VideoHeader):
                plan = self._family.plan_video_from_size(
                    header.timestamps_s, header.width, header.height
                )
            else:
                plan = self._family.plan_from_size(header.width, header.height)
        except InvalidRequestError as error:
            field = f"images[{image.image_index}]"
            raise InvalidRequestError(
                f"{field}: {error.message}", field=field, reason=error.reason
            ) from error
        return EmbeddingSpec(
            plan, (plan.embedding_tokens, self._family.embedding_features), self._dtype
        )

    def _changed(self) -> None:
        for callback in self._watchers:
            callback()


def _finished(granted: Sequence[Grant]) -> "asyncio.Queue[Grant]":
    """A queue that gets each image as soon as its embedding is there or has failed."""
    finished: asyncio.Queue[Grant] = asyncio.Queue()
    for one in granted:
        if one.production is None:
            finished.put_nowait(one)
        else:
            one.production.when_finished(functools.partial(finished.put_nowait, one))
    return finished
