"""From samples to tensors.

All sizes are rounded up to a few round numbers: matrix kernels are compiled per shape, and
compiling new ones in every step would cost more than computing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from .mixture import Sample
from .model import MERGE_SIZE
from .patches import IGNORED, PatchBatch, build_patches, patch_cells

_LENGTH_STEP: Final = 16


@dataclass(frozen=True)
class TextBatch:
    """Sequences of similar length.  Answers are listed by row, padded with weight 0."""

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    image_features: torch.Tensor  # index of every picture token among all encoded features
    image_slots: torch.Tensor  # and among the flattened tokens of this batch
    ordinals: torch.Tensor  # for every picture token: which picture of its row it belongs to
    changes: torch.Tensor  # second picture of a pair: did the cell of this token change?
    answer_columns: torch.Tensor  # tokens whose successor is part of an answer
    answer_ids: torch.Tensor
    answer_weights: torch.Tensor
    answer_turns: torch.Tensor  # for every answer token: the number of its question
    turn_kinds: list[str]


@dataclass(frozen=True)
class Batch:
    """One training step: all its pictures, and its sequences in parts of similar length."""

    patches: PatchBatch
    texts: list[TextBatch]


def build_batch(samples: list[Sample], pad_id: int, parts: int = 2) -> Batch:
    """Collect the pictures; sort the rows by length, so that little is lost to padding."""
    samples = sorted(samples, key=lambda sample: len(sample.row.ids))
    members = [(sample, number) for sample in samples for number in range(len(sample.pictures))]
    members.sort(key=lambda member: _patch_count(*member))
    starts: dict[tuple[int, int], int] = {}
    total = 0
    for sample, number in members:
        starts[id(sample), number] = total
        total += _patch_count(sample, number) // MERGE_SIZE**2
    size = -(-len(samples) // parts)
    return Batch(
        patches=build_patches([sample.pictures[number] for sample, number in members]),
        texts=[
            _build_text(samples[first : first + size], pad_id, starts)
            for first in range(0, len(samples), size)
        ],
    )


def _build_text(
    samples: list[Sample], pad_id: int, starts: dict[tuple[int, int], int]
) -> TextBatch:
    length = _round_up(max(len(sample.row.ids) for sample in samples))
    shape = (len(samples), length)
    ids = np.full(shape, pad_id, dtype=np.int64)
    positions = np.zeros((3, *shape), dtype=np.int64)
    blocks = np.full(shape, -1, dtype=np.int64)
    weights = np.zeros(shape, dtype=np.float32)
    features, slots, ordinals, changes = [], [], [], []
    for index, sample in enumerate(samples):
        used = len(sample.row.ids)
        ids[index, :used] = sample.row.ids
        positions[:, index, :used] = np.array(sample.row.positions).T
        blocks[index, :used] = sample.row.blocks
        weights[index, :used] = sample.row.weights
        for number, start in enumerate(sample.row.image_starts):
            tokens = np.arange(_patch_count(sample, number) // MERGE_SIZE**2)
            features.append(starts[id(sample), number] + tokens)
            slots.append(index * length + start + tokens)
            ordinals.append(np.full(len(tokens), number))
            changes.append(_changes(sample, number))
    shared = (blocks[:, None, :] == 0) | (blocks[:, None, :] == blocks[:, :, None])
    mask = shared & np.tril(np.ones((length, length), dtype=bool))
    answers = _round_up(int((weights > 0).sum(axis=1).max()))
    # A stable sort brings the answer tokens of every row to the front, in their order.
    columns = np.argsort(weights == 0, axis=1, kind="stable")[:, :answers]
    lengths = [size for sample in samples for size in sample.row.answer_lengths]
    return TextBatch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        mask=torch.from_numpy(mask[:, None]),
        image_features=torch.from_numpy(np.concatenate(features)),
        image_slots=torch.from_numpy(np.concatenate(slots)),
        ordinals=torch.from_numpy(np.concatenate(ordinals)),
        changes=torch.from_numpy(np.concatenate(changes)),
        answer_columns=torch.from_numpy(np.maximum(columns - 1, 0)),
        answer_ids=torch.from_numpy(np.take_along_axis(ids, columns, axis=1)),
        answer_weights=torch.from_numpy(np.take_along_axis(weights, columns, axis=1)),
        answer_turns=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        turn_kinds=[kind for sample in samples for kind in sample.row.answer_kinds],
    )


def _round_up(value: int) -> int:
    return -(-value // _LENGTH_STEP) * _LENGTH_STEP


def _patch_count(sample: Sample, number: int) -> int:
    rows, columns = sample.pictures[number].grid
    return rows * columns


def _changes(sample: Sample, number: int) -> np.ndarray:
    """Only tokens that lie in a single cell have a target."""
    cells = patch_cells(sample.pictures[number].grid).reshape(-1, MERGE_SIZE**2)
    if not sample.is_pair or number == 0:
        return np.full(len(cells), IGNORED)
    before, after = (picture.scene for picture in sample.pictures)
    changed = np.array([a != b for a, b in zip(before.cells, after.cells, strict=True)])
    inside = (cells == cells[:, :1]).all(axis=1)
    return np.where(inside, changed[cells[:, 0]].astype(np.int64), IGNORED)
