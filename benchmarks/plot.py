"""Line charts with two logarithmic axes, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["Chart", "Curve", "draw"]

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 74
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


@dataclass(frozen=True)
class Curve:
    """The points of a curve, with x and y above 0; ``dashed`` sets it apart."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    color: int | None = None


@dataclass(frozen=True)
class Chart:
    """Curves over the same sizes."""

    title: str
    label: str
    curves: Sequence[Curve] = field(default_factory=list)


def draw(charts: Sequence[Chart], *, columns: int) -> str:
    """Draw charts side by side."""
    rows = math.ceil(len(charts) / columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * WIDTH} {rows * HEIGHT}" '
        f'width="{columns * WIDTH}" height="{rows * HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{columns * WIDTH}" height="{rows * HEIGHT}" fill="white"/>',
    ]
    for i, chart in enumerate(charts):
        row, column = divmod(i, columns)
        parts.append(f'<g transform="translate({column * WIDTH},{row * HEIGHT})">')
        parts += _chart(chart)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(chart: Chart) -> Iterable[str]:
    points = [point for curve in chart.curves for point in curve.points if min(point) > 0]
    if not points:
        return
    xs = sorted({x for x, _ in points})
    low, high = _decades([y for _, y in points])
    left, right = math.log10(xs[0]), math.log10(xs[-1])
    wide = max(right - left, 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - left) / wide
        up = (math.log10(y) - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    yield f'<text x="{LEFT}" y="18" font-size="13" font-weight="bold">{escape(chart.title)}</text>'
    bottom = HEIGHT - BOTTOM
    for decade in range(low, high + 1):
        _, y = place(xs[0], 10.0**decade)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**decade:,.10g}</text>'
    for x in xs:
        at, _ = place(x, 10.0**low)
        yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}" stroke="#eee"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 14}" text-anchor="middle">{x:,g}</text>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{bottom + 28}" text-anchor="middle">{escape(chart.label)}</text>'
    for i, curve in enumerate(chart.curves):
        color = COLORS[(i if curve.color is None else curve.color) % len(COLORS)]
        dash = ' stroke-dasharray="5 3"' if curve.dashed else ""
        placed = [place(x, y) for x, y in curve.points if min(x, y) > 0]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        yield f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6"{dash}/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{color}"/>' for x, y in placed)
        at_x, at_y = LEFT + (i % 2) * (WIDTH - LEFT) / 2, bottom + 43 + 14 * (i // 2)
        yield f'<line x1="{at_x}" x2="{at_x + 18}" y1="{at_y - 4}" y2="{at_y - 4}" stroke="{color}" stroke-width="2"{dash}/>'
        yield f'<text x="{at_x + 23}" y="{at_y}">{escape(curve.name)}</text>'


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)
