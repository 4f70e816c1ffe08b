"""Settings of the preprocessing pool."""

from dataclasses import dataclass, field
from pathlib import Path

from epd.encoding.image_limits import ImageLimits


@dataclass(frozen=True)
class PreprocessConfig:
    """Size and bounds of the pool. ``memory_bytes`` bounds each process's address space."""

    model_folder: Path
    limits: ImageLimits = field(default_factory=ImageLimits)
    processes: int = 1
    timeout_s: float = 30.0
    start_timeout_s: float = 60.0
    memory_bytes: int = 4 * 1024**3
