"""A request's encoding that goes on while prefill has begun."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from epd.cleanup import cancel_and_wait
from services.router.attempt import Outcome


async def beside(
    encoding: "asyncio.Task[None]", attempt: Coroutine[Any, Any, Outcome], culprit_grace_s: float
) -> Outcome:
    """Runs an attempt while its images are still encoded; the first failure ends both.

    An attempt that fails waits a moment for the encoders' word: without an image prefill fails too,
    and they know better why.

    Raises:
        LegFailedError: the leg that is to blame.
    """
    running = asyncio.create_task(attempt)
    try:
        await asyncio.wait({encoding, running}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            encoding.result()
            await asyncio.wait({running})
        elif running.exception() is not None and not encoding.done():
            await asyncio.wait({encoding}, timeout=culprit_grace_s)
        if encoding.done() and not encoding.cancelled() and (error := encoding.exception()):
            raise error
        return running.result()
    finally:
        await cancel_and_wait(running)
