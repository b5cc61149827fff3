"""What a handle on a mesh of processes knows: the processes, their ranks, and the program that asks them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NoReturn

from monarch_kernel.actor.done_awaitable import DoneAwaitable
from monarch_kernel.actor.fault_hook import call_fault_hook
from monarch_kernel.base.mesh import Extent, Region, Shaped
from monarch_kernel.errors import Failure
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.controller.session import Session
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.handles import PROCESS, Handle
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC

__all__ = ["ProcHandle"]


class ProcHandle(Handle, Shaped):
    """A handle on processes, one per rank; `ProcMesh` adds what can be done with them.

    Attributes:
        name: the name of the mesh.
        spawned_extent: the extent of the mesh as it was spawned, of which this may be a slice.
    """

    def __init__(
        self,
        client: Client,
        region: Region,
        procs: Sequence[int],
        name: str,
        extent: Extent,
        session: Session | None = None,
    ) -> None:
        self._client = client
        self._session = session
        if isinstance(client, Runtime):
            client.unhandled.tell = call_fault_hook
        self._region = region
        self._base = procs
        self.spawned_extent = extent
        self.name = name
        self._hosts: Any = None

    def place_on(self, hosts: Any) -> None:
        """Note the hosts on which the processes were spawned."""
        self._hosts = hosts

    @property
    def host_mesh(self) -> Any:
        """The hosts on which the whole mesh was spawned; for the process that asks, its machine.

        Raises:
            RuntimeError: the processes were not spawned on hosts, such as that of the program, which another process asks for.
        """
        if self._hosts is None:
            own = (CONTROLLER_PROC,) if PROCESS.proc is None else PROCESS.proc.procs
            if tuple(self.procs) == tuple(own):
                return PROCESS.host_mesh()
            raise RuntimeError(f"mesh {self.name!r} was not spawned on hosts; call this_host()")
        return self._hosts

    def sync_workspace(self, workspace: Any = None, conda: bool = False, auto_reload: bool = False) -> DoneAwaitable:
        """Do what `HostMesh.sync_workspace` does."""
        done: DoneAwaitable = self.host_mesh.sync_workspace(workspace, conda, auto_reload)
        return done

    def logging_option(
        self, stream_to_client: bool = False, aggregate_window_sec: int | None = None, level: int = logging.INFO
    ) -> DoneAwaitable:
        """Accept options of PyTorch Monarch. Output of the processes always reaches the program, and equal lines are folded.

        Raises:
            ValueError: the options contradict each other, or the level is none.
        """
        if not 0 <= level <= 255:
            raise ValueError(f"a level is from 0 to 255, not {level}")
        if not stream_to_client and aggregate_window_sec:
            raise ValueError("output can't be aggregated without streaming: pass aggregate_window_sec=None")
        return DoneAwaitable()

    @property
    def runtime(self) -> Runtime:
        """The runtime of the controller. It raises in other processes, which can't do what needs the controller."""
        if not isinstance(self._client, Runtime):
            raise RuntimeError(
                f"only the process that made mesh {self.name!r} can do this: call it there, not where the mesh is an argument"
            )
        return self._client

    @property
    def region(self) -> Region:
        """The ranks of this mesh, in the mesh as it was spawned."""
        return self._region

    @cached_property
    def procs(self) -> tuple[int, ...]:
        """The numbers of the processes, unique in the session."""
        return tuple(self._base[rank] for rank in self._region.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The flat ranks in the mesh as it was spawned."""
        return tuple(self._region.ranks)

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole mesh as it was spawned, not a slice."""
        return len(self._region) == len(self._base)

    @classmethod
    def from_host_mesh(cls, host_mesh: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: PyTorch Monarch makes meshes from objects of its library by this, and hosts spawn processes here."""
        raise NotImplementedError(
            "from_host_mesh() takes an object of Monarch's Rust library: call spawn_procs() of the mesh of hosts"
        )

    def to_table(self) -> str:
        """Return the processes as a table, one column for each place on the last axis: ``1.gpu[3]`` is the fourth of host 1."""
        per_host = self.spawned_extent.nelements // (1 if self._hosts is None else len(self._hosts))
        names = [f"{rank // per_host}.gpu[{rank % per_host}]" for rank in self.ranks]
        outer, inner = list(self.extent)[:-1], list(self.extent)[-1:]
        n_columns = self.extent[inner[0]] if inner else 1
        head = [*outer, *(f"{inner[0]}={i}" for i in range(n_columns))] if inner else ["process"]
        rows = []
        for first in range(0, len(names), n_columns):
            point = self.extent.point(first)
            rows.append([*(str(point[axis]) for axis in outer), *names[first : first + n_columns]])
        widths = [max(map(len, column)) for column in zip(head, *rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (head, *rows)]
        return "\n".join(lines)

    def deaths(self) -> dict[int, Failure]:
        """Return flat rank -> how it ended, for the ranks that are dead or stopped."""
        found = self._client.deaths(self.procs)
        return {rank: found[proc] for rank, proc in zip(self.ranks, self.procs) if proc in found}
