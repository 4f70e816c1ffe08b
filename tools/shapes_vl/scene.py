"""Scenes: what a picture shows, before anything is drawn.

A scene is four cells in reading order (top left, top right, bottom left, bottom right); every
cell is empty or holds one shape.  Keeping contents apart from pixels lets the question writer
and the auxiliary training targets use exact ground truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

KINDS: Final = ("circle", "square", "triangle", "star")
COLOURS: Final = ("red", "green", "blue", "yellow", "purple", "orange", "black", "white")
PLACES: Final = ("top left", "top right", "bottom left", "bottom right")


@dataclass(frozen=True)
class Shape:
    """One coloured shape; ``kind`` and ``colour`` are words from the tables above."""

    kind: str
    colour: str

    @property
    def phrase(self) -> str:
        """``red circle``: the words without an article."""
        return f"{self.colour} {self.kind}"

    @property
    def noun_phrase(self) -> str:
        """``a red circle`` or ``an orange star``."""
        return f"{'an' if self.colour[0] in 'aeiou' else 'a'} {self.phrase}"


@dataclass(frozen=True)
class Scene:
    """Four cells in reading order; ``None`` is an empty cell."""

    cells: tuple[Shape | None, Shape | None, Shape | None, Shape | None]

    @property
    def shapes(self) -> list[Shape]:
        """The shapes present, in reading order."""
        return [shape for shape in self.cells if shape is not None]

    def count(self, shape: Shape) -> int:
        """How many cells hold exactly this shape."""
        return sum(cell == shape for cell in self.cells)


def random_shape(rng: np.random.Generator) -> Shape:
    """Any kind in any colour, all equally likely."""
    return Shape(KINDS[rng.integers(len(KINDS))], COLOURS[rng.integers(len(COLOURS))])


def random_scene(rng: np.random.Generator) -> Scene:
    """One to four shapes in random cells.

    A quarter of the later shapes share the colour or the kind of an earlier one (or both), so
    that looking only at the colour, or only at the kind, is punished during training.
    """
    cells: list[Shape | None] = [None] * 4
    previous: list[Shape] = []
    for index in rng.permutation(4)[: rng.integers(1, 5)]:
        shape = random_shape(rng)
        if previous and rng.random() < 0.25:
            other = previous[rng.integers(len(previous))]
            keep = rng.integers(5)
            if keep < 2:
                shape = Shape(shape.kind, other.colour)
            elif keep < 4:
                shape = Shape(other.kind, shape.colour)
            else:
                shape = other
        cells[int(index)] = shape
        previous.append(shape)
    return Scene((cells[0], cells[1], cells[2], cells[3]))


def confusing_scene(rng: np.random.Generator) -> Scene:
    """Two to four different shapes in no more than two colours.

    Where something is can be told from the colour alone in most random scenes, and a model that
    does so gains little by looking at the kind as well.  Here it must bind the two.
    """
    colours = rng.permutation(len(COLOURS))[: rng.integers(1, 3)]
    choices = [Shape(kind, COLOURS[colour]) for kind in KINDS for colour in colours]
    cells: list[Shape | None] = [None] * 4
    order = rng.permutation(len(choices))
    for place, choice in zip(rng.permutation(4)[: rng.integers(2, 5)], order, strict=False):
        cells[int(place)] = choices[int(choice)]
    return Scene((cells[0], cells[1], cells[2], cells[3]))


def changed_scene(rng: np.random.Generator, scene: Scene) -> Scene:
    """The same scene with one shape given another colour or another kind."""
    filled = [index for index, cell in enumerate(scene.cells) if cell is not None]
    index = filled[rng.integers(len(filled))]
    old = scene.cells[index]
    assert old is not None
    if rng.random() < 0.5:
        colours = [colour for colour in COLOURS if colour != old.colour]
        new = Shape(old.kind, colours[rng.integers(len(colours))])
    else:
        kinds = [kind for kind in KINDS if kind != old.kind]
        new = Shape(kinds[rng.integers(len(kinds))], old.colour)
    cells = list(scene.cells)
    cells[index] = new
    return Scene((cells[0], cells[1], cells[2], cells[3]))
