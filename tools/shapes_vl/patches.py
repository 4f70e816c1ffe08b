"""The pictures of one step as patches, with what every patch should know about its cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from .model import IMAGE_MEAN, IMAGE_STD, MERGE_SIZE, PATCH_SIZE
from .pool import Picture
from .scene import COLOURS, KINDS, Scene

IGNORED: Final = -100
_PATCH_STEP: Final = 1024  # see the module text of shapes_vl.batch


@dataclass(frozen=True)
class PatchBatch:
    """The patches of all pictures, one after the other, sorted by their number per picture.

    ``targets`` are the auxiliary targets of every patch: in which cell it lies, and the colour
    and the kind that this cell holds (0 is nothing).
    """

    values: torch.Tensor  # (patches, values)
    places: torch.Tensor  # (patches, 2): row and column
    lengths: list[tuple[int, int]]  # (patches per picture, pictures), in order
    targets: torch.Tensor  # (patches, 3)


def build_patches(pictures: list[Picture]) -> PatchBatch:
    """Cut the pictures up; they must be sorted by their number of patches."""
    lengths: list[tuple[int, int]] = []
    targets = []
    for picture in pictures:
        cell = patch_cells(picture.grid)
        known = (np.arange(4), _colours(picture.scene), _kinds(picture.scene))
        targets.append(np.stack(known, axis=1)[cell])
        if lengths and lengths[-1][0] == len(cell):
            lengths[-1] = (len(cell), lengths[-1][1] + 1)
        else:
            lengths.append((len(cell), 1))
    padding = -sum(map(len, targets)) % _PATCH_STEP
    raw = np.concatenate([patchify(picture.pixels) for picture in pictures])
    values = torch.from_numpy(np.pad(raw, ((0, padding), (0, 0)))).float()
    mean = torch.tensor(IMAGE_MEAN).repeat_interleave(PATCH_SIZE**2) * 255
    deviation = torch.tensor(IMAGE_STD).repeat_interleave(PATCH_SIZE**2) * 255
    places = np.concatenate([patch_places(picture.grid) for picture in pictures])
    codes = np.pad(np.concatenate(targets), ((0, padding), (0, 0)), constant_values=IGNORED)
    return PatchBatch(
        values=(values - mean) / deviation,
        places=torch.from_numpy(np.pad(places, ((0, padding), (0, 0)))),
        lengths=lengths,
        targets=torch.from_numpy(codes),
    )


def patchify(pixels: np.ndarray) -> np.ndarray:
    """(height, width, 3) bytes to (patches, values), in merged order, one frame only."""
    height, width, _ = pixels.shape
    step = PATCH_SIZE * MERGE_SIZE
    split = pixels.reshape(
        height // step, MERGE_SIZE, PATCH_SIZE, width // step, MERGE_SIZE, PATCH_SIZE, 3
    )
    return split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(height * width // PATCH_SIZE**2, -1)


def patch_places(grid: tuple[int, int]) -> np.ndarray:
    """Row and column of every patch, in merged order."""
    rows, columns = grid
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    split = places.reshape(rows // MERGE_SIZE, MERGE_SIZE, columns // MERGE_SIZE, MERGE_SIZE, 2)
    return split.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def patch_cells(grid: tuple[int, int]) -> np.ndarray:
    """The cell (0 to 3) of every patch, in merged order."""
    second = patch_places(grid) >= np.array(grid) // 2
    return np.asarray(2 * second[:, 0] + second[:, 1])


def _colours(scene: Scene) -> np.ndarray:
    return np.array([0 if cell is None else 1 + COLOURS.index(cell.colour) for cell in scene.cells])


def _kinds(scene: Scene) -> np.ndarray:
    return np.array([0 if cell is None else 1 + KINDS.index(cell.kind) for cell in scene.cells])
