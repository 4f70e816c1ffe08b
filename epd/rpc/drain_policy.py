"""What a process that drains still answers, and what it waits for."""

#: Streams that last as long as their callers do: nobody loses anything when they end.
_WATCHES = frozenset(
    {
        "epd.v1.DecodeService/Pair",
        "epd.v1.WorkerService/WatchKvEvents",
        "epd.v1.WorkerService/WatchLoad",
        "grpc.health.v1.Health/Watch",
    }
)
#: Short calls without which requests that run already could not end.
_UPKEEP = frozenset(
    {
        "epd.v1.DecodeService/Announce",
        "epd.v1.DecodeService/Fail",
        "epd.v1.DecodeService/Renew",
        "epd.v1.DecodeService/Settle",
        "epd.v1.EncoderService/AwaitReady",
        "epd.v1.EncoderService/Release",
        "epd.v1.EncoderService/Renew",
        "epd.v1.WorkerService/GetInfo",
        "grpc.health.v1.Health/Check",
    }
)


def is_work(method: str) -> bool:
    """Whether a call does a request's work: refused while draining, waited for when it runs.

    Args:
        method: Full name without a leading slash.
    """
    return method not in _WATCHES and method not in _UPKEEP
