"""The notebook says which of its variables are instances of a class that a cell has defined again."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.events import EventManager, available_events

from monarch_kernel.notebook.magics.earlier_instances import EarlierInstances

TEXT = "is an instance of an earlier class Cfg, which a cell has defined again: isinstance({0}, Cfg) is False; make it again"


class Shell:
    """Runs cells with IPython's events; ``meshes`` are those of the notebook."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {"__name__": "__main__"}
        self.events = EventManager(self, available_events)
        self.meshes: list[str] = ["t"]
        shell: Any = self
        self.told = EarlierInstances(shell, self.meshes)
        self.told.install()

    def run(self, code: str) -> None:
        self.events.trigger("pre_run_cell", SimpleNamespace(raw_cell=code))
        exec(code.removeprefix("%%remote t --local\n"), self.user_ns)
        self.events.trigger("post_run_cell", SimpleNamespace())


@pytest.fixture
def shell() -> Iterator[Shell]:
    shell = Shell()
    shell.run("%%remote t --local\nclass Cfg: pass\nclass Other: pass\nold = Cfg(); other = Other(); First = Cfg")
    yield shell
    shell.told.remove()


def test_instances_that_the_cell_leaves_are_named_once(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run("%%remote t --local\nclass Cfg: pass\nnew = Cfg()")
    assert capsys.readouterr().err == f"old {TEXT.format('old')}\n"
    shell.run("old, new")
    shell.run("new = Cfg()")
    assert capsys.readouterr().err == ""


def test_an_instance_that_comes_later_is_named(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run("del old\nclass Cfg: pass")
    assert capsys.readouterr().err == ""
    shell.run("came = First()")  # as ranks that have kept an instance send it
    assert capsys.readouterr().err == f"came {TEXT.format('came')}\n"
    shell.run("came = First()")
    assert capsys.readouterr().err == f"came {TEXT.format('came')}\n"


@pytest.mark.parametrize(
    "code", ["x = 'class Cfg: pass'", "class Cfg: pass\nold = Cfg()", "Cfg = None", "class New: pass"]
)
def test_nothing_is_said_without_a_cause(shell: Shell, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run(code)
    assert capsys.readouterr().err == ""


def test_nothing_is_said_without_meshes(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    shell.meshes.clear()
    shell.run("class Cfg: pass")
    assert capsys.readouterr().err == ""
