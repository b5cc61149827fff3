"""The last lines of a rank that died are what a terminal would show."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from monarch_kernel.runtime.host.last_lines import LastLines


def lines_of(*texts: str) -> tuple[str, ...]:
    last = LastLines()
    for text in texts:
        last.add(text)
    return last.lines()


def nested_bars() -> str:
    """What two bars write, the second in each turn of the first, up to a moment in the last turn."""
    file = io.StringIO()
    file.write("loads the data\n")
    outer = tqdm(total=3, desc="epochs", file=file, mininterval=0, miniters=1, ncols=60, position=0)
    for _ in range(3):
        inner = tqdm(total=200, desc="steps", file=file, mininterval=0, miniters=1, ncols=60, position=1, leave=False)
        for _ in range(120):
            inner.update()
        outer.update()
    written = file.getvalue()
    for bar in (inner, outer):  # so that they write nothing when they are collected
        bar.disable = True
    return written


def test_bars_are_their_last_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread
    written = nested_bars()
    assert written.count("\n") > 300
    first, *bars = (line for line in lines_of(written) if line.strip())
    assert first == "loads the data"
    assert [bar.partition(":")[0] for bar in bars] == ["epochs", "steps"]
    assert "3/3" in bars[0]
    assert "120/200" in bars[1]


@given(st.integers(1, 40))
def test_it_does_not_matter_how_the_text_is_cut(size: int) -> None:
    written = "a\n\router 1\n\rinner 10\x1b[1A\router 2\n\rinner 20\x1b[A\r\n\nbar 1\rbar 2\r\n\x1b[31mred\x1b[0m\nlast"
    parts = [written[i : i + size] for i in range(0, len(written), size)]
    assert lines_of(*parts) == ("a", "outer 2", "inner 20", "bar 2", "\x1b[31mred\x1b[0m", "last")


def test_a_bar_is_its_last_state_and_lines_are_kept_to_sixty() -> None:
    assert lines_of("1 %\r", "2 %\r", "3 %") == ("3 %",)
    assert lines_of("".join(f"line {i}\n" for i in range(100)), "end") == (
        *(f"line {i}" for i in range(40, 100)),
        "end",
    )
    last = LastLines()
    last.add("one\ntwo\x1b[A")
    last.clear()
    assert last.lines() == ()
    last.add("three\n")
    assert last.lines() == ("three",)
