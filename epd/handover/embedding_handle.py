"""Leave to READ one image's embedding from an encoder's memory."""

import math
from dataclasses import dataclass

from epd.errors import InvalidRequestError
from epd.host_memory import MEMORY_END
from epd.transfer.base import AgentDescriptor, Segment

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Its reader renews a lease three times while it lasts and must hear the answer; the least that an
#: encoder can be set to. With less, or none, the reader would do nothing but renew and still be
#: too late. A very long one is the encoder's own promise and costs nobody anything.
MIN_LEASE_S = 0.05


@dataclass(frozen=True)
class EmbeddingHandle:
    """Mirrors the proto message. ``shape`` is (tokens, features); ``lease_s`` counts from the last
    renewal that the encoder has confirmed.
    """

    handle_id: str
    agent: AgentDescriptor
    digest: bytes
    segments: tuple[Segment, ...]
    byte_count: int
    shape: tuple[int, ...]
    dtype: str
    lease_s: float
    encoder_address: str

    def check(self, field: str) -> None:
        """Checks that segments, byte count, shape and dtype agree, that memory can lie there and
        that the lease can be renewed in time.

        Raises:
            InvalidRequestError: they do not; ``field`` is the handle's path in the request.
        """
        width = _ELEMENT_BYTES.get(self.dtype)
        if width is None:
            raise InvalidRequestError(f"dtype {self.dtype!r} is unknown", field=f"{field}.dtype")
        shaped = math.prod(self.shape) * width
        held = sum(segment.length for segment in self.segments)
        if not self.byte_count or not self.byte_count == shaped == held:
            raise InvalidRequestError(
                f"byte_count is {self.byte_count}, the shape has {shaped} bytes and the segments "
                f"have {held}",
                field=f"{field}.byte_count",
            )
        if self.lease_s < MIN_LEASE_S:
            raise InvalidRequestError(
                f"a lease of {self.lease_s} s cannot be renewed in time, the shortest is "
                f"{MIN_LEASE_S} s",
                field=f"{field}.lease_ms",
            )
        for one in self.segments:
            if not one.length or one.address + one.length > MEMORY_END:
                raise InvalidRequestError(
                    f"no process has {one.length} bytes at {one.address:#x}",
                    field=f"{field}.segments",
                )
