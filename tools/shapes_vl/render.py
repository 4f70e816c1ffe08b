"""Drawing: a scene becomes a picture, in many styles.

Everything a different renderer might do differently is varied here: picture size and aspect,
shape size and place, rotation, point geometry, outlines, anti-aliasing and JPEG artefacts.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from .palette import Rgb, background, contrast, shade
from .scene import Scene, Shape

_SMALLEST_SIDE = 84
_LARGEST_SIDE = 336
_FEWEST_PIXELS_PER_SHAPE = 9.0


def _star(inner: float) -> np.ndarray:
    """Corners of an upright five-pointed star."""
    angles = np.arange(10) * math.pi / 5 - math.pi / 2
    radii = np.where(np.arange(10) % 2 == 0, 1.0, inner)
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


_UPRIGHT = {
    "circle": np.array([[-1.0, -1.0], [1.0, 1.0]]),  # two corners of its box
    "square": np.array([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]]),
    "triangle": np.array([[0.0, -0.95], [1.0, 0.95], [-1.0, 0.95]]),
    "star": _star(0.42),
}


@dataclass(frozen=True)
class Canvas:
    """Size in pixels, and how many times larger it is drawn before being scaled down."""

    width: int
    height: int
    supersampling: int


def random_canvas(rng: np.random.Generator) -> Canvas:
    """Square in a third of the cases; half of the others only mildly elongated."""
    width = int(rng.integers(_SMALLEST_SIDE, _LARGEST_SIDE + 1))
    style = rng.random()
    if style < 0.33:
        height = width
    elif style < 0.66:
        height = round(width * math.exp(rng.uniform(-0.5, 0.5)))
    else:
        height = int(rng.integers(_SMALLEST_SIDE, _LARGEST_SIDE + 1))
    height = min(max(height, _SMALLEST_SIDE), _LARGEST_SIDE)
    return Canvas(width, height, int(rng.choice([1, 1, 2, 3, 4])))


def render(
    rng: np.random.Generator, scene: Scene, canvas: Canvas | None = None, *, easy: bool = False
) -> Image.Image:
    """Draw the scene in a random style, on a random canvas unless one is given.

    Easy pictures have large upright shapes: kinds are hard to tell apart before edges and corners
    of large shapes have been learned.
    """
    canvas = canvas or random_canvas(rng)
    shades = [shade(rng, shape.colour) for shape in scene.shapes]
    plain = background(rng, shades)
    scale = canvas.supersampling
    picture = Image.new("RGB", (canvas.width * scale, canvas.height * scale), plain)
    draw = ImageDraw.Draw(picture)
    outlined = rng.random() < 0.25
    cell_width, cell_height = canvas.width / 2, canvas.height / 2
    alike = rng.uniform(0.3, 0.95) if rng.random() < 0.3 else None  # one size for all shapes
    colours = iter(shades)
    for index, shape in enumerate(scene.cells):
        if shape is None:
            continue
        fraction = alike if alike is not None else _size(rng)
        if easy:
            fraction = rng.uniform(0.65, 0.98)
        side = max(fraction * min(cell_width, cell_height), _FEWEST_PIXELS_PER_SHAPE)
        left, top = _place(rng, cell_width - side, cell_height - side)
        centre_x = (index % 2) * cell_width + left + side / 2
        centre_y = (index // 2) * cell_height + top + side / 2
        fill = next(colours)
        points = (_UPRIGHT[shape.kind] if easy else _outline(rng, shape)) * (side / 2 * scale)
        points += np.array([centre_x * scale, centre_y * scale])
        line = _line_colour(rng, fill, plain) if outlined and side >= 16 else None
        _paint(draw, shape, points, fill, line, max(1, round(side / 24 * scale)))
    if scale > 1:
        picture = picture.resize((canvas.width, canvas.height), Image.Resampling.BOX)
    return _jpeg(rng, picture) if rng.random() < 0.08 else picture


def _size(rng: np.random.Generator) -> float:
    """Fraction of the cell a shape fills; small ones are over-represented as they are harder."""
    low, high = (0.2, 0.45) if rng.random() < 0.4 else (0.35, 0.99)
    return float(rng.uniform(low, high))


def _place(rng: np.random.Generator, free_x: float, free_y: float) -> tuple[float, float]:
    """Roughly centred half of the time, else anywhere inside the cell."""
    if rng.random() < 0.5:
        return free_x * rng.uniform(0.3, 0.7), free_y * rng.uniform(0.3, 0.7)
    return free_x * rng.uniform(0, 1), free_y * rng.uniform(0, 1)


def _outline(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Corner points inside the box from (-1, -1) to (1, 1); a circle is its two box corners."""
    if shape.kind == "circle":
        return _UPRIGHT["circle"]
    if shape.kind == "square":
        return _turned(_UPRIGHT["square"], rng.uniform(-18, 18) if rng.random() < 0.4 else 0.0)
    if shape.kind == "triangle":
        tip = rng.uniform(-0.15, 0.15) if rng.random() < 0.3 else 0.0
        tall = rng.uniform(0.8, 1.0)
        corners = np.array([[tip, -tall], [1.0, tall], [-1.0, tall]])
        style = rng.random()
        if style < 0.7:
            return corners if rng.random() < 0.6 else _turned(corners, rng.uniform(-20, 20))
        return _turned(corners, rng.uniform(0, 360) if style < 0.9 else 180.0)
    return _turned(
        _star(rng.uniform(0.34, 0.56)), rng.uniform(-36, 36) if rng.random() < 0.4 else 0.0
    )


def _turned(points: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate, then shrink so that the figure still fits its box."""
    if degrees == 0.0:
        return points
    angle = math.radians(degrees)
    matrix = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    turned = points @ matrix
    return np.asarray(turned / max(1.0, float(np.abs(turned).max())))


def _line_colour(rng: np.random.Generator, fill: Rgb, plain: Rgb) -> Rgb | None:
    """A darker edge, or a black or white one; never one that hides the colour of the shape."""
    if rng.random() < 0.5:
        red, green, blue = (int(channel * 0.55) for channel in fill)
        return red, green, blue
    edge = (0, 0, 0) if rng.random() < 0.7 else (255, 255, 255)
    return edge if contrast(edge, fill) > 60 and contrast(edge, plain) > 30 else None


def _paint(
    draw: ImageDraw.ImageDraw,
    shape: Shape,
    points: np.ndarray,
    fill: Rgb,
    line: Rgb | None,
    line_width: int,
) -> None:
    width = line_width if line is not None else 0
    if shape.kind == "circle":
        (left, top), (right, bottom) = points.tolist()
        draw.ellipse((left, top, right, bottom), fill=fill, outline=line, width=width)
        return
    corners = [(float(x), float(y)) for x, y in points]
    draw.polygon(corners, fill=fill)
    if line is not None:
        draw.line([*corners, corners[0], corners[1]], fill=line, width=width, joint="curve")


def _jpeg(rng: np.random.Generator, picture: Image.Image) -> Image.Image:
    """People send JPEG files too; the pictures then carry faint artefacts."""
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=int(rng.integers(70, 96)))
    return Image.open(buffer).convert("RGB")
