"""The connection to a router."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import grpc
from opentelemetry import context as otel_context

from epd.client.answers import Answer, AnswerStream
from epd.client.model import Model, model_from_proto
from epd.client.prompts import (
    ImageSource,
    Message,
    Prompt,
    RawText,
    Tokens,
    conversation,
    refuse_images,
)
from epd.client.sampling import Sampling, sampling_to_proto
from epd.errors import InvalidRequestError
from epd.rpc.channels import open_channel
from epd.rpc.client_tls import ClientTls
from epd.rpc.options import IMAGE_MESSAGE_BYTES
from epd.rpc.status import error_from_rpc
from epd.rpc.tls_config import ClientTlsConfig
from epd.telemetry.propagation import inject_context
from epd.v1 import router_pb2, router_pb2_grpc

DEFAULT_TIMEOUT_S = 600.0


class EpdClient:
    """A connection to one router, shared by any number of concurrent requests.

    The trace context of the current OpenTelemetry span, if there is one, goes along.

    Args:
        address: host:port of the router.
        timeout_s: Deadline of a request that names none.
        api_key: Sent with every call; empty sends none.
        tls: How the connection is protected. Certificate files are read again when they change,
            inside ``async with``.

    Raises:
        ConfigError: plain text to an address that is not loopback without ``tls.insecure``, or
            certificate files that cannot be read.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        api_key: str = "",
        tls: ClientTlsConfig | None = None,
    ) -> None:
        self._tls = ClientTls(tls or ClientTlsConfig(), address)
        self._channel = open_channel(
            address, message_bytes=IMAGE_MESSAGE_BYTES, tls=self._tls.channel
        )
        self._router = router_pb2_grpc.RouterServiceStub(self._channel)
        self._timeout_s = timeout_s
        self._key_metadata = (("x-api-key", api_key),) if api_key else ()

    async def __aenter__(self) -> "EpdClient":
        self._tls.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; open requests are cancelled."""
        await self._tls.stop()
        await self._channel.close(None)

    def generate(
        self,
        prompt: Prompt,
        *,
        images: Sequence[ImageSource] = (),
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        logprobs: bool = False,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> AnswerStream:
        """Asks for an answer.

        Args:
            prompt: A text is one user message; otherwise messages, raw text or tokens.
            images: Put before the text of a ``prompt`` that is a text.
            sampling: How tokens are drawn.
            stop: Texts that end the answer; they are not part of it.
            logprobs: Whether deltas carry log probabilities.
            model: Must be the served one; empty takes it.
            request_id: Unique among live requests; empty lets the router choose.
            timeout_s: Deadline of the whole request.

        Raises:
            ValueError: images beside a prompt that is no text.
            OSError: an image file cannot be read.
            InvalidRequestError: the images together are longer than a message may be.
        """
        request = router_pb2.GenerateRequest(
            request_id=request_id,
            model=model,
            sampling=sampling_to_proto(sampling or Sampling()),
            stop=stop,
            logprobs=logprobs,
        )
        if isinstance(prompt, Tokens):
            refuse_images(images)
            request.token_prompt.token_ids.extend(prompt.token_ids)
        elif isinstance(prompt, RawText):
            refuse_images(images)
            request.text_prompt = prompt.text
        else:
            request.conversation.CopyFrom(conversation(prompt, images))
        _check_size(request)
        call = self._router.Generate(
            request, timeout=timeout_s or self._timeout_s, metadata=self._metadata()
        )
        return AnswerStream(call)

    async def collect(self, prompt: Prompt, **options: Any) -> Answer:
        """The whole answer; ``options`` are those of :meth:`generate`.

        Raises:
            EpdError: what the router answered.
        """
        return await self.generate(prompt, **options).collect()

    async def count_tokens(
        self, prompt: str | Sequence[Message] | RawText, images: Sequence[ImageSource] = ()
    ) -> int:
        """Prompt tokens, image placeholders included, without generating.

        Raises:
            EpdError: what the router answered.
        """
        request = router_pb2.CountTokensRequest()
        if isinstance(prompt, RawText):
            refuse_images(images)
            request.text_prompt = prompt.text
        else:
            request.conversation.CopyFrom(conversation(prompt, images))
        _check_size(request)
        response = await self._unary(self._router.CountTokens, request)
        return int(response.token_count)

    async def model(self) -> Model:
        """Which model is served, and by which workers.

        Raises:
            EpdError: what the router answered.
        """
        response = await self._unary(self._router.GetModel, router_pb2.GetModelRequest())
        return model_from_proto(response)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (*inject_context(otel_context.get_current()), *self._key_metadata)

    async def _unary(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout_s, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


def _check_size(request: router_pb2.GenerateRequest | router_pb2.CountTokensRequest) -> None:
    """Says what gRPC would answer with RESOURCE_EXHAUSTED, as if trying again could help."""
    if request.ByteSize() > IMAGE_MESSAGE_BYTES:
        raise InvalidRequestError(
            f"the request has {request.ByteSize()} bytes, a message may have {IMAGE_MESSAGE_BYTES}",
            field="conversation.messages",
            reason="REQUEST_TOO_LARGE",
        )
