"""Requests that this worker serves alone (unified mode)."""

from typing import Protocol

from services.decode.answer import Emit
from services.decode.request import DecodeJob, LocalImage


class LocalDecoding(Protocol):
    """Encodes, prefills and decodes in this process."""

    async def run(self, job: DecodeJob, images: tuple[LocalImage, ...], emit: Emit) -> None:
        """One request."""
