"""Jupyter's ports of a kernel: with ``transport = "ipc"`` they are sockets that other users of the machine can't open."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import KernelManager

from tests.support.stranger import run_as_nobody
from tests.support.waiting import LONG_S

CONNECT = """
for path in sys.argv[1:]:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        print("connected", path)
    except PermissionError:
        print("refused")
"""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[KernelManager]:
    """A kernel whose connection file is in a directory of mode 0700, as that of a Jupyter server is."""
    manager = KernelManager(kernel_name="monarch", transport="ipc", connection_file=str(tmp_path / "kernel.json"))
    manager.start_kernel()
    yield manager
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


@pytest.mark.slow  # a separate kernel
def test_a_kernel_with_ipc_has_sockets_for_its_user_only(manager: KernelManager) -> None:
    client = manager.blocking_client()
    client.start_channels(hb=False)
    try:
        client.wait_for_ready(timeout=LONG_S)
        reply = client.execute_interactive(
            "%mesh up t -n 1 --device cpu", timeout=LONG_S, output_hook=lambda message: None
        )
        assert reply["content"]["status"] == "ok"
        kernel = psutil.Process(manager.provisioner.pid)  # type: ignore[union-attr]
        listening = [each.laddr for each in kernel.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        # ipykernel takes output of forked processes there, with a secret that they have copied.
        assert [each.ip for each in listening] == ["127.0.0.1"]
        paths = glob.glob(f"{glob.escape(manager.ip)}-*")
        assert len(paths) == 5
        assert run_as_nobody(CONNECT, *paths).split() == ["refused"] * 5
        client.execute_interactive("%mesh down --all", timeout=LONG_S, output_hook=lambda message: None)
    finally:
        client.stop_channels()
