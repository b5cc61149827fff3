"""Detached meshes, which outlive the kernel: brings them up, lists them and attaches them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monarch_kernel.actor.host_mesh import HostMesh, serve_ranks
from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.events import DetachedView
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.base.text import format_seconds
from monarch_kernel.errors import AttachError, RemoteError, format_ranks
from monarch_kernel.notebook.cells.cell import CellQueue, RemoteCell
from monarch_kernel.notebook.cells.display import Sink
from monarch_kernel.notebook.cells.output import CellOutput
from monarch_kernel.notebook.magics.bring_up_hosts import recipe_of
from monarch_kernel.notebook.output.folding import FoldedLine, OutputFolder, render
from monarch_kernel.notebook.syntax.lines import UsageProblem
from monarch_kernel.notebook.syntax.up_arguments import UpOptions
from monarch_kernel.notebook.view.text import detached_text
from monarch_kernel.runtime.controller.adoption import Resumed
from monarch_kernel.runtime.detached.registry import FoundMesh, Home, default_root, find, home_of
from monarch_kernel.runtime.detached.session import DetachedSession, end
from monarch_kernel.runtime.rpc.answers import Value
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.gather import CellResult, gather

__all__ = ["AttachedMesh", "DetachedMeshes", "ResumedCell", "default_root", "resumed_cells", "show_missed"]


@dataclass
class AttachedMesh:
    """A mesh that was attached.

    Attributes:
        mesh: the whole mesh, as it was brought up.
        session: the session of this mesh alone.
        options: the options with which it was brought up.
        detached_s: how long it had no kernel, in seconds.
    """

    mesh: ProcMesh
    session: DetachedSession
    options: UpOptions
    detached_s: float


class DetachedMeshes:
    """The user's detached meshes.

    Args:
        root: directory that has a subdirectory for each detached mesh.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    # -- bringing up

    def check_free(self, name: str, *, detach: bool) -> None:
        """Check that no detached mesh has this name.

        Raises:
            UsageProblem: a detached mesh has it.
        """
        home = home_of(self._root, name)
        if home is None:
            return
        owner = home.owner()
        if over := home.time_over():
            raise UsageProblem(
                f"%mesh up: {name!r} is the name of a detached mesh, and {over}; remove it with %mesh down {name}"
            )
        if not owner:
            raise UsageProblem(
                f"%mesh up: a detached mesh {name!r} exists; attach it with %mesh attach {name}, "
                f"or end it with %mesh down {name}"
            )
        if detach:
            raise UsageProblem(
                f"%mesh up: a detached mesh {name!r} exists and is attached to another kernel, pid {owner}; "
                "choose another name"
            )

    def session(self, name: str) -> DetachedSession:
        """Create a session for a mesh that outlives this process.

        Raises:
            AttachError: the session can't be created.
        """
        home = Home(self._root, name)
        home.create()
        try:
            return DetachedSession(home)
        except BaseException:
            home.remove()
            raise

    def hosts(self, name: str) -> tuple[HostMesh, DetachedSession]:
        """Return this machine as a host for a mesh that outlives this process, with its session.

        Raises:
            AttachError: the session can't be created.
        """
        session = self.session(name)
        try:
            serve_ranks(session)
            return HostMesh(session.runtime, Region.whole(Extent()), (session.local_host(),)), session
        except BaseException:
            session.close()
            raise

    @staticmethod
    def keep(session: DetachedSession, mesh: ProcMesh, options: UpOptions) -> None:
        """Make a mesh that is up outlive this process."""
        specs = mesh.runtime.queries.specs(mesh.procs)
        recipe = recipe_of(options) if options.hosts else None
        keep_s = options.keep_s
        session.keep(mesh.name, specs, options.gpus, options.device, options.env, keep_s=keep_s, recipe=recipe)

    # -- listing

    def has(self, name: str) -> bool:
        """Whether a detached mesh has this name; it may be attached to another kernel."""
        return home_of(self._root, name) is not None

    def names(self) -> list[str]:
        """Return the names of the meshes that can be attached."""
        return [home.name for home in find(self._root) if not home.owner() and not home.is_gone()]

    def available_text(self) -> str:
        """List the meshes that can be attached, for the end of an error message."""
        names = self.names()
        return f"available: {', '.join(names)}" if names else "available: none"

    def text(self, ours: Sequence[str]) -> str:
        """Format a table of the meshes that this notebook has not attached, and of removed ones; empty if there is none."""
        views: list[DetachedView] = []
        notes: list[str] = []
        for home in find(self._root):
            if home.name in ours:
                continue
            try:
                why = home.time_over() or "its processes have ended"
                if not self.has(home.name):
                    notes.append(f"{home.name} is gone: {why}; its remaining files were removed")
                else:
                    views.append(_view(home.look(), home.owner()))
            except AttachError as error:
                notes.append(f"{home.name}: {error}")
        return "\n".join([*([detached_text(views)] if views else []), *notes])

    # -- attach and down

    def attach(self, name: str) -> AttachedMesh:
        """Attach a detached mesh.

        Raises:
            UsageProblem: there is no such mesh.
            AttachError: the mesh can't be attached.
        """
        home = self._existing(name, "attach")
        found = home.look() if not home.owner() else None
        session, manifest = DetachedSession.attach(home)
        serve_ranks(session)
        first = manifest.specs[0]
        extent = Extent(first.axes)
        procs = [spec.proc for spec in manifest.specs]
        mesh = ProcMesh(session.runtime, Region.whole(extent), procs, name, extent, session)
        options = UpOptions(name, dict(first.axes), manifest.gpus, manifest.device, manifest.env, detach=True)
        if manifest.elsewhere is not None:
            count = len(set(manifest.elsewhere.places))
            options = replace(options, engine=manifest.elsewhere.engine, hosts=count)
        return AttachedMesh(mesh, session, options, time.time() - found.since if found else 0.0)

    def down(self, name: str) -> int:
        """End a mesh that is attached to no kernel, and return the number of its ranks; 0 if none of its hosts came up.

        Raises:
            AttachError: the mesh is attached to another kernel.
        """
        return end(self._existing(name, "down"))

    def _existing(self, name: str, command: str) -> Home:
        over = Home(self._root, name).time_over()
        home = home_of(self._root, name)
        if home is None and over:
            raise UsageProblem(f"%mesh {command}: mesh {name!r} is gone: {over}; {self.available_text()}")
        if home is None:
            raise UsageProblem(f"%mesh {command}: there is no detached mesh {name!r}; {self.available_text()}")
        return home


def _view(found: FoundMesh, owner: int) -> DetachedView:
    manifest = found.manifest
    where = ""
    if manifest.elsewhere is not None:
        hosts = len(set(manifest.elsewhere.places))
        state = "time is over" if found.home.time_over() else "not asked"
        where = f"{len(manifest.specs):,} on {hosts:,} host{'s' * (hosts != 1)}, {state}"
    runs = tuple(runs if alive else None for alive, runs in found.ranks)
    return DetachedView(manifest.name, manifest.specs[0].axes, runs, max(0.0, time.time() - found.since), owner, where)


class ResumedCell(RemoteCell):
    """A cell that an earlier kernel sent; it still runs, or has ended meanwhile.

    Attributes:
        born: when it was sent.
    """

    def __init__(
        self, cell_queue: CellQueue, mesh: ProcMesh, cell: Resumed, future: Future[Any], output: CellOutput
    ) -> None:
        super().__init__(cell_queue, mesh, "", number=cell.number, want_value=False, output=output)
        self.born = time.monotonic() - cell.age_s
        self._future = future
        self.stage = "running"


def resumed_cells(attached: AttachedMesh, cell_queue: CellQueue, sink: Sink) -> list[ResumedCell]:
    """Return the cells of an earlier kernel that still run, or whose result no kernel has received; the oldest first."""
    mesh, runtime = attached.mesh, attached.session.runtime
    cells = []
    for cell, future in runtime.attachment.resumed:
        region = Region(Extent({"ranks": len(cell.procs)}), tuple(_ranks(mesh, cell.procs)))

        def read(answer: Value) -> CellResult:
            return CellResult(None, answer.bundle)

        finish = gather(region, f"{cell.description} failed on {mesh.name}", RemoteError, read, mesh.spawned_extent)
        output = CellOutput(mesh.with_region(region), sink, cell_queue.slots, raw=False)
        runtime.listen(cell.id, output.handle)
        cells.append(ResumedCell(cell_queue, mesh.with_region(region), cell, future.read_with(finish), output))
    return cells


def show_missed(attached: AttachedMesh, sink: Sink) -> None:
    """Show what ranks wrote while the mesh had no kernel, and which of them died."""
    runtime, mesh = attached.session.runtime, attached.mesh
    now = time.monotonic()
    sink.write("stdout", f"{mesh.name}: attached; it was without a kernel for {format_seconds(attached.detached_s)}\n")
    chunks = [(event.ranks[chunk.proc], chunk) for event in runtime.listeners.backlog for chunk in event.chunks]
    if chunks:
        sink.write("stdout", "its ranks wrote meanwhile:\n")
        folder = OutputFolder(mesh.ranks, repeats=True, more=f"%mesh logs {mesh.name}")
        for rank, chunk in chunks:
            folder.feed(rank, chunk.stream, chunk.text, now, chunk.dropped_lines)
        for stream, text in render(line for line in folder.finish(now) if isinstance(line, FoldedLine)):
            sink.write(stream, text)
    for rank, failure in sorted(mesh.deaths().items()):
        sink.write("stderr", f"[{rank}] died: {failure.message}\n")
    if runtime.attachment.silent:
        late = format_ranks(_ranks(mesh, runtime.attachment.silent))
        sink.write("stderr", f"{late} did not answer yet (native code?); messages to them wait\n")


def _ranks(mesh: ProcMesh, procs: Sequence[int]) -> list[int]:
    places = {proc: rank for rank, proc in enumerate(mesh.whole.procs)}
    return sorted(places[proc] for proc in procs)
