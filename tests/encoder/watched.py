"""The vision half as tests bend it, and what they look at."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import torch

from epd.encoding.encoder_stats import EncoderStats
from epd.engine.families.base import PixelInput
from epd.engine.vision_runner import VisionRunner
from tests.encoder.pictures import encoded, picture

#: Bytes of the embedding of a 112 x 112 picture: 4 x 4 tokens of 128 float32.
ONE = 16 * 128 * 4
#: Ends a test that forgot to open the gate; no test waits for it.
GATE_TIMEOUT_S = 120.0


def file(seed: int) -> bytes:
    """A 112 x 112 picture as a file."""
    return encoded(picture(112, 112, seed), "PNG")


def memory(stats: EncoderStats) -> tuple[int, int, int]:
    """Where the bytes are: free, in use, quarantined."""
    return stats.free_bytes, stats.in_use_bytes, stats.quarantined_bytes


class Watched:
    """The real vision half, held up, broken or bent by a test."""

    def __init__(self, vision: VisionRunner) -> None:
        self.vision = vision
        #: Images of each forward pass, added before it waits at the gate.
        self.calls: list[int] = []
        #: While clear, forward passes hang where they begin.
        self.gate = threading.Event()
        self.gate.set()
        self.fault: BaseException | None = None
        self.bend: Callable[[torch.Tensor], torch.Tensor] = lambda embedding: embedding

    def encode(self, images: Sequence[PixelInput]) -> list[torch.Tensor]:
        self.calls.append(len(images))
        self.gate.wait(GATE_TIMEOUT_S)
        if self.fault is not None:
            raise self.fault
        return [self.bend(embedding) for embedding in self.vision.encode(images)]


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for a state that must come; the bound is for a machine that is busy elsewhere."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
