"""What answers at each path."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from epd.errors import InvalidRequestError, NotFoundError
from epd.rpc.request_context import request_id
from epd.rpc.server import GrpcServer
from epd.rpc.server_interceptors import typed_error
from epd.rpc.status import root_error
from epd.telemetry.setup import Telemetry
from epd.text.token_bytes import TokenBytes
from services.router.api_keys import ApiKeys
from services.router.calls import GenerateCall, PromptInput, TextPrompt, TokenPrompt
from services.router.choices import choices_of, generate_choices
from services.router.deadline import Deadline
from services.router.http.answers import AnswerFormat, ChatFormat, CompletionFormat
from services.router.http.body import BodyReader
from services.router.http.chat_request import ChatRequest, read_chat_request
from services.router.http.completion_request import CompletionRequest, read_completion_request
from services.router.http.errors import error_response, error_shape
from services.router.http.exchange import EventStream, unless_gone, whole_answer
from services.router.http.telemetry import HttpTelemetry
from services.router.registry import WorkerRegistry
from services.router.router import Router
from services.router.workers import ServedModel

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
_CLIENT_GONE = 499

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class HttpParts:
    """What the HTTP face works with.

    Args:
        router: Answers.
        registry: Knows the model.
        has_route: Whether the workers suffice for a request.
        server: The gRPC server of the same process: both drain and fail together.
        telemetry: The service's.
        token_bytes: Spells tokens for log probabilities.
        bodies: Reads requests.
        keys: Which callers are served.
        max_prompts: Most prompts of one completion request.
        max_choices: Most answers to one prompt.
        max_video_frames: Most frames of a video.
        tool_parser: What reads answers with tool calls.
        request_timeout_s: Deadline of every request.
        send_timeout_s: Longest wait for a client that reads nothing.
    """

    router: Router
    registry: WorkerRegistry
    has_route: Callable[[], bool]
    server: GrpcServer
    telemetry: Telemetry
    token_bytes: TokenBytes
    bodies: BodyReader
    keys: ApiKeys
    max_prompts: int
    max_choices: int
    max_video_frames: int
    tool_parser: str
    request_timeout_s: float
    send_timeout_s: float


def http_app(parts: HttpParts) -> ASGIApp:
    """The application."""
    endpoints = _Endpoints(parts)
    answered = functools.partial(_answered, parts.keys)
    routes = [
        Route(CHAT_PATH, answered(endpoints.chat), methods=["POST"]),
        Route(COMPLETIONS_PATH, answered(endpoints.completions), methods=["POST"]),
        Route("/v1/models", answered(endpoints.models)),
        Route("/v1/models/{name:path}", answered(endpoints.model)),
        Route("/health", endpoints.health),
        Route("/ready", endpoints.ready),
        Route("/metrics", endpoints.metrics),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_path})
    return HttpTelemetry(app, parts.telemetry, frozenset({CHAT_PATH, COMPLETIONS_PATH}))


class _Endpoints:
    """Converts at the edge; everything else is the router's."""

    def __init__(self, parts: HttpParts) -> None:
        self._parts = parts
        self._started_s = int(time.time())

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        model = await self._served()
        read = functools.partial(
            read_chat_request,
            default_max_tokens=model.context_length,
            max_choices=self._parts.max_choices,
            max_video_frames=self._parts.max_video_frames,
            tool_parser=self._parts.tool_parser,
        )
        asked = await self._parts.bodies.read(request, read)
        answer_format = functools.partial(ChatFormat, new_output=asked.tool_use.output)
        try:
            return await self._answer(
                request, asked, [asked.conversation], answer_format, model.name
            )
        except InvalidRequestError as error:
            if asked.tool_use.is_forced and error.field == "sampling.constraint":
                raise InvalidRequestError(
                    error.message, field="tools", reason=error.reason
                ) from error
            raise

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        model = await self._served()
        read = functools.partial(
            read_completion_request,
            max_prompts=self._parts.max_prompts,
            max_choices=self._parts.max_choices,
        )
        asked = await self._parts.bodies.read(request, read)
        echoes = [self._spelled(prompt) for prompt in asked.prompts] if asked.echo else []
        answer_format = functools.partial(CompletionFormat, echoes=echoes)
        return await self._answer(request, asked, asked.prompts, answer_format, model.name)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        found, name = self._model(), request.path_params["name"]
        if name != found["id"]:
            raise NotFoundError(f"model {name!r} is not served", reason="MODEL_NOT_SERVED")
        return JSONResponse(found)

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the process can serve at all."""
        failure = self._parts.server.failure
        return PlainTextResponse(failure or "ok", 503 if failure else 200)

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 while requests are welcome."""
        if self._parts.server.draining or self._parts.server.failure:
            return PlainTextResponse("not serving", 503)
        ready = self._parts.has_route()
        return PlainTextResponse("ready" if ready else "no workers", 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: the text of the Prometheus endpoint, where that is on."""
        endpoint = self._parts.telemetry.endpoint
        if endpoint is None:
            return PlainTextResponse("metrics are off", 404)
        text = await asyncio.to_thread(endpoint.text)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _answer(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        prompts: Sequence[PromptInput],
        answer_format: Callable[[str, str, TokenBytes | None, int], AnswerFormat],
        model: str,
    ) -> Response:
        call = GenerateCall(
            request_id(),
            asked.model,
            prompts[0],
            asked.sampling,
            asked.stop,
            client=request.state.client,
        )
        spelling = self._parts.token_bytes if asked.logprobs else None
        answer = answer_format(call.request_id, model, spelling, asked.choice_count)
        calls = choices_of(call, prompts, asked.choice_count)
        deadline = Deadline(self._parts.request_timeout_s)
        events = generate_choices(self._parts.router, calls, deadline)
        if asked.stream is None:
            return await unless_gone(request.receive, whole_answer(events, answer))
        try:
            first = await unless_gone(request.receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(events, first, answer, asked.stream, self._parts.send_timeout_s)

    def _spelled(self, prompt: TextPrompt | TokenPrompt) -> str:
        if isinstance(prompt, TextPrompt):
            return prompt.text
        data = b"".join(map(self._parts.token_bytes.of, prompt.token_ids))
        return data.decode("utf-8", errors="replace")

    async def _served(self) -> ServedModel:
        """The served model. A worker that is just coming is waited for, as over gRPC."""
        return await self._parts.router.model(Deadline(self._parts.request_timeout_s))

    def _model(self) -> dict[str, object]:
        model = self._parts.registry.model()
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "epd",
            "max_model_len": model.context_length,
        }


def _answered(keys: ApiKeys, endpoint: Endpoint) -> Endpoint:
    """The endpoint for callers with a key; errors become answers of OpenAI's shape."""

    async def answer(request: Request) -> Response:
        try:
            request.state.client = keys.client(request.headers.items())
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Exception as raised:
            return error_response(typed_error(root_error(raised), request.url.path))

    return answer


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_shape(error.status_code, error.detail, code="NO_SUCH_ENDPOINT")
    return JSONResponse(body, error.status_code, error.headers)
