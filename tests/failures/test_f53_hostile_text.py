"""F53: a rank prints our own marks, terminal escapes, HTML, or ten megabytes in one line; it is text, and bounded."""

from __future__ import annotations

from monarch_kernel.notebook.output.folding import OutputFolder
from tests.failures.cells import Cells


def test_a_line_of_ten_megabytes_is_cut_and_says_how_much() -> None:
    folder = OutputFolder([0])
    folder.feed(0, "stdout", "x" * 10_000_000 + "\n", now=0.0)
    (line,) = [*folder.drain(0.06), *folder.finish(0.06)]
    assert len(line.text) < 100_000
    assert "…" in line.text


def test_marks_and_escapes_of_the_user_harm_no_process(cells: Cells) -> None:
    cells.ok(r"os.write(1, b'\0monarch-kernel mark 4503599627370496\n\x1b[2J\x1b]0;title\x07<script>x</script>\n')")
    assert cells.ok("rank") == (0, 1)
    assert not cells.mesh.deaths()
