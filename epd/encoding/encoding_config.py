"""Settings of image encoding, shared by the encoder service and workers that encode locally."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blake3 import blake3

from epd.config import option
from epd.encoding.disk_tier import DiskTierConfig
from epd.encoding.encode_batcher import BatcherConfig
from epd.encoding.image_limits import READABLE_FORMATS, ImageLimits
from epd.encoding.preprocess_config import PreprocessConfig
from epd.engine.families.base import ModelFamily
from epd.handover.embedding_handle import MIN_LEASE_S

_MIB = 1 << 20


@dataclass(frozen=True)
class EncodingConfig:
    """What images may be, how much memory their embeddings get, how many are worked on at once."""

    max_image_bytes: int = option(20 * _MIB, help="longest image file", unit="bytes", minimum=1)
    max_image_pixels: int = option(
        50_000_000, help="most pixels of an image file", unit="pixels", minimum=1
    )
    max_image_side_ratio: float = option(
        200.0, help="longer side of an image over the shorter", minimum=1
    )
    max_images: int = option(32, help="most images of one request", minimum=1)
    max_video_frames: int = option(64, help="most frames of a video", minimum=1)
    max_video_pixels: int = option(
        100_000_000, help="most pixels of a video's frames together", unit="pixels", minimum=1
    )
    image_formats: tuple[str, ...] = option(
        READABLE_FORMATS, help=f"image formats to accept, of {', '.join(READABLE_FORMATS)}"
    )
    embedding_cache_bytes: int = option(
        64 * _MIB,
        help="embeddings kept for images that come again; 0 is off",
        unit="bytes",
        minimum=0,
    )
    embedding_working_bytes: int = option(
        64 * _MIB,
        help="registered memory besides the cache, for embeddings in use beyond its size",
        unit="bytes",
        minimum=4096,
    )
    embedding_policy: Literal["s3fifo", "lru"] = option(
        "s3fifo", help="which cached embedding goes first"
    )
    embedding_disk_folder: str = option(
        "", help="folder of a second cache tier on disk, one process at a time; empty is off"
    )
    embedding_disk_bytes: int = option(
        4096 * _MIB, help="most bytes of that folder", unit="bytes", minimum=4096
    )
    embedding_disk_writes: int = option(
        32, help="embeddings waiting to be written there, more are not written", minimum=1
    )
    embedding_lease_s: float = option(
        60.0, help="how long a handle lives without a renewal", unit="s", minimum=MIN_LEASE_S
    )
    embedding_hold_s: float = option(
        60.0,
        help="how long memory is held back that a vanished reader may still read",
        unit="s",
        minimum=0.05,
    )
    max_pending_images: int = option(
        64, help="images not yet encoded, one more is refused", minimum=1
    )
    encode_timeout_s: float = option(
        120.0, help="longest wait of an image for its embedding", unit="s", minimum=0.1
    )
    pixel_bytes: int = option(
        256 * _MIB,
        help="preprocessed pixels that wait for the vision tower",
        unit="bytes",
        minimum=1,
    )
    patch_budget: int = option(
        4096, help="most patches of one forward pass; a larger image runs alone", minimum=1
    )
    max_batch: int = option(16, help="most images of one forward pass", minimum=1)
    ageing_patches_per_s: float = option(
        4096.0,
        help="patches an image may be heavier, per second of waiting, and still go first",
        minimum=0,
    )
    jpeg_draft: bool = option(
        False,
        help="decode JPEG files of several times the model's resolution coarsely: faster, and "
        "pixels differ a little; the same on all encoders",
    )
    preprocess_processes: int = option(1, help="processes that decode and resize", minimum=1)
    preprocess_timeout_s: float = option(
        30.0, help="longest preprocessing of one image", unit="s", minimum=0.1
    )
    preprocess_memory_bytes: int = option(
        4096 * _MIB,
        help="address space of a preprocessing process; 0 is unbounded",
        unit="bytes",
        minimum=0,
    )

    def __post_init__(self) -> None:
        unknown = set(self.image_formats) - set(READABLE_FORMATS)
        if unknown or not self.image_formats:
            raise ValueError(
                f"image_formats holds {', '.join(sorted(unknown)) or 'nothing'}, "
                f"readable are {', '.join(READABLE_FORMATS)}"
            )

    @property
    def disk_tier(self) -> DiskTierConfig | None:
        """The second tier; None when it is off."""
        if not self.embedding_disk_folder:
            return None
        return DiskTierConfig(
            Path(self.embedding_disk_folder).expanduser(),
            self.embedding_disk_bytes,
            self.embedding_disk_writes,
        )

    @property
    def arena_bytes(self) -> int:
        """Registered memory in all."""
        return self.embedding_cache_bytes + self.embedding_working_bytes

    def processor_digest(self, family: ModelFamily) -> str:
        """Digest of all that decides what the vision tower sees of an image file."""
        if not self.jpeg_draft:
            return family.processor_digest
        return blake3(f"jpeg_draft\n{family.processor_digest}".encode()).hexdigest()

    @property
    def limits(self) -> ImageLimits:
        """What an image may be."""
        return ImageLimits(
            self.max_image_bytes,
            self.max_image_pixels,
            self.max_image_side_ratio,
            self.max_images,
            self.max_video_frames,
            self.max_video_pixels,
            frozenset(self.image_formats),
        )

    def batcher(self, threads: int) -> BatcherConfig:
        """Settings of the encode batcher, which computes on that many torch threads."""
        return BatcherConfig(self.patch_budget, self.max_batch, self.ageing_patches_per_s, threads)

    def preprocess(self, model_folder: Path) -> PreprocessConfig:
        """Settings of the preprocessing pool."""
        return PreprocessConfig(
            model_folder,
            self.limits,
            self.preprocess_processes,
            self.preprocess_timeout_s,
            memory_bytes=self.preprocess_memory_bytes,
        )
