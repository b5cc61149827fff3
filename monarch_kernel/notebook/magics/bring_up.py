"""Brings up a mesh for a notebook: starts its ranks on this machine or on other hosts, and shows the progress."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from monarch_kernel.actor.host_mesh import HostMesh, this_host
from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.actor.start_notes import environment_notes, gpu_notes, shadow_notes, shared_memory_notes
from monarch_kernel.errors import LaunchError, RanksError, RemoteInterrupt
from monarch_kernel.notebook.cells.cell import CellQueue
from monarch_kernel.notebook.cells.display import LiveView
from monarch_kernel.notebook.cells.held_interrupts import HeldInterrupts
from monarch_kernel.notebook.magics.attach import DetachedMeshes
from monarch_kernel.notebook.magics.bring_up_hosts import Allocation
from monarch_kernel.notebook.magics.mesh_entry import MeshEntry
from monarch_kernel.notebook.syntax.up_arguments import UpOptions
from monarch_kernel.notebook.view.hosts import missing_ranks_text
from monarch_kernel.runtime.host.gpus import VISIBLE
from monarch_kernel.train.process_group.worker import GroupStore

__all__ = ["BringUp", "print_notes"]

_PUMP_S = 0.05
_UP_TIMEOUT_S = 150.0
_OTHERS_S = 0.5  # ranks that end within this time are reported together
_FIRST_WORD_S = 1.0  # a mesh that is up sooner shows no progress, for frontends that can't update output


class BringUp:
    """The start of one mesh.

    Args:
        options: what the user has requested.
        detached: the meshes that outlive the kernel, to which this one may belong.
        store: forms the process groups of its cells.
        interrupts: the interrupts that come meanwhile.
        on_progress: called with a line about what the mesh waits for.
    """

    def __init__(
        self,
        options: UpOptions,
        detached: DetachedMeshes,
        store: GroupStore,
        interrupts: HeldInterrupts,
        on_progress: Callable[[str], object],
    ) -> None:
        self._options = options
        self._detached = detached
        self._store = store
        self._interrupts = interrupts
        self._view = LiveView(is_brief=True, on_text=on_progress)

    def run(self) -> MeshEntry:
        """Start the ranks, and return the mesh when all of them are up.

        Raises:
            LaunchError: the mesh did not come up; processes that had started were ended.
            RemoteInterrupt: the user has interrupted the start.
        """
        if self._options.hosts:
            return self._on_hosts()
        agent = None if self._options.detach else this_host()
        try:
            return self._here()
        except LaunchError:
            if agent is None or not agent.is_ending:
                raise
        return self._here()  # something has ended the machine's agent just before, or meanwhile: with another one

    def _here(self) -> MeshEntry:
        options = self._options
        hosts, kept = self._detached.hosts(options.name) if options.detach else (this_host(), None)
        mesh: ProcMesh | None = None
        try:
            mesh = _spawn(hosts, options.axes, options)
            entry = MeshEntry(mesh, options, CellQueue(mesh, self._store.form), self._view, kept=kept)
            self._await_start(entry)
            if kept is not None:
                self._detached.keep(kept, mesh, options)
        except BaseException:
            if mesh is not None:
                mesh.stop("it did not come up", grace_s=0.0)
            if kept is not None:
                kept.close()
            raise
        return entry

    def _on_hosts(self) -> MeshEntry:
        options = self._options
        kept = self._detached.session(options.name) if options.detach else None
        try:
            allocation = Allocation(options, kept)
        except BaseException:
            if kept is not None:
                kept.close()
            raise
        try:
            allocation.wait(self._view, self._interrupts)
            mesh = _spawn(allocation.hosts, {"gpus": options.per_host}, options)
            entry = MeshEntry(
                mesh, options, CellQueue(mesh, self._store.form), self._view, allocation=allocation, kept=kept
            )
            self._await_start(entry)
            if kept is not None:
                self._detached.keep(kept, mesh, options)
        except BaseException:
            allocation.release()
            if kept is not None:
                kept.close()
            raise
        for line in allocation.warnings():
            print(line, file=sys.stderr, flush=True)
        return entry

    def _await_start(self, entry: MeshEntry) -> None:
        """Wait until all ranks are up, and show the progress; give up soon after a rank has ended.

        Raises:
            LaunchError: some ranks did not come up; the text names them and says why.
            RemoteInterrupt: the wait was interrupted.
        """
        mesh, name = entry.mesh, entry.options.name
        begin = time.monotonic()
        shown_s = _FIRST_WORD_S - LiveView.EVERY_S
        lost_s: float | None = None
        future = mesh.initialized
        while not future.wait(_PUMP_S):
            if self._interrupts.count:
                raise RemoteInterrupt(f"interrupted while {name} was starting; the ranks that were up have been ended")
            waited_s = time.monotonic() - begin
            if lost_s is None and mesh.deaths():
                lost_s = waited_s
            if lost_s is not None and waited_s > lost_s + _OTHERS_S:  # do not wait for slow ranks without use
                raise LaunchError(missing_ranks_text(name, len(mesh), mesh.deaths(), waited_s))
            if waited_s < shown_s + LiveView.EVERY_S:
                continue
            shown_s = waited_s
            states = [rank.state for rank in mesh.view().ranks]
            up = sum(state not in ("starting", "dead", "stopped") for state in states)
            entry.view.show_text(
                f"{name}: waiting for ranks to start ({up} of {len(states)} are up, {waited_s:.1f} s)",
                first=entry.view.is_new,
            )
            if waited_s > _UP_TIMEOUT_S:
                raise LaunchError(f"{name}: gave up waiting for ranks to start after {waited_s:.0f} s; {up} are up")
        try:
            future.get()
        except RanksError as error:
            failures = {point.rank: failure for point, failure in error.reports.items()}
            raise LaunchError(missing_ranks_text(name, len(mesh), failures, time.monotonic() - begin)) from None


def _spawn(hosts: HostMesh, per_host: Mapping[str, int], options: UpOptions) -> ProcMesh:
    device: Any = options.device
    return hosts.spawn_procs(
        per_host,
        name=options.name,
        env=options.env,
        fresh=False,
        device=device,
        axes=options.axes,
        restart=options.restart,
        max_restarts=options.max_restarts,
    )


def print_notes(mesh: ProcMesh, options: UpOptions) -> None:
    """Say what the ranks of a mesh lack that the user may expect."""
    devices = [rank.device for rank in mesh.view().ranks]
    visible = None if options.hosts else os.environ.get(VISIBLE, "")
    notes = gpu_notes(devices, options.device, options.per_host, options.env, visible)
    if not options.hosts:
        notes = [*environment_notes(mesh, options.env), *shadow_notes(), *shared_memory_notes(), *notes]
    for line in notes:
        print(f"{options.name}: {line}", file=sys.stderr, flush=True)
