"""Questions and their answers: the language of the task.

The first wording of every kind is the canonical one; answers have exactly one form, so that
accuracy is plain string equality.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .scene import COLOURS, KINDS, PLACES, Scene, Shape, random_shape

NUMBERS: Final = ("zero", "one", "two", "three", "four")
ORDINALS: Final = ("the first", "the second", "the third", "the fourth")
SINGLE_KINDS: Final = ("count", "what", "where", "describe")
MULTI_KINDS: Final = ("which", "different")

_WORDINGS: Final[dict[str, tuple[str, ...]]] = {
    "count": (
        "how many shapes are there?",
        "how many shapes are in the image?",
        "how many shapes do you see?",
        "how many shapes are in the picture?",
    ),
    "what": ("what is at the {}?", "what is in the {}?", "what's at the {}?", "what is {}?"),
    "where": ("where is the {}?", "where's the {}?", "where is {}?", "where can I see the {}?"),
    "describe": (
        "describe the image.",
        "describe the picture.",
        "describe this image.",
        "what is in the image?",
    ),
    "which": (
        "which image has {}?",
        "which picture has {}?",
        "which image contains {}?",
        "which image shows {}?",
    ),
    "different": (
        "what is different?",
        "what changed?",
        "what is the difference?",
        "what's different?",
    ),
}


@dataclass(frozen=True)
class Turn:
    """One question with its only right answer."""

    kind: str
    question: str
    answer: str


def word(rng: np.random.Generator, kind: str, filler: str = "", *, canonical: bool = False) -> str:
    """A question of this kind; mostly the canonical wording, with small variations of typing."""
    wordings = _WORDINGS[kind]
    choice = 0 if canonical or rng.random() < 0.85 else int(rng.integers(1, len(wordings)))
    text = wordings[choice].format(filler)
    if canonical:
        return text
    if rng.random() < 0.35:
        text = text[0].upper() + text[1:]
    elif rng.random() < 0.06:
        text = text.upper() if rng.random() < 0.5 else text.title()
    if rng.random() < 0.25:
        text = text.rstrip("?.")
    return text


def count_turn(rng: np.random.Generator, scene: Scene, *, canonical: bool = False) -> Turn:
    """How many shapes there are, in words."""
    return Turn("count", word(rng, "count", canonical=canonical), NUMBERS[len(scene.shapes)])


def what_turn(
    rng: np.random.Generator, scene: Scene, place: int, *, canonical: bool = False
) -> Turn:
    """What a cell holds: a shape, or nothing."""
    cell = scene.cells[place]
    answer = cell.noun_phrase if cell is not None else "nothing"
    return Turn("what", word(rng, "what", PLACES[place], canonical=canonical), answer)


def unique_places(scene: Scene) -> list[int]:
    """Cells whose shape occurs nowhere else, so that "where" has one answer."""
    return [
        place
        for place, cell in enumerate(scene.cells)
        if cell is not None and scene.count(cell) == 1
    ]


def where_turn(
    rng: np.random.Generator, scene: Scene, place: int, *, canonical: bool = False
) -> Turn:
    """Where the shape of this cell is; the cell must be one of :func:`unique_places`."""
    cell = scene.cells[place]
    assert cell is not None
    return Turn("where", word(rng, "where", cell.phrase, canonical=canonical), PLACES[place])


def describe_turn(rng: np.random.Generator, scene: Scene, *, canonical: bool = False) -> Turn:
    """Every shape with its place, in reading order."""
    parts = [
        f"{cell.noun_phrase} at the {place}"
        for cell, place in zip(scene.cells, PLACES, strict=True)
        if cell is not None
    ]
    return Turn("describe", word(rng, "describe", canonical=canonical), ", ".join(parts))


def which_turn(
    rng: np.random.Generator,
    scenes: list[Scene],
    *,
    hard: bool = False,
    canonical: bool = False,
) -> Turn | None:
    """Which image has a shape that at most one of them has; one question in five asks in vain.

    Returns nothing where every shape is in more than one image.  A shape asked for in vain is
    often a near miss, of which some image has the colour and another one the kind.  To say that
    no image has it is learned last of all, so ``hard`` questions ask more often in vain, and for
    nearer misses.
    """
    if rng.random() < (0.4 if hard else 0.22):
        present = [shape for scene in scenes for shape in scene.shapes]
        for _ in range(20):
            shape = random_shape(rng)
            near = present[rng.integers(len(present))]
            if hard and rng.random() < 0.5:
                shape = _illusion(rng, scenes)
            elif rng.random() < 0.6:
                shape = (
                    Shape(near.kind, COLOURS[rng.integers(len(COLOURS))])
                    if rng.random() < 0.5
                    else Shape(KINDS[rng.integers(len(KINDS))], near.colour)
                )
            if shape not in present:
                question = word(rng, "which", shape.noun_phrase, canonical=canonical)
                return Turn("which", question, "none")
    owners: dict[Shape, set[int]] = {}
    for index, scene in enumerate(scenes):
        for shape in scene.shapes:
            owners.setdefault(shape, set()).add(index)
    images = sorted({next(iter(who)) for who in owners.values() if len(who) == 1})
    if not images:
        return None
    image = images[rng.integers(len(images))]  # every image equally likely, however full it is
    shapes = [shape for shape, who in owners.items() if who == {image}]
    shape = shapes[rng.integers(len(shapes))]
    question = word(rng, "which", shape.noun_phrase, canonical=canonical)
    return Turn("which", question, ORDINALS[image])


def _illusion(rng: np.random.Generator, scenes: list[Scene]) -> Shape:
    """The kind of one shape in the colour of another one of the same image."""
    shapes = scenes[rng.integers(len(scenes))].shapes
    first, second = (shapes[rng.integers(len(shapes))] for _ in range(2))
    return Shape(first.kind, second.colour)


def different_turn(
    rng: np.random.Generator, before: Scene, after: Scene, *, canonical: bool = False
) -> Turn:
    """What changed from the first image to the second: one shape, or nothing."""
    answer = "nothing"
    for place, old, new in zip(PLACES, before.cells, after.cells, strict=True):
        if old != new:
            assert old is not None
            assert new is not None
            answer = f"the {place} changed from {old.noun_phrase} to {new.noun_phrase}"
    return Turn("different", word(rng, "different", canonical=canonical), answer)
