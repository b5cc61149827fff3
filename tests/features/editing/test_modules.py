"""Modules that import an edited module are reloaded in order, and an edit can be undone."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.features.editing.modules import LocalModules, ModuleEdit, imported_by, in_order
from monarch_kernel.net.wire.messages import ModuleSource

KNOWN = dict.fromkeys(["a", "a.b", "a.b.c", "a.d", "os"])


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("x", "import a.b.c", {"a.b.c"}),
        ("x", "import a.b as b, os", {"a.b", "os"}),
        ("x", "from a import b, d", {"a.b", "a.d"}),
        ("x", "from a import b, something", {"a", "a.b"}),
        ("x", "from a import *", {"a"}),
        ("a.d", "from . import b", {"a.b"}),
        ("a.d", "from .b import f", {"a.b"}),
        ("a.b.c", "from ..d import f\nfrom .. import b", {"a.d", "a.b"}),
        ("a.d", "from .. import beyond", set()),
        ("a.b", "from . import f", {"a"}),
        ("x", "def f():\n    import a", set()),
        (
            "x",
            "class A:\n    import a\nif 1:\n    try:\n        import a.b\n    except ImportError:\n        import os",
            {"a", "a.b", "os"},
        ),
        ("x", "x = (", set()),
        ("x", "import x", set()),
    ],
)
def test_imports_that_run_with_a_module(name: str, text: str, found: set[str]) -> None:
    assert imported_by(ModuleSource(name, f"/{name}.py", text, False), KNOWN) == found


def test_a_package_counts_dots_from_itself() -> None:
    assert imported_by(ModuleSource("a.b", "/a/b/__init__.py", "from . import c\nfrom ..d import f", True), KNOWN) == {
        "a.b.c",
        "a.d",
    }


def test_a_source_is_parsed_again_only_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of hundreds of modules would spend seconds on each edit."""
    parsed: list[str] = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda text: parsed.append(text) or parse(text))  # type: ignore[func-returns-value]
    for text, found in (
        ("import a.b", {"a.b"}),
        ("import a.b", {"a.b"}),
        ("import a.d", {"a.d"}),
        ("import a.b", {"a.b"}),
    ):
        assert imported_by(ModuleSource("parsed_once", "/parsed_once.py", text, False), KNOWN) == found
    assert parsed == ["import a.b", "import a.d", "import a.b"]


def test_a_file_that_was_removed_since_it_was_read_counts_as_written_just_now(tmp_path: Path) -> None:
    local = LocalModules()
    local.edit([ModuleSource("gone", str(tmp_path / "gone.py"), "x = 1", False)])
    assert not local._loaded


MODULES = st.sampled_from("abcdefg")


@given(st.dictionaries(MODULES, st.sets(MODULES)), st.sets(MODULES))
def test_dependents_run_once_after_their_imports(imports: dict[str, set[str]], edited: set[str]) -> None:
    order = in_order(sorted(edited), imports)
    assert len(set(order)) == len(order)
    assert edited <= set(order)
    reached = {name: _reachable(name, imports) for name in {*imports, *edited}}
    assert set(order) - edited == {name for name, there in reached.items() if there & edited} - edited
    for i, name in enumerate(order):
        for later in order[i + 1 :]:
            in_circle = name in _reachable(later, imports)
            assert later not in imports.get(name, set()) or in_circle, "what it needs comes first, but in a circle"


def _reachable(name: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    pending = [name]
    while pending:
        for needed in imports.get(pending.pop(), set()) - found:
            found.add(needed)
            pending.append(needed)
    return found


@pytest.fixture
def module() -> Iterator[ModuleType]:
    module = ModuleType("edited_here")
    module.__dict__["__file__"] = "/nowhere/edited_here.py"
    sys.modules["edited_here"] = module
    yield module
    del sys.modules["edited_here"]


def edit(text: str, loaded: dict[str, str] | None = None) -> ModuleEdit:
    source = ModuleSource("edited_here", "/nowhere/edited_here.py", text, False)
    return ModuleEdit([source], {} if loaded is None else loaded, set())


BEFORE = """
import functools
N = 1
CACHE = {}
def f():
    return N
def gone():
    pass
def traced(function):
    @functools.wraps(function)
    def wrapper():
        return function() + N
    return wrapper
@traced
def g():
    return 10
class A:
    def f(self):
        return N
class Gone:
    pass
"""


def test_functions_and_classes_keep_their_identity(module: Any) -> None:
    exec(BEFORE, vars(module))
    f, g, cls, a = module.f, module.g, module.A, module.A()
    after = BEFORE.replace("N = 1", "N = 2").replace("return 10", "return 20").replace("CACHE = {}", "")
    after = (
        after.replace("def gone():\n    pass", "")
        .replace("class Gone:\n    pass", "")
        .replace("return N\n", "return -N\n")
    )
    change = edit(after)
    module.CACHE["x"] = 1
    assert change.edited == ("edited_here",)
    assert change.prepare() == []
    change.conclude()
    change.classes.become()
    assert (f(), g(), a.f()) == (-2, 22, -2)
    assert (module.f, module.g, module.A) == (f, g, cls)
    assert not hasattr(module, "gone")
    assert not hasattr(module, "Gone")
    assert module.CACHE == {"x": 1}, "what is not set again stays"


def test_undo_restores_the_module(module: Any) -> None:
    loaded = {"edited_here": "digest"}
    exec(BEFORE, vars(module))
    before = dict(vars(module))
    change = edit("N = 5\nEXTRA = 1\nclass A: pass\ndel f", loaded)
    assert change.prepare() == []
    assert module.EXTRA == 1
    change.undo()
    assert vars(module) == before
    assert loaded == {"edited_here": "digest"}
    with pytest.raises(ZeroDivisionError):
        edit("N = 6\n1 / 0", loaded).prepare()
    assert vars(module) == before


def test_a_module_with_the_same_source_stays_unchanged(module: Any) -> None:
    loaded: dict[str, str] = {}
    first = edit("N = 1", loaded)
    first.prepare()
    first.conclude()
    module.N = 7
    assert edit("N = 1", loaded).unchanged == ("edited_here",)
    assert edit("N = 1  ", loaded).edited == ("edited_here",)
