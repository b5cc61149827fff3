"""Light ranks, on hosts that behave as if they were elsewhere: cells and actors work, and nothing is imported for them."""

from __future__ import annotations

import sys

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.actor.hosts import HostMesh, serve_ranks, shutdown_context
from monarch_kernel.controller.session import current_session
from monarch_kernel.launch.local import LocalLauncher
from monarch_kernel.mesh import Extent, Region

HEAVY = ("tor" + "ch", "IPy" + "thon", "numpy")


class Looker(Actor):
    @endpoint
    def imported(self) -> list[str]:
        return [name for name in HEAVY if name in sys.modules]


def test_light_ranks_work_without_torch_and_ipython_until_a_cell_needs_them() -> None:
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
