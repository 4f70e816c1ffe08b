"""What :class:`epd.encoding.encoder.Encoder` is given and what it answers."""

from dataclasses import dataclass, field

from epd.encoding.embedding import EmbeddingSpec
from epd.media import Media
from epd.transfer.base import Segment


@dataclass(frozen=True)
class ImageInput:
    """One image or video of a call.

    ``image_index`` is its position in the client's request; ``digest`` what the caller says its
    content digest is; ``data`` the file or the frames.
    """

    image_index: int
    digest: bytes
    data: Media = field(repr=False)


@dataclass(frozen=True)
class EmbeddingHandle:
    """Leave to read one embedding: its random id, where it lies and for how long it stays there."""

    handle_id: str
    digest: bytes
    segment: Segment
    spec: EmbeddingSpec
    lease_s: float


@dataclass(frozen=True)
class ImagePlanned:
    """The image's place in the prompt and its memory are known; there is no embedding yet."""

    image_index: int
    handle: EmbeddingHandle
    cache_hit: bool


@dataclass(frozen=True)
class Stage:
    """A stage that an image went through, by ``time.monotonic_ns``."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class ImageReady:
    """The embedding is in place, and has been since the last of ``stages`` ended.

    They follow each other without overlap: the plan of the call's images, then what making this one
    took from there on, which is nothing after a cache hit.
    """

    image_index: int
    stages: tuple[Stage, ...]


EncodeEvent = ImagePlanned | ImageReady
