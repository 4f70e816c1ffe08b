"""What one training step consists of: which pictures, and which questions about them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import questions
from .pool import Picture, Pool
from .questions import Turn
from .rows import Row, RowWriter


@dataclass(frozen=True)
class Mixture:
    """Rows of every sort in one step.

    Finding a thing by its description is learned last, so "where", "which" and "different" get
    far more questions than an even share.
    """

    single: int = 12
    chat: int = 1
    text_first: int = 2
    pairs: int = 5
    two: int = 3
    three: int = 4
    four: int = 6


@dataclass(frozen=True)
class Sample:
    """A row with its pictures; ``is_pair`` where the two pictures are almost the same."""

    row: Row
    pictures: list[Picture]
    is_pair: bool = False


def draw_step(
    rng: np.random.Generator, pool: Pool, writer: RowWriter, mixture: Mixture
) -> list[Sample]:
    """Choose pictures from the pool and write one step's rows."""
    samples: list[Sample] = []

    def take(count: int) -> list[Picture]:
        return [pool.pictures[int(index)] for index in pool.sample(rng, count)]

    for _ in range(mixture.single):
        pictures = take(1)
        samples.append(
            Sample(writer.independent(rng, pictures, _single(rng, pictures[0])), pictures)
        )
    for _ in range(mixture.chat):
        pictures = take(1)
        turns = _single(rng, pictures[0])
        order = rng.permutation(len(turns))
        samples.append(Sample(writer.chat(rng, pictures, [turns[i] for i in order]), pictures))
    for index in range(mixture.text_first):
        pictures = take(1)
        turns = _single(rng, pictures[0])
        turn = turns[rng.integers(len(turns))]
        if index == 0:
            pictures = take(int(rng.integers(2, 5)))
            turn = questions.which_turn(rng, [p.scene for p in pictures]) or turn
            pictures = pictures if turn.kind == "which" else pictures[:1]
            if turn.kind != "which":
                turn = _single(rng, pictures[0])[0]
        samples.append(Sample(writer.text_first(rng, pictures, turn), pictures))
    for _ in range(mixture.pairs):
        first = 2 * int(rng.integers(len(pool.pictures) // 2))
        pictures = pool.pictures[first : first + 2]
        if rng.random() < 0.5:
            pictures = pictures[::-1]
        before, after = (picture.scene for picture in pictures)
        turns = [questions.different_turn(rng, before, after), *_which(rng, pictures, 4)]
        samples.append(Sample(writer.independent(rng, pictures, turns), pictures, is_pair=True))
    for count, share in ((2, mixture.two), (3, mixture.three), (4, mixture.four)):
        for _ in range(share):
            pictures = take(count)
            turns = _which(rng, pictures, 9 - count)
            if turns:
                samples.append(Sample(writer.independent(rng, pictures, turns), pictures))
    return samples


def _single(rng: np.random.Generator, picture: Picture) -> list[Turn]:
    scene = picture.scene
    turns = [questions.count_turn(rng, scene), questions.describe_turn(rng, scene)]
    turns += [questions.what_turn(rng, scene, int(place)) for place in rng.permutation(4)[:3]]
    turns += [questions.where_turn(rng, scene, p) for p in questions.unique_places(scene)]
    return turns


def _which(rng: np.random.Generator, pictures: list[Picture], count: int) -> list[Turn]:
    scenes = [picture.scene for picture in pictures]
    turns = [questions.which_turn(rng, scenes, hard=True) for _ in range(count)]
    return [turn for turn in turns if turn is not None]
