"""What a router measures of a request: the GenAI server metrics and the hand-over."""

from opentelemetry.metrics import Meter

from epd.telemetry import semconv as names
from epd.telemetry.metrics import histogram


class GenAiMetrics:
    """Records one request at its end. Token timings count successful requests only."""

    def __init__(self, meter: Meter, model_name: str) -> None:
        self._request_duration = histogram(meter, names.GEN_AI_SERVER_REQUEST_DURATION)
        self._time_to_first_token = histogram(meter, names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN)
        self._time_per_output_token = histogram(meter, names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN)
        self._handover = histogram(meter, names.DISAGG_PREFILL_TO_DECODE_LATENCY_MS)
        self._attributes = {
            names.GEN_AI_PROVIDER_NAME: names.PROVIDER_EPD,
            names.GEN_AI_REQUEST_MODEL: model_name,
            names.GEN_AI_RESPONSE_MODEL: model_name,
        }

    def record_success(
        self,
        operation: str,
        *,
        duration_s: float,
        first_token_s: float,
        output_tokens: int,
        handover_ns: int | None = None,
    ) -> None:
        """A request that ended by itself; both times count from its arrival.

        ``handover_ns`` runs from the first token to the start of decode; None where one worker did
        both or the first token was the last.
        """
        attributes = {**self._attributes, names.GEN_AI_OPERATION_NAME: operation}
        self._request_duration.record(duration_s, attributes)
        self._time_to_first_token.record(first_token_s, attributes)
        if output_tokens > 1:
            per_token_s = (duration_s - first_token_s) / (output_tokens - 1)
            self._time_per_output_token.record(per_token_s, attributes)
        if handover_ns is not None:
            self._handover.record(handover_ns / 1e6)

    def record_failure(self, operation: str, *, duration_s: float, error_type: str) -> None:
        """A request that ended with a status; ``error_type`` is the code's name."""
        self._request_duration.record(
            duration_s,
            {
                **self._attributes,
                names.GEN_AI_OPERATION_NAME: operation,
                names.ERROR_TYPE: error_type,
            },
        )
