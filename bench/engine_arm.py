"""This engine in process: scheduler, paged KV and sampler, without gRPC."""

import threading
import time
from itertools import count
from pathlib import Path

from bench.generated import Generated
from epd.engine.build import build_engine
from epd.engine.engine_config import EngineConfig
from epd.engine.requests import EngineEvent, EngineRequest, Failed, Finished, NewTokens
from epd.sampling import SamplingParams

TIMEOUT_S = 600.0


class EngineArm:
    """Holds one running engine in float32."""

    name = "epd"

    def __init__(self, folder: Path, threads: int, max_batch: int, max_tokens: int) -> None:
        block_size = 32
        config = EngineConfig(
            block_size=block_size,
            num_blocks=max_batch * (-(-max_tokens // block_size) + 1),
            max_running=max_batch,
            token_budget=max_batch * max_tokens,
            prefix_cache=False,  # repeated prompts are part of the method, not of the workload
            threads=threads,
        )
        self._engine = build_engine(folder, config, model_digest="")
        self.vocab_size = self._engine.family.vocab_size
        self._ids = count()
        self._batch = _Batch([])
        self._engine.start(lambda events: self._batch.take(events))

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generated:
        """Continues prompts by exactly ``new_tokens`` greedy tokens each, all at once."""
        sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        requests = [EngineRequest(str(next(self._ids)), prompt, sampling) for prompt in prompts]
        batch = self._batch = _Batch([request.request_id for request in requests])
        for request in requests:
            self._engine.submit(request)
        return batch.result(TIMEOUT_S)

    def close(self) -> None:
        """Stops the engine."""
        self._engine.stop()


class _Batch:
    """Collects what the engine delivers for one batch; written by the engine's thread alone."""

    def __init__(self, request_ids: list[str]) -> None:
        self._tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
        self._full_step_ns: list[int] = []
        self._left = len(request_ids)
        self._failure: Exception | None = None
        self._ended = threading.Event()

    def take(self, events: list[tuple[str, EngineEvent]]) -> None:
        """One step's events."""
        grown = 0
        for request_id, event in events:
            if isinstance(event, NewTokens):
                self._tokens[request_id] += event.token_ids
                grown += 1
            elif isinstance(event, Finished | Failed):
                self._failure = event.error if isinstance(event, Failed) else self._failure
                self._left -= 1
        if grown == len(self._tokens):  # requests that joined late make a few smaller steps
            self._full_step_ns.append(time.monotonic_ns())
        if not self._left:
            self._ended.set()

    def result(self, timeout_s: float) -> Generated:
        """Waits for the last token of all."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"the batch did not end in {timeout_s:g} s")
        if self._failure is not None:
            raise self._failure
        times = self._full_step_ns
        return Generated(
            list(self._tokens.values()), (times[-1] - times[0]) / 1e9 / (len(times) - 1)
        )
