"""Existing classes are updated in place, for instances, derived classes and references to methods; or the edit is refused."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import gc
import sys
from collections import namedtuple
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.features.editing.class_mapping import ClassMapping
from monarch_kernel.features.editing.patch import become, has_instances, is_same_code, objections


def defined(code: str, **names: Any) -> SimpleNamespace:
    """Run code like a cell, and return what it defines, in a separate namespace."""
    variables: dict[str, Any] = {"__name__": __name__, **names}
    exec(code, variables)
    return SimpleNamespace(**variables)


BEFORE = """
class Base:
    def greet(self):
        return "base"

class Living(Base):
    level = 1
    gone = True
    def __init__(self):
        self.kept = 7
    def greet(self):
        return super().greet() + " old"
    @property
    def size(self):
        return 1
    @staticmethod
    def plain():
        return "old"
    @classmethod
    def named(cls):
        return cls
"""

AFTER = """
class Base:
    def greet(self):
        return "new base"

class Living(Base):
    level = 2
    def greet(self):
        return super().greet() + " new"
    def added(self):
        return self.kept, Living
    @property
    def size(self):
        return 2
    @staticmethod
    def plain():
        return "new"
    @classmethod
    def named(cls):
        return cls, __class__

LIST = [Living]
NAMES = {"living": Living, Living: 1}
INSTANCE = Living()

class Derived(Living):
    pass
"""


def test_instances_have_the_members_of_the_new_class_and_keep_their_state() -> None:
    old, new = defined(BEFORE), defined(AFTER)
    living = old.Living()
    greet, read = living.greet, old.Living.size.fget
    pairs = {new.Living: old.Living, new.Base: old.Base}
    assert objections(pairs) == {}
    become(pairs)
    assert living.greet() == "new base new"
    assert greet() == "new base new", "a method that somebody keeps runs the new code"
    assert (living.size, read(living), living.plain(), living.level) == (2, 2, "new", 2)
    assert not hasattr(living, "gone")
    assert living.added() == (7, old.Living)
    assert living.named() == (old.Living, old.Living)
    assert isinstance(living, old.Living)


def test_references_to_the_new_class_become_references_to_the_existing_one() -> None:
    old, new = defined(BEFORE), defined(AFTER)
    become({new.Living: old.Living, new.Base: old.Base})
    [known] = new.LIST
    assert known is old.Living
    assert list(new.NAMES.items()) == [("living", old.Living), (old.Living, 1)]
    assert type(new.INSTANCE) is old.Living
    assert new.Derived.__bases__ == (old.Living,)
    assert new.Derived().greet() == "new base new"


def test_a_class_inside_a_class_is_found_there() -> None:
    code = "class Outer:\n    class Inner:\n        def f(self): return {0}\n    def make(self): return self.Inner()"
    old, new = defined(code.format(1)), defined(code.format(2))
    assert old.Outer().make().f() == 1  # fills Python's inline caches
    become({new.Outer: old.Outer, new.Outer.Inner: old.Outer.Inner})
    inner = old.Outer.Inner
    assert new.Outer.Inner is inner
    assert type(old.Outer().make()) is inner
    assert old.Outer().make().f() == 2


def test_derived_classes_follow_their_base() -> None:
    old = defined(BEFORE + "\nclass Derived(Living):\n    def greet(self):\n        return super().greet() + '!'\n")
    derived = old.Derived()
    new = defined(AFTER)
    become({new.Living: old.Living})
    assert derived.greet() == "new base new!"


def test_a_changed_base_is_taken_over() -> None:
    old = defined("class A: pass\nclass B(A): pass")
    new = defined("class C:\n    def hi(self): return 3\nclass B(C): pass")
    living = old.B()
    assert objections({new.B: old.B}) == {}
    assert old.B.__bases__ == (old.A,), "looking changes nothing"
    become({new.B: old.B})
    assert living.hi() == 3
    assert not isinstance(living, old.A)


def test_a_base_of_another_layout_is_refused() -> None:
    old, new = defined("class A: pass\nclass B(A): pass"), defined("class B(dict): pass")
    assert "its base classes have changed from (A) to (dict)" in objections({new.B: old.B})[old.B]
    assert old.B.__bases__ == (old.A,)


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("class A: __slots__ = ('x',)", "class A: __slots__ = ('x', 'y')", "no place for y"),
        ("class A: __slots__ = ('x',)", "class A: pass", "no place for __dict__"),
        ("class A: pass", "class A(metaclass=abc.ABCMeta): pass", "metaclass has changed from type to ABCMeta"),
        ("A = namedtuple('A', 'x y')", "A = namedtuple('A', 'x z')", "fields have changed from (x, y) to (x, z)"),
    ],
)
def test_members_that_need_new_slots_are_refused(before: str, after: str, why: str) -> None:
    names = {"abc": abc, "enum": enum, "namedtuple": namedtuple}
    old, new = defined(before, **names).A, defined(after, **names).A
    assert why in objections({new: old})[old]


def test_slots_keep_their_values() -> None:
    code = "class A:\n    __slots__ = ('x',)\n    def f(self): return self.x + {0}"
    old, new = defined(code.format(1)).A, defined(code.format(10)).A
    living = old()
    living.x = 5
    assert objections({new: old}) == {}
    become({new: old})
    assert living.f() == 15


def test_slots_of_a_class_with_a_dict_are_attributes() -> None:
    old, new = defined("class A: pass").A, defined("class A:\n    __slots__ = ('x',)").A
    living = old()
    assert objections({new: old}) == {}
    become({new: old})
    living.x = 5
    assert living.x == 5


COLOR = """
class Color(enum.IntEnum):
    RED = {0}
    BLUE = 2
class Size(enum.IntEnum):
    SMALL = 1
def red(value, default=Color.RED):
    return value is Color.RED and value is default
KEPT = [Color.RED, Size.SMALL]
class Holder:
    color = Color.RED
    def __init__(self):
        self.color = Color.RED
"""


@pytest.mark.parametrize("value", [1, 7])
def test_members_of_an_enum_are_those_of_the_new_one(value: int) -> None:
    """Or the old ones, if they are equal: either way there is one set of members."""
    old, new = defined(COLOR.format(1), enum=enum), defined(COLOR.format(value), enum=enum)
    holder = old.Holder()
    mapping = ClassMapping()
    remains = mapping.add(new.Color, [old.Color], old.Color)
    mapping.add(new.Holder, [old.Holder], old.Holder)
    assert remains is (old.Color if value == 1 else new.Color)
    assert mapping.objections() == {}
    mapping.become()
    assert old.Color is new.Color is remains
    assert holder.color is remains.RED is holder.__class__.color is old.KEPT[0] is new.KEPT[0]
    assert old.KEPT[1] is old.Size.SMALL is not new.Size.SMALL, "what is equal is not the same"


def test_a_class_without_instances_is_replaced_if_it_can_not_change() -> None:
    old, new = defined("class A: __slots__ = ('x',)"), defined("class A: __slots__ = ('x', 'y')\nB = A")
    mapping = ClassMapping()
    mapping.add(new.A, [old.A], old.A)
    assert mapping.becomes() == {old.A: new.A}
    assert mapping.objections() == {}
    mapping.become()
    assert old.A is new.A is new.B
    living, third = new.A(), defined("class A: __slots__ = ('z',)")
    mapping = ClassMapping()
    mapping.add(third.A, [new.A], new.A)
    assert mapping.objections() == {new.A: "its instances have __slots__ and no place for z"}
    assert type(living) is new.A is old.A


def test_frozen_variables_refer_to_the_existing_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank inherits such variables from its zygote."""
    cells = ModuleType("cells")
    cells.__dict__["kept"] = []
    monkeypatch.setitem(sys.modules, "cells", cells)
    was_frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        living, new = defined("class A: pass").A, defined("class A: level = 2").A
        cells.__dict__.update(A=new)
        become({new: living})
    finally:
        if not was_frozen:  # otherwise all modules of the tests would slow down each collection from here on
            gc.unfreeze()
    assert vars(cells)["A"] is living
    assert living.level == 2


def test_dataclasses_and_decorated_methods() -> None:
    code = """
def traced(function):
    @functools.wraps(function)
    def wrapper(*args):
        return ("traced {0}", function(*args))
    return wrapper

@dataclasses.dataclass
class A:
    x: int = {0}
    @traced
    def f(self):
        return self.x, {0}
"""
    names = {"functools": functools, "dataclasses": dataclasses}
    old, new = defined(code.format(1), **names).A, defined(code.format(2), **names).A
    living = old()
    kept = living.f
    become({new: old})
    assert living.f() == kept() == ("traced 2", (1, 2))
    assert old() == old(2)


def test_every_edit_reaches_references_to_methods() -> None:
    code = """
class Mark:
    def __init__(self, function): self.function = function
    def __get__(self, instance, owner): return self.function.__get__(instance, owner)
class A:
    @Mark
    def marked(self): return {0}
    @property
    def size(self): return {0}
    def plain(self): return {0}
"""
    cells = [defined(code.format(i)).A for i in range(4)]
    living = cells[0]()
    kept = living.marked, living.plain, cells[0].__dict__["size"].fget
    for i in (1, 2, 3):
        become({cells[i]: cells[0]})
        assert (kept[0](), kept[1](), kept[2](living), living.marked(), living.size, living.plain()) == (i,) * 6


def test_abstract_methods_are_those_of_the_new_class() -> None:
    code = "class A(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\n    {0}"
    old = defined(code.format("def f(self): return 1"), abc=abc).A
    new = defined(code.format("def f(self): return 2"), abc=abc).A
    living = old()
    become({new: old})
    assert living.f() == 2
    assert old().f() == 2


def test_variables_of_this_process_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class from a cell on the rank uses the rank's variables; code from elsewhere brings its own."""
    there = defined("class A:\n    def f(self): return LR * 100", LR=2)
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "LR", 1, raising=False)
    exec("class A:\n    def f(self): return LR", vars(here))
    cls = vars(here).pop("A")
    living = cls()
    become({there.A: cls})
    assert living.f() == 200
    assert vars(here)["LR"] == 1


def test_instances_are_counted_with_those_of_derived_classes() -> None:
    cell = defined("class A: pass\nclass B(A): pass")
    assert not has_instances([cell.A])
    living = cell.B()
    assert has_instances([cell.A])
    del living
    gc.collect()
    assert not has_instances([cell.A])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("def f(x): return x + 1", "def f(x):\n    # a comment\n    return x + 1", True),
        ("def f(x): return x + 1", "def f(x): return x + 2", False),
        ("def f(x): return x + 1", "def f(x): return x - 1", False),
        ("def f(x=1): return x", "def f(x=2): return x", False),
        ("def f(): return [y for y in a]", "def f(): return [y for y in b]", False),
        ("f = property(lambda self: 1)", "f = property(lambda self: 1)", True),
        ("f = property(lambda self: 1)", "f = property(lambda self: 2)", False),
    ],
)
def test_code_is_compared_without_its_position(one: str, other: str, same: bool) -> None:
    assert is_same_code(defined(one).f, defined(other).f) is same


def test_other_threads_see_an_edit_as_atomic(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    set_interval: Callable[[float], None] = sys.setswitchinterval
    monkeypatch.setattr(sys, "setswitchinterval", lambda s: (seen.append(s), set_interval(s)))
    before = sys.getswitchinterval()
    old, new = defined("class A: pass").A, defined("class A: pass").A
    become({new: old})
    assert seen == [10.0, before]
