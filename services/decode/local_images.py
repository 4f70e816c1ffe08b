"""Embeddings of a request's images, made in this process."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import torch

from epd.encoding.encode_events import EmbeddingHandle, ImageInput, ImagePlanned, ImageReady
from epd.encoding.encoder import Encoder
from epd.engine.families.base import ImagePlan
from epd.errors import UnsupportedFeatureError
from epd.telemetry import semconv
from epd.worker.stages import Stages
from services.decode.request import LocalImage


@dataclass
class EncodedImages:
    """Pinned embeddings in order of the images; valid until :meth:`release`."""

    encoder: Encoder | None = None
    handles: list[EmbeddingHandle] = field(default_factory=list)

    @property
    def plans(self) -> list[ImagePlan]:
        """Where each image goes in the prompt."""
        return [handle.spec.plan for handle in self.handles]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The embeddings, [tokens, features] each, in the encoder's memory."""
        if self.encoder is None:
            return ()
        return tuple(self.encoder.embedding(handle.handle_id) for handle in self.handles)

    @property
    def handle_ids(self) -> list[str]:
        """What the encoder calls them."""
        return [handle.handle_id for handle in self.handles]

    def release(self) -> None:
        """Gives the embeddings back. Idempotent."""
        if self.encoder is not None:
            self.encoder.release(self.handle_ids, settled=True)
        self.handles = []


class LocalImages:
    """A unified worker's own encoder; None when the model takes no images."""

    def __init__(self, encoder: Encoder | None) -> None:
        self._encoder = encoder

    @asynccontextmanager
    async def encoded(
        self, images: Sequence[LocalImage], stages: Stages
    ) -> AsyncIterator[EncodedImages]:
        """Embeddings of all images or of none, pinned inside.

        Raises:
            UnsupportedFeatureError: the model takes no images.
            EpdError: as :meth:`Encoder.encode`.
        """
        if not images:
            yield EncodedImages()
            return
        if self._encoder is None:
            raise UnsupportedFeatureError("the model takes no images", reason="IMAGES_UNSUPPORTED")
        encoded = EncodedImages(self._encoder, await self._encode(self._encoder, images, stages))
        renewing = asyncio.create_task(_keep(self._encoder, encoded))
        try:
            yield encoded
        finally:
            renewing.cancel()
            encoded.release()

    async def _encode(
        self, encoder: Encoder, images: Sequence[LocalImage], stages: Stages
    ) -> list[EmbeddingHandle]:
        inputs = [ImageInput(n, image.digest, image.data) for n, image in enumerate(images)]
        planned: dict[int, EmbeddingHandle] = {}
        ready: list[ImageReady] = []
        async with aclosing(encoder.encode(inputs)) as events:
            async for event in events:
                if isinstance(event, ImagePlanned):
                    planned[event.image_index] = event.handle
                    continue
                ready.append(event)
                for stage in event.stages:
                    if stage.name in semconv.IMAGE_SPANS:
                        stages.record(stage.name, stage.start_ns, stage.end_ns)
        # Images are made side by side: the one that came last tells where the time went.
        for stage in ready[-1].stages:
            in_queue = stage.name == semconv.SPAN_QUEUE  # that name is the engine's queue here
            name = semconv.STAGE_ENCODE_QUEUE if in_queue else stage.name
            stages.count(name, stage.end_ns - stage.start_ns)
        return [planned[index] for index in range(len(images))]


async def _keep(encoder: Encoder, encoded: EncodedImages) -> None:
    """Renews the pins while the request waits in the engine's queue."""
    period_s = min((handle.lease_s for handle in encoded.handles), default=1.0) / 3
    while encoded.handles:
        encoder.renew(encoded.handle_ids)
        await asyncio.sleep(period_s)
