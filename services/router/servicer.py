"""RouterService: the wire around :class:`services.router.router.Router`."""

import contextlib
from collections.abc import AsyncIterator

from epd.errors import UnavailableError
from epd.rpc.aliases import ServicerContext
from epd.rpc.deadlines import remaining_s
from epd.rpc.request_context import request_id, set_request_id
from epd.v1 import router_pb2, router_pb2_grpc
from services.router.api_keys import ApiKeys
from services.router.calls import Completion
from services.router.deadline import Deadline
from services.router.limits import RequestLimits
from services.router.registry import WorkerRegistry
from services.router.router import Router
from services.router.wire import (
    call_from_proto,
    check_lists,
    completion_to_proto,
    delta_to_proto,
    model_to_proto,
    prompt_from_proto,
)


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Converts at the edge; everything else is the router's.

    Args:
        router: Answers.
        registry: For GetModel.
        limits: On what a request may contain.
        keys: Which callers are served.
        timeout_s: Deadline of a request whose client gives none, and the longest there is.
    """

    def __init__(
        self,
        router: Router,
        registry: WorkerRegistry,
        limits: RequestLimits,
        keys: ApiKeys,
        timeout_s: float,
    ) -> None:
        self._router = router
        self._registry = registry
        self._limits = limits
        self._keys = keys
        self._timeout_s = timeout_s

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: ServicerContext
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """See the proto."""
        client = self._client(context)
        deadline = Deadline(remaining_s(context, self._timeout_s))
        check_lists(request, self._limits)
        call = call_from_proto(request, client)
        set_request_id(call.request_id)
        async with contextlib.aclosing(self._router.generate(call, deadline)) as events:
            async for event in events:
                if isinstance(event, Completion):
                    yield completion_to_proto(event)
                else:
                    yield delta_to_proto(event, call.logprobs)

    async def CountTokens(
        self, request: router_pb2.CountTokensRequest, context: ServicerContext
    ) -> router_pb2.CountTokensResponse:
        """See the proto."""
        client = self._client(context)
        deadline = Deadline(remaining_s(context, self._timeout_s))
        check_lists(request, self._limits)
        prompt = prompt_from_proto(request)
        count = await self._router.count_tokens(prompt, client, request_id(), deadline)
        return router_pb2.CountTokensResponse(token_count=count)

    async def GetModel(
        self, request: router_pb2.GetModelRequest, context: ServicerContext
    ) -> router_pb2.GetModelResponse:
        """See the proto. Without a worker the model is unknown, the list of workers is not."""
        self._client(context)
        try:
            model = self._registry.model()
        except UnavailableError:
            model = None
        max_images = self._limits.images_for(model) if model else 0
        return model_to_proto(model, max_images, self._registry.states())

    def _client(self, context: ServicerContext) -> str:
        """Name of the caller.

        Raises:
            UnauthenticatedError: it shows no valid key.
        """
        return self._keys.client(context.invocation_metadata() or ())
