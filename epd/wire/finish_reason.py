"""Finish reasons on the wire."""

from epd.sampling import FinishReason
from epd.v1 import common_pb2

_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


def finish_reason_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason:
    """The wire form; None, which means "not ended", is UNSPECIFIED."""
    if reason is None:
        return common_pb2.FINISH_REASON_UNSPECIFIED
    return _TO_PROTO[reason]


def finish_reason_from_proto(value: common_pb2.FinishReason) -> FinishReason | None:
    """The reason of a wire value; None for UNSPECIFIED and for values of a later version."""
    return next((reason for reason, wire in _TO_PROTO.items() if wire == value), None)
