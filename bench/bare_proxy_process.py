"""The least that a gRPC proxy in Python can do: reads a stream of messages and writes them on.

``python -m bench.bare_proxy_process DECODE_ADDRESS`` is driven by lines.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from bench.line_server import serve_lines
from epd.v1 import decode_pb2, decode_pb2_grpc


class BareProxy(decode_pb2_grpc.DecodeServiceServicer):
    """Forwards Decode."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: Any
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        async for response in self._stub.Decode(request):
            yield response


async def main() -> None:
    """Serves until standard input ends."""
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        server = grpc.aio.server()
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(BareProxy(channel), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()

        async def address() -> str:
            return f"127.0.0.1:{port}"

        await serve_lines({"address": address})
        await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
