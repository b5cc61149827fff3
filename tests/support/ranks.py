"""Ranks that train, driven by cells."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.errors import RemoteError
from monarch_kernel.train.group import GroupStore
from tests.waiting import LONG_S

__all__ = ["Ranks"]


class Ranks:
    """A mesh of ``n`` ranks along ``dp`` with a process group, in which ``prelude`` has run.

    Attributes:
        mesh: the ranks.
        store: that forms their group.
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
        """Run a cell that fails on all ranks; the text of the first error."""
        with pytest.raises(RemoteError) as caught:
            self.run(code)
        assert set(caught.value.ranks) == set(range(len(self.mesh))), caught.value
        return caught.value.primary.headline()

    def close(self) -> None:
        """Have the ranks leave their group, and its store end."""
        self.run("import gc\nmodel = reference = optimizer = m = None\ngc.collect()\ndist.destroy_process_group()")
        self.store.close()
