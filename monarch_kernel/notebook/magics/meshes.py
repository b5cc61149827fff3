"""The notebook's meshes by name: brings them up, selects them, runs cells on them, and ends them."""

from __future__ import annotations

import logging
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.actor.host_mesh import shutdown_context, this_host
from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.events import StopEvent
from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.errors import LaunchError, MeshDownError, format_ranks
from monarch_kernel.notebook.cells.background import Background
from monarch_kernel.notebook.cells.cell import CellQueue, RemoteCell, run_in_foreground
from monarch_kernel.notebook.cells.display import LiveView, Sink
from monarch_kernel.notebook.cells.held_interrupts import HeldInterrupts
from monarch_kernel.notebook.cells.interrupt_progress import MeshInterruptProgress
from monarch_kernel.notebook.cells.output import CellOutput
from monarch_kernel.notebook.magics.attach import AttachedMesh, DetachedMeshes
from monarch_kernel.notebook.magics.bring_up import BringUp, print_notes
from monarch_kernel.notebook.magics.debug import DebugPrompt
from monarch_kernel.notebook.magics.healing import replace_ranks
from monarch_kernel.notebook.magics.mesh_entry import MeshEntry
from monarch_kernel.notebook.magics.rank_widgets import RankWidgets
from monarch_kernel.notebook.magics.viewers import Command, Viewers
from monarch_kernel.notebook.syntax.arguments import unknown_mesh
from monarch_kernel.notebook.syntax.lines import UsageProblem
from monarch_kernel.notebook.syntax.selector import evaluate, pick_ranks, root_name
from monarch_kernel.notebook.syntax.up_arguments import UpOptions
from monarch_kernel.notebook.view.text import mesh_line
from monarch_kernel.runtime.rpc.gather import CellResult
from monarch_kernel.train.process_group.worker import GroupStore

__all__ = ["Meshes", "cell_number", "root_name"]

_POLL_S = 0.01
_SHARE = 0.01  # share of a processor for drawing the table of a mesh
_BESIDE_WIDGET_S = 2.0  # update interval of the table beside a widget, which only the saved notebook shows

_log = logging.getLogger(__name__)


def _taken(there: MeshEntry, options: UpOptions) -> UsageProblem:
    """Say why a mesh can't be brought up under the name of one that is up."""
    name = options.name
    if there.options == options:
        dead = there.mesh.deaths()
        if any(death.kind == "stopped" for death in dead.values()):
            return UsageProblem(
                f"%mesh up: stop() has ended the ranks of {name}; end {name} itself first: %mesh down {name}"
            )
        replaces = f"%mesh heal {name} replaces {'it' if len(dead) == 1 else 'them'}"
        return UsageProblem(f"%mesh up: {name!r} is already up, but {format_ranks(dead)} died; {replaces}")
    return UsageProblem(
        f"%mesh up: {name!r} is already up, as {dict(there.mesh.extent)}; "
        f"end it first (%mesh down {name}) or choose another name"
    )


def cell_number(shell: InteractiveShell) -> int:
    """Return the number of the running cell as the notebook shows it; ``execution_count`` may be one ahead already."""
    history = shell.history_manager
    return max(1, len(history.input_hist_parsed) - 1) if history is not None else shell.execution_count


class Meshes:
    """The meshes of one notebook.

    Args:
        shell: the shell of the notebook.
        detached: the meshes that outlive the notebook's kernel.

    Attributes:
        interrupt_others: interrupts what runs on other threads of the notebook; called when the main thread is interrupted.
        viewers: the viewers of the meshes.
        command: carries out the commands of viewers.
    """

    command: Command

    def __init__(self, shell: InteractiveShell, detached: DetachedMeshes) -> None:
        self.detached = detached
        self._shell = shell
        self.background = Background(self._draw)
        self.debugger = DebugPrompt(shell, lambda key, poll: self.background.drive(key, poll))
        self._entries: dict[str, MeshEntry] = {}
        self._store: GroupStore | None = None
        self._latest = ""
        self.interrupt_others: Callable[[], object] = lambda: None
        self.viewers = Viewers(self._up, lambda *args, **kwargs: self.command(*args, **kwargs))

    def __iter__(self) -> Iterator[MeshEntry]:
        return iter(self._entries.values())

    def _up(self) -> list[ProcMesh]:
        return [entry.mesh for entry in list(self._entries.values()) if not entry.mesh.runtime.closed]

    @property
    def names(self) -> list[str]:
        """Names of the meshes that are up, in the order in which they came up."""
        self._forget_closed()
        return list(self._entries)

    def latest_mesh(self) -> ProcMesh | None:
        """Return the mesh that was brought up last; None if none is up."""
        self._forget_closed()
        return self._entries[self._latest].mesh if self._entries else None

    def _forget_closed(self) -> None:
        """Remove the meshes of a session that was shut down by ``shutdown_context()``."""
        for name, entry in list(self._entries.items()):
            if entry.mesh.runtime.closed:
                del self._entries[name]
        if self._latest not in self._entries:
            self._latest = next(reversed(self._entries), "")

    def get(self, name: str) -> MeshEntry:
        """Return a mesh that is known to be up."""
        return self._entries[name]

    # -- up and down

    def prepare(self) -> None:
        """Start this machine's agent and zygote, so that the first mesh comes up quickly; if that fails, `up` will say why."""
        try:
            this_host()
        except LaunchError:
            pass
        except Exception:  # the kernel is of use without ranks
            _log.warning("ranks can't be started: %%mesh up will try again", exc_info=True)

    def up(self, options: UpOptions) -> MeshEntry:
        """Bring up a mesh and show it; its name becomes a variable.

        Raises:
            UsageProblem: the name is taken.
            LaunchError: the mesh did not come up; processes that had started were ended.
        """
        self._forget_closed()
        there = self._entries.get(options.name)
        if there is not None:
            if there.options == options and not there.mesh.deaths():
                self._shell.user_ns[options.name] = there.mesh
                self.show(there)
                return there
            raise _taken(there, options)
        self.detached.check_free(options.name, detach=options.detach)
        store = self._group_store()
        with HeldInterrupts(self.interrupt_others) as interrupts:
            self.viewers.show_coming(f"{options.name} is coming up")
            try:
                entry = BringUp(options, self.detached, store, interrupts, self.viewers.show_coming).run()
                # The widget comes before the table: a page would show the table until there is a widget, which hides it.
                # A terminal can't replace the progress by the table.
                text = "" if entry.view.is_new else mesh_line(entry.mesh.view())
                entry.widget = self.viewers.widget(entry.options.name, text)
                self._add(entry)  # an interrupt from here on has no effect
            finally:
                self.viewers.show_coming("")
        self.attend_to_stops(entry)
        print_notes(entry.mesh, options)
        entry.draw()
        return entry

    def show(self, entry: MeshEntry) -> None:
        """Show a mesh in a new place; its previous view keeps the last state."""
        entry.end_widget(f"The live view of {entry.options.name} has moved to a later cell (%mesh show).")
        entry.new_view()
        entry.widget = self.viewers.widget(entry.options.name)

    def _group_store(self) -> GroupStore:
        if self._store is None:
            self._store = GroupStore()
        return self._store

    def _add(self, entry: MeshEntry) -> None:
        self._entries[entry.options.name] = entry
        self._latest = entry.options.name
        RankWidgets.follow(entry.mesh.runtime)
        self._shell.user_ns[entry.options.name] = entry.mesh
        self.background.start()

    def attend_to_stops(self, entry: MeshEntry) -> None:
        """Ask the user when ranks stop in the debugger, also for ranks that have already stopped."""
        self.debugger.watch(entry.mesh.runtime, self._sink_of)

    def attach(self, name: str) -> tuple[MeshEntry, AttachedMesh]:
        """Attach a mesh that outlived its kernel; its name becomes a variable. The caller calls `attend_to_stops`.

        Raises:
            UsageProblem: there is no such mesh, or it is attached here already.
            AttachError: the mesh can't be attached.
        """
        if name in self.names:
            raise UsageProblem(f"%mesh attach: {name!r} is already attached")
        store = self._group_store()
        attached = self.detached.attach(name)
        entry = MeshEntry(attached.mesh, attached.options, CellQueue(attached.mesh, store.form), kept=attached.session)
        self._add(entry)
        return entry, attached

    def down(self, name: str) -> int:
        """End a mesh and return the number of its ranks."""
        entry = self._entries.pop(name)
        if self._latest == name:
            self._latest = next(reversed(self._entries), "")
        try:
            entry.mesh.stop(f"mesh {name!r} was ended by %mesh down").get()
        finally:  # the mesh ends even if the wait is interrupted
            if entry.kept is not None:
                entry.kept.close()
            if entry.allocation is not None:
                entry.allocation.release()
            entry.draw()
            entry.end_widget(f"{name} was ended by %mesh down. The table shows its last state.")
            self.viewers.publish(force=True)
        return len(entry.mesh)

    def close(self) -> None:
        """End all meshes except detached ones, and the session."""
        kept = [entry.kept for entry in self._entries.values() if entry.kept is not None]
        for entry in self._entries.values():
            entry.end_widget(entry.end_note())
        self._entries.clear()
        self._latest = ""
        shutdown_context().get()
        self.background.close()
        self.background = Background(self._draw)
        for session in kept:  # after closing the background thread, which would show that their cells have ended
            session.leave()
        if self._store is not None:
            self._store.close()
            self._store = None

    # -- selecting a mesh

    def is_mesh(self, name: str | None, namespace: Mapping[str, Any]) -> bool:
        """Whether a name is a mesh of the notebook, or a variable that is a mesh or a slice of one."""
        return name in self._entries or (name is not None and isinstance(namespace.get(name), ProcMesh))

    def select(self, selector: str, namespace: Mapping[str, Any], targets: str = "") -> tuple[MeshEntry, ProcMesh]:
        """Return the mesh that a selector selects; an empty selector selects the mesh last brought up.

        Args:
            selector: see `evaluate`.
            namespace: the user's variables.
            targets: which of its ranks, see `pick_ranks`; empty for all.

        Raises:
            UsageProblem: the selector selects no mesh.
        """
        mesh = self.find(selector, namespace, targets)
        return self._entry_of(mesh, selector), mesh

    def find(self, selector: str, namespace: Mapping[str, Any], targets: str = "") -> ProcMesh:
        """Return the mesh that a selector selects, as `select` does, without creating an entry for it."""
        mesh = self._find(selector, namespace)
        return mesh[pick_ranks(targets, mesh.ranks)] if targets else mesh

    def _find(self, selector: str, namespace: Mapping[str, Any]) -> ProcMesh:
        self._forget_closed()
        if not self._entries and not self.is_mesh(root_name(selector), namespace):
            raise UsageProblem("no mesh is up; bring one up with: %mesh up NAME -n 4")
        if not selector:
            return self._entries[self._latest].mesh
        name = root_name(selector)
        if name is not None and not self.is_mesh(name, namespace):
            raise unknown_mesh(name, self._entries)
        ours = {name: entry.mesh for name, entry in self._entries.items()}
        mesh = evaluate(selector, ChainMap(ours, cast("dict[str, Any]", namespace)), self._latest)
        if not isinstance(mesh, ProcMesh):
            raise UsageProblem(f"{selector!r} is a {type(mesh).__name__}, not a mesh; write, for example, {name}[0:2]")
        return mesh

    def _entry_of(self, mesh: ProcMesh, selector: str) -> MeshEntry:
        """Return the entry of a mesh; the first cell on a mesh that the user made with ``spawn_procs`` creates its entry."""
        whole = mesh.whole
        for entry in self._entries.values():
            if entry.mesh.procs == whole.procs:
                return entry
        if mesh.runtime.closed or any(death.kind == "stopped" for death in mesh.deaths().values()):
            have = ", ".join(self._entries) or "none"
            raise UsageProblem(f"{selector}: mesh {mesh.name!r} is down; available: {have}")
        if mesh.name in self._entries:
            raise UsageProblem(
                f"{selector}: another mesh is called {mesh.name!r}; give this one a different name: "
                "spawn_procs(..., name=...)"
            )
        if self._store is None:
            self._store = GroupStore()
        options = UpOptions(mesh.name, dict(whole.extent), gpus=False, device="auto")
        entry = self._entries[mesh.name] = MeshEntry(whole, options, CellQueue(whole, self._store.form))
        self.background.start()
        self.attend_to_stops(entry)
        self._latest = self._latest or mesh.name
        return entry

    # -- cells

    def cell(
        self,
        entry: MeshEntry,
        mesh: ProcMesh,
        code: str | Callable[[], Any],
        sink: Sink,
        *,
        number: int,
        want_value: bool,
        raw: bool,
        stream: bool,
        timeout_s: float | None,
        fail_fast: bool = False,
        warn_after_s: float | None = None,
        needs_all: bool = False,
    ) -> RemoteCell:
        """Create a cell and queue it; the caller drives it with `run` or by the `background`."""
        output = CellOutput(mesh, sink, entry.cell_queue.slots, raw=raw, stream=stream)
        return RemoteCell(
            entry.cell_queue,
            mesh,
            code,
            number=number,
            want_value=want_value,
            output=output,
            timeout_s=timeout_s,
            fail_fast=fail_fast or entry.options.fail_fast,
            warn_after_s=entry.options.warn_after_s if warn_after_s is None else warn_after_s,
            needs_all=needs_all,
        )

    def run(self, entry: MeshEntry, cell: RemoteCell, interrupts: HeldInterrupts) -> ValueMesh[CellResult]:
        """Drive a cell to its end, and show its output and its values.

        Args:
            entry: the mesh of the cell.
            cell: the cell to run.
            interrupts: counts interrupts since before the cell was queued.

        Raises:
            RemoteError: the cell failed on some ranks.
            SupervisionError: a rank is dead.
            RemoteInterrupt: the cell was interrupted, or took longer than its timeout.
            LaunchError: the process group could not be formed.
        """
        try:
            with self.debugger.foreground(cell) as attend:
                results = run_in_foreground(cell, interrupts, attend)
            cell.show_values()  # here, where %%capture captures them
            return results
        finally:
            entry.catch_up()
            if cell.stage == "over":
                self.background.follow(cell.output)
            else:
                self.background.drive(cell, self._drive_on(cell))

    def call(self, mesh: ProcMesh, function: Callable[[], Any]) -> ValueMesh[Any]:
        """Call a function on all ranks of a mesh, as a cell of the notebook that runs now.

        Raises:
            MeshDownError: the mesh is down.
            MonarchError: as `run`.
        """
        try:
            entry = self._entry_of(mesh, mesh.name)
        except UsageProblem as problem:
            raise MeshDownError(str(problem)) from None
        with HeldInterrupts(self.interrupt_others) as interrupts:  # else a cell could stay in the queue for ever
            cell = self.cell(
                entry,
                mesh,
                function,
                Sink(self._shell),
                number=cell_number(self._shell),
                want_value=True,
                raw=False,
                stream=True,
                timeout_s=None,
            )
            results = self.run(entry, cell, interrupts)
        if interrupts.count:  # after the cell had ended; the user still wants to stop here
            raise KeyboardInterrupt
        return ValueMesh(results.extent, [result.value for result in results.values()])

    def interrupt(self, entry: MeshEntry, mesh: ProcMesh, *, abort: bool) -> str:
        """Interrupt everything that a mesh or a slice of it runs and has queued, and describe the effect."""
        ranks = set(mesh.ranks)
        queued = [cell for cell in list(entry.cell_queue.cells) if cell.ranks <= ranks]
        waited = [cell.number for cell in queued if cell.stage == "waiting"]
        view = entry.mesh.view()
        with HeldInterrupts(self.interrupt_others) as interrupts:
            progress = MeshInterruptProgress(entry.mesh, mesh, abort=abort)
            for cell in queued:
                cell.note_stop("interrupted by %mesh interrupt")
            seen = 0
            while not progress.is_over():
                now = time.monotonic()
                if interrupts.count > seen:
                    seen = interrupts.count
                    progress.again(now)
                progress.poll(now)
                time.sleep(_POLL_S)
            return progress.text(view, waited)

    def replace_ranks(self, entry: MeshEntry, mesh: ProcMesh, *, restart: bool) -> str:
        """Replace the dead ranks, or all ranks, of a mesh or a slice of it by new processes, and describe the result.

        Raises:
            UsageProblem: another thread replaces ranks of this mesh, such as for a button of the view.
        """
        if not entry.replacing.acquire(blocking=False):
            raise UsageProblem(f"{entry.options.name}: ranks are already being replaced; wait until that is done")
        try:
            return replace_ranks(entry.cell_queue, mesh, self.interrupt_others, restart=restart)
        finally:
            entry.replacing.release()
            entry.catch_up()

    def _drive_on(self, cell: RemoteCell) -> Callable[[float], bool]:
        """Return the function that drives a cell in the background after it did not stop when it was interrupted."""
        cell.output.sink.pin()

        def poll(now: float) -> bool:
            cell.poll(now)
            if cell.stage == "over":
                self.background.follow(cell.output)
            return cell.stage != "over"

        return poll

    def _sink_of(self, stop: StopEvent) -> Sink | None:
        """Return the sink of the cell that has stopped; None for stopped code that is not a cell."""
        cells = [cell for entry in self for cell in list(entry.cell_queue.cells) if stop in cell.stops()]
        return cells[0].output.sink if cells else None

    def _draw(self, now: float) -> None:
        self.viewers.publish()
        for entry in list(self._entries.values()):
            entry.watch_calls(now)
            if now >= entry.draw_at:
                started = time.thread_time()
                is_drawn = self.viewers.are_looking(entry.options.name)
                entry.view.follow(entry.mesh.view(), now, every_s=_BESIDE_WIDGET_S if is_drawn else LiveView.EVERY_S)
                entry.draw_at = now + (time.thread_time() - started) / _SHARE
