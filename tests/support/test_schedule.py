"""Several test processes share the tests: what takes longest starts first, and what belongs together stays together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from monarch_kernel.actor import shutdown_context
from tests.support.schedule import LONGEST, TOGETHER, longest_first, scope_of

ROOT = Path(__file__).parents[2]


def test_each_name_in_the_tables_exists() -> None:
    assert [name for name in TOGETHER if not (ROOT / name).exists()] == []
    assert [name for name in LONGEST if name not in TOGETHER.values() and not (ROOT / name).exists()] == []
    assert not TOGETHER.keys() & set(LONGEST), "such a module is in the list under the name of its group"


def test_the_longest_come_first_and_all_else_keeps_its_order() -> None:
    names = ["tests/a/test_z.py::test", f"{LONGEST[-1]}::test_b", f"{LONGEST[-1]}::test_a", "tests/a/test_a.py::test"]
    names += [f"{place if place.endswith('.py') else place + '/test_a.py'}::test" for place in reversed(TOGETHER)]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    ordered = [item.nodeid for item in longest_first(items)]
    assert ordered[-4:] == [f"{LONGEST[-1]}::test_b", f"{LONGEST[-1]}::test_a", names[0], names[3]]
    scopes = list(dict.fromkeys(map(scope_of, ordered)))
    assert scopes[:2] == ["JupyterLab", "Ray"]
    assert [scope_of(name) for name in ordered] == sorted(map(scope_of, ordered), key=scopes.index)
    assert scope_of("tests/launch/test_conformance.py::TestLauncher::test_a[ray]") == "Ray"


def test_modules_that_end_the_session_come_last() -> None:
    ending = SimpleNamespace(shutdown_context=shutdown_context)
    items: list[Any] = [
        SimpleNamespace(nodeid="tests/a/test_a.py::test_a", fixturenames=["session"]),
        SimpleNamespace(nodeid="tests/a/test_a.py::test_b", fixturenames=["session", "own_session"]),
        SimpleNamespace(nodeid="tests/a/test_b.py::test", module=ending),
        SimpleNamespace(nodeid="tests/a/test_c.py::test", fixturenames=["session"]),
        SimpleNamespace(nodeid=f"{LONGEST[-1]}::test", fixturenames=["own_session"]),
    ]
    ordered = [item.nodeid for item in longest_first(items)]
    assert ordered == [items[each].nodeid for each in (4, 3, 0, 1, 2)]
