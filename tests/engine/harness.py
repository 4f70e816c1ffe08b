"""Runs requests through a real engine thread and compares with transformers."""

import dataclasses
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from epd.engine.build import build_engine
from epd.engine.engine import Engine
from epd.engine.engine_config import EngineConfig
from epd.engine.families.base import ModelFamily
from epd.engine.requests import (
    EngineEvent,
    EngineRequest,
    Failed,
    Finished,
    NewTokens,
    Preempted,
    PrefillDone,
    PromptImage,
    SamplingParams,
)
from epd.engine.vision_runner import VisionRunner
from tests.support.tiny_model import IM_START, VISION_END, VISION_START

#: Small blocks and chunks, so that every border is crossed.
SMALL = EngineConfig(
    block_size=8, num_blocks=256, max_running=16, token_budget=48, threads=1, prefix_cache=True
)
LAST = (Finished, Preempted, Failed, PrefillDone)


class Client:
    """Collects events per request; waits with a bound."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._batches: queue.Queue[list[tuple[str, EngineEvent]]] = queue.Queue()
        self.events: dict[str, list[EngineEvent]] = {}
        engine.start(self._batches.put)

    def pump(self, timeout_s: float = 60.0) -> None:
        """Waits for one batch of events."""
        for request_id, event in self._batches.get(timeout=timeout_s):
            self.events.setdefault(request_id, []).append(event)

    def wait(self, request_id: str, *kinds: type) -> Any:
        """The first event of one of these kinds."""
        while True:
            for event in self.events.get(request_id, ()):
                if isinstance(event, kinds):
                    return event
            self.pump()

    def tokens(self, request_id: str) -> list[int]:
        """Tokens received so far."""
        events = self.events.get(request_id, ())
        return [t for e in events if isinstance(e, NewTokens) for t in e.token_ids]

    def run(self, requests: Iterable[EngineRequest]) -> list[list[int]]:
        """Submits all, waits for all to finish, returns their tokens."""
        requests = list(requests)
        for request in requests:
            self.engine.submit(request)
        for request in requests:
            last = self.wait(request.request_id, *LAST)
            assert isinstance(last, Finished), last
        return [self.tokens(request.request_id) for request in requests]

    def hand_over(self, done: PrefillDone, request_id: str) -> tuple[int, ...]:
        """The KV of a prefill in blocks of its own, as it arrives elsewhere; ends the prefill."""
        blocks = self.engine.pool.allocate(len(done.block_ids))
        assert blocks is not None
        kv = self.engine.kv_cache.tensor
        kv[:, blocks] = kv[:, list(done.block_ids)]
        self.engine.release(request_id)
        return tuple(blocks)

    def assert_idle(self) -> None:
        """No request, no block in use, accounts in order."""
        stats = self.engine.stats()
        assert (stats.running_requests, stats.waiting_requests, stats.held_requests) == (0, 0, 0)
        assert stats.free_blocks == stats.total_blocks
        assert stats.waiting_tokens == 0
        self.engine.pool.check_integrity()


@contextmanager
def running(
    folder: Path,
    hook: Any = None,
    before_start: Callable[[Engine], None] = lambda engine: None,
    **changes: Any,
) -> Iterator[Client]:
    """A started engine with small sizes; stopped at the end, accounts checked."""
    engine = build_engine(folder, dataclasses.replace(SMALL, **changes), "digest", hook)
    before_start(engine)
    client = Client(engine)
    try:
        yield client
    finally:
        assert engine.stop()
        engine.pool.check_integrity()


def text_prompt(length: int, seed: int = 0) -> list[int]:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def request(
    request_id: str, token_ids: list[int], max_tokens: int = 32, **fields: Any
) -> EngineRequest:
    """A greedy request unless ``sampling`` says otherwise."""
    fields.setdefault("sampling", SamplingParams(max_tokens=max_tokens))
    return EngineRequest(request_id, token_ids, **fields)


class ImagePrompts:
    """Makes prompts with images, encoded once."""

    def __init__(self, family: ModelFamily, runner: VisionRunner) -> None:
        self._family = family
        self._runner = runner

    def request(
        self, request_id: str, sizes: list[tuple[int, int]], text: int, seed: int = 0, **more: Any
    ) -> tuple[EngineRequest, dict[str, torch.Tensor]]:
        """A request and what ``generate`` takes for the same prompt.

        Each image is followed by ``text`` random tokens.
        """
        rng = np.random.default_rng(seed)
        tokens, images, pixels, delta = [IM_START], [], [], 0
        for width, height in sizes:
            image = Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))
            pixels.append(self._family.preprocess(image))
            plan = self._family.plan_image(pixels[-1].grid)
            tokens.append(VISION_START)
            digest = image.tobytes()[:32]
            images.append(PromptImage(len(tokens), len(plan.placeholder_ids), digest, plan.grid))
            tokens += [*plan.placeholder_ids, VISION_END, *rng.integers(0, 256, text).tolist()]
            delta += plan.position_delta
        if not sizes:
            tokens += rng.integers(0, 256, text).tolist()
        made = request(
            request_id,
            tokens,
            images=tuple(images),
            embeddings=tuple(self._runner.encode(pixels)) if pixels else (),
            position_delta=delta,
            **more,
        )
        ids = torch.tensor([tokens])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if pixels:
            inputs["pixel_values"] = torch.cat([torch.from_numpy(p.patches) for p in pixels])
            inputs["image_grid_thw"] = torch.tensor([p.grid for p in pixels])
            assert self._family.embedding_token_id is not None
            inputs["mm_token_type_ids"] = ids.eq(self._family.embedding_token_id).int()
        return made, inputs


class Reference:
    """The whole model in plain transformers."""

    def __init__(self, folder: Path, vision: bool) -> None:
        kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        self._model = kind.from_pretrained(folder).eval()

    @torch.inference_mode()
    def generate(self, inputs: dict[str, torch.Tensor], max_tokens: int) -> list[int]:
        """Greedy tokens, end token included."""
        output = self._model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        return output[0, inputs["input_ids"].shape[1] :].tolist()

    def generate_text(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """The same for text."""
        ids = torch.tensor([token_ids])
        return self.generate({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, max_tokens)

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int], count: int) -> list[float]:
        """Log probabilities of the last ``count`` tokens."""
        logits = self._model(torch.tensor([token_ids])).logits[0].float()
        chosen = torch.tensor(token_ids[-count:])[:, None]
        return logits[-count - 1 : -1].log_softmax(-1).gather(-1, chosen)[:, 0].tolist()


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)
