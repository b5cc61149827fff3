"""The report about tests of others."""

from __future__ import annotations

import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from tests.integrations.monarch.upstream.__main__ import MONARCH, differences, left_out, report, unaccounted
from tests.support.results import Results

ROOT = Path(__file__).parents[3]
USES = """
from monarch._src.actor import actor_mesh
from monarch._src.actor.actor_mesh import Channel, _client_context
from monarch._rust_bindings.monarch_hyperactor.pytokio import PythonTask
import monarch.actor, monarch.job.kubernetes
assert actor_mesh.Channel is Channel is monarch.actor.Channel

class Derived(PythonTask):
    def both(self, given: PythonTask[int] | None) -> int: return 1

assert Derived().both(None) == 1
for use in (PythonTask, _client_context, actor_mesh.Of.any.kind):
    try: use()
    except BaseException as error: print(type(error).__name__, error)
"""


def test_failures_have_a_reason_or_count() -> None:
    results = Results(
        passed={"t.py::test_a"},
        failed={
            "t.py::test_b[1]": "AssertionError: it differs",
            "t.py::test_c": "AttributeError: 'ProcMesh' object has no attribute '_hy_proc_mesh'",
            "t.py::test_d": "a trace\nValueError: wrong",
        },
        skipped={"t.py::test_e": "Skipped: a private name of Monarch is used: Shared", "t.py::test_f": "no GPU"},
        is_complete=True,
    )
    text, unexpected = report("monarch/t", results, [("monarch/t::test_b*", "on purpose")])
    assert text.splitlines() == [
        "monarch/t: 1 pass, 1 fail, 1 differ on purpose, 2 use private names, 1 skip themselves",
        "    monarch/t::test_d: ValueError: wrong",
    ]
    assert unexpected == 1
    results.is_complete = False
    assert report("monarch/t", results, [("*", "on purpose")])[1] == 1


def test_each_known_difference_has_a_reason() -> None:
    assert all(pattern.startswith(("monarch/", "torchstore/")) and " " in reason for pattern, reason in differences())


def test_each_module_is_run_or_left_out_for_a_reason(tmp_path: Path) -> None:
    assert all(" " in reason for _, reason in left_out())
    assert not [(module, pattern) for module in MONARCH for pattern, _ in left_out() if fnmatchcase(module, pattern)]
    for name in (*MONARCH, "simulator/test_ir", "test_new", "tools/test_newer"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").touch()
    assert unaccounted(tmp_path) == ["test_new", "tools/test_newer"]


def test_private_names_may_be_imported_but_not_used() -> None:
    path = os.pathsep.join([str(Path(__file__).parent / "upstream" / "path"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", USES], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        f"Skipped a private name of Monarch is used: {name}"
        for name in ("PythonTask", "_client_context", "Of.any.kind")
    ], done.stderr
