"""The likeliest tokens of a position on the wire. Free of engine and data plane."""

from collections.abc import Iterable

from epd.sampling import TopLogprobs
from epd.v1 import common_pb2


def top_to_proto(top: TopLogprobs) -> common_pb2.TopLogprobs:
    """The wire form."""
    return common_pb2.TopLogprobs(token_ids=top.token_ids, logprobs=top.logprobs)


def tops_from_proto(messages: Iterable[common_pb2.TopLogprobs]) -> list[TopLogprobs]:
    """One per message, in order."""
    return [TopLogprobs(tuple(top.token_ids), tuple(top.logprobs)) for top in messages]
