"""What a Generate stream of the router brought."""

from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from epd.v1 import common_pb2, router_pb2


@dataclass
class Answer:
    """What has arrived of an answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[common_pb2.TopLogprobs] = field(default_factory=list)
    deltas: list[router_pb2.Delta] = field(default_factory=list)
    _completion: router_pb2.Completion | None = None

    @property
    def completion(self) -> router_pb2.Completion:
        """The last message, which an answer that is whole must have."""
        assert self._completion is not None, "the stream ended without its completion"
        return self._completion

    def add(self, response: router_pb2.GenerateResponse) -> None:
        """Takes in the next message."""
        if not response.HasField("delta"):
            self._completion = response.completion
            return
        self.deltas.append(response.delta)
        self.token_ids += response.delta.token_ids
        self.text += response.delta.text
        self.logprobs += response.delta.logprobs
        self.top_logprobs += response.delta.top_logprobs


async def collect(call: AsyncIterable[router_pb2.GenerateResponse]) -> Answer:
    """Reads a stream to its end. Raises grpc.aio.AioRpcError."""
    answer = Answer()
    async for response in call:
        answer.add(response)
    return answer
