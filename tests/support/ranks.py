"""Ranks for training tests, driven by cells, and helpers for tests with process groups."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.errors import RemoteError
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.train.process_group.worker import GroupStore
from tests.support.waiting import LONG_S, wait_until

__all__ = ["Ranks", "wait_until_in_collective", "warm_up"]


def warm_up() -> None:
    """Start the agent and the zygote if an earlier test has ended them.

    A module whose tests spawn meshes themselves calls this from a fixture of module scope. Otherwise the first of these tests
    would leave both behind.
    """
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    mesh.initialized.get(LONG_S)
    mesh.stop(grace_s=0).get(LONG_S)


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
