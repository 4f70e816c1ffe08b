"""KServe's inference service, spoken with the stubs that ``tritonclient`` ships."""

import asyncio
import contextlib
import importlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from epd.cleanup import cancel_and_wait
from epd.config import ConfigError
from epd.errors import InternalError, InvalidRequestError, NotFoundError
from epd.rpc.aliases import GenericRpcHandler, ServicerContext
from epd.rpc.deadlines import remaining_s
from epd.rpc.request_context import set_request_id
from epd.rpc.server import GrpcServer
from epd.rpc.server_interceptors import typed_error
from epd.rpc.status import INTERNAL_TEXT, root_error
from epd.telemetry.setup import metadata_version
from services.router.api_keys import ApiKeys
from services.router.calls import Completion
from services.router.deadline import Deadline
from services.router.kserve.infer_request import (
    INPUTS,
    OUTPUTS,
    VERSION,
    check_version,
    read_infer_request,
)
from services.router.kserve.infer_response import ResponseWriter
from services.router.registry import WorkerRegistry
from services.router.router import Router

SERVICE_NAME = "inference.GRPCInferenceService"
_STREAM = f"/{SERVICE_NAME}/ModelStreamInfer"
#: Responses of one stream that wait for its client; then the requests' own buffers fill.
_WAITING_RESPONSES = 16


class KserveServicer:
    """Server and model state, ModelInfer and ModelStreamInfer; other methods do not exist here.

    Args:
        router: Answers.
        registry: Knows the model.
        has_route: Whether the workers suffice for a request.
        server: Tells whether the process drains or has failed.
        keys: Which callers are served.
        timeout_s: Longest deadline of a request.
        stream_requests: Most live requests of one stream; it is read no further meanwhile.

    Raises:
        ConfigError: the package with the stubs is not installed.
    """

    def __init__(
        self,
        router: Router,
        registry: WorkerRegistry,
        has_route: Callable[[], bool],
        server: GrpcServer,
        keys: ApiKeys,
        timeout_s: float,
        stream_requests: int,
    ) -> None:
        self._router = router
        self._registry = registry
        self._has_route = has_route
        self._server = server
        self._keys = keys
        self._timeout_s = timeout_s
        self._stream_requests = stream_requests
        try:
            self._pb: Any = importlib.import_module("tritonclient.grpc.service_pb2")
        except (ImportError, RuntimeError) as error:
            raise ConfigError("--kserve needs the package tritonclient: epd[kserve]") from error

    def handler(self) -> GenericRpcHandler:
        """For the server; gRPC itself answers UNIMPLEMENTED to what is not in it."""
        unary = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.model_infer,
        }
        methods: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                call, getattr(self._pb, f"{name}Request").FromString, _serialized
            )
            for name, call in unary.items()
        }
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self.model_stream_infer, self._pb.ModelInferRequest.FromString, _serialized
        )
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    async def server_live(self, request: Any, context: ServicerContext) -> Any:
        """Whether the process can serve at all."""
        return self._pb.ServerLiveResponse(live=not self._server.failure)

    async def server_ready(self, request: Any, context: ServicerContext) -> Any:
        """Whether requests are welcome."""
        return self._pb.ServerReadyResponse(ready=self._is_ready())

    async def model_ready(self, request: Any, context: ServicerContext) -> Any:
        """Whether requests to this model are welcome."""
        ready = self._is_ready() and request.name == self._registry.model().name
        return self._pb.ModelReadyResponse(ready=ready and request.version in ("", VERSION))

    async def server_metadata(self, request: Any, context: ServicerContext) -> Any:
        """Name and version of this software."""
        self._client(context)
        return self._pb.ServerMetadataResponse(name="epd", version=metadata_version())

    async def model_metadata(self, request: Any, context: ServicerContext) -> Any:
        """The model's tensors."""
        self._client(context)
        name = self._registry.model().name
        if request.name != name:
            raise NotFoundError(f"model {request.name!r} is not served", reason="MODEL_NOT_SERVED")
        check_version(request.version)

        def tensors(specs: Any) -> list[Any]:
            kind = self._pb.ModelMetadataResponse.TensorMetadata
            return [kind(name=s.name, datatype=s.datatype, shape=s.shape) for s in specs]

        return self._pb.ModelMetadataResponse(
            name=name,
            versions=[VERSION],
            platform="epd",
            inputs=tensors(INPUTS),
            outputs=tensors(OUTPUTS),
        )

    async def model_infer(self, request: Any, context: ServicerContext) -> Any:
        """An answer in one piece."""
        answers = [a async for a in self._answers(request, context, may_stream=False)]
        (answer,) = answers
        return answer

    async def model_stream_infer(
        self, requests: AsyncIterator[Any], context: ServicerContext
    ) -> AsyncIterator[Any]:
        """Requests side by side, each with one response or many; errors are responses too."""
        responses: asyncio.Queue[Any] = asyncio.Queue(_WAITING_RESPONSES)
        slots = asyncio.Semaphore(self._stream_requests)

        async def answer(request: Any) -> None:
            try:
                async with contextlib.aclosing(
                    self._answers(request, context, may_stream=True)
                ) as answers:
                    async for found in answers:
                        await responses.put(self._pb.ModelStreamInferResponse(infer_response=found))
            except Exception as raised:
                await responses.put(self._failed(request, raised))
            finally:
                slots.release()

        async def read() -> None:
            try:
                async with asyncio.TaskGroup() as running:
                    async for request in requests:
                        await slots.acquire()
                        running.create_task(answer(request))
            except Exception as error:
                await responses.put(error)
            else:
                await responses.put(None)

        reading = asyncio.create_task(read())
        try:
            while (response := await responses.get()) is not None:
                if isinstance(response, Exception):
                    raise response
                yield response
        finally:
            await cancel_and_wait(reading)

    async def _answers(
        self, request: Any, context: ServicerContext, *, may_stream: bool
    ) -> AsyncGenerator[Any, None]:
        answers = self._generated(request, context, may_stream=may_stream)
        async with contextlib.aclosing(answers):
            try:
                async for answer in answers:
                    yield answer
            except InvalidRequestError as error:
                # These clients show the text only, not the details with the field in them.
                text = f"{error.field}: {error.message}" if error.field else error.message
                raise InvalidRequestError(text, field=error.field, reason=error.reason) from error

    async def _generated(
        self, request: Any, context: ServicerContext, *, may_stream: bool
    ) -> AsyncGenerator[Any, None]:
        asked = read_infer_request(request, self._client(context))
        if asked.streams and not may_stream:
            raise InvalidRequestError("needs ModelStreamInfer", field="inputs.stream")
        set_request_id(asked.call.request_id)
        deadline = Deadline(remaining_s(context, self._timeout_s))
        writer = ResponseWriter(asked, request.model_name, self._pb)
        texts: list[str] = []
        async with contextlib.aclosing(self._router.generate(asked.call, deadline)) as events:
            async for event in events:
                if isinstance(event, Completion):
                    if asked.streams:
                        yield writer.end(event)
                    else:
                        yield writer.whole("".join(texts), event)
                elif asked.streams:
                    yield writer.delta(event)
                else:
                    texts.append(event.text)

    def _failed(self, request: Any, raised: BaseException) -> Any:
        error = typed_error(root_error(raised), _STREAM)
        text = INTERNAL_TEXT if isinstance(error, InternalError) else str(error)
        return self._pb.ModelStreamInferResponse(
            error_message=f"{error.code} {error.reason}: {text}",
            infer_response=self._pb.ModelInferResponse(id=request.id),
        )

    def _is_ready(self) -> bool:
        return not (self._server.draining or self._server.failure) and self._has_route()

    def _client(self, context: ServicerContext) -> str:
        return self._keys.client(context.invocation_metadata() or ())


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
