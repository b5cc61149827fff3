"""Tests the application that starts the kernel."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace

import ipykernel.kernelapp
import pytest
from traitlets.config import Config, Configurable

from monarch_kernel.notebook.kernel.app import NO_ENCRYPTION, KernelApp
from monarch_kernel.notebook.kernel.comms import LiveComms
from monarch_kernel.notebook.kernel.kernel import MonarchKernel


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("IPKernelApp", logging.WARNING, "", 0, message, (), None)


@pytest.mark.parametrize(
    ("ip", "is_shown"), [("127.0.0.1", False), ("::1", False), ("localhost", False), ("10.1.2.3", True), ("vm", True)]
)
def test_the_warning_about_connections_without_encryption_is_shown_if_packets_leave_the_machine(
    ip: str, is_shown: bool
) -> None:
    app = KernelApp()
    app.ip = ip
    assert app.concerns(record(f"{NO_ENCRYPTION} All communication ...")) is is_shown
    assert app.concerns(record("something else"))
    source = inspect.getsource(ipykernel.kernelapp)
    assert NO_ENCRYPTION in source or "without encryption" not in source, "ipykernel has changed the text"


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_setting_says_whether_ranks_are_prepared_when_the_kernel_starts(
    is_wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LiveComms, "start", lambda self: None, raising=False)
    monkeypatch.setattr(MonarchKernel, "_control_loop", None)
    config = Config()
    config.MonarchKernel.prepares_ranks = is_wanted
    kernel = MonarchKernel.__new__(MonarchKernel)
    Configurable.__init__(kernel, config=config)
    prepared: list[bool] = []
    kernel._interrupts = SimpleNamespace(watch=lambda loop: None, install=lambda: None)  # type: ignore[assignment]
    kernel._magics = SimpleNamespace(meshes=SimpleNamespace(prepare=lambda: prepared.append(True)))  # type: ignore[assignment]
    kernel.start()
    assert prepared == [True] * is_wanted
