"""The engine as other threads see it."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from epd.engine.block_pool import BlockPool
from epd.engine.engine_config import EngineConfig
from epd.engine.engine_core import Deliver, EngineCore, LayerHook
from epd.engine.grammar import GrammarCompiler
from epd.engine.inbox import Inbox
from epd.engine.language_runner import LanguageRunner
from epd.engine.requests import EngineRequest, EngineStats
from epd.engine.sequence import Sequence
from epd.engine.submission import check_submission
from epd.errors import EpdError, InternalError, UnavailableError
from epd.thread_slices import compute_patiently

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests over one model and one pool.

    Its methods may be called from any thread and none of them waits for a step, except ``stop``.
    The work itself happens on one thread of the engine's own, in :class:`EngineCore`.
    """

    def __init__(
        self,
        runner: LanguageRunner,
        pool: BlockPool,
        config: EngineConfig,
        grammars: GrammarCompiler,
        layer_hook: LayerHook | None = None,
    ) -> None:
        config.validate()
        assert pool.num_blocks == runner.kv_cache.num_blocks
        self.pool = pool
        self.family = runner.family
        self.kv_cache = runner.kv_cache
        #: Most tokens of prompt and output: the model's, the configured or what the pool holds.
        self.max_context = min(
            config.max_context or runner.family.context_length,
            runner.family.context_length,
            pool.num_blocks * pool.block_size,
        )
        #: Makes the matchers of constrained requests.
        self.grammars = grammars
        self._threads = config.threads
        self._inbox = Inbox(config.max_waiting)
        self._deliver: Deliver = lambda events: None
        self._core = EngineCore(
            runner,
            pool,
            self._inbox,
            config,
            self.max_context,
            layer_hook,
            lambda events: self._deliver(events),
        )
        self._fatal_error: EpdError | None = None
        self._fatal_callbacks: list[Callable[[EpdError], None]] = []
        self._thread = threading.Thread(target=self._main, name="epd-engine", daemon=True)
        pool.on_freed(self._on_blocks_freed)

    def start(self, deliver: Deliver) -> None:
        """Starts the engine thread. Once."""
        self._deliver = deliver
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Fails what is left with UnavailableError and ends the thread after its current step.

        Returns False when the thread still runs after ``timeout_s``.
        """
        self._inbox.close(UnavailableError("the engine is stopping", reason="ENGINE_STOPPED"))
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError: it can never run here; limits are named with both numbers.
            UnsupportedFeatureError: it has images and the model takes none.
            DuplicateRequestError: a live or held request has this id.
            ResourceExhaustedError: the waiting queue is full.
            UnavailableError: the engine has stopped or failed.
        """
        arrived_ns = time.monotonic_ns()
        check_submission(request, self.family, self.max_context, self.pool.block_size)
        self._inbox.submit(Sequence(request, arrived_ns=arrived_ns))

    def sealed(self, request_id: str) -> None:
        """The KV of a request that was submitted with an ``arrival`` is complete and in order: its
        blocks are the engine's from now on.

        Raises:
            NotFoundError: the request has ended; the blocks stay the caller's.
            UnavailableError: the engine has stopped or failed; likewise.
        """
        self._inbox.seal(request_id, time.monotonic_ns())

    def cancel(self, request_id: str) -> None:
        """Ends a request with RequestCancelledError before the next step. Unknown ids are fine."""
        self._inbox.cancel(request_id)

    def proceed(self) -> None:
        """Looks again at requests that an image gate has held back: one was opened."""
        self._inbox.nudge()

    def release(self, request_id: str) -> None:
        """Frees the blocks of a PREFILL_ONLY request: no transfer reads them any more.

        Cancels it too when it has not ended. Unknown ids are fine.
        """
        self._inbox.release(request_id)

    def stats(self) -> EngineStats:
        """Counters as of the last step, queue and blocks as of now."""
        return replace(
            self._core.stats,
            waiting_requests=self._inbox.queued_count,
            free_blocks=self.pool.num_free,
            quarantined_blocks=self.pool.num_quarantined,
        )

    @property
    def decode_step_s(self) -> float:
        """How long a step without prompts takes of late; 0 before the first."""
        return self._core.decode_step_s

    @property
    def fatal_error(self) -> EpdError | None:
        """Why the engine thread died, None while it is well."""
        return self._fatal_error

    def on_fatal(self, callback: Callable[[EpdError], None]) -> None:
        """Has ``callback`` called on the engine thread when it dies. Before :meth:`start`."""
        self._fatal_callbacks.append(callback)

    def _main(self) -> None:
        compute_patiently()
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            idle = True
            while not self._inbox.is_closed:
                idle = not self._core.step(self._inbox.take(wait=idle))
        except BaseException as error:
            logger.exception("the engine thread died")
            self._die(InternalError(f"engine failed: {error!r}", reason="ENGINE_FAILED"))
        else:
            self._core.fail_all(UnavailableError("the engine stopped", reason="ENGINE_STOPPED"))

    def _die(self, error: EpdError) -> None:
        self._fatal_error = error
        self._inbox.close(UnavailableError("the engine has failed", reason="ENGINE_FAILED"))
        try:
            self._core.fail_all(error)
        finally:
            for callback in self._fatal_callbacks:
                callback(error)

    def _on_blocks_freed(self) -> None:
        if threading.current_thread() is not self._thread:  # a step sees its own frees anyway
            self._inbox.nudge()
