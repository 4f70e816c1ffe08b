"""Starts what only a unified worker has: the vision half and an encoder around it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from epd.encoding.encoder import Encoder
from epd.engine.build import build_vision_runner
from epd.engine.engine import Engine
from services.decode.config import DecodeConfig


@asynccontextmanager
async def local_encoder(
    config: DecodeConfig, engine: Engine, on_fatal: Callable[[BaseException], None]
) -> AsyncIterator[Encoder | None]:
    """A running encoder, or None when the model takes no images.

    Raises:
        EpdError: the vision half cannot be loaded or a process does not come up.
    """
    if not engine.family.accepts_images:
        yield None
        return
    language = config.language
    runner = await asyncio.to_thread(
        build_vision_runner, language.model, language.dtype, language.device
    )
    encoder = Encoder(
        engine.family,
        runner,
        engine.kv_cache.layout.model_digest,
        config.encoding,
        dtype=language.dtype,
        threads=language.threads,
        on_fatal=on_fatal,
    )
    try:
        await encoder.start()
        yield encoder
    finally:
        await encoder.stop()
