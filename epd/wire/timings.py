"""Stage durations on the wire. Free of engine and data plane, so every service can use it."""

from collections.abc import Iterable, Mapping

from epd.v1 import common_pb2


def timings_to_proto(durations_ns: Mapping[str, int]) -> list[common_pb2.StageTiming]:
    """One message per stage, in order; durations in nanoseconds, each from one clock."""
    return [
        common_pb2.StageTiming(stage=stage, duration_ns=duration)
        for stage, duration in durations_ns.items()
    ]


def timings_from_proto(messages: Iterable[common_pb2.StageTiming]) -> dict[str, int]:
    """Nanoseconds by stage; a stage that is named twice counts the sum."""
    durations: dict[str, int] = {}
    for message in messages:
        durations[message.stage] = durations.get(message.stage, 0) + message.duration_ns
    return durations
