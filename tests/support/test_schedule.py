"""Several test processes share the tests: what takes longest starts first, and what belongs together stays together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from monarch_kernel.actor import shutdown_context
from tests.support.schedule import LONGEST, TOGETHER, Schedule, longest_first, scope_of

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


class Process:
    """Stands for a test process of xdist: it keeps the tests that it receives, and whether it must end."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.given: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_a_module_goes_to_a_process_when_it_needs_it_to_start_its_last_test() -> None:
    config: Any = SimpleNamespace(
        getvalue=lambda name: ["2*popen"], option=SimpleNamespace(loadscopereorder=False, tx=["2*popen"])
    )
    schedule = Schedule(config)
    tests = [f"a.py::test_{i}" for i in range(4)] + [f"{name}.py::test" for name in "bcde"]
    processes: list[Any] = [Process("1"), Process("2")]
    for process in processes:
        schedule.add_node(process)
        schedule.add_node_collection(process, tests)
    schedule.schedule()
    first, second = processes
    assert first.given == [0, 1, 2, 3]
    assert second.given == [4, 5]
    for index in (0, 1):
        schedule.mark_test_complete(first, index)
        assert first.given == [0, 1, 2, 3], "the modules that are left may go to the other process"
    schedule.mark_test_complete(second, 4)
    assert second.given == [4, 5, 6]
    schedule.mark_test_complete(first, 2)
    assert first.given == [0, 1, 2, 3, 7], "it can't start its last test without the one after it"
    assert not first.shutting_down
    for process, index in ((second, 5), (first, 3)):
        schedule.mark_test_complete(process, index)
        assert process.shutting_down
    assert not schedule.workqueue
    assert schedule.tests_finished


def test_two_processes_run_all_tests(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.support.schedule import Schedule\n"
        "def pytest_xdist_make_scheduler(config, log):\n"
        "    config.option.loadscopereorder = False\n"
        "    return Schedule(config, log)\n"
    )
    for name, count in zip("abcdef", (4, 1, 1, 3, 1, 2)):
        tests = [f"def test_{i}():\n    pass\n" for i in range(count)]
        (tmp_path / f"test_{name}.py").write_text("".join(tests))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "2", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "12 passed" in run.stdout, run.stdout + run.stderr
