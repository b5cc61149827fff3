"""A class that one cell defines in two processes is one class for the values that travel between them."""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from monarch_kernel.net.wire import shared_classes
from monarch_kernel.net.wire.shared_classes import ByValuePickler, CellClasses, adopt

CELL = """
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
class Color(Enum):
    RED = 1
    GREEN = 2
@dataclass(frozen=True)
class Config:
    lr: float
    color: Color
    class Inner:
        def where(self): return place
Alias = Config
class P(NamedTuple):
    x: int
class Base:
    pass
class Child(Base):
    pass
del Base
Made = type("Made", (), {"__module__": "__main__"})
"""


class Process:
    """A process with its own tables and namespace."""

    def __init__(self, place: str) -> None:
        self._tables: dict[str, Any] = {
            "_by_id": weakref.WeakValueDictionary(),
            "_id_of": weakref.WeakKeyDictionary(),
            "_own": weakref.WeakSet(),
            "_running": [],
        }
        self.names: dict[str, Any] = {"__name__": "__main__", "place": place}

    @contextmanager
    def current(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, table in self._tables.items():
                patch.setattr(shared_classes, name, table)
            yield

    def run(self, code: str, number: int = 3) -> None:
        with self.current(), CellClasses(number, code, self.names):
            exec(code, self.names)

    def dump(self, expression: str) -> bytes:
        with self.current():
            file = io.BytesIO()
            ByValuePickler(file, 5).dump(eval(expression, self.names))
            return file.getvalue()

    def load(self, data: bytes) -> Any:
        with self.current():
            return pickle.loads(data)


@pytest.fixture
def here() -> Process:
    return Process("here")


@pytest.fixture
def there() -> Process:
    return Process("there")


@pytest.mark.parametrize(
    ("value", "cls"),
    [
        ("Config(0.5, Color.GREEN)", "Config"),
        ("Color.GREEN", "Color"),
        ("P(3)", "P"),
        ("Config.Inner()", "Config.Inner"),
        ("Made()", "Made"),
        ("Child()", "Child"),
    ],
)
def test_a_value_that_arrives_has_the_class_that_the_cell_defined_there(
    here: Process, there: Process, value: str, cls: str
) -> None:
    for each in (here, there):
        each.run(CELL)
    assert type(there.load(here.dump(value))) is eval(cls, there.names)
    assert type(here.load(there.dump(value))) is eval(cls, here.names)


def test_values_that_arrive_are_equal_to_those_of_the_process(here: Process, there: Process) -> None:
    here.run(CELL)
    there.names["Alias"] = None  # the names of a process may be in another order
    there.run(CELL)
    config = there.load(here.dump("Config(0.5, Color.GREEN)"))
    own = eval("Config(0.5, Color.GREEN)", there.names)
    assert config == own
    assert {config: 1}[own] == 1
    assert config.color is there.names["Color"].GREEN


def test_methods_keep_the_variables_of_their_process(here: Process, there: Process) -> None:
    for each in (here, there):
        each.run(CELL)
    arrived = there.load(here.dump("Config.Inner()"))
    assert arrived.where() == "there"
    assert there.names["Config"].Inner().where() == "there"


def test_a_cell_that_runs_again_defines_another_class(here: Process, there: Process) -> None:
    for each in (here, there):
        each.run(CELL)
        each.run("former = Config(0.5, Color.RED)", 4)
        each.run(CELL, 5)
    assert not isinstance(there.load(here.dump("former")), there.names["Config"])
    assert type(there.load(here.dump("former"))) is type(there.names["former"])
    assert isinstance(there.load(here.dump("Config(0.5, Color.RED)")), there.names["Config"])


def test_a_class_has_its_id_while_its_cell_still_runs(here: Process, there: Process) -> None:
    there.run(CELL)
    with here.current(), CellClasses(3, CELL, here.names):
        exec(CELL, here.names)
        file = io.BytesIO()
        ByValuePickler(file, 5).dump(here.names["Made"])
    assert there.load(file.getvalue()) is there.names["Made"]


def test_the_class_of_another_cell_keeps_its_id_under_a_new_name(here: Process, there: Process) -> None:
    for each in (here, there):
        each.run(CELL)
        each.run("Other = Made\nfrom collections import OrderedDict", 4)
    assert there.load(here.dump("Other")) is there.names["Made"]


def test_a_successor_takes_over_the_id(here: Process, there: Process) -> None:
    for each in (here, there):
        each.run(CELL)
    successor = type("Made", (), {"__module__": "__main__"})
    with there.current():
        adopt(there.names["Made"], successor)
    there.names["Made"] = successor
    assert there.load(here.dump("Made")) is successor
    assert here.load(there.dump("Made")) is here.names["Made"]


def test_code_that_is_no_cell_and_classes_of_this_package_get_no_id(here: Process) -> None:
    here.run("class A: pass", 0)
    here.run("from monarch_kernel.actor import Actor\nclass B(Actor): pass", 4)
    assert not here._tables["_id_of"]
