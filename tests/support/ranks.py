"""Ranks for training tests, driven by cells, and helpers for tests with process groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from monarch_kernel.actor import HostMesh, ProcMesh, this_host
from monarch_kernel.actor.host_mesh import serve_ranks
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.errors import RemoteError
from monarch_kernel.features.live.controller import FOR_TRAINING, LoopExtension
from monarch_kernel.launch.base import Launcher
from monarch_kernel.launch.local import LocalHost, LocalLauncher
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.config import AgentConfig
from monarch_kernel.net.wire.messages import Preload
from monarch_kernel.runtime.controller.session import current_session
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.train.process_group.worker import GroupStore
from tests.support.waiting import LONG_S, wait_until

__all__ = [
    "LIGHT_RANKS",
    "LightLauncher",
    "Ranks",
    "light_hosts",
    "preload_training",
    "wait_until_in_collective",
    "warm_up",
]

LIGHT_RANKS = """\
from monarch_kernel.runtime.controller.session import LocalAgents
LocalAgents.is_light = True
"""
"""First lines of a program whose ranks need no torch: its import takes the zygote two seconds of processor time."""


def warm_up() -> None:
    """Start the agent and the zygote if an earlier test has ended them.

    A module whose tests spawn meshes themselves calls this from a fixture of module scope. Otherwise the first of these tests
    would leave both behind.
    """
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    mesh.initialized.get(LONG_S)
    mesh.stop(grace_s=0).get(LONG_S)


def light_hosts(launcher: Launcher, count: int, **options: Any) -> HostMesh:
    """Allocate hosts that start quickly, because they preload no torch; the options are those of `Session.add_hosts`."""
    session = current_session()
    serve_ranks(session)
    numbers = session.add_hosts(launcher, count, is_light=True, **options)
    return HostMesh(session.runtime, Region.whole(Extent({"hosts": count})), numbers)


class LightLauncher(LocalLauncher):
    """Starts hosts whose ranks start without torch, for tests that call `allocate`."""

    def launch(self, configs: Sequence[AgentConfig]) -> list[LocalHost]:
        return super().launch([msgspec.structs.replace(config, is_light=True) for config in configs])


def preload_training() -> None:
    """Let the zygote import what training and checkpoints need, as it does for loops that recover.

    Otherwise each rank of each mesh would import it, in most of a second of processor time.
    """
    session = current_session()
    host, loops = session.local_host(), session.runtime.extension(LoopExtension)
    if (session.directory, host) in _prepared:
        return
    _prepared.add((session.directory, host))
    message = pack(Preload((*FOR_TRAINING, "monarch_kernel.train.checkpoint")))
    session.runtime.run_on_io_thread(lambda: session.runtime.perform(loops.core.to_host(host, message)))
    warm_up()  # it imports when it is idle, so after this mesh and before the next one


_prepared: set[tuple[Path, int]] = set()  # directory of a session and number of its host


def wait_until_in_collective(mesh: ProcMesh) -> None:
    """Wait until all ranks of a mesh have started a collective, and wait for its end."""

    def waits(answer: object) -> bool:
        return isinstance(answer, Doing) and any("wait()" in activity.call for activity in answer.activities)

    wait_until(lambda: all(map(waits, mesh.doing().get(LONG_S).values())), "all ranks to wait in a collective")


class Ranks:
    """A mesh of ``n`` ranks along ``dp`` with a process group, in which ``prelude`` has run.

    Attributes:
        mesh: the ranks.
        store: the store that forms their group.
    """

    def __init__(self, n: int, prelude: str) -> None:
        preload_training()
        self.store = GroupStore()
        self.mesh: ProcMesh = this_host().spawn_procs({"dp": n}, name=f"t{n}", device="cpu")
        self.mesh.run(prelude).get(LONG_S)
        self.store.form(self.mesh).get(LONG_S)

    def run(self, code: str) -> tuple[Any, ...]:
        """Run a cell; gives the value of each rank."""
        return self.mesh.run(code).get(LONG_S).values()

    def fails(self, code: str) -> str:
        """Run a cell that fails on all ranks; gives the text of the first error."""
        with pytest.raises(RemoteError) as caught:
            self.run(code)
        assert set(caught.value.ranks) == set(range(len(self.mesh))), caught.value
        return caught.value.primary.headline()

    def close(self) -> None:
        """Let the ranks leave their group, then end them and the store."""
        self.run("import gc\nmodel = reference = optimizer = m = None\ngc.collect()\ndist.destroy_process_group()")
        self.mesh.stop(grace_s=0).get(LONG_S)
        self.store.close()
