"""F19: a module is missing on one host; the report names the host, the ranks and the interpreter there."""

from __future__ import annotations

import re

import pytest

from monarch_kernel.base.mesh import Extent
from monarch_kernel.errors import Failure, RemoteError
from monarch_kernel.notebook.view.errors import error_block
from monarch_kernel.runtime.diagnostics.failures import describe


def missing(host: str, python: str) -> Failure:
    return Failure("exception", "ModuleNotFoundError", "No module named 'einops'", host=host, pid=7, python=python)


def test_a_failed_import_names_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/opt/env/bin/python")
    try:
        import no_such_module_anywhere  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        assert describe(error).python == "/opt/env/bin/python"
    assert describe(ValueError("no data")).python == ""


def test_the_error_names_host_rank_and_interpreter() -> None:
    points = Extent({"hosts": 4})
    reports = {points.point(3): missing("node3", "/usr/bin/python3")}
    error = RemoteError("cell [4] failed on m", reports, {points.point(rank): None for rank in range(3)})
    block = "\n".join(error_block(error, color=False))
    assert re.search(
        r"\[3\] ModuleNotFoundError: No module named 'einops'\n    on node3 \(pid 7\)\n    with /usr/bin/", block
    )
    assert "on host node3, pid 7, python /usr/bin/python3" in str(error)


def test_errors_of_different_interpreters_are_merged() -> None:
    points = Extent({"hosts": 2})
    reports = {points.point(i): missing(f"node{i}", f"/env{i}/bin/python") for i in range(2)}
    block = "\n".join(error_block(RemoteError("cell [4] failed on m", reports, {}), color=False))
    assert block.count("ModuleNotFoundError") == 1
    assert "    with /env0/bin/python, /env1/bin/python" in block
