"""Tests the static pictures of curves, which saved notebooks show."""

from __future__ import annotations

import math
import re
import struct
import zlib
from base64 import b64decode
from html.parser import HTMLParser
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from monarch_kernel.base.events import CurvePoint, CurveView, LoopView
from monarch_kernel.notebook.view.pictures import curves_html


def loop(*curves: CurveView, state: str = "over") -> LoopView:
    return LoopView((1, 0), "t", "cell [5]", 99, 100, state, 1.0, curves=curves)


def curve(*means: float, name: str = "loss", spread: float = 0.0) -> CurveView:
    points = tuple(CurvePoint(step, mean, mean - spread, mean + spread) for step, mean in enumerate(means))
    return CurveView(name, means[-1], points=points)


class Page(HTMLParser):
    """The images of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.sources: list[str | None] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "source":
            self.sources.append(dict(attrs)["srcset"])
        if tag == "img":
            self.images.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.text += data

    def paths(self, i: int = 0) -> list[str]:
        """The paths of a picture, without the axis."""
        kind, _, svg = str(self.sources[i] if self.sources else self.images[i]["src"]).partition(",")
        assert kind == "data:image/svg+xml"
        return [path.attrib["d"] for path in ElementTree.fromstring(unquote(svg))][1:]


def test_a_curve_is_an_image_with_its_name_last_value_steps_and_range_as_text() -> None:
    page = Page(curves_html([loop(curve(4.0, 2.0, 1.0, name="loss & more"))]))
    assert page.paths() == ["M0.0 3.0L150.0 52.3L300.0 77.0"]
    assert page.text == "loss & more 1steps 0 to 2 · 1 to 4"
    assert page.images[0]["alt"] == "loss & more from step 0 to 2: first 4, last 1, range 1 to 4"


def test_a_value_that_does_not_change_is_a_straight_line_although_its_means_are_rounded() -> None:
    page = Page(curves_html([loop(curve(0.1, 0.1 + 2e-17, 0.1 - 3e-17, 0.1))]))
    assert page.paths()[-1] == "M0.0 40.0L100.0 40.0L200.0 40.0L300.0 40.0"
    assert page.text == "loss 0.1steps 0 to 3 · 0.1"


def test_ranks_that_differ_are_a_band_around_the_mean() -> None:
    band, line = Page(curves_html([loop(curve(1.0, 2.0, spread=0.5))])).paths()
    assert band == "M0.0 40.0L300.0 3.0L300.0 40.0L0.0 77.0Z"
    assert line == "M0.0 58.5L300.0 21.5"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_numbers_are_gaps(bad: float) -> None:
    page = Page(curves_html([loop(curve(1.0, 2.0, bad, 3.0))]))
    assert page.paths() == ["M0.0 77.0L100.0 40.0M300.0 3.0h3"]
    assert curves_html([loop(curve(bad, bad))]) == ""


def test_a_long_curve_is_thinned_and_keeps_its_extremes_and_its_end() -> None:
    means = [1.0] * 1000
    means[537] = 9.0
    page = Page(curves_html([loop(curve(*means))]))
    band, line = page.paths()
    places = re.findall(r"[\d.]+ [\d.]+", line)
    assert len(places) <= 128
    assert places[-1] == "300.0 77.0"
    assert " 3.0L" in band
    assert "steps 0 to 999 · 1 to 9" in page.text


def test_no_text_of_a_rank_becomes_markup_and_many_curves_are_counted() -> None:
    names = ['<img src=x onerror="alert(1)">', *(f"m{i}" for i in range(9))]
    page = Page(curves_html([loop(*(curve(1.0, name=name) for name in names))]))
    assert len(page.images) == 8
    assert names[0] in page.text
    assert page.text.endswith("and 2 more curves")


def test_a_loop_without_logged_values_has_no_pictures() -> None:
    assert curves_html([loop()]) == ""
    assert curves_html([]) == ""


class Png:
    """The pixels of a picture: the opacity of each, by row."""

    def __init__(self, html: str) -> None:
        kind, _, data = str(Page(html).images[0]["src"]).partition(",")
        assert kind == "data:image/png;base64"
        file = b64decode(data)
        assert file[:8] == b"\x89PNG\r\n\x1a\n"
        chunks: dict[bytes, bytes] = {}
        at = 8
        while at < len(file):
            (length,) = struct.unpack_from(">I", file, at)
            kind_of = file[at + 4 : at + 8]
            chunks[kind_of] = file[at + 8 : at + 8 + length]
            assert struct.unpack_from(">I", file, at + 8 + length) == (zlib.crc32(kind_of + chunks[kind_of]),)
            at += 12 + length
        assert b"IEND" in chunks
        self.width, self.height, depth, colors, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
        assert (depth, colors) == (8, 3)
        pixels = zlib.decompress(chunks[b"IDAT"])
        rows = [pixels[at : at + self.width + 1] for at in range(0, len(pixels), self.width + 1)]
        assert len(rows) == self.height
        self.alpha = [[chunks[b"tRNS"][each] for each in row[1:]] for row in rows]

    def line(self, column: int) -> list[int]:
        """The rows that the line covers fully in a column."""
        return [row for row in range(self.height - 1) if self.alpha[row][column] == 255]


def test_a_loop_that_is_over_has_png_images_for_programs_that_show_no_svg() -> None:
    html = curves_html([loop(curve(4.0, 2.0, 1.0))])
    image = Png(html)
    assert (image.width, image.height) == (600, 160)
    assert image.line(2) == pytest.approx([6, 7], abs=2)  # at the top, where the first value is
    assert min(image.line(300)) <= 105 <= max(image.line(300)) + 1  # the second value, of 52.3 in 80
    assert max(image.line(597)) == pytest.approx(154, abs=2)
    assert image.alpha[159] == [128] * 600  # the axis
    assert html == curves_html([loop(curve(4.0, 2.0, 1.0))])


def test_a_png_image_has_the_band_and_the_gaps() -> None:
    image = Png(curves_html([loop(curve(1.0, 1.0, math.nan, 1.0, 1.0, spread=0.5))]))
    assert [image.alpha[40][column] for column in (75, 300, 525)] == [64, 0, 64]
    assert [image.line(column) for column in (75, 300, 525)] == [[79, 80], [], [79, 80]]


def test_a_single_value_is_a_dot_in_a_png_image() -> None:
    image = Png(curves_html([loop(curve(math.nan, 3.0, math.nan))]))
    assert sum(map(bool, (image.line(column) for column in range(600)))) == 6


def test_a_loop_that_runs_has_no_png_image() -> None:
    html = curves_html([loop(curve(4.0, 2.0), state="running")])
    assert "image/png" not in html
    assert "<picture>" not in html
    assert len(Page(html).images) == 1
