"""The report of a crash shows the user's frames, in whatever pieces it arrives."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.runtime.host.crash_output import CrashFilter

# Each piece is one write of faulthandler.
PIECES = (
    *("Fatal Python error: ", "Segmentation fault", "\n\n"),
    *("Current thread 0x", "00007f5d61a2eb80", " (most recent call first):\n"),
    *("  File ", '"<remote cell [7]>"', ", line ", "4", " in ", "<module>", "\n"),
    *("  File ", '"/home/me/model.py"', ", line ", "7", " in ", "forward", "\n"),
    *("  File ", '"/x/site-packages/monarch_kernel/runtime/worker/rank.py"', ", line ", "3", " in ", "serve", "\n"),
    *("  File ", '"<string>"', ", line ", "1", " in ", "<module>", "\n"),
    *("\n", "Extension modules: ", "numpy._core", ", ", "torch._C", " (total: 2)", "\n"),
)
SHOWN = """Fatal Python error: Segmentation fault
Current thread 0x00007f5d61a2eb80 (most recent call first):
  File "<remote cell [7]>", line 4 in <module>
  File "/home/me/model.py", line 7 in forward
"""


@given(st.sets(st.integers(1, len(PIECES) - 1)), st.sampled_from(["", "half a line; ", "a line\n"]))
def test_a_report_shows_the_frames_of_the_user(cuts: set[int], before: str) -> None:
    places = [0, *sorted(cuts), len(PIECES)]
    filter = CrashFilter()
    texts = [before, *("".join(PIECES[a:b]) for a, b in pairwise(places))]
    assert "".join(map(filter.feed, texts)) + filter.end() == before + SHOWN


@pytest.mark.parametrize(
    "after", ["50%|#####", "a line\n\nanother\n", "\rhalf", "Traceback (most recent call last):\n"]
)
def test_what_follows_a_report_passes_at_once(after: str) -> None:
    """A process that was forked has crashed, and the rank goes on."""
    filter = CrashFilter()
    assert filter.feed("".join(PIECES)) == SHOWN
    assert filter.feed(after) == after
    assert filter.feed("\n\n") == "\n\n"


def test_a_second_report_is_filtered_as_well() -> None:
    filter = CrashFilter()
    assert filter.feed("".join(PIECES) + "and then\n" + "".join(PIECES)) == f"{SHOWN}and then\n{SHOWN}"


def test_thousands_of_reports_in_one_read_are_no_problem() -> None:
    text = "Fatal Python error: no\nthen\n" * 5000
    assert CrashFilter().feed(text) == text


@pytest.mark.parametrize("begin", ["Fatal Python error: ", "Fatal Python error: no\nExtension modules: "])
def test_a_line_that_never_ends_is_not_kept(begin: str) -> None:
    filter = CrashFilter()
    shown = "".join(filter.feed(each) for each in (begin, *["x" * 1000] * 100))
    assert shown == begin + "x" * 100_000


def test_exec_of_the_user_stays() -> None:
    assert '"<string>"' in CrashFilter().feed("".join(PIECES[:6]) + '  File "<string>", line 2 in <module>\n')


@given(st.text(st.sampled_from("ab \n"), max_size=40), st.integers(0, 40))
def test_other_text_passes_unchanged(text: str, cut: int) -> None:
    filter = CrashFilter()
    assert filter.feed(text[:cut]) + filter.feed(text[cut:]) + filter.end() == text


def test_a_report_of_this_python_keeps_its_user_frames() -> None:
    code = (
        "import faulthandler, os, threading, numpy\n"
        "faulthandler.enable(2, all_threads=True)\n"
        "def crash(): os.kill(os.getpid(), 11)\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "crash()\n"
    )
    text = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True).stderr
    assert "Extension modules" in text
    shown = CrashFilter().feed(text)
    assert shown.splitlines() == [line for line in text.splitlines() if line and "Extension modules" not in line]
    assert "in crash" in shown
