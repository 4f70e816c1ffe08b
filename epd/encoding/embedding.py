"""What an image's embedding is: its place in the prompt, shape and element type."""

import math
from dataclasses import dataclass

from epd.engine.families.base import ImagePlan

#: Bytes per element of the types embeddings are kept in.
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class EmbeddingSpec:
    """Known before the image is decoded. ``shape`` is (embedding tokens, features)."""

    plan: ImagePlan
    shape: tuple[int, ...]
    dtype: str

    @property
    def byte_count(self) -> int:
        """Bytes of the embedding, without gaps."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]
