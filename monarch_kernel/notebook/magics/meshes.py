"""The notebook's meshes by name: brings them up, selects them, runs cells on them, and ends them."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.actor.host_mesh import HostMesh, shutdown_context, this_host
from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.actor.start_notes import environment_notes, gpu_notes, shadow_notes, shared_memory_notes
from monarch_kernel.base.events import MeshView, StopEvent
from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.errors import LaunchError, MeshDownError, RanksError, RemoteInterrupt, format_ranks
from monarch_kernel.notebook.cells.background import Background
from monarch_kernel.notebook.cells.call_watch import CallWatch
from monarch_kernel.notebook.cells.cell import CellQueue, RemoteCell, run_in_foreground
from monarch_kernel.notebook.cells.display import LiveView, Sink
from monarch_kernel.notebook.cells.interrupt_progress import MeshInterruptProgress
from monarch_kernel.notebook.cells.interrupts import HeldInterrupts
from monarch_kernel.notebook.cells.output import CellOutput
from monarch_kernel.notebook.magics.attach import AttachedMesh, DetachedMeshes
from monarch_kernel.notebook.magics.bring_up_hosts import Allocation
from monarch_kernel.notebook.magics.debug import DebugPrompt
from monarch_kernel.notebook.magics.healing import replace_ranks
from monarch_kernel.notebook.magics.rank_widgets import RankWidgets
from monarch_kernel.notebook.magics.viewers import Command, LiveWidget, Viewers
from monarch_kernel.notebook.syntax.arguments import unknown_mesh
from monarch_kernel.notebook.syntax.lines import UsageProblem
from monarch_kernel.notebook.syntax.selector import evaluate, pick_ranks, root_name
from monarch_kernel.notebook.syntax.up_arguments import UpOptions
from monarch_kernel.notebook.view.hosts import missing_ranks_text
from monarch_kernel.notebook.view.text import mesh_line
from monarch_kernel.runtime.detached.session import DetachedSession
from monarch_kernel.runtime.host.gpus import VISIBLE
from monarch_kernel.runtime.rpc.gather import CellResult
from monarch_kernel.train.process_group.worker import GroupStore

__all__ = ["MeshEntry", "Meshes", "cell_number", "root_name"]

_PUMP_S = 0.05
_POLL_S = 0.01
_UP_TIMEOUT_S = 150.0
_SHARE = 0.01  # share of a processor for drawing the table of a mesh
_BESIDE_WIDGET_S = 2.0  # update interval of the table beside a widget, which only the saved notebook shows
_OTHERS_S = 0.5  # ranks that end within this time are reported together
_FIRST_WORD_S = 1.0  # a mesh that is up sooner shows no progress, for frontends that can't update output

_log = logging.getLogger(__name__)


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


def _print_notes(mesh: ProcMesh, options: UpOptions) -> None:
    """Say what the ranks of a mesh lack that the user may expect."""
    devices = [rank.device for rank in mesh.view().ranks]
    visible = None if options.hosts else os.environ.get(VISIBLE, "")
    notes = gpu_notes(devices, options.device, options.per_host, options.env, visible)
    if not options.hosts:
        notes = [*environment_notes(mesh, options.env), *shadow_notes(), *shared_memory_notes(), *notes]
    for line in notes:
        print(f"{options.name}: {line}", file=sys.stderr, flush=True)


def _taken(there: MeshEntry, options: UpOptions) -> UsageProblem:
    """Say why a mesh can't be brought up under the name of one that is up."""
    name = options.name
    if there.options == options:
        dead = there.mesh.deaths()
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


@dataclass
class MeshEntry:
    """A named mesh with its cells and the table that shows it."""

    mesh: ProcMesh
    options: UpOptions
    cell_queue: CellQueue
    view: LiveView = field(default_factory=LiveView)
    draw_at: float = 0.0  # when to draw the table next; later if drawing was slow
    widget: LiveWidget | None = None  # the live view, where the frontend can draw it
    kept: DetachedSession | None = None  # the session of a mesh that outlives the kernel
    allocation: Allocation | None = None  # its hosts, if they are not this machine
    replacing: threading.Lock = field(default_factory=threading.Lock)  # held while ranks are replaced
    calls: CallWatch = field(init=False)

    def __post_init__(self) -> None:
        self.calls = CallWatch(self.options.warn_after_s)
        self.view.complete = self._with_curves

    def new_view(self) -> None:
        """Show the table in the running cell; the previous table keeps the last state."""
        self.view = LiveView(self._with_curves)
        self.view.show(self.mesh.view())

    def draw(self) -> None:
        """Draw the table now."""
        self.view.update(self.mesh.view(), time.monotonic(), force=True)

    def catch_up(self) -> None:
        """Draw the table now, unless it shows the current state."""
        self.view.follow(self.mesh.view(), time.monotonic(), force=True)

    def watch_calls(self, now: float) -> None:
        """Show in the view which ranks have waited long in calls of actors, when it is time to look."""
        if not self.mesh.runtime.closed:
            self.calls.poll(self.mesh, now)

    def end_widget(self, note: str) -> None:
        """Replace the widget by a note, below the table with the last known state."""
        if self.widget is not None:
            self.draw()
            self.widget.close(note)
            self.widget = None

    def end_note(self) -> str:
        """Say what becomes of the mesh when the kernel ends."""
        if self.kept is not None:
            return f"The kernel has ended. {self.options.name} goes on: %mesh attach {self.options.name}"
        return f"{self.options.name} ended with the kernel. The table shows its last state."

    def _with_curves(self, view: MeshView) -> MeshView:
        keys = {loop.key for loop in view.loops}
        loops = []
        for loop in self.mesh.loops if keys else ():
            with suppress(LookupError):  # the loop may be gone by now
                if loop.key in keys:
                    loops.append(loop.view())
        return replace(view, loops=tuple(loops)) if loops else view


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
        view = LiveView(is_brief=True)
        with HeldInterrupts(self.interrupt_others) as interrupts:
            if options.hosts:
                entry = self._up_on_hosts(options, store, view, interrupts)
            else:
                entry = self._up_here(options, store, view, interrupts)
            # The widget comes before the table: a page would show the table until there is a widget, which hides it.
            text = (
                "" if view.is_new else mesh_line(entry.mesh.view())
            )  # a terminal can't replace the progress by the table
            entry.widget = self.viewers.widget(entry.options.name, text)
            self._add(entry)  # an interrupt from here on has no effect
        self.attend_to_stops(entry)
        _print_notes(entry.mesh, options)
        entry.draw()
        return entry

    def show(self, entry: MeshEntry) -> None:
        """Show a mesh in a new place; its previous view keeps the last state."""
        entry.end_widget(f"The live view of {entry.options.name} has moved to a later cell (%mesh show).")
        entry.new_view()
        entry.widget = self.viewers.widget(entry.options.name)

    def _up_here(self, options: UpOptions, store: GroupStore, view: LiveView, interrupts: HeldInterrupts) -> MeshEntry:
        hosts, kept = self.detached.hosts(options.name) if options.detach else (this_host(), None)
        mesh: ProcMesh | None = None
        try:
            mesh = _spawn(hosts, options.axes, options)
            entry = MeshEntry(mesh, options, CellQueue(mesh, store.form), view, kept=kept)
            self._await_start(entry, interrupts)
            if kept is not None:
                self.detached.keep(kept, mesh, options)
        except BaseException:
            if mesh is not None:
                mesh.stop("it did not come up", grace_s=0.0)
            if kept is not None:
                kept.close()
            raise
        return entry

    def _up_on_hosts(
        self, options: UpOptions, store: GroupStore, view: LiveView, interrupts: HeldInterrupts
    ) -> MeshEntry:
        kept = self.detached.session(options.name) if options.detach else None
        try:
            allocation = Allocation(options, kept)
        except BaseException:
            if kept is not None:
                kept.close()
            raise
        try:
            allocation.wait(view, interrupts)
            mesh = _spawn(allocation.hosts, {"gpus": options.per_host}, options)
            entry = MeshEntry(mesh, options, CellQueue(mesh, store.form), view, allocation=allocation, kept=kept)
            self._await_start(entry, interrupts)
            if kept is not None:
                self.detached.keep(kept, mesh, options)
        except BaseException:
            allocation.release()
            if kept is not None:
                kept.close()
            raise
        for line in allocation.warnings():
            print(line, file=sys.stderr, flush=True)
        return entry

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

    def _await_start(self, entry: MeshEntry, interrupts: HeldInterrupts) -> None:
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
            if interrupts.count:
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
        )

    def run(self, entry: MeshEntry, cell: RemoteCell) -> ValueMesh[CellResult]:
        """Drive a cell to its end, and show its output and its values.

        Raises:
            RemoteError: the cell failed on some ranks.
            SupervisionError: a rank is dead.
            RemoteInterrupt: the cell was interrupted, or took longer than its timeout.
            LaunchError: the process group could not be formed.
        """
        try:
            with self.debugger.foreground(cell) as attend:
                results = run_in_foreground(cell, self.interrupt_others, attend)
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
        results = self.run(entry, cell)
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
