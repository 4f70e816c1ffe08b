"""The GenAI span and metrics of a request. No prompt and no answer is ever in them."""

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from epd.errors import EpdError, InternalError, RequestCancelledError
from epd.telemetry import semconv
from epd.telemetry.genai_metrics import GenAiMetrics
from epd.telemetry.setup import Telemetry
from services.router.calls import Completion, Conversation, GenerateCall
from services.router.critical_path import KV_HANDOVER, CriticalPath


class RequestRecord:
    """One request's span, from arrival to its end.

    Args:
        telemetry: The router's.
        metrics: Of the served model.
        call: The request.
        model_name: The served model.
        path: Of the request; begun on arrival, before there was a worker to serve it perhaps.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        metrics: GenAiMetrics,
        call: GenerateCall,
        model_name: str,
        path: CriticalPath,
    ) -> None:
        is_chat = isinstance(call.prompt, Conversation)
        self._operation = semconv.OPERATION_CHAT if is_chat else semconv.OPERATION_TEXT_COMPLETION
        self._metrics = metrics
        self._path = path
        self._ended = False
        sampling = call.sampling
        self._span = telemetry.tracer.start_span(
            f"{self._operation} {model_name}",
            kind=SpanKind.INTERNAL,
            attributes={
                semconv.GEN_AI_OPERATION_NAME: self._operation,
                semconv.GEN_AI_PROVIDER_NAME: semconv.PROVIDER_EPD,
                semconv.GEN_AI_OUTPUT_TYPE: "text",
                semconv.GEN_AI_REQUEST_MODEL: model_name,
                semconv.GEN_AI_REQUEST_STREAM: True,
                semconv.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_tokens,
                semconv.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
                semconv.GEN_AI_REQUEST_TOP_P: sampling.top_p,
                semconv.GEN_AI_REQUEST_TOP_K: sampling.top_k,
                semconv.GEN_AI_REQUEST_SEED: _exportable(sampling.seed),
                semconv.GEN_AI_RESPONSE_ID: call.request_id,
                semconv.GEN_AI_RESPONSE_MODEL: model_name,
                semconv.EPD_REQUEST_ID: call.request_id,
            },
        )
        if call.stop:
            self._span.set_attribute(semconv.GEN_AI_REQUEST_STOP_SEQUENCES, call.stop)

    @property
    def context(self) -> otel_context.Context:
        """The context that calls of this request are made in."""
        return trace.set_span_in_context(self._span)

    def first_token(self) -> None:
        """Marks the moment."""
        self._span.add_event(semconv.EVENT_FIRST_TOKEN)

    def completed(self, completion: Completion) -> None:
        """Ends the span of a request that ended by itself."""
        usage = completion.usage
        self._span.set_attributes(
            {
                semconv.GEN_AI_RESPONSE_FINISH_REASONS: [completion.finish_reason.value],
                semconv.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: completion.ttft_ns / 1e9,
                semconv.GEN_AI_USAGE_INPUT_TOKENS: usage.prompt_tokens,
                semconv.GEN_AI_USAGE_OUTPUT_TOKENS: usage.completion_tokens,
                semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: usage.cached_tokens,
                semconv.EPD_ATTEMPT: completion.attempt_count,
                **{
                    f"{semconv.EPD_STAGE_NS_PREFIX}{stage}": duration_ns
                    for stage, duration_ns in completion.timings_ns.items()
                },
            }
        )
        self._end(semconv.OUTCOME_OK)
        self._metrics.record_success(
            self._operation,
            duration_s=self._elapsed_s(),
            first_token_s=completion.ttft_ns / 1e9,
            output_tokens=usage.completion_tokens,
            handover_ns=completion.timings_ns.get(KV_HANDOVER),
        )

    def failed(self, error: Exception) -> None:
        """Ends the span of a request that failed."""
        self._span.set_status(Status(StatusCode.ERROR))
        code = error.code if isinstance(error, EpdError) else InternalError.code
        self._fail(code, semconv.OUTCOME_ERROR)

    def close(self) -> None:
        """Ends the span of a request that nobody waits for any more."""
        if not self._ended:
            self._fail(RequestCancelledError.code, semconv.OUTCOME_CANCELLED)

    def _fail(self, error_type: str, outcome: str) -> None:
        self._span.set_attribute(semconv.ERROR_TYPE, error_type)
        self._end(outcome)
        self._metrics.record_failure(
            self._operation, duration_s=self._elapsed_s(), error_type=error_type
        )

    def _end(self, outcome: str) -> None:
        self._ended = True
        self._span.set_attribute(semconv.EPD_OUTCOME, outcome)
        self._span.end()

    def _elapsed_s(self) -> float:
        return self._path.elapsed_ns() / 1e9


def _exportable(number: int) -> int | str:
    """OTLP knows signed 64-bit numbers only; a larger one goes as text."""
    return number if number < 2**63 else str(number)
