"""What a finished or failed transfer adds to the metrics."""

from opentelemetry.metrics import Meter

from epd.telemetry import semconv as names
from epd.telemetry.metrics import counter, histogram


class KvTransferMetrics:
    """KV pushes of a prefill worker; time runs from posting to completion, without queueing."""

    def __init__(self, meter: Meter) -> None:
        self._duration = histogram(meter, names.KV_TRANSFER_DURATION)
        self._throughput = histogram(meter, names.DISAGG_KV_TRANSFER_THROUGHPUT_GB_S)
        self._io = counter(meter, names.KV_TRANSFER_IO)
        self._failed = counter(meter, names.KV_TRANSFER_FAILED)

    def record(self, byte_count: int, transfer_ns: int) -> None:
        """One request's finished push."""
        self._io.add(byte_count)
        if transfer_ns > 0:
            self._throughput.record(byte_count / transfer_ns)
        # Last: whoever sees the transfer counted finds its bytes.
        self._duration.record(transfer_ns / 1e9)

    def record_failure(self) -> None:
        """One request's failed push."""
        self._failed.add(1)


class EmbeddingTransferMetrics:
    """Embedding reads of a prefill worker."""

    def __init__(self, meter: Meter) -> None:
        self._duration = histogram(meter, names.EMBEDDING_TRANSFER_DURATION)
        self._io = counter(meter, names.EMBEDDING_TRANSFER_IO)
        self._failed = counter(meter, names.EMBEDDING_TRANSFER_FAILED)

    def record(self, byte_count: int, transfer_ns: int) -> None:
        """The finished read of one request's embeddings."""
        self._io.add(byte_count)
        self._duration.record(transfer_ns / 1e9)  # last, as above

    def record_failure(self) -> None:
        """One request's failed read."""
        self._failed.add(1)
