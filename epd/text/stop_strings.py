"""Ends an output at the first of some texts, wherever tokens are cut."""

from collections.abc import Iterable
from typing import NamedTuple


class StopScan(NamedTuple):
    """``text`` may be sent; ``stopped`` says that a stop string has been completed after it."""

    text: str
    stopped: bool


class StopStringScanner:
    """Finds the stop string that is completed first and holds back what may become one.

    What has been sent never contains a stop string or a part of the one that ends the output. The
    result does not depend on how the text is cut into pieces. At most the longest stop string's
    length is held back.
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        assert all(self._stop_strings), "an empty stop string would stop at once"
        self._held = ""

    def push(self, text: str) -> StopScan:
        """Takes the next piece of text."""
        if not self._stop_strings:
            return StopScan(text, stopped=False)
        buffer = self._held + text
        ends = [
            (start + len(stop), start)
            for stop in self._stop_strings
            if (start := buffer.find(stop)) >= 0
        ]
        if ends:
            self._held = ""
            return StopScan(buffer[: min(ends)[1]], stopped=True)
        sure = len(buffer) - self._unsure(buffer)
        self._held = buffer[sure:]
        return StopScan(buffer[:sure], stopped=False)

    def flush(self) -> str:
        """What is held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _unsure(self, buffer: str) -> int:
        """Length of the longest end of ``buffer`` that a stop string begins with."""
        return max(
            (
                length
                for stop in self._stop_strings
                for length in range(1, min(len(stop), len(buffer) + 1))
                if buffer.endswith(stop[:length])
            ),
            default=0,
        )
