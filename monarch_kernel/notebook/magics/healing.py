"""Replaces ranks of a notebook's mesh, shows the progress, and describes the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from monarch_kernel.actor.host_mesh import HostMesh, lost_hosts
from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.errors import LaunchError, MonarchError, RemoteInterrupt, format_ranks
from monarch_kernel.notebook.cells.cell import CellQueue
from monarch_kernel.notebook.cells.display import LiveView
from monarch_kernel.notebook.cells.held_interrupts import HeldInterrupts
from monarch_kernel.notebook.view.hosts import coming_text, engine_title, up_text
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["replace_ranks"]

_PUMP_S = 0.05
_FIRST_WORD_S = 1.0
_MAX_NAMES = 4
_GROUP_TIMEOUT_S = 60.0


def replace_ranks(
    cell_queue: CellQueue,
    mesh: ProcMesh,
    interrupt_others: Callable[[], object],
    *,
    restart: bool,
    grace_s: float = 2.0,
) -> str:
    """Replace ranks by new processes, form the process group again if there was one, and describe the result.

    Args:
        cell_queue: the queue of the whole mesh.
        mesh: the whole mesh, or the slice of it whose ranks are replaced.
        interrupt_others: interrupts what runs on other threads of the notebook.
        restart: whether to replace live ranks, too, and not only dead ones.
        grace_s: how long live ranks have to end, in seconds, before they are killed.

    Raises:
        RemoteInterrupt: the wait was interrupted; the replacement continues.
        SupervisionError: new processes have died, or the mesh was stopped.
        ActorError: actors could not be created again.
    """
    had_group = bool(cell_queue.group_members) and not cell_queue.cells
    started = time.monotonic()
    with HeldInterrupts(interrupt_others) as interrupts:
        lost = lost_hosts(mesh)
        waiting = _Waiting(mesh, lost)
        coming = _coming(mesh)
        if coming and cell_queue.healing is not None:
            started, lost = cell_queue.healing[0], lost or cell_queue.healing[1]
        cell_queue.healing = None
        try:
            replaced: tuple[int, ...] = _wait(
                mesh.restart(grace_s=grace_s) if restart else mesh.heal(), interrupts, poll=waiting.poll
            )
        except RemoteInterrupt:
            cell_queue.healing = started, lost
            raise
        waiting.end()
        replaced = tuple(sorted({*replaced, *coming}))
        if not replaced:
            return f"{mesh.name}: no rank is dead{'' if mesh.is_whole else ' there'}; %mesh restart replaces live ranks"
        text = _describe(mesh, replaced, time.monotonic() - started, _named(mesh, lost))
        if not had_group or cell_queue.mesh.deaths():
            return text
        started = time.monotonic()
        future = cell_queue.begin_group()
        try:
            _wait(future, interrupts, _GROUP_TIMEOUT_S)
        except MonarchError as error:
            future.cancel()
            why = str(error).partition("\n")[0]
            return f"{text}; the process group could not be formed again ({why}): the next cell tries again"
        cell_queue.needs_group = False
        return f"{text}; process group formed again in {time.monotonic() - started:.2f} s"


def _coming(mesh: ProcMesh) -> set[int]:
    """Return the ranks that an earlier command is still replacing."""
    rows = mesh.view().ranks
    return {rank for rank in mesh.ranks if rows[rank].restarts and rows[rank].state == "starting"}


class _Waiting:
    """Shows progress in the cell while an engine brings up other hosts."""

    def __init__(self, mesh: ProcMesh, lost: HostMesh | None) -> None:
        self._mesh = mesh
        self._hosts = lost
        self._view = LiveView()
        self._started = time.monotonic()
        self._shown_s = _FIRST_WORD_S - LiveView.EVERY_S

    def poll(self) -> None:
        """Show the progress if it is time and the hosts are not up yet."""
        waited_s = time.monotonic() - self._started
        if self._hosts is None or waited_s < self._shown_s + LiveView.EVERY_S:
            return
        self._shown_s = waited_s
        hosts = self._hosts.view()
        if hosts.count("starting"):
            self._view.show_text(
                coming_text(self._mesh.name, hosts, waited_s, what="new host"), first=self._view.is_new
            )

    def end(self) -> None:
        """Replace the progress, if it was shown, when the hosts are up."""
        if self._hosts is not None and not self._view.is_new:
            hosts, waited_s = self._hosts.view(), time.monotonic() - self._started
            self._view.show_text(up_text(self._mesh.name, hosts, waited_s, what="new host"))


def _named(mesh: ProcMesh, hosts: HostMesh | None) -> str:
    """Describe the new hosts of new processes; empty if their hosts are not new."""
    if hosts is None:
        return ""
    view = hosts.view()
    of = f" of {engine_title(view.engine)}" if view.engine else ""
    names = ", ".join(host.name for host in view.hosts[:_MAX_NAMES])
    more = f" and {len(view.hosts) - _MAX_NAMES} more" if len(view.hosts) > _MAX_NAMES else ""
    return f" on {'another host' if len(view.hosts) == 1 else f'{len(view.hosts)} other hosts'}{of} ({names}{more})"


def _wait(
    future: Future[Any],
    interrupts: HeldInterrupts,
    timeout_s: float = float("inf"),
    poll: Callable[[], None] = lambda: None,
) -> Any:
    deadline = time.monotonic() + timeout_s
    while not future.wait(_PUMP_S):
        poll()
        if interrupts.count:
            raise RemoteInterrupt("interrupted; the replacement continues, and the next cell waits for it")
        if time.monotonic() >= deadline:
            raise LaunchError(f"not done within {timeout_s:g} s")
    return future.get()


def _describe(mesh: ProcMesh, replaced: Sequence[int], took_s: float, where: str) -> str:
    dead = mesh.whole.deaths()  # other ranks may have died meanwhile
    alive = [rank for rank in mesh.whole.ranks if rank not in replaced and rank not in dead]
    state = f"{'it has' if len(replaced) == 1 else 'they have'} no variables yet"
    if alive:
        state += f", {format_ranks(alive)} kept {'its own' if len(alive) == 1 else 'theirs'}"
    return f"{mesh.name}: {format_ranks(replaced)} replaced in {took_s:.2f} s{where}; {state}"
