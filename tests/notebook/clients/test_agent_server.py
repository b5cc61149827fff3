"""The server says what to install without the package of the protocol, and its errors name the tools of an agent."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_kernel.notebook.clients.actions import read_loop
from monarch_kernel.notebook.clients.agent_server import for_agent, make_server
from monarch_kernel.notebook.clients.connection import connect
from monarch_kernel.notebook.clients.kernels import ClientError, find_kernels, read_file


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server", None)  # as if it were not installed
    advice = r"needs the package mcp, version 2 or later \(.*\): pip install 'monarch_kernel\[mcp\]'"
    with pytest.raises(ClientError, match=advice):
        make_server()


def test_errors_name_the_tools_of_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: find_kernels("a.ipynb"), "is not known: the user has started this server for that kernel"),
        (lambda: read_file(tmp_path / "no.json"), "without --kernel, list_meshes names all that run"),
        (lambda: connect("", "t"), "or start this server with --kernel and the connection file of a kernel that runs"),
        (lambda: read_loop("t", []), "write one of "),
        (lambda: read_loop("t", ["faster"]), "'faster' is neither one of "),
    ]
    for fails, says in cases:
        with pytest.raises(ClientError) as refused:
            fails()
        text = for_agent(str(refused.value))
        assert says in text
        assert not re.search(r"python -m|mesh (list|loop)", text)
