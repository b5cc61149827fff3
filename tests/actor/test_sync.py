"""Sync of edited files: ranks reload a module and its importers, and can import modules whose files they do not have."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import ActorError, ProcMesh
from monarch_kernel.errors import EditError, RemoteError
from tests.support.waiting import LONG_S

PROCS = {"gpus": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the user's files."""
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def procs(procs: ProcMesh, folder: Path) -> Iterator[ProcMesh]:
    """Two ranks. The first has the folder of the files on its path; the second gets the modules from the controller only."""
    sys.path.insert(0, str(folder))
    procs.slice(gpus=0).run(f"import sys; sys.path.insert(0, {str(folder)!r})").get(LONG_S)
    yield procs
    sys.path.remove(str(folder))


Write = Callable[..., None]


@pytest.fixture
def write(folder: Path, procs: ProcMesh) -> Iterator[Write]:
    """Write files, and remove their modules from the program and the ranks after the test."""

    def write(**files: str) -> None:
        for name, text in files.items():
            path = folder / (name.replace("__dot__", "/") + ".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
            os.utime(path, ns=(os.stat(path).st_mtime_ns + 10**9,) * 2)  # Python compares whole seconds

    yield write
    names = [path.name.removesuffix(".py") for path in folder.iterdir()]
    forget = f"import sys; [sys.modules.pop(n) for n in list(sys.modules) if n.partition('.')[0] in {names!r}]"
    procs.run(f"{forget}\nsys.path_importer_cache.clear()").get(LONG_S)
    exec(forget, {})
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def on_ranks(procs: ProcMesh, expression: str) -> tuple[Any, ...]:
    return procs.run(expression).get(LONG_S).values()


def test_a_rank_without_the_files_imports_them(procs: ProcMesh, write: Write, folder: Path) -> None:
    write(
        pkg__dot____init__="from .inner import f",
        pkg__dot__inner="import alone\ndef f():\n    return alone.N\ndef fails():\n    return 1 / 0",
        alone="N = 3",
    )
    assert on_ranks(procs, "import pkg; pkg.f(), pkg.inner.__file__") == ((3, str(folder / "pkg/inner.py")),) * 2
    with pytest.raises(RemoteError) as error:
        procs.slice(gpus=1).run("pkg.inner.fails()").get(LONG_S)
    frame = next(iter(error.value.reports.values())).user_frame
    assert frame is not None
    assert frame.source[frame.line - frame.first_line].strip() == "return 1 / 0", "its lines are shown"


def test_a_missing_module_is_the_usual_error_and_is_found_once_it_exists(procs: ProcMesh, write: Write) -> None:
    with pytest.raises(RemoteError, match="ModuleNotFoundError: No module named 'comes_later'"):
        procs.run("import comes_later").get(LONG_S)
    write(comes_later="x = 1")
    part = procs.slice(gpus=1)
    assert part.run("import comes_later; comes_later.x").get(LONG_S).values() == (1,)
    with pytest.raises(RemoteError, match="ModuleNotFoundError"):
        procs.run("import torch.no_such_thing").get(LONG_S)


def test_a_namespace_package_is_found_too(procs: ProcMesh, write: Write) -> None:
    write(space__dot__part="x = 4")
    assert on_ranks(procs, "import space.part; space.part.x") == (4, 4)


def test_actors_can_import_on_their_threads(procs: ProcMesh, write: Write) -> None:
    write(
        acting="""
        from monarch_kernel.actor import Actor, endpoint
        class Sync(Actor):
            @endpoint
            def f(self):
                import helper_of_acting
                return helper_of_acting.x
        class Async(Actor):
            @endpoint
            async def f(self):
                import helper_of_async
                return helper_of_async.x
        """,
        helper_of_acting="x = 5",
        helper_of_async="x = 6",
    )
    import acting  # type: ignore[import-not-found]

    for cls, value in ((acting.Sync, 5), (acting.Async, 6)):
        mesh: Any = procs.spawn("acting", cls)
        assert mesh.f.call().get(LONG_S).values() == (value, value)
        mesh.stop().get(LONG_S)


def test_an_edited_module_is_reloaded(procs: ProcMesh, write: Write) -> None:
    write(lib="RATE = 1\ndef f():\n    return RATE, 'old'\ndef gone():\n    pass")
    assert on_ranks(procs, "import lib; from lib import f; kept = f; f()") == ((1, "old"),) * 2
    write(lib="RATE = 2\ndef f():\n    return RATE, 'new'")
    report = procs.sync("lib")
    assert on_ranks(procs, "f(), kept is lib.f, lib.RATE, hasattr(lib, 'gone')") == (((2, "new"), True, 2, False),) * 2
    assert (report.edited, report.dependents, report.absent) == ({"lib": (0, 1)}, {}, {})
    assert repr(report) == "t[0-1]: reloaded lib"
    again = procs.sync("lib")
    assert (again.edited, again.unchanged) == ({}, ("lib",))
    assert repr(again) == "t: no imported module has been edited"


def test_dependents_are_reloaded_in_order(procs: ProcMesh, write: Write) -> None:
    write(
        app__dot____init__="",
        app__dot__config="LR = 1",
        app__dot__model="from .config import LR\nclass Model:\n    lr = LR",
        app__dot__train="from app.model import Model\nLR3 = Model.lr * 3\nimport app.other",
        app__dot__other="def unrelated():\n    import app.config",
        app__dot__later="from app import train",
    )
    assert on_ranks(procs, "import app.train; m = app.model.Model(); app.train.LR3") == (3, 3)
    write(app__dot__config="LR = 2")
    import app  # type: ignore[import-not-found]

    report = procs.sync(app)
    assert report.edited == {"app.config": (0, 1)}
    assert list(report.dependents) == ["app.model", "app.train"]
    assert report.absent == {"app.later": (0, 1)}
    assert on_ranks(procs, "app.train.LR3, m.lr, type(m) is app.model.Model") == ((6, 2, True),) * 2
    assert repr(report) == (
        "t[0-1]: reloaded app.config\n"
        "t[0-1]: reloaded app.model, app.train, which import these\n"
        "here: reloaded app\n"
        "t[0-1]: not imported yet: app.later\n"
        "    Model: changed lr"
    )


def test_objects_switch_to_the_current_classes(procs: ProcMesh, write: Write) -> None:
    before = """
    class Base:
        def f(self):
            return "base"
    class Child(Base):
        def f(self):
            return super().f() + " one"
    """
    write(things=before)
    assert on_ranks(procs, "import things; c = things.Child(); c.f()") == ("base one",) * 2
    write(things=before.replace("base", "BASE").replace("one", "two"))
    procs.sync("things")
    assert (
        on_ranks(procs, "c.f(), isinstance(c, things.Child), isinstance(c, things.Base)")
        == (("BASE two", True, True),) * 2
    )
    write(things=before.replace("one", "three"))
    procs.sync("things")
    assert on_ranks(procs, "c.f()") == ("base three",) * 2


ACTOR = """
from monarch_kernel.actor import Actor, endpoint
class Worker(Actor):
    def __init__(self):
        self.n = 5
    {0}
    @endpoint
    def {1}(self, x={2}):
        return self.n + x
"""


ODD = """
class Raises(type):
    def __hash__(cls): raise RuntimeError("code of a metaclass ran")
    def __getattribute__(cls, name): raise RuntimeError("code of a metaclass ran")
class Odd(metaclass=Raises): pass
"""


def test_classes_whose_metaclass_raises_are_left_alone(procs: ProcMesh, write: Write) -> None:
    write(lib="class Model:\n    def size(self):\n        return 1")
    assert on_ranks(procs, f"{ODD}import lib; model = lib.Model(); model.size()") == (1, 1)
    write(lib="class Model:\n    def size(self):\n        return 2")
    procs.sync("lib")
    assert on_ranks(procs, "model.size(), type(model) is lib.Model") == ((2, True),) * 2
    procs.run("del Raises, Odd").get(LONG_S)


def test_actors_and_their_handles_switch_to_the_current_class(procs: ProcMesh, write: Write) -> None:
    write(worker=ACTOR.format("", "first", 1))
    import worker  # type: ignore[import-not-found]

    mesh: Any = procs.spawn("worker", worker.Worker)
    try:
        assert mesh.first.call().get(LONG_S).values() == (6, 6)
        hook = "def __reload__(self):\n        self.n += 100"
        write(worker=ACTOR.format(hook, "second", 2))
        report = procs.sync(worker)
        assert report.here == ("worker",)
        assert report.actors == {"worker": (0, 1)}
        assert mesh.second.call().get(LONG_S).values() == (107, 107)
        with pytest.raises(AttributeError, match="no endpoint 'first' any more"):
            mesh.first.call()
        assert str(report.changes[0]) == "Worker: added __reload__, second; removed first"
        again: Any = procs.spawn("again", worker.Worker)
        assert again.second.call().get(LONG_S).values() == (7, 7)
        again.stop().get(LONG_S)
    finally:
        mesh.stop().get(LONG_S)


def test_this_process_can_be_left_alone(procs: ProcMesh, write: Write) -> None:
    write(worker=ACTOR.format("", "first", 1))
    import worker

    mesh: Any = procs.spawn("worker", worker.Worker)
    try:
        mesh.initialized.get(LONG_S)
        write(worker=ACTOR.format("", "second", 2))
        assert procs.sync(worker, here=False).here == ()
        assert not hasattr(worker.Worker, "second")
        assert mesh.second.call().get(LONG_S).values() == (7, 7)
    finally:
        mesh.stop().get(LONG_S)


def test_a_syntax_error_is_found_before_anything_is_sent(procs: ProcMesh, write: Write) -> None:
    write(syntax="x = 1", other="y = 1")
    assert on_ranks(procs, "import syntax, other; syntax.x") == (1, 1)
    write(syntax="x = (", other="y = 2")
    with pytest.raises(SyntaxError, match=r"'\(' was never closed"):
        procs.sync(Path("/") / sys.path[0])
    assert on_ranks(procs, "other.y") == (1, 1)


def test_a_module_that_fails_changes_nothing_anywhere(procs: ProcMesh, write: Write) -> None:
    write(
        base="x = 1\nclass A:\n    f = 1",
        user="import os\nfrom base import x\nif 'MONARCH_ODD' in os.environ:\n    1 / 0",
    )
    assert on_ranks(procs, "import user, base; a = base.A(); user.x") == (1, 1)
    write(base="x = 2\nz = 1\nclass A:\n    f = 2")
    procs.slice(gpus=1).run("import os; os.environ['MONARCH_ODD'] = '1'").get(LONG_S)
    try:
        with pytest.raises(
            RemoteError, match=r"sync\(\) failed on t\n\[1\] ZeroDivisionError: division by zero \(.*user.py"
        ):
            procs.sync("base")
    finally:
        procs.run("import os; os.environ.pop('MONARCH_ODD', None)").get(LONG_S)
    assert (
        on_ranks(procs, "user.x, base.x, a.f, hasattr(base, 'z'), base.A is type(a)") == ((1, 1, 1, False, True),) * 2
    )
    procs.sync("base")
    assert on_ranks(procs, "user.x, base.x, a.f, hasattr(base, 'z'), base.A is type(a)") == ((2, 2, 2, True, True),) * 2


def test_a_class_that_objects_cannot_switch_to_is_refused(procs: ProcMesh, write: Write) -> None:
    write(slotted="class A:\n    __slots__ = ('x',)\ny = 1")
    assert on_ranks(procs, "import slotted; a = slotted.A() if rank else None; slotted.y") == (1, 1)
    write(slotted="class A:\n    __slots__ = ('x', 'z')\ny = 2")
    with pytest.raises(EditError) as error:
        procs.sync("slotted")
    assert str(error.value) == (
        "sync() was refused on t, and nothing has changed:\n"
        "    [1] slotted.A, which has instances: its instances have __slots__ and no place for z"
    )
    assert on_ranks(procs, "slotted.y") == (1, 1)
    on_ranks(procs, "del a; old = slotted.A")
    procs.sync("slotted")
    assert on_ranks(procs, "slotted.y, old is slotted.A, slotted.A.__slots__") == ((2, True, ("x", "z")),) * 2


def test_a_module_imported_later_has_its_current_text(procs: ProcMesh, write: Write) -> None:
    write(fresh="x = 1")
    assert procs.sync("fresh").absent == {"fresh": (0, 1)}
    write(fresh="x = 2")
    assert on_ranks(procs, "import fresh; fresh.x") == (2, 2)


def test_an_edited_module_is_not_imported_from_an_old_copy(procs: ProcMesh, write: Write, tmp_path: Path) -> None:
    """A host may have its own copy of the files; the modules that were sent take precedence."""
    (tmp_path / "copied.py").write_text("x = 'old'")
    write(copied="x = 'new'")
    with_copy = procs.slice(gpus=1)
    with_copy.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})").get(LONG_S)
    try:
        procs.sync("copied")
        assert with_copy.run("import copied; copied.x").get(LONG_S).values() == ("new",)
    finally:
        with_copy.run(f"sys.path.remove({str(tmp_path)!r})").get(LONG_S)


def test_without_an_argument_all_modules_of_the_user_are_reloaded(procs: ProcMesh, write: Write) -> None:
    write(mine="x = 1")
    import mine  # type: ignore[import-not-found]

    assert mine.x == 1
    on_ranks(procs, "import mine")
    write(mine="x = 2")
    report = procs.sync()
    assert report.edited == {"mine": (0, 1)}
    assert mine.x == 2
    assert not any(name.startswith(("monarch_kernel", "torch")) for name in report.unchanged)


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        (
            "torch",
            ValueError,
            "module 'torch' is not a source file of yours: it is built in, installed, or does not exist",
        ),
        ("no/such/file.py", ValueError, "there is no file, folder or module 'no/such/file.py'"),
        (__file__, ValueError, " can't be imported: no entry of sys.path leads to it"),
        (5, TypeError, "sync() takes a module, its name, or a path, not 5 (of type int)"),
    ],
)
def test_misuse(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch, what: Any, error: type[Exception], text: str) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, __name__, raising=False)
    with pytest.raises(error) as caught:
        procs.sync(what)
    assert text in str(caught.value)


def test_a_process_forked_from_a_rank_does_not_ask_the_controller(procs: ProcMesh, write: Write) -> None:
    write(forked="x = 1")
    code = """
import os, importlib
pid = os.fork()
if pid == 0:
    try:
        importlib.import_module("forked")
    except ModuleNotFoundError:
        os._exit(3)
    os._exit(0)
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    assert on_ranks(procs, code) == (0, 3)


def test_a_missing_module_is_the_usual_error_in_an_actor(procs: ProcMesh, write: Write) -> None:
    write(
        lacking="""
        from monarch_kernel.actor import Actor, endpoint
        class Lacking(Actor):
            @endpoint
            def f(self):
                import is_nowhere
        """
    )
    import lacking  # type: ignore[import-not-found]

    mesh: Any = procs.spawn("lacking", lacking.Lacking)
    with pytest.raises(ActorError, match="ModuleNotFoundError: No module named 'is_nowhere'"):
        mesh.f.call().get(LONG_S)
    mesh.stop().get(LONG_S)
