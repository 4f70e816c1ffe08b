"""A pool of rendered pictures, so that drawing never limits the speed of training.

Pictures come in pairs whose scenes differ in one shape or in nothing.  Worker processes render
them, already scaled as the image processor would; a part of the pool is replaced all the time.
"""

from __future__ import annotations

from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from .model import MAX_PIXELS, MERGE_SIZE, MIN_PIXELS, PATCH_SIZE
from .render import random_canvas, render
from .scene import Scene, changed_scene, confusing_scene, random_scene

CONFUSING: Final = 0.5  # share of scenes in which the colour alone does not identify a shape


@dataclass(frozen=True)
class Picture:
    """Pixels (height, width, 3) at the size the vision encoder sees, and what they show."""

    pixels: np.ndarray
    scene: Scene

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.pixels.shape[0] // PATCH_SIZE, self.pixels.shape[1] // PATCH_SIZE


def fit(picture: Image.Image) -> np.ndarray:
    """Scale a picture as the image processor does."""
    height, width = smart_resize(
        picture.height,
        picture.width,
        factor=PATCH_SIZE * MERGE_SIZE,
        min_pixels=MIN_PIXELS,
        max_pixels=MAX_PIXELS,
    )
    return np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))


def render_pairs(seed: tuple[int, int], pairs: int, easy: float = 0.0) -> list[Picture]:
    """Render pairs of pictures one after the other (``2 * pairs`` in all).

    A quarter of the pairs show the same thing.  Half of the pairs share the canvas; for some of
    these the drawing is repeated too, so that nothing but the changed shape differs.
    """
    rng = np.random.default_rng(seed)
    pictures: list[Picture] = []
    for _ in range(pairs):
        before = confusing_scene(rng) if rng.random() < CONFUSING else random_scene(rng)
        after = before if rng.random() < 0.25 else changed_scene(rng, before)
        canvas = random_canvas(rng)
        style = int(rng.integers(2**31))
        simple = bool(rng.random() < easy)
        image = render(np.random.default_rng(style), before, canvas, easy=simple)
        pictures.append(Picture(fit(image), before))
        sharing = rng.random()
        if sharing >= 0.25:
            style += 1
        if sharing >= 0.5:
            canvas = random_canvas(rng)
        image = render(np.random.default_rng(style), after, canvas, easy=simple)
        pictures.append(Picture(fit(image), after))
    return pictures


class Pool:
    """Pairs of pictures, one picture after the other, renewed in the background."""

    def __init__(self, seed: int, pairs: int, chunk: int, workers: int, easy: float = 0.0) -> None:
        self._seed = seed
        self.easy = easy  # share of easy pictures among those rendered from now on
        self._chunk = chunk
        self._executor = ProcessPoolExecutor(workers)
        self._rendered = 0
        self._oldest = 0
        self.pictures: list[Picture] = []
        futures = [self._submit() for _ in range(-(-pairs // chunk))]
        for future in futures:
            self.pictures.extend(future.result())
        self._next = self._submit()

    def _submit(self) -> Future[list[Picture]]:
        self._rendered += 1
        return self._executor.submit(
            render_pairs, (self._seed, self._rendered), self._chunk, self.easy
        )

    def renew(self) -> None:
        """Put the next rendered chunk in place of the oldest one and order another."""
        size = 2 * self._chunk
        self.pictures[self._oldest : self._oldest + size] = self._next.result()
        self._oldest = (self._oldest + size) % len(self.pictures)
        self._next = self._submit()

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Indices of random pictures."""
        return rng.integers(len(self.pictures), size=count)

    def close(self) -> None:
        """Stop the workers."""
        self._executor.shutdown(wait=False, cancel_futures=True)
