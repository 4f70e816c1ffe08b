"""Parsers of tool calls by the names of the formats that models write them in."""

from collections.abc import Callable, Collection, Mapping

from epd.text.hermes_calls import HermesCalls
from epd.text.llama_calls import LlamaCalls

#: Each takes the names of the offered tools and reads one answer.
CALL_PARSERS: Mapping[str, Callable[[Collection[str]], HermesCalls | LlamaCalls]] = {
    "hermes": HermesCalls,
    "llama3": LlamaCalls,
}
