"""An answer taken apart into what is said and which tools are called."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class SaidText:
    """Text for people."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """The next call begins; ``arguments`` follow as :class:`CallArguments`."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of the arguments of the call that has begun last."""

    text: str


ToolPiece = SaidText | CallBegun | CallArguments


class ToolOutput(Protocol):
    """Takes an answer's text as it comes. How it is cut changes nothing but the pieces' borders.

    No character of the answer is lost: what turns out to be no call is text.
    """

    def push(self, text: str) -> list[ToolPiece]:
        """What is certain after the next text."""
        ...

    def finish(self) -> list[ToolPiece]:
        """The rest, once no more text comes."""
        ...


def partial_at_end(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that ``tag`` begins with, ``tag`` itself excepted."""
    return next(
        (n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0
    )
