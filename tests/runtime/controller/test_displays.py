"""Displays and output arrive on different connections, and are reported in the order in which the rank made them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Hello, HostHello, Lost, Output, OutputChunk, Ping, Rich
from monarch_kernel.net.wire.stream_marks import DISPLAY, FIRST_MARK, MARK_STEP
from monarch_kernel.runtime.controller.effects import Effect, RichEvent, Tell
from monarch_kernel.runtime.controller.output_order import OUTPUT_GRACE_S
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.testing import rank_spec


def display_mark(i: int) -> int:
    return FIRST_MARK + MARK_STEP * i + DISPLAY


def cell_mark(i: int) -> int:
    return FIRST_MARK + MARK_STEP * i


def a_state() -> State:
    """One rank, which runs a request."""
    state = State()
    state.hosts.add(1, 0.0)
    state.handle(HostHello("t", 1, "here", 10, 4, 0), (), b"H1", 0.0)
    state.processes.start(1, [rank_spec(1)], 0.0)
    state.handle(Hello("t", 1, 11, "cpu"), (), b"R1", 0.0)
    state.request(5, [1], pack(Ping(5)), "cell [1]", 0.0)
    return state


def texts_and_data(effects: list[Effect]) -> list[Any]:
    """Texts, and the data of displays."""
    events = [effect.event for effect in effects if isinstance(effect, Tell)]
    return [event.data["x"] if isinstance(event, RichEvent) else getattr(event, "text", None) for event in events]


def rich(i: int) -> Rich:
    return Rich(5, {"x": i}, {}, (display_mark(i), display_mark(i)))


def output(*chunks: tuple[Any, str, int]) -> Output:
    return Output(tuple(OutputChunk(1, stream, text, end) for stream, text, end in chunks))


@given(st.lists(st.text("ab", max_size=2), min_size=1, max_size=6), st.data())
def test_output_and_displays_keep_the_order_of_the_rank(texts: list[str], data: st.DataObject) -> None:
    """A rank writes a text, displays something, and so on; each of the two connections keeps its order."""
    state = a_state()
    chunks: list[OutputChunk] = []
    expected: list[Any] = []
    for i, text in enumerate(texts):
        chunks += [
            OutputChunk(1, "stdout", text, display_mark(i)),
            OutputChunk(1, "stderr", "", display_mark(i)),
        ]
        expected += [text] * bool(text) + [i]
    chunks.append(OutputChunk(1, "stdout", "end", display_mark(len(texts) - 1)))
    expected.append("end")
    displays = [rich(i) for i in range(len(texts))]
    seen: list[Any] = []
    while chunks or displays:
        if chunks and (not displays or data.draw(st.booleans())):
            n = data.draw(st.integers(1, len(chunks)))
            seen += texts_and_data(state.handle(Output(tuple(chunks[:n])), (), b"H1", 0.0))
            del chunks[:n]
        else:
            seen += texts_and_data(state.handle(displays.pop(0), (), b"R1", 0.0))
    assert seen == expected


def test_output_waits_for_a_missing_display_only_for_a_while() -> None:
    state = a_state()
    first = output(
        ("stdout", "before", display_mark(0)), ("stderr", "", display_mark(0)), ("stdout", "after", display_mark(0))
    )
    assert texts_and_data(state.handle(first, (), b"H1", 1.0)) == ["before"]
    assert texts_and_data(state.tick(1.0 + OUTPUT_GRACE_S - 0.01)) == []
    assert texts_and_data(state.tick(1.0 + OUTPUT_GRACE_S)) == ["after"]
    assert texts_and_data(state.handle(rich(0), (), b"R1", 2.0)) == [0], "it is late, but shown"


def test_a_display_waits_for_missing_output_only_for_a_while() -> None:
    state = a_state()
    assert texts_and_data(state.handle(rich(0), (), b"R1", 1.0)) == []
    assert texts_and_data(state.tick(1.0 + OUTPUT_GRACE_S)) == [0]


def test_withheld_output_is_reported_when_the_rank_is_lost() -> None:
    state = a_state()
    state.handle(
        output(("stdout", "before", display_mark(0)), ("stdout", "last words", display_mark(0))), (), b"H1", 1.0
    )
    effects = state.handle(Lost(1, 0, 9, "", (), 0), (), b"H1", 1.1)
    assert texts_and_data(effects)[0] == "last words"


def test_output_of_processes_left_running_belongs_to_their_request() -> None:
    state = a_state()
    state.handle(output(("stdout", "mine", display_mark(0))), (), b"H1", 1.0)
    chunk = OutputChunk(1, "stdout", "the child's", cell_mark(0), 0, 3)
    (effect,) = state.handle(Output((chunk,)), (), b"H1", 1.0)
    assert isinstance(effect, Tell)
    assert (getattr(effect.event, "text", ""), effect.event.request) == ("the child's", 3)
    assert texts_and_data(state.handle(output(("stdout", "waits", display_mark(0))), (), b"H1", 1.0)) == [], (
        "it still waits for the display"
    )


def test_the_mark_of_a_cell_withholds_nothing() -> None:
    state = a_state()
    message = output(
        ("stdout", "one", cell_mark(0)), ("stdout", "two", cell_mark(0)), ("stdout", "three", cell_mark(1))
    )
    assert texts_and_data(state.handle(message, (), b"H1", 1.0)) == ["one", "two", "three"]
