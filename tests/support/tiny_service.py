"""A service without model: ``python -m tests.support.tiny_service --step-s 1``."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from epd.config import option
from epd.errors import UnavailableError
from epd.rpc.server_config import ServerConfig
from epd.rpc.service import Service, ServiceContext
from epd.v1 import prefill_pb2, prefill_pb2_grpc


@dataclass(frozen=True, kw_only=True)
class TinyConfig(ServerConfig):
    """A service for tests of the platform."""

    load_until: Path | None = option(None, help="loading lasts until this file is there")
    load_error: str = option("", help="what loading fails with")
    step_s: float = option(0.05, help="time between responses", unit="s", minimum=0)


class TinyServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Streams as many responses as the request has tokens; token 0 makes the service fail."""

    def __init__(self, config, context):
        self._config = config
        self._server = context.server

    async def Prefill(self, request, context):
        if request.token_ids[:1] == [0]:
            await self._server.fail("engine died")
        for token in request.token_ids:
            await asyncio.sleep(self._config.step_s)
            yield prefill_pb2.PrefillResponse(first_token=prefill_pb2.FirstToken(token_id=token))


@contextlib.asynccontextmanager
async def application(config: TinyConfig, context: ServiceContext) -> AsyncIterator[None]:
    """Loads and adds the servicer; a task group lives as long as the service."""
    async with asyncio.TaskGroup() as group:
        while config.load_until is not None and not config.load_until.exists():
            await asyncio.sleep(0.02)
        if config.load_error:
            raise UnavailableError(config.load_error)
        upkeep = group.create_task(asyncio.sleep(3600))
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(
            TinyServicer(config, context), context.server.handlers
        )
        yield
        print("application stopped", flush=True)
        upkeep.cancel()


SERVICE = Service("prefill", TinyConfig, ("epd.v1.PrefillService",), application)

if __name__ == "__main__":
    SERVICE.main()
