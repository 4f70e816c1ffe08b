"""Which images of a prompt may be computed already. Plain Python."""

from collections.abc import Iterable, Sequence

from epd.engine.requests import PromptImage


class ImageGate:
    """Closed for images whose embedding is still on its way.

    The engine computes a prompt up to the first closed image. Opened by the thread that fetches
    embeddings and read by the engine's: what is shared is one reference to a tuple, replaced and
    never changed.
    """

    def __init__(self, images: Sequence[PromptImage], closed: Iterable[int]) -> None:
        """``closed``: positions in ``images``."""
        self._images = images
        self._closed = tuple(closed)

    def open(self, position: int) -> None:
        """The image's embedding is in its place."""
        self._closed = tuple(one for one in self._closed if one != position)

    def end(self, start: int, end: int) -> int:
        """How far tokens from ``start`` may be computed: at most ``end``, at least ``start``.

        What lies before ``start`` has its KV, out of a prefix cache perhaps, and needs nothing.
        """
        images = [self._images[position] for position in self._closed]
        starts = [one.offset for one in images if one.offset + one.length > start]
        return max(start, min([end, *starts]))
