"""Light ranks on simulated remote hosts: cells and actors work without imports of heavy libraries."""

from __future__ import annotations

import sys
from pathlib import Path

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.actor.host_mesh import HostMesh, serve_ranks, shutdown_context
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.errors import RemoteError
from monarch_kernel.launch.local import LocalLauncher
from monarch_kernel.runtime.controller.session import current_session
from tests.support.waiting import LONG_S, wait_until

HEAVY = ("tor" + "ch", "IPy" + "thon", "numpy")


class Looker(Actor):
    @endpoint
    def imported(self) -> list[str]:
        return [name for name in HEAVY if name in sys.modules]


def test_light_ranks_import_torch_and_ipython_only_when_a_cell_needs_them() -> None:
    session = current_session()
    serve_ranks(session)
    try:
        hosts = session.add_hosts(LocalLauncher(session.directory), 2, is_light=True, lost_after_s=10.0)
        mesh = HostMesh(session.runtime, Region.whole(Extent({"hosts": 2})), hosts).spawn_procs({"procs": 2})
        lookers = mesh.spawn("lookers", Looker)
        assert lookers.imported.call().get().values() == ([],) * 4
        cell = mesh.run_cell("where = (rank, world_size, local_rank, device)\nrank + 1", cell=1, want_value=True).get()
        assert [result.value for result in cell.values()] == [1, 2, 3, 4]
        assert [result.bundle for result in cell.values()] == [{"text/plain": str(rank)} for rank in (1, 2, 3, 4)]
        assert mesh["where"].values() == tuple((rank, 4, rank % 2, "cpu") for rank in range(4))
        assert lookers.imported.call().get().values() == ([],) * 4
        mesh.slice(hosts=0, procs=1).run_cell("%alias_magic t timeit", cell=2).get()
        assert lookers.imported.call().get().values() == ([], [HEAVY[1]], [], [])
    finally:
        shutdown_context().get()


# Blocks in the middle of an import until a file exists, and creates another file if the import is interrupted.
STALL = """
import os, sys, time
class Stall:
    def find_spec(self, name, path=None, target=None):
        if name == "IPy" + "thon.core.magic":
            try:
                open("{started}", "w").close()
                while not os.path.exists("{go_on}"):
                    time.sleep(0.001)
            except BaseException:
                open("{cut}", "w").close()
                raise
sys.meta_path.insert(0, Stall())
"""


def test_an_interrupt_does_not_abort_imports_that_a_cell_needs(tmp_path: Path) -> None:
    started, go_on, cut = (tmp_path / name for name in ("started", "go_on", "cut"))
    session = current_session()
    serve_ranks(session)
    try:
        hosts = session.add_hosts(LocalLauncher(session.directory), 1, is_light=True, lost_after_s=10.0)
        mesh = HostMesh(session.runtime, Region.whole(Extent({"hosts": 1})), hosts).spawn_procs(device="cpu")
        mesh.run_cell(STALL.format(started=started, go_on=go_on, cut=cut), cell=1).get()
        future = mesh.run_cell("%time import time; time.sleep(600)", cell=2)
        wait_until(started.exists, "the import to start")
        mesh.interrupt()
        mesh.doing().get()  # the rank has handled the interrupt
        go_on.touch()
        error = future.exception(LONG_S)
        assert not cut.exists()
        assert isinstance(error, RemoteError)
        assert error.primary.kind == "interrupted"
        mesh.run_cell("%time 1", cell=3).get()
    finally:
        shutdown_context().get()
