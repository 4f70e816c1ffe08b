"""Which calls are traced, the same on both sides."""

_UNTRACED_PREFIXES = (
    "grpc.",  # health and reflection
    "epd.v1.WorkerService/",  # watches that live as long as the process
)
#: Upkeep of pairs and leases: their effect shows in the stages, and batches serve many requests.
_UNTRACED_METHODS = frozenset(
    {
        "epd.v1.DecodeService/Pair",
        "epd.v1.DecodeService/Renew",
        "epd.v1.DecodeService/Settle",
        "epd.v1.EncoderService/Renew",
        "epd.v1.EncoderService/Release",
    }
)


def is_traced(method: str) -> bool:
    """True for calls that belong to one request; ``method`` has no leading slash."""
    return not method.startswith(_UNTRACED_PREFIXES) and method not in _UNTRACED_METHODS
