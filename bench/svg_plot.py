"""Small line charts as SVG text, without a plotting library."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 46
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines by name. ``log_x``: powers of two are evenly spaced. Values start at 0."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Points]
    log_x: bool = False


def render(charts: Sequence[Chart]) -> str:
    """The charts side by side."""
    width = WIDTH * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
        f'viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
    ]
    for number, chart in enumerate(charts):
        parts += [f'<g transform="translate({number * WIDTH},0)">', *_chart(chart), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(chart: Chart) -> list[str]:
    xs = sorted({x for points in chart.lines.values() for x, _ in points})
    top = _round_up(max(y for points in chart.lines.values() for _, y in points))

    def at(x: float, y: float) -> tuple[float, float]:
        low, high, here = (math.log2(v) if chart.log_x else v for v in (xs[0], xs[-1], x))
        share = (here - low) / (high - low) if high > low else 0.5
        return (
            LEFT + share * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM),
        )

    bottom = HEIGHT - BOTTOM
    parts = [f'<text x="{LEFT}" y="16" font-size="13">{escape(chart.title)}</text>']
    for step in range(5):
        value = top * step / 4
        y = at(xs[0], value)[1]
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>',
        ]
    for x in xs:
        place = at(x, 0)[0]
        parts.append(f'<text x="{place:.1f}" y="{bottom + 15}" text-anchor="middle">{x:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts += [
        f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(chart.x_label)}</text>',
        f'<text transform="translate(13,{HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>",
    ]
    for number, (name, points) in enumerate(chart.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [at(*point) for point in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        y = TOP + 12 + 15 * number
        parts += [
            f'<line x1="{LEFT + 8}" x2="{LEFT + 26}" y1="{y}" y2="{y}" stroke="{colour}" '
            'stroke-width="2"/>',
            f'<text x="{LEFT + 31}" y="{y + 4}">{escape(name)}</text>',
        ]
    return parts


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8 or 10 times a power of ten."""
    scale: float = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(step * scale for step in (1, 2, 4, 5, 8, 10) if step * scale >= value)
