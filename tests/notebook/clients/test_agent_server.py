"""Without the package of the protocol, the server says what to install."""

from __future__ import annotations

import sys

import pytest

from monarch_kernel.notebook.clients.agent_server import make_server
from monarch_kernel.notebook.clients.kernels import ClientError


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server", None)  # as if it were not installed
    advice = r"needs the package mcp, version 2 or later \(.*\): pip install 'monarch_kernel\[mcp\]'"
    with pytest.raises(ClientError, match=advice):
        make_server()
