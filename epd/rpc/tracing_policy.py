"""Which calls are traced, the same on both sides."""

_UNTRACED_PREFIXES = (
    "grpc.",  # health and reflection
    "epd.v1.WorkerService/",  # watches that live as long as the process
)
_UNTRACED_METHODS = frozenset({"epd.v1.DecodeService/Pair"})


def is_traced(method: str) -> bool:
    """True for calls that belong to one request; ``method`` has no leading slash."""
    return not method.startswith(_UNTRACED_PREFIXES) and method not in _UNTRACED_METHODS
