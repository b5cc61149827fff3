"""The notebook's meshes by name, and how a cell is run on one: output, results, errors and interrupts as the user sees them."""

from __future__ import annotations

import ast
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monarch_kernel.actor.meshes import CellResult, ProcMesh, shutdown_context, this_host
from monarch_kernel.controller.future import Future
from monarch_kernel.controller.state import RichEvent
from monarch_kernel.errors import LaunchError, RanksError, RemoteInterrupt, format_ranks
from monarch_kernel.events import OutputEvent
from monarch_kernel.mesh import ValueMesh
from monarch_kernel.notebook.display import LiveView, RichFolder, write_lines
from monarch_kernel.notebook.interrupts import HeldInterrupts
from monarch_kernel.notebook.options import UpOptions, UsageProblem
from monarch_kernel.output.folding import OutputFolder
from monarch_kernel.train.group import GroupStore

__all__ = ["INTERRUPT_GRACE_S", "Entry", "Meshes"]

INTERRUPT_GRACE_S = 2.0
_PUMP_S = 0.05
_UP_TIMEOUT_S = 150.0
_GROUP_TIMEOUT_S = 90.0

T = TypeVar("T")


@dataclass
class Entry:
    """A mesh with a name."""

    mesh: ProcMesh
    options: UpOptions
    view: LiveView = field(default_factory=LiveView)
    needs_group: bool = True


class Meshes:
    """The meshes of one notebook."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._store: GroupStore | None = None
        self._latest = ""

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def names(self) -> list[str]:
        """Names of the meshes that are up, in the order in which they came."""
        self._forget_closed()
        return list(self._entries)

    def _forget_closed(self) -> None:
        """Forget the meshes of a session that was shut down by ``shutdown_context()``."""
        for name, entry in list(self._entries.items()):
            if entry.mesh._runtime.closed:
                del self._entries[name]
        if self._latest not in self._entries:
            self._latest = next(reversed(self._entries), "")

    def get(self, name: str) -> Entry:
        """A mesh that is known to be up."""
        return self._entries[name]

    # -- up and down

    def prepare(self) -> None:
        """Have this machine's agent and zygote start, so that the first mesh comes up at once."""
        this_host()

    def up(self, options: UpOptions) -> Entry:
        """Bring a mesh up and show it.

        Raises:
            UsageProblem: the name is taken.
            LaunchError: it did not come up; what had come is ended again.
        """
        self._forget_closed()
        there = self._entries.get(options.name)
        if there is not None:
            if there.options == options and not there.mesh.deaths():
                there.view = LiveView()
                there.view.show(there.mesh.view())
                return there
            raise UsageProblem(
                f"%mesh up: {options.name!r} is up already, as {dict(there.mesh.extent)}; "
                f"end it first (%mesh down {options.name}) or choose another name"
            )
        if self._store is None:
            self._store = GroupStore()
        device: Any = options.device
        mesh = this_host().spawn_procs(options.axes, name=options.name, env=options.env, device=device)
        entry = Entry(mesh, options)
        try:
            with HeldInterrupts() as interrupts:
                self._await_start(entry, mesh.initialized, "ranks to start", interrupts)
        except BaseException:
            mesh.stop("it did not come up", grace_s=0.0)
            raise
        self._entries[options.name] = entry
        self._latest = options.name
        entry.view.update(mesh.view(), time.monotonic(), force=True)
        return entry

    def _await_start(self, entry: Entry, future: Future[T], what: str, interrupts: HeldInterrupts) -> None:
        """Wait for a stage of the start, and say what is waited for."""
        name = entry.options.name
        begin = time.monotonic()
        said_s = 0.0
        while not future.wait(_PUMP_S):
            if interrupts.count:
                raise RemoteInterrupt(f"interrupted while {name} was brought up; what had come is ended again")
            waited_s = time.monotonic() - begin
            if waited_s < said_s + LiveView.EVERY_S:
                continue
            said_s = waited_s
            view = entry.mesh.view()
            up = sum(rank.state != "starting" for rank in view.ranks)
            entry.view.say(
                f"{name}: waiting for {what} ({up} of {len(view.ranks)} are up, {waited_s:.1f} s)",
                first=entry.view.is_new,
            )
            if waited_s > _UP_TIMEOUT_S:
                raise LaunchError(f"{name}: gave up waiting for {what} after {waited_s:.0f} s; {up} ranks are up")
        try:
            future.get()
        except RanksError as error:
            failure = error.primary
            log = "".join(f"\n    | {line}" for line in failure.last_lines)
            raise LaunchError(
                f"{name}: waiting for {what}: ranks {format_ranks(error.ranks)}: {failure.message}{log}"
            ) from None

    def down(self, name: str) -> int:
        """End a mesh; gives the number of its ranks."""
        entry = self._entries.pop(name)
        if self._latest == name:
            self._latest = next(reversed(self._entries), "")
        entry.mesh.stop(f"mesh {name!r} was ended by %mesh down").get()
        entry.view.update(entry.mesh.view(), time.monotonic(), force=True)
        return len(entry.mesh)

    def close(self) -> None:
        """End all meshes, and the session."""
        self._entries.clear()
        self._latest = ""
        shutdown_context().get()
        if self._store is not None:
            self._store.close()
            self._store = None

    # -- which mesh

    def is_mesh(self, name: str | None, namespace: Mapping[str, Any]) -> bool:
        """Whether a variable is a mesh, or a slice of one, as far as cells are concerned."""
        return name in self._entries or (name is not None and isinstance(namespace.get(name), ProcMesh))

    def select(self, selector: str, namespace: Mapping[str, Any]) -> tuple[Entry, ProcMesh]:
        """The mesh that a selector means; an empty one means the mesh last brought up.

        Raises:
            UsageProblem: it means none.
        """
        self._forget_closed()
        if not self._entries:
            raise UsageProblem("no mesh is up; bring one up with: %mesh up NAME -n 4")
        if not selector:
            entry = self._entries[self._latest]
            return entry, entry.mesh
        name = root_name(selector)
        if name is None:
            raise UsageProblem(
                f"{selector!r} selects no mesh; write a name and, if need be, a slice, such as "
                f"{self._latest}[0:2] or {self._latest}.slice(...)"
            )
        if not self.is_mesh(name, namespace):
            raise UsageProblem(f"there is no mesh {name!r}; there is: {', '.join(self._entries)}")
        scope = {name: self._entries[name].mesh} if name in self._entries else {}
        try:
            mesh = eval(selector, {"__builtins__": {"slice": slice}}, {**namespace, **scope})
        except Exception as error:
            raise UsageProblem(f"{selector}: {error}") from None
        if not isinstance(mesh, ProcMesh):
            raise UsageProblem(f"{selector!r} is a {type(mesh).__name__}, not a mesh; write such as {name}[0:2]")
        if mesh.name not in self._entries:
            raise UsageProblem(
                f"{selector}: cells run on meshes that %mesh up has brought up, and {mesh.name!r} is none, or is down; "
                f"there is: {', '.join(self._entries)}"
            )
        return self._entries[mesh.name], mesh

    # -- cells

    def run(
        self,
        entry: Entry,
        mesh: ProcMesh,
        code: str,
        *,
        cell: int,
        want_value: bool,
        raw: bool,
        timeout_s: float | None,
    ) -> ValueMesh[CellResult]:
        """Run a cell and show what it writes while it runs.

        Raises:
            RemoteError: it failed on some ranks.
            SupervisionError: a rank is dead.
            RemoteInterrupt: it was interrupted, or took longer than ``timeout_s``.
        """
        with HeldInterrupts() as interrupts:
            self._form_group(entry, mesh, interrupts)
            events: deque[object] = deque()
            forget = mesh._runtime.watch(events.append)
            try:
                future = mesh.run_cell(code, cell=cell, want_value=want_value, claims_output=True)
                pump = _Pump(entry, mesh, future.id, events, raw)
                try:
                    self._await_cell(future, pump, timeout_s, interrupts)
                finally:
                    pump.finish()
                    mesh._runtime.printer.release(future.id)
                    entry.needs_group |= not future.in_step
                return future.get()
            finally:
                forget()

    def _form_group(self, entry: Entry, mesh: ProcMesh, interrupts: HeldInterrupts) -> None:
        """Have the whole mesh form its process group: before its first cell, and when the last cell has broken it.

        Not while a rank is dead, or one that the cell is not for is busy: it could not join.
        """
        if not entry.needs_group or self._store is None or entry.mesh.deaths():
            return
        if any(rank.state == "running" and rank.rank not in mesh.ranks for rank in entry.mesh.view().ranks):
            return
        future = self._store.form(entry.mesh)
        deadline = time.monotonic() + _GROUP_TIMEOUT_S
        while not future.wait(_PUMP_S):
            if interrupts.count:
                future.interrupt()
                raise RemoteInterrupt("interrupted while the process group was formed; the cell was not sent")
            if time.monotonic() > deadline:
                future.cancel()
                late = format_ranks(rank.rank for rank in entry.mesh.view().ranks if rank.state == "running")
                raise LaunchError(
                    f"{mesh.name}: the process group did not form within {_GROUP_TIMEOUT_S:g} s, {late} are busy still; "
                    f"%mesh interrupt {mesh.name} interrupts them, %mesh down {mesh.name} ends them"
                )
        future.get()
        entry.needs_group = False

    def _await_cell(
        self, future: Future[Any], pump: _Pump, timeout_s: float | None, interrupts: HeldInterrupts
    ) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        why = "interrupted"
        while not future.wait(_PUMP_S):
            pump.turn()
            if not interrupts.count:
                if deadline is None or time.monotonic() < deadline:
                    continue
                why = f"stopped after {timeout_s:g} s (--timeout)"
            future.interrupt()
            end = time.monotonic() + INTERRUPT_GRACE_S
            seen = interrupts.count  # the next time the user does not want to wait any longer
            while not future.wait(_PUMP_S) and time.monotonic() < end and interrupts.count == seen:
                pump.turn()
            raise RemoteInterrupt(_interrupt_text(why, future, pump.mesh))
        if interrupts.count and future.exception(0) is None:
            raise RemoteInterrupt("interrupted, but all ranks had just finished")  # the user wants to stop here, still


def root_name(selector: str) -> str | None:
    """The variable that a selector starts with: ``t`` of ``t[0:2].slice(dp=0)``; None if it is nothing like that."""
    try:
        node: ast.expr = ast.parse(selector.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    while True:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, (ast.Subscript, ast.Attribute)):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return None


def _interrupt_text(why: str, future: Future[Any], mesh: ProcMesh) -> str:
    if not future.done():
        view = {rank.rank: rank for rank in mesh.view().ranks}
        stuck = [rank for rank in mesh.ranks if view[rank].state == "running"]
        others = "" if len(stuck) == len(mesh.ranks) else "; the others kept their state"
        return (
            f"{why}; {format_ranks(stuck)} did not stop yet (native code, or code that ignores interrupts){others}. "
            f"Wait, interrupt again with %mesh interrupt {mesh.name}, or end the mesh with %mesh down {mesh.name}"
        )
    try:
        future.get()
    except RanksError as error:
        by_kind: dict[str, list[int]] = {}
        for point, failure in error.reports.items():
            by_kind.setdefault(failure.kind, []).append(point.rank)
        stopped = by_kind.pop("interrupted", [])
        parts = [f"{why} on {format_ranks(stopped)}; their state is kept" if stopped else why]
        finished = [point.rank for point in error.results]
        if finished:
            parts.append(f"{format_ranks(finished)} had finished")
        for kind, failed in by_kind.items():
            parts.append(f"{format_ranks(failed)} {kind}: {error.primary.headline()}")
        return "; ".join(parts)
    return f"{why}, but all ranks had just finished"


class _Pump:
    """Moves a cell's output from the events to the notebook."""

    def __init__(self, entry: Entry, mesh: ProcMesh, request: int, events: deque[object], raw: bool) -> None:
        self.mesh = mesh
        self._entry = entry
        self._request = request
        self._events = events
        self._folder = OutputFolder(mesh.ranks, raw=raw)
        self._rich = RichFolder(mesh.ranks)

    def turn(self) -> None:
        """Show what has come."""
        now = time.monotonic()
        self._take(now)
        write_lines(self._folder.drain(now))
        self._rich.show(now)
        self._entry.view.update(self._entry.mesh.view(), now)

    def finish(self) -> None:
        """Show all that is left."""
        now = time.monotonic()
        self._take(now)
        write_lines(self._folder.finish(now))
        self._rich.show(now, everything=True)
        self._entry.view.update(self._entry.mesh.view(), now, force=True)

    def _take(self, now: float) -> None:
        written: list[OutputEvent] = []
        while self._events:
            event = self._events.popleft()
            if isinstance(event, OutputEvent) and event.request == self._request:
                written.append(event)
            elif isinstance(event, RichEvent) and event.request == self._request:
                self._rich.feed(event.rank, event.data, event.metadata, now)
        for line in sorted(written, key=lambda event: event.rank):  # what came within one turn is shown by rank
            self._folder.feed(line.rank, line.stream, line.text, now, line.dropped_lines)
