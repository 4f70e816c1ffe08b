"""What a prefill worker measures beside its gauges."""

from opentelemetry.metrics import Meter

from epd.telemetry import semconv
from epd.telemetry.metrics import histogram
from epd.telemetry.transfer_metrics import EmbeddingTransferMetrics, KvTransferMetrics


class PrefillMetrics:
    """Histograms and counters, written on the event loop."""

    def __init__(self, meter: Meter) -> None:
        self.kv = KvTransferMetrics(meter)
        self.embeddings = EmbeddingTransferMetrics(meter)
        self._queue = histogram(meter, semconv.REQUEST_QUEUE_DURATION)

    def record_queue(self, queue_ns: int) -> None:
        """One request's wait for a place in the running set."""
        self._queue.record(queue_ns / 1e9)
