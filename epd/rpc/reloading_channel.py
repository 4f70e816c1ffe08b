"""A channel whose new calls use the certificates of their moment."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from epd.cleanup import CleanupTasks
from epd.rpc.tls_files import TlsFiles, TlsMaterial


class _Generation:
    """A real channel, made of one state of the files, and the calls that run on it."""

    def __init__(self, material: TlsMaterial, channel: grpc.aio.Channel) -> None:
        self.material = material
        self.channel = channel
        self.calls = 0
        self._multi_callables: dict[tuple[str, str], Any] = {}

    def multi_callable(self, arity: str, method: str, codec: tuple[Any, Any]) -> Any:
        """What starts calls of a method."""
        key = (arity, method)
        if key not in self._multi_callables:
            self._multi_callables[key] = getattr(self.channel, arity)(method, *codec)
        return self._multi_callables[key]


class ReloadingChannel(grpc.aio.Channel):
    """Stands for a channel; stubs made of it live as long as they like.

    gRPC fixes a channel's certificates when it is made. So a change of the files makes the next
    call open another channel. The calls that run go on where they are, and the old channel is
    closed when the last of them has ended: there is one for the streams that outlive every change,
    and one per change that requests still run on.

    Args:
        open_channel: Makes a real channel of certificates.
        files: The certificates.
    """

    def __init__(
        self, open_channel: Callable[[TlsMaterial], grpc.aio.Channel], files: TlsFiles
    ) -> None:
        self._open_channel = open_channel
        self._files = files
        self._current = self._open()
        self._retired: set[_Generation] = set()
        self._closing = CleanupTasks()

    def unary_unary(self, method: str, *codec: Any, **options: Any) -> Any:
        """As of a channel; see the generated stubs."""
        return self._late("unary_unary", method, *codec, **options)

    def unary_stream(self, method: str, *codec: Any, **options: Any) -> Any:
        """As of a channel."""
        return self._late("unary_stream", method, *codec, **options)

    def stream_unary(self, method: str, *codec: Any, **options: Any) -> Any:
        """As of a channel."""
        return self._late("stream_unary", method, *codec, **options)

    def stream_stream(self, method: str, *codec: Any, **options: Any) -> Any:
        """As of a channel."""
        return self._late("stream_stream", method, *codec, **options)

    async def close(self, grace: float | None = None) -> None:
        """Closes everything; calls that still run are cancelled after ``grace`` seconds."""
        generations = [self._current, *self._retired]
        await asyncio.gather(*(one.channel.close(grace) for one in generations))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Of the channel that the next call uses."""
        return self._latest().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Of the channel that the next call uses."""
        await self._latest().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Of the channel that the next call uses."""
        await self._latest().channel.channel_ready()

    async def __aenter__(self) -> "ReloadingChannel":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _late(
        self,
        arity: str,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = None,
    ) -> Callable[..., Any]:
        codec = (request_serializer, response_deserializer)

        def start(*arguments: Any, **options: Any) -> Any:
            generation = self._latest()
            call = generation.multi_callable(arity, method, codec)(*arguments, **options)
            generation.calls += 1
            call.add_done_callback(lambda _: self._ended(generation))
            return call

        return start

    def _open(self) -> _Generation:
        material = self._files.current
        return _Generation(material, self._open_channel(material))

    def _latest(self) -> _Generation:
        if self._current.material is not self._files.current:
            old, self._current = self._current, self._open()
            self._retired.add(old)
            self._close_idle(old)
        return self._current

    def _ended(self, generation: _Generation) -> None:
        generation.calls -= 1
        self._close_idle(generation)

    def _close_idle(self, generation: _Generation) -> None:
        if generation in self._retired and not generation.calls:
            self._retired.discard(generation)
            self._closing.spawn(generation.channel.close(None))
