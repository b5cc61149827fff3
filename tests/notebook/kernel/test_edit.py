"""Classes and files that are edited while a notebook runs: cells that define classes again, and changed files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook.kernel.conftest import Notebook

COUNTER = """
from monarch_kernel.actor import Actor, endpoint

class {name}(Actor):
    def __init__(self):
        self.n = 5
    @endpoint
    def {endpoint}(self, k):
        {body}
"""


def test_an_actor_continues_with_the_class_of_another_cell(notebook: Notebook) -> None:
    notebook.ok(COUNTER.format(name="One", endpoint="step", body="return self.n + k"))
    notebook.ok("one = t.spawn('one', One); one.step.call(1).get()")
    notebook.ok(COUNTER.format(name="One", endpoint="walk", body="return self.n / k"))
    cell = notebook.ok("t.reload(One)")
    assert cell.plain == "reloaded one on t[0-1]\n    One: added walk; removed step"
    assert notebook.value("one.walk.call(2).get().values()") == (2.5, 2.5)
    cell = notebook.run("one.walk.call(0).get()")
    assert "ZeroDivisionError" in cell.error
    assert "----> " in cell.error
    assert "return self.n / k" in cell.error, "the source of the new cell, not of the old one"
    cell = notebook.run("one.step")
    assert cell.evalue == "One has no endpoint 'step' any more: its class has been reloaded; it has: walk"
    notebook.ok(COUNTER.format(name="One", endpoint="run", body="return 'ran'"))
    notebook.ok("one.reload()")
    assert notebook.value("one.run.call(0).get().values()") == ("ran", "ran")


def test_a_refusal_is_one_message(notebook: Notebook) -> None:
    notebook.ok(COUNTER.format(name="Two", endpoint="step", body="return 1"))
    notebook.ok("two = t.spawn('two', Two); two.step.call(1).get()")
    notebook.ok(
        COUNTER.format(name="Two", endpoint="step", body="return 2").replace("    def step", "    async def step")
    )
    cell = notebook.run("t.reload(Two)")
    assert cell.ename == "EditError"
    assert cell.evalue.startswith(
        "reload(Two) was refused on t, and nothing has changed:\n    [0-1] Two: the endpoints of"
    )
    assert "await" not in cell.error
    assert notebook.value("two.step.call(1).get().values()") == (1, 1)


def test_objects_of_remote_cells_follow_a_class_of_the_kernel(notebook: Notebook) -> None:
    net = "class Net:\n    def f(self): return {0}"
    notebook.ok("%%remote t\n" + net.format("'old', rank") + "\nnet = Net()\nkept = net.f")
    notebook.ok(net.format("'new', rank"))
    notebook.ok("t.reload(Net)")
    cell = notebook.run("%remote t net.f()")
    assert "NameError" in cell.error, "a class of the kernel does not see what ranks have"
    assert "return 'new', rank" in cell.error
    notebook.ok(net.format("'new'") + "\nt.reload(Net)")
    assert notebook.value("t.run('net.f()').get().values()") == ("new", "new")


def test_a_class_that_a_remote_cell_redefined_is_reloaded_by_name(notebook: Notebook) -> None:
    cell = "%%remote t\nclass Model:\n    def f(self): return {0}, rank\n"
    notebook.ok(cell.format("'old'") + "model = Model()\nkept = model.f")
    for new in ("'second'", "'third'"):
        notebook.ok(cell.format(new))
        report = notebook.ok("t.reload('Model')").plain
        assert report == "reloaded on t; no actor has these classes\n    Model: changed f"
        expected = ((new.strip("'"), 0), (new.strip("'"), 1))
        assert notebook.value("t.run('model.f()').get().values()") == expected
        assert notebook.value("t.run('kept()').get().values()") == expected
        assert notebook.value("t.run('type(model) is Model').get().values()") == (True, True)
    cell = notebook.run("t.reload('Model')")
    assert cell.evalue == "nothing on t uses an older class Model than the one that is defined there"
    cell = notebook.run("t.reload('Nothing')")
    assert "NameError: no class 'Nothing' is defined on this rank" in cell.evalue


def test_without_an_argument_all_redefined_classes_are_reloaded(notebook: Notebook) -> None:
    notebook.ok("globals().pop('Two', None)")  # an earlier test has left this class, which can't be reloaded
    notebook.ok(
        "class Part:\n    def f(self): return 1\nclass Same:\n    pass\nimport threading; lock = threading.Lock()"
    )
    notebook.ok("class Whole(Actor):\n    def __init__(self):\n        self.part, self.same = Part(), Same()")
    notebook.ok("class Unsendable:\n    lock = lock")
    notebook.ok("class Whole(Whole):\n    @endpoint\n    def f(self):\n        return self.part.f()")
    notebook.ok("whole = t.spawn('whole', Whole); whole.initialized.get()")
    assert notebook.ok("t.reload()").plain.startswith("no class of the notebook that t uses has been redefined")
    notebook.ok("class Part:\n    def f(self): return 2")
    assert notebook.ok("t.reload()").plain == "reloaded on t; no actor has these classes\n    Part: changed f"
    assert notebook.value("whole.f.call().get().values()") == (2, 2)


@pytest.fixture
def project(notebook: Notebook, tmp_path: Path) -> Path:
    """A folder on the path of the kernel only."""
    notebook.ok(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    return tmp_path


def test_edited_files_are_reloaded(notebook: Notebook, project: Path) -> None:
    (project / "nets.py").write_text("SCALE = 1\nclass Net:\n    def f(self, x):\n        return x * SCALE\n")
    notebook.ok("%%remote t\nimport nets\nnet = nets.Net()\nnet.f(3)")
    (project / "nets.py").write_text("SCALE = 10\nclass Net:\n    def f(self, x):\n        return 1 / 0 * SCALE\n")
    cell = notebook.ok("%mesh sync")
    assert cell.stdout.startswith("t[0-1]: reloaded nets\n    Net: changed f\n"), cell.stdout
    cell = notebook.run("%remote t net.f(3)")
    assert "return 1 / 0 * SCALE" in cell.error
    (project / "nets.py").write_text("SCALE = 100\nclass Net:\n    def f(self, x):\n        return x * SCALE\n")
    notebook.ok("%mesh sync t nets")
    assert notebook.value("t.run('net.f(3)').get().values()") == (300, 300)
    notebook.ok(f"%mesh sync t[0] {project}/nets.py")


def test_a_usage_error_of_the_magic_is_one_line(notebook: Notebook, project: Path) -> None:
    (project / "broken.py").write_text("x = (\n")
    cell = notebook.run("%mesh sync broken")
    assert cell.evalue.startswith(f"SyntaxError in {project}/broken.py, line 1: '(' was never closed")
    assert cell.evalue.endswith("; nothing was sent")
    cell = notebook.run("t.sync('broken')")
    assert cell.ename == "SyntaxError"
    assert "t.sync('broken')" in cell.error
    assert "monarch_kernel/" not in cell.error
    cell = notebook.run("%mesh sync t no_such_module")
    assert "%mesh sync: module 'no_such_module' is not a source file of yours" in cell.evalue
    cell = notebook.run("%mesh sync t torch extra")
    assert cell.evalue.startswith("%mesh sync: ")
