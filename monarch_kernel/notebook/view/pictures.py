"""Draws the curves of loops as static pictures, for saved notebooks and pages that nbconvert writes.

The texts of a picture are HTML, so they have the font and the colours of the page. The curve is an SVG image in a data URI:
JupyterLab removes inline SVG from notebooks that it does not trust, but keeps images. When the loop is over, a PNG image is
beside it, for programs that show no SVG: while the loop runs, the page is updated often, and to draw one takes milliseconds.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import lru_cache
from html import escape
from itertools import groupby
from urllib.parse import quote

from monarch_kernel.base.events import CurvePoint, CurveView, LoopView
from monarch_kernel.base.text import one_line, plain
from monarch_kernel.notebook.view.raster import Place, png

__all__ = ["curves_html"]

_WIDTH, _HEIGHT, _MARGIN = 300, 80, 3
_MAX_POINTS = 128  # a picture with more would show no difference
_MAX_CURVES = 8
_ROUNDING = 1e-9  # values that differ by a smaller part are equal: means of equal values differ by rounding
_PNG_SCALE = 2  # pixels of the PNG image for each of the page, so that it is sharp
_COLOR = "#1e88e5"  # readable on white and on black: an image does not know the theme of the page

_FIGURE = "display:inline-block;vertical-align:top;margin:0.25em 1.5em 0.5em 0"
_TEXT = "color:var(--jp-ui-font-color1, inherit);font-size:var(--jp-ui-font-size1, inherit);font-variant-numeric:tabular-nums"
_ATTRIBUTES = f'width="{_WIDTH}" height="{_HEIGHT}" style="display:block;max-width:100%;margin:0.25em 0"'


def curves_html(loops: Sequence[LoopView]) -> str:
    """Return pictures of the curves of loops as HTML, each with its name, last value, range and steps; empty without points."""
    curves = [(curve, loop.state == "over") for loop in loops for curve in loop.curves if _finite(curve.points)]
    if not curves:
        return ""
    hidden = len(curves) - _MAX_CURVES
    more = f'<p style="{_TEXT}">and {hidden:,} more curve{"" if hidden == 1 else "s"}</p>' if hidden > 0 else ""
    return f"<div>{''.join(_figure(*each) for each in curves[:_MAX_CURVES])}{more}</div>"


def _figure(curve: CurveView, is_final: bool) -> str:
    known = _finite(curve.points)
    least, most = _range(known)
    if most - least <= _ROUNDING * max(abs(least), abs(most)):
        most = least
    first, last = known[0].step, known[-1].step
    name = one_line(plain(curve.name))
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    span = f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
    label = f"{name} from step {first} to {last}: first {known[0].mean:.4g}, last {curve.last:.4g}, range {span}"
    source = f"data:image/svg+xml,{quote(_svg(curve.points, least, most))}"
    attributes = f'alt="{escape(label)}" {_ATTRIBUTES}'
    image = f'<img {attributes} src="{source}">'
    if is_final:
        fallback = f"data:image/png;base64,{_png(tuple(curve.points), least, most)}"
        image = f'<picture><source type="image/svg+xml" srcset="{source}"><img {attributes} src="{fallback}"></picture>'
    return (
        f'<div style="{_FIGURE}"><div style="{_TEXT}"><b>{escape(name)}</b> {curve.last:.4g}</div>'
        f"{image}"
        f'<div style="{_TEXT}">{steps} · {span}</div></div>'
    )


def _svg(points: Sequence[CurvePoint], least: float, most: float) -> str:
    points = _thinned(points)
    first, width = points[0].step, max(1, points[-1].step - points[0].step)

    def place(step: int, value: float) -> str:
        part = 0.5 if most == least else (value - least) / (most - least)
        x = _WIDTH * (step - first) / width
        return f"{x:.1f} {_HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * part:.1f}"

    line = band = ""
    for is_known, group in groupby(points, key=lambda point: math.isfinite(point.mean)):
        run = list(group)
        if not is_known:
            continue
        line += "M" + "L".join(place(point.step, point.mean) for point in run)
        line += "h3" if len(run) == 1 else ""
        if any(point.least < point.most for point in run):
            top = "L".join(place(point.step, point.most) for point in run)
            bottom = "L".join(place(point.step, point.least) for point in reversed(run))
            band += f"M{top}L{bottom}Z"
    drawn = f'<path d="{band}" fill="{_COLOR}" fill-opacity=".25"/>' if band else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">'
        f'<path d="M0 {_HEIGHT - 0.5}H{_WIDTH}" stroke="#888" stroke-opacity=".5"/>{drawn}'
        f'<path d="{line}" fill="none" stroke="{_COLOR}" stroke-width="1.5" stroke-linejoin="round"/></svg>'
    )


@lru_cache(maxsize=4 * _MAX_CURVES)
def _png(points: tuple[CurvePoint, ...], least: float, most: float) -> str:
    """Draw the same as `_svg`, as a PNG image in base 64."""
    thinned = _thinned(points)
    first, width = thinned[0].step, max(1, thinned[-1].step - thinned[0].step)

    def height(value: float) -> float:
        part = 0.5 if most == least or not math.isfinite(value) else (value - least) / (most - least)
        return _PNG_SCALE * (_HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * part)

    def places(run: Sequence[CurvePoint]) -> Iterator[Place]:
        for point in run:
            x = _PNG_SCALE * _WIDTH * (point.step - first) / width
            yield Place(x, height(point.mean), height(point.most), height(point.least))

    runs = [
        list(places(list(run))) for is_known, run in groupby(thinned, lambda each: math.isfinite(each.mean)) if is_known
    ]
    return b64encode(png(runs, _PNG_SCALE * _WIDTH, _PNG_SCALE * _HEIGHT, 1.5 * _PNG_SCALE)).decode()


def _thinned(points: Sequence[CurvePoint]) -> Sequence[CurvePoint]:
    """Merge neighbours until there are few enough points; extremes stay, and the last point ends the curve."""
    size = -(-len(points) // _MAX_POINTS)
    return points if size <= 1 else [_merged(points[i : i + size]) for i in range(0, len(points), size)]


def _merged(points: Sequence[CurvePoint]) -> CurvePoint:
    known = _finite(points)
    if not known:
        return points[-1]
    mean = sum(point.mean for point in known) / len(known)
    return CurvePoint(points[-1].step, mean, *_range(known))


def _finite(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    return [point for point in points if math.isfinite(point.mean)]


def _range(points: Sequence[CurvePoint]) -> tuple[float, float]:
    values = [value for point in points for value in (point.mean, point.least, point.most) if math.isfinite(value)]
    return min(values), max(values)
