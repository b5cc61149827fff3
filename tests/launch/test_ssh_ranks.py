"""Ranks on SSH hosts: real agents, whose connections go through SSH and break."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.actor import shutdown_context
from monarch_kernel.actor.host_mesh import allocate
from monarch_kernel.train.process_group.worker import GroupStore
from tests.launch.sshds import SshFolder, why_no_sshd
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_no_sshd()), reason=why_no_sshd())]

ssh = pytest.importorskip("monarch_kernel.launch.ssh")

LONG_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SshFolder]:
    folder = SshFolder(tmp_path)
    try:
        folder.add("a")
        folder.add("b", ["AllowTcpForwarding local"])
        yield folder
    finally:
        shutdown_context().get()
        folder.close()


def test_a_process_group_across_hosts_survives_broken_connections(folder: SshFolder) -> None:
    """One agent dials through a tunnel, the controller dials the other; both connections break, and no rank is lost."""
    launcher = ssh.SshLauncher("a,b", python=sys.executable, config=folder.config, tunnel="always")
    hosts = allocate(launcher, 2, lost_after_s=30.0)
    mesh = hosts.spawn_procs({"gpus": 2}, device="cpu")
    mesh.run("import os, torch, torch.distributed as dist").get(LONG_S)
    assert list(mesh.run("rank").get(LONG_S).values()) == [0, 1, 2, 3]
    store = GroupStore()
    try:
        store.form(mesh).get(LONG_S)
        total = "x = torch.tensor([rank]); dist.all_reduce(x); x.item()"
        assert list(mesh.run(total).get(LONG_S).values()) == [6] * 4
        pids = list(mesh.run("os.getpid()").get(LONG_S).values())
        for server in folder.servers:
            assert server.break_connections()
        late = mesh.run("'x' * 3_000_000")
        assert [len(text) for text in late.get(LONG_S).values()] == [3_000_000] * 4
        assert list(mesh.run(total).get(LONG_S).values()) == [6] * 4
        assert list(mesh.run("os.getpid()").get(LONG_S).values()) == pids
        assert not mesh.deaths()
    finally:
        store.close()
    hosts.shutdown().get()
    wait_until(lambda: not list(Path(os.environ["TMPDIR"]).glob("monarch-ssh-*")), "nothing to be left there")
    launcher.close(0.0)
