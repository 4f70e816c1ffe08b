"""Colours as numbers: shades of every named colour, and backgrounds that contrast with them.

The ranges leave gaps between neighbouring names (orange and yellow, blue and purple), because a
shade that two people would name differently cannot be a test of the model.
"""

from __future__ import annotations

import colorsys
from typing import Final

import numpy as np

Rgb = tuple[int, int, int]

# name -> hue range in degrees, saturation range, value range
_HUES: Final[dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]]] = {
    "red": ((346, 369), (0.70, 1.0), (0.66, 1.0)),
    "orange": ((24, 39.5), (0.75, 1.0), (0.86, 1.0)),
    "yellow": ((48.5, 63), (0.62, 1.0), (0.85, 1.0)),
    "green": ((88, 155), (0.50, 1.0), (0.40, 0.95)),
    "blue": ((204, 242), (0.60, 1.0), (0.50, 1.0)),
    "purple": ((268, 304), (0.50, 1.0), (0.42, 0.95)),
}


def shade(rng: np.random.Generator, colour: str) -> Rgb:
    """One shade that anybody would call by this name."""
    if colour in ("black", "white"):
        low, high = (0, 46) if colour == "black" else (226, 256)
        base = int(rng.integers(low, high))
        tint = rng.integers(-6, 7, size=3) if rng.random() < 0.5 else np.zeros(3, dtype=int)
        red, green, blue = np.clip(base + tint, 0, 255)
        return int(red), int(green), int(blue)
    hue, saturation, value = (rng.uniform(low, high) for low, high in _HUES[colour])
    return _from_hsv(hue, saturation, value)


def background(rng: np.random.Generator, shapes: list[Rgb]) -> Rgb:
    """A plain background at a clear distance from every shape on it.

    Tried in random order until one fits; with four unlike shapes few greys fit, so the demanded
    distance falls slowly instead of looping for ever.
    """
    distance = 130.0
    while True:
        candidate = _candidate(rng)
        if all(contrast(candidate, rgb) >= distance for rgb in shapes):
            return candidate
        distance -= 0.75


def contrast(first: Rgb, second: Rgb) -> float:
    """Weighted Euclidean distance ("redmean"), close to how different two colours look."""
    mean_red = (first[0] + second[0]) / 2
    red, green, blue = (a - b for a, b in zip(first, second, strict=True))
    return float(
        np.sqrt(
            (2 + mean_red / 256) * red**2 + 4 * green**2 + (2 + (255 - mean_red) / 256) * blue**2
        )
        / 1.73
    )


def _candidate(rng: np.random.Generator) -> Rgb:
    style = rng.random()
    if style < 0.2:
        return 255, 255, 255
    if style < 0.3:
        return 0, 0, 0
    if style < 0.55:
        grey = int(rng.integers(0, 256))
        return grey, grey, grey
    if style < 0.85:  # pale or muted tint
        return _from_hsv(rng.uniform(0, 360), rng.uniform(0.03, 0.4), rng.uniform(0.2, 1.0))
    return _from_hsv(rng.uniform(0, 360), rng.uniform(0.4, 1.0), rng.uniform(0.15, 1.0))


def _from_hsv(hue: float, saturation: float, value: float) -> Rgb:
    red, green, blue = colorsys.hsv_to_rgb((hue % 360) / 360, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)
