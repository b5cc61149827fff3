"""A reload gives living actors the new version of their class and keeps their state; or all ranks refuse it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    ActorMesh,
    ProcMesh,
    context,
    endpoint,
    this_host,
)
from monarch_kernel.errors import EditError, RemoteError
from monarch_kernel.features.record.notes import on_event
from monarch_kernel.train import record
from tests.support.waiting import LONG_S, wait_until

PROCS = {"gpus": 2}

Cell = Callable[..., SimpleNamespace]


@pytest.fixture
def cell() -> Cell:
    """Run cells of a notebook that share their variables, which belong to ``__main__``."""
    variables: dict[str, Any] = {
        "__name__": "__main__",
        "Actor": Actor,
        "endpoint": endpoint,
        "context": context,
        "threading": threading,
    }

    def run(code: str) -> SimpleNamespace:
        exec(code, variables)
        return SimpleNamespace(**variables)

    return run


@pytest.fixture
def spawn(procs: ProcMesh) -> Iterator[Callable[..., Any]]:
    spawned: list[ActorMesh] = []

    def spawn(name: str, cls: Any, *args: Any) -> Any:
        spawned.append(procs.spawn(name, cls, *args))
        return spawned[-1]

    yield spawn
    for mesh in spawned:
        mesh.stop().get(LONG_S)


def said(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


COUNTER = """
class Counter(Actor):
    step_size = 1
    def __init__(self):
        self.n = 5
        self.keep = self.describe
    def describe(self):
        return "first"
    @endpoint
    def step(self, k):
        self.n += k * self.step_size
        return self.n
    @endpoint
    def old(self):
        return self.keep()
"""

COUNTER_2 = """
class Counter(Actor):
    step_size = 10
    def describe(self):
        return "second"
    @property
    def double(self):
        return 2 * self.n
    @endpoint
    def step(self, k, more=0):
        self.n += k * self.step_size + more
        return self.n
    @endpoint
    def new(self):
        return self.double, self.keep(), isinstance(self, Counter), type(self).__name__
"""


def test_state_stays_and_methods_are_new(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    counter = spawn("counter", cell(COUNTER).Counter)
    assert counter.step.call(1).get(LONG_S).values() == (6, 6)
    report = procs.reload(cell(COUNTER_2).Counter)
    assert counter.step.call(1, more=1).get(LONG_S).values() == (17, 17)
    assert counter.new.call().get(LONG_S).values() == ((34, "second", True, "Counter"),) * 2
    assert report.actors == {"counter": (0, 1)}
    assert repr(report) == (
        "reloaded counter on t[0-1]\n    Counter: changed describe, step, step_size; added double, new; removed __init__, old"
    )


def test_existing_handles_get_the_new_endpoints(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    counter = spawn("counter", cell(COUNTER).Counter)
    part, old = counter.slice(gpus=1), counter.old
    procs.reload(cell(COUNTER_2).Counter)
    assert part.new.call_one().get(LONG_S)[0] == 10
    assert "new" in dir(part)
    with pytest.raises(
        AttributeError, match=r"Counter has no endpoint 'old' any more: its class has been reloaded; it"
    ) as e:
        old.call()
    assert said(e).endswith("it has: new, step")
    with pytest.raises(AttributeError, match="any more"):
        part.old  # noqa: B018
    with pytest.raises(TypeError, match=r"step\(k, more=0\): too many"):
        counter.step.call(1, 2, 3)


def test_handles_on_ranks_get_the_new_endpoints(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    code = """
class Holder(Actor):
    def __init__(self, other):
        self.other = other
        self.old = other.old
    @endpoint
    def names(self):
        return sorted(name for name in ("old", "new", "step") if name in dir(self.other))
    @endpoint
    def new(self):
        return self.other.new.call().get().values()[0][0]
    @endpoint
    def call_old(self):
        return self.old.call().get()
"""
    counter = spawn("counter", cell(COUNTER).Counter)
    holder = spawn("holder", cell(code).Holder, counter)
    assert holder.names.call().get(LONG_S).values() == (["old", "step"],) * 2
    procs.reload(cell(COUNTER_2).Counter)
    assert holder.names.call().get(LONG_S).values() == (["new", "step"],) * 2
    assert holder.new.call().get(LONG_S).values() == (10, 10)
    with pytest.raises(ActorError, match="no endpoint 'old' any more"):
        holder.call_old.call().get(LONG_S)


def test_an_actor_mesh_finds_its_class_by_name(
    procs: ProcMesh, cell: Cell, spawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import __main__

    counter = spawn("counter", cell(COUNTER).Counter)
    with pytest.raises(TypeError, match="class Counter no longer exists"):
        counter.reload()
    monkeypatch.setattr(__main__, "Counter", cell(COUNTER_2).Counter, raising=False)
    assert counter.reload().actors == {"counter": (0, 1)}
    assert counter.new.call().get(LONG_S).values()[0][1] == "second"


def test_a_renamed_class_must_be_passed(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    counter = spawn("counter", cell(COUNTER).Counter)
    renamed = cell(COUNTER_2.replace("Counter", "Meter")).Meter
    with pytest.raises(
        EditError, match=r"nothing on t uses a class named Meter; it has the actors: counter \(a Counter\)"
    ):
        procs.reload(renamed)
    counter.reload(renamed)
    assert counter.new.call().get(LONG_S).values()[0][0] == 10


def test_actors_of_derived_classes_are_reloaded(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    base = "class Base(Actor):\n    def hi(self): return {0}\n    @endpoint\n    def {1}(self): return self.hi()"
    cell(base.format(1, "one"))
    derived = cell("class Derived(Base):\n    def hi(self): return 10 * super().hi()").Derived
    mesh = spawn("derived", derived)
    assert mesh.one.call().get(LONG_S).values() == (10, 10)
    procs.reload(cell(base.format(2, "two")).Base)
    assert mesh.two.call().get(LONG_S).values() == (20, 20)
    # Now the derived class, which already has the new base.
    procs.reload(cell("class Derived(Base):\n    def hi(self): return 100 * super().hi()").Derived)
    assert mesh.two.call().get(LONG_S).values() == (200, 200)


def test_a_changed_base_is_applied(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    first = cell("class Child(Actor):\n    @endpoint\n    def f(self): return 1").Child
    mesh = spawn("child", first)
    assert mesh.f.call().get(LONG_S).values() == (1, 1)
    code = """
class Mixin:
    def help(self):
        return "helped"
class Child(Mixin, Actor):
    @endpoint
    def f(self):
        return self.help(), isinstance(self, Mixin)
"""
    procs.reload(cell(code).Child)
    assert mesh.f.call().get(LONG_S).values() == (("helped", True),) * 2


HELPED = """
class Net:
    scale = {0}
    def forward(self, x):
        return x * self.scale

def lift(x):
    return x + {0}

class Helped(Actor):
    def __init__(self):
        self.net = Net()
    @endpoint
    def f(self, x):
        return self.net.forward(x), lift(x), isinstance(self.net, Net)
"""


def test_classes_and_functions_of_the_same_cell_are_sent_too(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    mesh = spawn("helped", cell(HELPED.format(1)).Helped)
    assert mesh.f.call(2).get(LONG_S).values() == ((2, 3, True),) * 2
    procs.reload(cell(HELPED.format(7)).Helped)
    assert mesh.f.call(2).get(LONG_S).values() == ((14, 9, True),) * 2


def test_a_plain_class_is_reloaded_for_its_objects(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    mesh = spawn("helped", cell(HELPED.format(1)).Helped)
    mesh.initialized.get(LONG_S)
    report = procs.reload(cell(HELPED.format(7)).Net)
    assert mesh.f.call(2).get(LONG_S).values() == ((14, 3, True),) * 2
    assert repr(report) == "reloaded on t; no actor has these classes\n    Net: changed scale"


def test_later_arguments_have_the_same_class(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    code = """
class Config:
    n = {0}
class Reader(Actor):
    def __init__(self):
        self.config = Config()
    @endpoint
    def read(self, config):
        return isinstance(config, Config), type(config) is type(self.config), config.n
"""
    mesh = spawn("reader", cell(code.format(1)).Reader)
    mesh.initialized.get(LONG_S)
    names = cell(code.format(2))
    procs.reload(names.Reader)
    assert mesh.read.call(names.Config()).get(LONG_S).values() == ((True, True, 2),) * 2
    again = spawn("again", names.Reader)
    assert again.read.call(names.Config()).get(LONG_S).values() == ((True, True, 2),) * 2
    assert mesh.read.call(names.Config()).get(LONG_S).values() == ((True, True, 2),) * 2


def test_several_versions_of_a_class_become_one(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    code = "class Version(Actor):\n    @endpoint\n    def f(self): return {0}, type(self) is Version"
    meshes = [spawn(f"version{i}", cell(code.format(i)).Version) for i in range(3)]
    assert [mesh.f.call().get(LONG_S).values()[0][0] for mesh in meshes] == [0, 1, 2]
    for i in (8, 9):
        assert len(procs.reload(cell(code.format(i)).Version).actors) == 3
        assert [mesh.f.call().get(LONG_S).values() for mesh in meshes] == [((i, True),) * 2] * 3


def test_running_calls_of_async_actors_go_on(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    code = """
import asyncio
class Loop(Actor):
    def __init__(self):
        self.seen = []
    def part(self):
        return {0}
    @endpoint
    async def run(self, n):
        for _ in range(n):
            self.seen.append(self.part())
            await asyncio.sleep(0.001)
            if self.part() == 2:
                break
        return self.seen[0], self.part()
    @endpoint
    async def {1}(self):
        return {0}
"""
    mesh = spawn("loop", cell(code.format(1, "one")).Loop)
    running = mesh.run.call(10**9)
    procs.reload(cell(code.format(2, "two")).Loop)
    first, last = running.get(LONG_S).values()[0]
    assert (first, last) in ((1, 2), (2, 2)), "an endpoint that runs finds the new methods"
    assert mesh.two.call().get(LONG_S).values() == (2, 2)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_hook_changes_the_state_before_the_next_message(procs: ProcMesh, cell: Cell, spawn: Any, kind: str) -> None:
    code = """
class Moved(Actor):
    def __init__(self):
        self.{1} = 5
        self.thread = threading.get_ident()
    {2}
    @endpoint
    {0} get(self):
        return self.{1}
"""
    hook = f"{kind} __reload__(self): self.new = self.__dict__.pop('old') + (threading.get_ident() == self.thread)"
    mesh = spawn("moved", cell(code.format(kind, "old", "")).Moved)
    assert mesh.get.call().get(LONG_S).values() == (5, 5)
    procs.reload(cell(code.format(kind, "new", hook)).Moved)
    assert mesh.get.call().get(LONG_S).values() == (6, 6)


def test_a_hook_that_fails_is_an_error_and_the_actor_lives(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    code = "class Hooked(Actor):\n    @endpoint\n    def f(self): return {0}\n    {1}"
    mesh = spawn("hooked", cell(code.format(1, "")).Hooked)
    hook = "def __reload__(self):\n        if context().actor_instance.rank.rank == 1: raise ValueError('no state')"
    with pytest.raises(
        RemoteError, match=r"Hooked was reloaded on t, but __reload__ failed\n\[1\] ValueError: no state"
    ):
        procs.reload(cell(code.format(2, hook)).Hooked)
    assert mesh.f.call().get(LONG_S).values() == (2, 2)


REFUSED = {
    "async": (
        "class R(Actor):\n    @endpoint\n    def f(self): return 1",
        "class R(Actor):\n    @endpoint\n    async def f(self): return 2",
        "R: the endpoints of actor 'refused' are sync and would be async; an actor's thread can't change that: spawn",
    ),
    "base": (
        "class R(Actor):\n    @endpoint\n    def f(self): return 1",
        "class R(Actor, dict):\n    @endpoint\n    def f(self): return 2",
        "R: its base classes have changed from (Actor) to (Actor, dict): ",
    ),
    "metaclass": (
        "class R(Actor):\n    @endpoint\n    def f(self): return 1",
        "import abc\nclass R(Actor, metaclass=abc.ABCMeta):\n    @endpoint\n    def f(self): return 2",
        "R: its metaclass has changed from type to ABCMeta",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_an_impossible_change_is_refused_with_the_reason(procs: ProcMesh, cell: Cell, spawn: Any, why: str) -> None:
    before, after, reason = REFUSED[why]
    mesh = spawn("refused", cell(before).R)
    mesh.initialized.get(LONG_S)
    with pytest.raises(EditError) as error:
        procs.reload(cell(after).R)
    assert "was refused on t, and nothing has changed:\n    [0-1] " + reason in said(error)
    assert mesh.f.call().get(LONG_S).values() == (1, 1)


def test_a_refusal_on_one_rank_applies_to_all(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    """A rank that can't make the class counts as one that refuses it."""
    code = """
import os
class Meta(type):
    def __new__(kind, name, bases, names):
        if os.environ.get("MONARCH_ODD"):
            raise ImportError("no such library here")
        return super().__new__(kind, name, bases, names)
class Atom(Actor{1}):
    @endpoint
    def f(self): return {0}
"""
    mesh = spawn("atom", cell(code.format(1, "")).Atom)
    mesh.initialized.get(LONG_S)
    procs.slice(gpus=1).run("import os; os.environ['MONARCH_ODD'] = '1'").get(LONG_S)
    try:
        with pytest.raises(RemoteError, match=r"reload\(Atom\) failed on t\n\[1\] ImportError: no such library here"):
            procs.reload(cell(code.format(2, ", metaclass=Meta")).Atom)
        assert mesh.f.call().get(LONG_S).values() == (1, 1)
        procs.reload(cell(code.format(3, "")).Atom)
        assert mesh.f.call().get(LONG_S).values() == (3, 3)
    finally:
        procs.run("import os; os.environ.pop('MONARCH_ODD', 0)").get(LONG_S)


def test_an_enum_of_the_same_cell_is_sent_too(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    code = """
import enum
class Color(enum.Enum):
    RED = {0}
class Painter(Actor):
    def __init__(self):
        self.color = Color.RED
    @endpoint
    def f(self):
        return {0}, self.color is Color.RED
"""
    mesh = spawn("painter", cell(code.format(1)).Painter)
    mesh.initialized.get(LONG_S)
    for value in (1, 2, 3):
        assert procs.reload(cell(code.format(value)).Painter).left == ()
        assert mesh.f.call().get(LONG_S).values() == ((value, True),) * 2


def test_the_result_names_a_helper_that_cannot_change(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    code = """
import collections
Pair = collections.namedtuple("Pair", "{0}")
Pair.__module__ = "__main__"
class Holder(Actor):
    def __init__(self):
        self.pair = Pair(1, 2)
    @endpoint
    def f(self):
        return Pair._fields, type(self.pair) is Pair
"""
    mesh = spawn("pairs", cell(code.format("a b")).Holder)
    mesh.initialized.get(LONG_S)
    assert procs.reload(cell(code.format("a c")).Holder).left == (
        "Pair stays as it is: its fields have changed from (a, b) to (a, c)",
    )
    assert mesh.f.call().get(LONG_S).values() == ((("a", "c"), False),) * 2


def test_a_broadcast_of_a_removed_endpoint_does_not_end_the_actor(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    """The handle does not know of the reload yet: its call is on the way when the class changes."""
    code = """
class Slow(Actor):
    def __init__(self):
        self.gate = threading.Event()
    @endpoint
    def wait(self):
        return 1
    {0}
"""
    mesh = spawn("slow", cell(code.format("@endpoint\n    def gone(self): return 1")).Slow)
    interface = mesh._interface
    stale = dict(interface.endpoints)
    mesh.initialized.get(LONG_S)
    procs.reload(cell(code.format("")).Slow)
    interface.endpoints = stale
    mesh.gone.broadcast()
    with pytest.raises(ActorError, match="no endpoint 'gone' any more: its class has been reloaded; it has: wait"):
        mesh.gone.call().get(LONG_S)
    assert mesh.wait.call().get(LONG_S).values() == (1, 1)


def test_an_endpoint_named_reload_is_kept(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    code = "class Weights(Actor):\n    @endpoint\n    def reload(self): return {0}"
    mesh = spawn("weights", cell(code.format(1)).Weights)
    assert mesh.reload.call().get(LONG_S).values() == (1, 1)
    procs.reload(cell(code.format(2)).Weights)
    assert mesh.slice(gpus=0).reload.call_one().get(LONG_S) == 2


class Misused:
    """A class in a file."""


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (5, TypeError, "reload() takes classes or their names, not 5 (of type int)"),
        (
            SimpleNamespace,
            TypeError,
            "SimpleNamespace belongs to types, which is not a module of yours: it can't be reloaded",
        ),
        (Misused, TypeError, "Misused is imported from misused: edit the file, then mesh.sync('misused')"),
    ],
)
def test_misuse(
    procs: ProcMesh, monkeypatch: pytest.MonkeyPatch, given: Any, error: type[Exception], text: str
) -> None:
    monkeypatch.setattr(Misused, "__module__", "misused")
    monkeypatch.setitem(sys.modules, "misused", sys.modules[__name__])
    with pytest.raises(error) as caught:
        procs.reload(given)
    assert said(caught) == text


def test_a_tensor_module_keeps_its_weights(procs: ProcMesh, cell: Cell, spawn: Any) -> None:
    code = """
class Linear:
    pass
class Model(Actor):
    def __init__(self):
        import torch
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.w = torch.nn.Parameter(torch.ones(2))
            def forward(self, x):
                return (self.w * x).sum().item() * {0}
        self.net = Net()
    @endpoint
    def f(self, x):
        return self.net(x)
"""
    mesh = spawn("model", cell(code.format(1)).Model)
    assert mesh.f.call(3).get(LONG_S).values() == (6, 6)
    procs.reload(cell(code.format(10)).Model)
    assert mesh.f.call(3).get(LONG_S).values() == (6, 6), "what is made inside a method is made when it runs"


def test_a_healed_rank_has_the_current_class(procs: ProcMesh, cell: Cell) -> None:
    mesh = this_host().spawn_procs({"gpus": 2}, device="cpu")  # a mesh that this test may end
    try:
        counter: Any = mesh.spawn("counter", cell(COUNTER).Counter)
        counter.initialized.get(LONG_S)
        second = COUNTER.replace("first", "second").replace("def old", "def new")
        mesh.reload(cell(second).Counter)
        pid = mesh.slice(gpus=1).run("import os; os.getpid()").get(LONG_S).values()[0]
        os.kill(pid, signal.SIGKILL)
        wait_until(mesh.deaths, "the death of a rank")
        mesh.heal().get(LONG_S)
        assert counter.new.call().get(LONG_S).values() == ("second", "second")
        mesh.reload(cell(second.replace("second", "third")).Counter)
        assert counter.new.call().get(LONG_S).values() == ("third", "third")
    finally:
        mesh.stop(grace_s=0).get(LONG_S)


def test_a_record_has_the_edit(procs: ProcMesh, spawn: Callable[..., Any], cell: Cell, tmp_path: Path) -> None:
    counter = spawn("counter", cell(COUNTER).Counter)
    counter.step.call(1).get(LONG_S)
    record.start(tmp_path / "run")
    try:
        reloaded = procs.reload(cell(COUNTER_2).Counter)
    finally:
        record.stop()
    with record.open(tmp_path / "run") as run:
        assert [(event.kind, event.text) for event in run.events] == [("edit", repr(reloaded))]
    assert not on_event
