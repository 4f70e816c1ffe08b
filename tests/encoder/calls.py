"""Calls of an encoder as tests make them."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from epd.encoding.encode_events import ImageInput, ImagePlanned, ImageReady
from epd.encoding.encoder import Encoder
from epd.image_digest import image_digest


@dataclass
class Answer:
    """The events of one call by image index."""

    planned: dict[int, ImagePlanned] = field(default_factory=dict)
    ready: dict[int, ImageReady] = field(default_factory=dict)

    @property
    def handle_ids(self) -> list[str]:
        return [planned.handle.handle_id for planned in self.planned.values()]

    @property
    def hits(self) -> list[bool]:
        return [planned.cache_hit for planned in self.planned.values()]


class Caller:
    """Makes image inputs with the right digests and collects what an encoder answers."""

    def __init__(self, processor_digest: str, model_digest: str) -> None:
        self._model_digest = model_digest
        self._processor_digest = processor_digest

    def images(self, files: Sequence[bytes]) -> list[ImageInput]:
        return [
            ImageInput(n, image_digest(self._model_digest, self._processor_digest, data), data)
            for n, data in enumerate(files)
        ]

    async def encode(self, encoder: Encoder, *files: bytes) -> Answer:
        answer = Answer()
        async with aclosing(encoder.encode(self.images(files))) as events:
            async for event in events:
                if isinstance(event, ImagePlanned):
                    answer.planned[event.image_index] = event
                else:
                    answer.ready[event.image_index] = event
        return answer
