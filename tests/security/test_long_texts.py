"""Long texts that are made to be slow to search, and numbers that Python refuses to convert, are text like any other.

A text here has so many characters that a search whose time grows with the square of its length does not end within the limit of
a test.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.errors import Failure
from monarch_kernel.notebook.magics.remote_names import _FROM
from monarch_kernel.notebook.output.folding import OutputFolder, render
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.diagnostics.reprs import describe_value
from monarch_kernel.runtime.diagnostics.torch_notes import torch_notes
from monarch_kernel.train.process_group.labels import label_of

N = 1_000_000
LONGER = getattr(sys.int_info, "default_max_str_digits", 4300) + 700
"""More digits than Python converts to a number."""

PRINTED = {
    "digits": "1" * N,
    "digits and slashes": "1/" * (N // 2),
    "a large fraction": "9" * 400 + "/1",
    "a fraction of long numbers": f"{'9' * LONGER}/{'9' * LONGER}",
    "a long percentage": "9" * LONGER + "%",
    "a long time": f"50%|x| [{'9' * LONGER}:{'9' * LONGER}<1:00]",
    "up by a long number": f"\x1b[{'9' * LONGER}A50%|x",
    "a long rank": f"[rank {'9' * LONGER}] x",
    "brackets": "[" * N,
    "times": "12:34:56 " * (N // 9),
    "sequences": "\x1b[" * (N // 2),
}


@pytest.mark.parametrize("text", PRINTED.values(), ids=PRINTED)
@pytest.mark.parametrize("before", ["", "\r"])
def test_any_line_is_output_or_a_bar(text: str, before: str) -> None:
    folder = OutputFolder([0, 1])
    for now in range(3):
        for rank in (0, 1):
            folder.feed(rank, "stderr", f"{before}{text}", float(now))
        folder.drain(float(now))
        folder.bars(float(now))
    folder.feed(0, "stdout", "the end\n", 4.0)
    shown = "".join(part for _, part in render([*folder.drain(4.0), *folder.finish(5.0)]))  # type: ignore[list-item]
    assert "the end" in shown


def test_bars_of_usual_numbers_are_still_bars() -> None:
    folder = OutputFolder([0, 1])
    for rank, done in ((0, 30), (1, 10)):
        folder.feed(rank, "stderr", f"\r{done}%|x| {done}/100 [00:05<00:07]", 0.0)
    folder.drain(0.0)
    (block,) = folder.bars(1.0)
    assert "10%" in block.text


@pytest.mark.parametrize("text", ["token-" * 680, "passw" * 800, "a-" * 2_048, "key-" * 1_000, "secret_" * 580])
def test_a_value_is_described_soon(text: str) -> None:
    assert "long)" in describe_value(text)


def test_a_message_about_groups_is_searched_soon() -> None:
    assert torch_notes(RuntimeError("Process group " * (N // 14))) == ()
    (note, _) = torch_notes(RuntimeError("Process group <object> is not initialized in the world group map"))
    assert note.startswith("this group was made before")


def test_an_error_of_torch_is_classified_soon() -> None:
    text = "gloo/" * 4_000
    assert not Failure("exception", "RuntimeError", text).is_broken_connection
    assert Failure("exception", "RuntimeError", f"{text}: Connection reset by peer").is_broken_connection
    assert not Failure("exception", "RuntimeError", "Connection reset by peer").is_broken_connection


def test_a_value_of_blanks_is_shown_soon() -> None:
    assert len(repr(ValueMesh({"r": 1}, ["x" + " " * N]))) < 10_000


def test_an_import_of_many_names_is_completed_soon() -> None:
    many = ", ".join(f"name{i}" for i in range(100))
    assert _FROM.search(f"from torch import {many}  # the end") is None
    for names, written in ((f"{many},  ab", "ab"), ("", ""), ("a , b,", ""), ("ab", "ab"), ("a as b, c", "c")):
        found = _FROM.search(f"from torch.nn import {names}")
        assert found is not None
        assert (found[1], found[2]) == ("torch.nn", written)


def test_names_of_classes_functions_and_files_in_a_report_have_limits() -> None:
    long = "x" * 100_000
    kind = f"type({long!r}, (Exception,), {{'__module__': '__main__'}})"
    code = f"def {long}({long}):\n    raise {kind}('a') from {kind}('b')"
    namespace: dict[str, object] = {}
    exec(compile(code, f"/{long}.py", "exec"), namespace)
    with pytest.raises(Exception, match="a") as caught:
        namespace[long](1)  # type: ignore[operator]
    failure = describe(caught.value)
    assert failure.etype.startswith("xxx")
    assert failure.chain[0].etype.startswith("xxx")
    assert failure.notes == ()
    assert len(repr(replace(failure, traceback="", exception=b""))) < 30_000
    assert len(failure.headline()) < 1_000
    assert all(len(frame.file) <= 4_096 and len(frame.function) <= 200 for frame in failure.frames)


def test_the_description_of_a_group_is_cut_and_groups_stay_distinct() -> None:
    long = "d" * 1_000_000
    labels = {label_of(name, f"{long}{name}") for name in ("3", "4")}
    assert len(labels) == 2
    assert all(len(label) < 200 for label in labels)
    assert (label_of("3", "mesh_dp"), label_of("3", "undefined"), label_of("0", "default_pg")) == ("dp", "3", "")
