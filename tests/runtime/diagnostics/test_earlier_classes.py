"""Tests the notes about instances of classes that a cell has defined again."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from monarch_kernel.runtime.diagnostics.earlier_classes import (
    classes_to_be_redefined,
    instances_text,
    notes_about_instances,
)
from monarch_kernel.runtime.diagnostics.failures import describe


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The namespace of cells, in which a class ``Cfg`` has been defined, and an instance of it made."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    run(vars(module), "class Cfg: pass\nold, _hidden = Cfg(), Cfg()")
    return vars(module)


def run(namespace: dict[str, Any], code: str) -> str:
    unit = compile(code, "<remote cell [7]>", "exec")
    before = classes_to_be_redefined([unit], namespace)
    exec(unit, namespace)
    return instances_text(before, namespace)


def test_variables_that_are_left_are_named(main: dict[str, Any]) -> None:
    assert run(main, "class Cfg: pass\nnew = Cfg()") == (
        "old is an instance of an earlier class Cfg, which a cell has defined again: "
        "isinstance(old, Cfg) is False; make it again"
    )
    assert run(main, "class Cfg: pass").startswith("new is an instance of")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("[0, Cfg()]", "kept[1] is an instance of an earlier class Cfg, {again}: isinstance(kept[1], Cfg) is False;"),
        (
            "(Cfg(), Cfg())",
            "kept[0], kept[1] are instances of an earlier class Cfg, {again}: isinstance(kept[0], Cfg) is",
        ),
        ("{'a': Cfg()}", "kept['a'] is an instance of"),
        (
            "{(1, 2): Cfg()}",
            "a value of kept is an instance of an earlier class Cfg, {again}: isinstance(it, Cfg) is False;",
        ),
        ("{'a': [(0, Cfg())]}", "kept['a'][0][1] is an instance of"),
        ("__import__('collections').deque([Cfg()])", "kept[0] is an instance of"),
        ("__import__('collections').defaultdict(list, a=[Cfg()])", "kept['a'][0] is an instance of"),
        ("(lambda each: (each.append(each), each.append(Cfg()), each)[2])([])", "kept[1] is an instance of"),
        ("{Cfg(): 1}", "a key of kept is an instance of"),
        ("{Cfg()}", "an element of kept is an instance of"),
        ("type('Bag', (list,), {})([Cfg()])", ""),  # it may run code of the user
    ],
)
def test_elements_that_are_left_are_named(main: dict[str, Any], value: str, text: str) -> None:
    run(main, f"del old\nkept = {value}")
    said = run(main, "class Cfg: pass")
    expected = text.format(again="which a cell has defined again")
    assert said.startswith(expected) if text else not said


@pytest.mark.parametrize(
    "code",
    [
        "class Cfg: pass\nold = Cfg()",
        "class Other: pass",
        "def Cfg(): pass",
        "class Cfg: pass\ndel old",
        "import argparse\ndef argparse(): pass",
        "x = [lambda: 1 for _ in range(2)]",
    ],
)
def test_nothing_is_said_without_a_cause(main: dict[str, Any], code: str) -> None:
    assert run(main, code) == ""


def test_classes_of_modules_are_left_alone(main: dict[str, Any]) -> None:
    run(main, "from argparse import Namespace\nspace = Namespace()")
    assert run(main, "class Namespace: pass") == ""


def test_an_error_in_which_an_instance_is_used_names_it(main: dict[str, Any]) -> None:
    run(main, "class Cfg: pass\nnew = Cfg()")
    code = "def use(cfg):\n    assert isinstance(cfg, Cfg)\nuse(new)\nuse(old)"
    with pytest.raises(AssertionError) as caught:
        exec(compile(code, "<remote cell [8]>", "exec"), main)
    notes = describe(caught.value).notes
    assert notes == (
        "cfg is an instance of an earlier class Cfg, which a cell has defined again: "
        "isinstance(cfg, Cfg) is False; make it again",
    )
    assert notes_about_instances([sys._getframe()]) == ()


def test_an_actor_is_no_instance_of_an_earlier_class(main: dict[str, Any]) -> None:
    """Ranks get the class of an actor from the program, also where a cell has defined it on ranks, too."""
    code = "from monarch_kernel.actor import Actor\nclass Echo(Actor): pass\nself = Echo()"
    run(main, code)
    run(main, "class Echo(Actor): pass")
    with pytest.raises(ValueError, match="no") as caught:
        exec(compile("def fail(self): raise ValueError('no')\nfail(self)", "<remote cell [8]>", "exec"), main)
    assert describe(caught.value).notes == ()
