"""Tests where a cell runs, according to its text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.notebook.syntax.cell_kind import code_at, read_cell


def is_t(name: str | None) -> bool:
    return name == "t"


@pytest.mark.parametrize(
    ("text", "mode", "runs", "why", "selector", "body"),
    [
        ("x = 1", None, "kernel", "", "", "x = 1"),
        ("x = 1", "t --raw", "ranks", "%autoremote", "t", "x = 1"),
        ("x = 1", "", "ranks", "%autoremote", "", "x = 1"),
        ("%%remote\nx", None, "ranks", "%%remote", "", "x"),
        ("%%remote t[0, 1] --out v\nx\ny", None, "ranks", "%%remote", "t[0, 1]", "x\ny"),
        ("%%remote --out v u\nx", "t", "ranks", "%%remote", "u", "x"),
        ("\n  %%remote t # why\nx", None, "ranks", "%%remote", "t", "x"),
        ("%%remote t --wro", None, "ranks", "%%remote", "t", ""),
        ("%%remote t[0, --x", None, "ranks", "%%remote", "t[0, --x", ""),
        ("%%remote --out\nx", None, "ranks", "%%remote", "", "x"),
        ("%%remotely\nx", None, "kernel", "", "", "%%remotely\nx"),
        ("%%local\nx", "t", "kernel", "%%local", "", "x"),
        ("# why\n%%local\nx", "t", "kernel", "%%local", "", "x"),
        ("%%time\nx", "t", "ranks", "%autoremote", "t", "%%time\nx"),
        ("!ls", "t", "ranks", "%autoremote", "t", "!ls"),
        ("%remote t[0] rank + 1", None, "ranks", "%remote", "t[0]", "rank + 1"),
        ("%remote t.x", None, "ranks", "%remote", "t.x", ""),
        ("%remote rank + 1", None, "ranks", "%remote", "", "rank + 1"),
        ("%remote --raw t --targets 0 rank", None, "ranks", "%remote", "t", "rank"),
        ("%remote", "t", "ranks", "%remote", "", ""),
        ("", "t", "kernel", "", "", ""),
        ("\n# only a comment\n", "t", "kernel", "", "", "\n# only a comment\n"),
    ],
)
def test_a_cell_is_read(text: str, mode: str | None, runs: str, why: str, selector: str, body: str) -> None:
    form = read_cell(text, mode, is_t)
    assert (form.runs, form.why, form.selector, form.body) == (runs, why, selector, body)
    assert text[form.start :].strip() == body.strip()


@pytest.mark.parametrize(
    "text",
    [
        "%mesh",
        "%mesh down t",
        "%tb Verbose",
        "%xmode Verbose",
        "# look\n\n%mesh show\nx = 1",
        "%autoremote off",
        "autoremote off",
        "%autoremote?",
        "%%remote?",
        "%%px -t 0\nx",
        "%load_ext monarch_kernel",
        "%unload_ext monarch_kernel",
        "exit",
        "quit()",
    ],
)
def test_mesh_commands_stay_in_the_kernel_while_autoremote_is_on(text: str) -> None:
    assert read_cell(text, "t").why in ("", "%%remote")


@pytest.mark.parametrize(
    "text", ["exit_code = 1", "%meshgrid", "%load_ext other", "exit() if x else 0", "mesh", "%ranked"]
)
def test_code_that_resembles_a_mesh_command_goes_to_the_ranks(text: str) -> None:
    assert read_cell(text, "t").why == "%autoremote"


@given(st.text(alphabet="%remotlca tx[]#\n\t -", max_size=40), st.sampled_from([None, "t", "t["]))
def test_any_text_is_read(text: str, mode: str | None) -> None:
    form = read_cell(text, mode, is_t)
    assert 0 <= form.start <= len(text)
    assert form.body.strip() == text[form.start :].strip() or form.why == "%remote"


@pytest.mark.parametrize(
    ("text", "mode", "found"),
    [
        ("x|", None, None),
        ("x.y|", "t[0]", ("t[0]", "x.y", 3)),
        ("%%remote t\nx|", None, ("t", "x", 1)),
        ("%%remote t\n|x", None, ("t", "x", 0)),
        ("%%remote t --o|\nx", None, None),
        ("%%remote t --o|", None, None),
        ("%%remote |", "t", None),
        ("%%remote t\n|", None, ("t", "", 0)),
        ("%%remote t\n%remote|", None, ("t", "%remote", 7)),
        ("%%local\nx|", "t", None),
        ("x = 1\n%remote t[0] y.z|\nu", None, ("t[0]", "y.z", 3)),
        ("x = 1\n%remote y|", None, ("", "y", 1)),
        ("x = 1\n%remote t |", None, ("t", "", 0)),
        ("x = 1\n%remote t|", None, None),
        ("x = 1\n%remote t --raw y|\n", None, ("t", "y", 1)),
        ("x = 1\n%rem|", None, None),
        ("%mesh down |", "t", None),
    ],
)
def test_code_at_the_cursor(text: str, mode: str | None, found: tuple[str, str, int] | None) -> None:
    cursor = text.index("|")
    form = code_at(text.replace("|", ""), cursor, mode, is_t)
    assert found == (form and (form.selector, form.body, cursor - form.start))
