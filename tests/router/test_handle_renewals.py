"""How often the router renews the leases of embeddings."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from epd.cleanup import CleanupTasks
from epd.v1 import common_pb2
from services.router.handles import HandleSet


class StoppedError(Exception):
    """Ends what goes on for ever."""


async def test_an_encoder_that_grants_absurdly_short_leases_is_not_flooded_with_renewals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise StoppedError
        await asyncio.sleep(0)

    handles = HandleSet(CleanupTasks(), 1.0)
    plan = SimpleNamespace(handle=common_pb2.EmbeddingHandle(handle_id="h", lease_ms=1))
    handles.add(cast(Any, None), cast(Any, plan))
    handles.forget()  # there is nobody to ask
    monkeypatch.setattr("services.router.handles.asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(StoppedError):
        await handles.keep_alive()
    assert min(slept) >= 0.01
