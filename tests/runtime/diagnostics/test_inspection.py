"""Inspection of a namespace finds values, attributes and keys without running any of the user's code."""

from __future__ import annotations

import collections
import gc
import types
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from monarch_kernel.net.wire.messages import Names
from monarch_kernel.runtime.diagnostics import inspection
from monarch_kernel.runtime.diagnostics.namespace import NameTracker


class Trap:
    """Records everything but a look into its dictionaries."""

    ran: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.stored = {"deep": [1, torch.zeros(2, 3)]}

    @property
    def computed(self) -> int:
        self.ran.append("property")
        return 1

    def __getattr__(self, name: str) -> Any:
        self.ran.append("__getattr__")
        raise AttributeError(name)

    def __getattribute__(self, name: str) -> Any:
        if name not in ("stored", "ran"):
            Trap.ran.append("__getattribute__")
        return object.__getattribute__(self, name)

    def __getitem__(self, key: object) -> Any:
        self.ran.append("__getitem__")

    def __repr__(self) -> str:
        self.ran.append("__repr__")
        return ""

    def __dir__(self) -> Any:
        self.ran.append("__dir__")
        return []

    def method(self, of: int, *, default: object = None) -> None:
        """What it does."""


class TrapDict(dict[str, int]):
    def __getitem__(self, key: str) -> int:
        Trap.ran.append("dict.__getitem__")
        return 1

    def __iter__(self) -> Any:
        Trap.ran.append("dict.__iter__")
        return iter(())


Point = collections.namedtuple("Point", "x y")


def named(found: list[tuple[Any, str]]) -> dict[Any, str]:
    return dict(found)


def test_find_evaluates_names_attributes_and_subscripts() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ModuleDict({"head": nn.ReLU()}))
    space: dict[str, object] = {
        "model": model,
        "cfg": {"lr": {"max": 3}, 4: "four", (1, 2): "pair"},
        "point": Point(torch.zeros(2), "y"),
        "cases": [Trap(), "text"],
    }
    found = {
        "model[0].weight": model[0].weight,
        "model[-1]['head']": model[1]["head"],
        "cfg['lr']['max']": 3,
        "cfg[4]": "four",
        "cfg[1, 2]": "pair",
        "point.x": space["point"].x,  # type: ignore[attr-defined]
        "cases[1]": "text",
        "cases[0].stored": space["cases"][0].stored,  # type: ignore[index]
        "'literal'": "literal",
        "alias.Linear": nn.Linear,
        "Linear": nn.Linear,
        "len": len,
    }
    imports = {"alias": "torch.nn", "Linear": "torch.nn.Linear", "absent": "no.such.module"}
    for expression, value in found.items():
        assert (
            inspection.find(expression, space, imports) is value or inspection.find(expression, space, imports) == value
        ), expression
    for expression in (
        "nothing",
        "absent",
        "model[7]",
        "cfg['no']",
        "point.z",
        "model[0](1)",
        "cfg[[]]",
        "1 +",
        "len.nope",
    ):
        with pytest.raises(LookupError):
            inspection.find(expression, space, imports)


def test_attributes_keys_and_arguments() -> None:
    model = nn.Linear(2, 3)
    shown = inspection.attributes(model, private=False)
    assert named(shown)["weight"] == "Parameter[3, 2] float32"
    assert named(shown)["forward"] == "function"
    assert [name for name, _ in shown].index("weight") < [name for name, _ in shown].index("apply"), "own ones first"
    assert not [name for name, _ in shown if name.startswith("_")]
    assert "_parameters" in named(inspection.attributes(model, private=True))
    assert named(inspection.attributes(torch.nn, private=False))["Linear"] == "class"
    assert named(inspection.attributes(torch, private=False))["nn"] == "module"

    assert inspection.keys({"a": 1, 2: [], (1, 2): 0, 2.5: 0}) == [("a", "int"), (2, "list")]
    assert inspection.keys(collections.defaultdict(list, a=1)) == [("a", "int")]
    assert named(inspection.keys(nn.ModuleDict({"head": model}))) == {"head": "Linear"}
    assert inspection.keys(np.zeros(2, dtype=[("re", float)])) == [("re", "NoneType")]
    assert len(inspection.keys(dict.fromkeys(range(100_000)))) <= 1_000

    assert inspection.arguments(Trap.method) == [("self=", "param"), ("of=", "param"), ("default=", "param")]
    assert ("in_features=", "param") in inspection.arguments(nn.Linear)


def test_names_and_keys_that_are_offered_are_short_and_can_be_written() -> None:
    long = "x" * 5_000_000
    odd = {long: 1, "\x1b]0;title\x07": 2, "a\nb": 3, "good": 4}
    assert inspection.keys(odd) == [("good", "int")]
    assert dict(inspection.names(odd, ())).keys() <= {"\x1b]0;title\x07", "a\nb", "good"}
    holder = type("Holder", (), {})()
    holder.__dict__.update({long: 1, "good": 2})
    assert "good" in dict(inspection.attributes(holder, private=False))
    assert long not in dict(inspection.attributes(holder, private=False))
    function = eval(f"lambda {long}: 0")
    assert len(repr(inspection.about(function, source=False))) < 200_000
    assert inspection.arguments(function) == []


def test_no_code_of_the_user_runs() -> None:
    trap, mapping = Trap(), TrapDict(a=1)
    space: dict[str, object] = {"trap": trap, "mapping": mapping, "cls": Trap}
    Trap.ran.clear()
    assert inspection.find("trap.stored['deep'][1]", space, {}).shape == (2, 3)
    shown = named(inspection.attributes(trap, private=True))
    assert (shown["stored"], shown["computed"], shown["method"]) == ("dict", "property", "function")
    assert inspection.find("trap.method", space, {}).__func__ is Trap.__dict__["method"]
    for expression in ("trap.computed", "trap.nope", "trap['key']", "mapping['a']", "cls.computed"):
        with pytest.raises(LookupError):
            inspection.find(expression, space, {})
    assert inspection.keys(mapping) == []
    inspection.about(trap, source=True)
    described = inspection.about(inspection.find("trap.method", space, {}), source=False)
    assert described["Signature"] == "method(of: int, *, default: object = None) -> None"
    assert described["Docstring"] == "What it does."
    NameTracker(()).news(space)
    assert Trap.ran == []


def test_defaults_are_described_not_represented() -> None:
    Trap.ran.clear()
    trap, zeros = Trap(), torch.zeros(3)

    def function(a: Trap = trap, b: torch.Tensor = zeros, c: str = "c") -> None: ...

    described = inspection.about(function, source=False)
    assert "a: Trap = Trap, b: torch.Tensor = Tensor[3] float32 cpu" in described["Signature"]
    assert Trap.ran == []


def test_kinds() -> None:
    values: dict[str, object] = {
        "Tensor[4, 3] float32": torch.zeros(4, 3),
        "Parameter[2] float64": nn.Parameter(torch.zeros(2, dtype=torch.float64)),
        "ndarray[2] int32": np.zeros(2, dtype="int32"),
        "module": types,
        "function": len,
        "class": dict,
        "Linear": nn.Linear(1, 1),
        "NoneType": None,
        "generator": (each for each in ()),
    }
    assert {inspection.kind_of(value): value for value in values.values()} == values


def test_the_tracker_reports_changes() -> None:
    tracker = NameTracker({"exit"})
    space: dict[str, object] = {"exit": 1, "_private": 1, "x": 1, "t": torch.zeros(2)}
    assert tracker.news(space) == Names({"x": "int", "t": "Tensor[2] float32"})
    assert tracker.news(space) is None
    space["x"] = 2
    assert tracker.news(space) is None, "another value of the same kind is no change"
    space.update(t=torch.zeros(3), y="text")
    del space["x"]
    assert tracker.news(space) == Names({"t": "Tensor[3] float32", "y": "str"}, ("x",))
    assert tracker.everything() == Names({"t": "Tensor[3] float32", "y": "str"}), "for a new controller"
    space["x"] = 1
    assert tracker.news(space) == Names({"x": "int"})
    space.clear()
    news = tracker.news(space)
    assert news is not None
    assert set(news.removed) == {"t", "x", "y"}


def test_the_tracker_is_bounded_and_keeps_no_value_alive() -> None:
    tracker = NameTracker(())
    value = Trap()
    alive = weakref.ref(value)
    space: dict[str, object] = {"long" * 100: 1, **{f"v{i}": value for i in range(5_000)}}
    news = tracker.news(space)
    assert news is not None
    assert len(news.changed) == 2_000
    space.clear()
    del value
    gc.collect()
    assert alive() is None
