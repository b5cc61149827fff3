"""What code prints and displays in ``with output:`` is the state of the widget; the rest goes where it went."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.features.widgets.captures import Capture, capture_in_this_process


class Widget:
    """An Output widget without a page."""

    def __init__(self) -> None:
        self.outputs: tuple[dict[str, Any], ...] = ()


class Shell:
    """A rank's shell that records what it publishes."""

    def __init__(self) -> None:
        self.published: list[dict[str, Any]] = []
        self.emit = lambda data, metadata: self.published.append(data)

    def display(self, text: str, **about: Any) -> None:
        self.emit({"text/plain": text}, {"monarch_kernel": about} if about else {})


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    shell = Shell()
    monkeypatch.setattr("monarch_kernel.runtime.worker.ipython_shell.current_shell", lambda: shell)
    return shell


def texts(widget: Widget) -> list[str]:
    return [str(each.get("text") or each["data"]["text/plain"]) for each in widget.outputs]


def test_streams_and_displays_are_kept_in_order(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    widget = Widget()
    capture = Capture(widget, shell)
    capture.start()
    print("one")
    print("two")
    print("oh", file=sys.stderr)
    shell.display("figure")
    print("three")
    capture.stop()
    print("outside")
    shell.display("shown")
    assert texts(widget) == ["one\ntwo\n", "oh\n", "figure", "three\n"]
    assert [each.get("name") for each in widget.outputs] == ["stdout", "stderr", None, "stdout"]
    assert capsys.readouterr() == ("outside\n", "")
    assert shell.published == [{"text/plain": "shown"}]


def test_other_threads_write_where_they_wrote(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    widget = Widget()
    capture = Capture(widget, shell)
    capture.start()
    thread = threading.Thread(target=lambda: (print("theirs"), shell.display("theirs")))
    thread.start()
    thread.join()
    print("mine")
    capture.stop()
    assert texts(widget) == ["mine\n"]
    assert capsys.readouterr().out == "theirs\n"
    assert shell.published == [{"text/plain": "theirs"}]


def test_output_is_cleared_at_once_or_by_what_follows(shell: Shell) -> None:
    widget = Widget()
    capture = Capture(widget, shell)
    capture.start()
    print("old")
    shell.emit({}, {"monarch_kernel": {"clear_output": True}})
    capture.stop()
    assert texts(widget) == ["old\n"]
    capture = Capture(widget, shell)
    capture.start()
    shell.emit({}, {"monarch_kernel": {"clear_output": True}})
    print("new")
    capture.stop()
    assert texts(widget) == ["new\n"]
    capture = Capture(widget, shell)
    capture.start()
    shell.emit({}, {"monarch_kernel": {"clear_output": False}})
    capture.stop()
    assert texts(widget) == []


def test_displays_are_updated_in_their_places(shell: Shell) -> None:
    widget = Widget()
    capture = Capture(widget, shell)
    capture.start()
    shell.display("epoch 1", display_id="e")
    print("loss")
    shell.display("epoch 2", display_id="e", update=True)
    capture.stop()
    assert texts(widget) == ["epoch 2", "loss\n"]


def test_blocks_nest_and_show_errors(shell: Shell) -> None:
    class Output(Widget):
        __enter__: Any
        __exit__: Any

    capture_in_this_process(SimpleNamespace(Output=Output))  # type: ignore[arg-type]
    outer, inner = Output(), Output()
    with outer:
        print("a")
        with inner:
            print("b")
            raise ValueError("not this way")
        print("c")
    assert texts(outer) == ["a\nc\n"]
    assert inner.outputs[0]["text"] == "b\n"
    assert inner.outputs[1]["ename"] == "ValueError"
    assert inner.outputs[1]["evalue"] == "not this way"
    assert inner.outputs[1]["traceback"][-1] == "ValueError: not this way"
    with pytest.raises(KeyboardInterrupt), inner:
        raise KeyboardInterrupt
