"""An answer taken apart into what is said and which tools are called."""

import json
from collections.abc import Collection
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


def written_call(text: str, names: Collection[str], arguments_key: str) -> list[ToolPiece]:
    """The call that ``text`` writes as a JSON object; empty when it is none of an offered tool.

    Args:
        text: What may be a call.
        names: Of the offered tools.
        arguments_key: What the object's arguments stand under.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    name = found.get("name") if isinstance(found, dict) else None
    arguments = found.get(arguments_key, {}) if name else None
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return []
    return [CallBegun(name), CallArguments(json.dumps(arguments, ensure_ascii=False))]


def partial_at_end(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that ``tag`` begins with, ``tag`` itself excepted."""
    return next(
        (n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0
    )
