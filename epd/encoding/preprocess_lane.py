"""One preprocessing process and the pipe to it.

Not an executor of the standard library: those wait for ever for the rest of an answer when the
process is killed while it writes one. Here the process holds the only other end of the pipe, so
its death, at any byte, ends every wait at once.
"""

import asyncio
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from epd.encoding import preprocess_worker
from epd.encoding.preprocess_config import PreprocessConfig
from epd.encoding.preprocess_worker import Answer, Job
from epd.errors import UnavailableError

T = TypeVar("T")


class LaneBrokenError(Exception):
    """The process has died."""


class PreprocessLane:
    """Has at most one image in work; a new process takes the place of one that was killed."""

    def __init__(self, config: PreprocessConfig) -> None:
        self._config = config
        self._process: _Process | None = None

    async def ensure_started(self) -> None:
        """Starts the process unless it runs, and waits until its image processor is loaded.

        Raises:
            UnavailableError: it does not come up.
        """
        if self._process is not None:
            return
        self._process = _Process(self._config)
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._process.greeting()
        except BaseException as error:
            self.kill()
            if isinstance(error, LaneBrokenError | TimeoutError):
                raise UnavailableError("a preprocessing process did not start") from error
            raise

    async def process(self, job: Job) -> Answer:
        """Has one image processed; see :func:`preprocess_worker.process`.

        Raises:
            LaneBrokenError: the process died.
            TimeoutError: it hangs.
            UnavailableError: it does not come up.
        """
        await self.ensure_started()
        assert self._process is not None
        async with asyncio.timeout(self._config.timeout_s):
            return await self._process.ask(job)

    def kill(self) -> None:
        """Ends the process, whatever it does; nobody waits for it any more."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    async def stop(self) -> None:
        """Ends the process and returns when it is gone."""
        process = self._process
        self.kill()
        if process is not None:
            await asyncio.to_thread(process.join)


class _Process:
    """A running process. Its thread alone reads and writes the pipe, which blocks."""

    def __init__(self, config: PreprocessConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=preprocess_worker.serve,
            args=(theirs, config.model_folder, config.limits, config.memory_bytes),
            daemon=True,
        )
        self._process.start()
        theirs.close()  # from here on the pipe ends where the process ends
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="preprocess-lane")

    async def greeting(self) -> None:
        """Returns when the process is ready for images."""
        await self._call(self._pipe.recv)

    async def ask(self, job: Job) -> Answer:
        """The answer to one image."""

        def exchange() -> Answer:
            self._pipe.send(job)
            answer: Answer = self._pipe.recv()
            return answer

        return await self._call(exchange)

    def kill(self) -> None:
        """Ends the process; a call under way raises LaneBrokenError. Called once."""
        self._process.kill()
        self._thread.submit(self._reap)
        self._thread.shutdown(wait=False)

    def join(self) -> None:
        """Returns when the process that was killed is gone; blocks."""
        self._thread.shutdown(wait=True)

    def _reap(self) -> None:
        self._pipe.close()
        self._process.join()
        self._process.close()

    async def _call(self, function: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except (EOFError, OSError) as error:
            raise LaneBrokenError from error
