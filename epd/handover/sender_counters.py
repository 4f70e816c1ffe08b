"""What has become of a prefill worker's pushes."""

from dataclasses import dataclass


@dataclass
class SenderCounters:
    """Totals since the start; ``undrained`` pushes were left while a WRITE still read their KV."""

    pushed: int = 0
    failed: int = 0
    undrained: int = 0
    layers_without_push: int = 0
