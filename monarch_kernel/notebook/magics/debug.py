"""The prompt of the debuggers on ranks: ``%mesh debug``, and cells whose code stops at ``breakpoint()``.

Theory of operation
===================

pdb runs on the rank (``features/debugging/worker.py``). The controller knows where ranks have stopped (`ProcMesh.stops`), and
sends each of them a line of input. This module asks the user for that line with Jupyter's ``input()``. Where it does so depends
on what has stopped:

- a cell in the foreground asks in its own loop, between two turns (`DebugPrompt.foreground`);
- an endpoint whose future the main thread waits for asks in that wait (`Future.halt`, `DebugPrompt.attend`);
- anything else, such as a cell in the background, does not ask. A line says where it stopped, and ``%mesh debug t[1]`` opens
  the prompt.

Ranks skip breakpoints where no frontend accepts input. A frontend says with each cell whether it accepts input; a frontend
that does may also send cells that do not, such as those of an extension that inspects variables. So the cell that waits for
the stopped code decides, and code that stops in the background waits if any cell has accepted input so far.

A `Conversation` decides which rank to ask next, and which of the ranks' replies to show.

An interrupt at the prompt ends the cell, as it would without a debugger. If a rank dies while its prompt is open, the thread
that drives the views (`Background`) notices it and interrupts the wait for input.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.events import KeptError, StopEvent
from monarch_kernel.base.text import printable
from monarch_kernel.errors import MonarchError, RemoteInterrupt, format_ranks
from monarch_kernel.features.debugging.controller import DebugPrompts
from monarch_kernel.net.wire.messages import ListErrors
from monarch_kernel.notebook.cells.cell import RemoteCell
from monarch_kernel.notebook.cells.display import Sink
from monarch_kernel.notebook.cells.held_interrupts import HeldInterrupts
from monarch_kernel.notebook.magics.debug_prompt import TOGETHER_S, Conversation, grouped, label
from monarch_kernel.notebook.syntax.lines import UsageProblem
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["DebugPrompt"]

_POLL_S = 0.05
_LOOK_S = 2.0
_NO_STDIN = "this frontend takes no input (nbclient, papermill and the like do not); use JupyterLab or a console"

Drive = Callable[[object, Callable[[float], bool]], None]


class DebugPrompt:
    """The notebook's prompt for the debuggers on ranks.

    Args:
        shell: the shell of the notebook.
        drive: calls a function about 20 times a second until it returns False (`Background.drive`).
    """

    def __init__(self, shell: InteractiveShell, drive: Drive) -> None:
        self._shell = shell
        self._drive = drive
        self._watched: list[Runtime] = []
        self._sink_of: Callable[[StopEvent], Sink | None] = lambda stop: None
        self._attended: list[Callable[[], list[StopEvent]]] = []
        self._unannounced: list[StopEvent] = []
        self._lock = threading.Lock()
        self._prompt = threading.Lock()  # cells of subshells share the channel on which input arrives
        self._holder: tuple[int, Runtime, int] | None = None  # thread, runtime and request of the open prompt
        self._asking: Callable[[float], bool] | None = None
        self._is_gone = False
        self._is_anybody_there = False
        shell.events.register("pre_execute", self._note_frontend)

    def _note_frontend(self) -> None:
        self._is_anybody_there |= self.may_ask()

    def watch(self, runtime: Runtime, sink_of: Callable[[StopEvent], Sink | None]) -> None:
        """Ask the user when ranks of a session stop.

        Args:
            runtime: the runtime of the session.
            sink_of: returns the sink of the cell that has stopped; None for stopped code that is not a cell.
        """
        if runtime not in self._watched:
            self._watched = [*(each for each in self._watched if not each.closed), runtime]
            self._sink_of = sink_of
            prompts = DebugPrompts(runtime)
            prompts.attend(lambda future: self.attend(runtime, future))
            runtime.watch(self._handle)
            for stop in prompts.stops():
                self._handle(stop)

    def _runtime_of(self, stop: StopEvent) -> Runtime | None:
        """Return the runtime whose rank still waits at this stop; None if there is none."""
        return next((each for each in self._watched if stop in DebugPrompts(each).stops([stop.proc])), None)

    # -- cells in the foreground

    @contextlib.contextmanager
    def foreground(self, cell: RemoteCell) -> Iterator[Callable[[RemoteCell, HeldInterrupts], None]]:
        """Ask in a cell while it runs; yields the function to call when its ranks have stopped."""
        conversation = Conversation(self, cell.output.sink)

        def attend(cell: RemoteCell, interrupts: HeldInterrupts) -> None:
            stops = cell.stops()
            if stops:  # what was printed before the prompt is read before it
                cell.output.poll(time.monotonic(), waits=False)
            conversation.poll(stops, interrupts)

        with self._attending(cell.stops):
            yield attend

    @contextlib.contextmanager
    def _attending(self, stops: Callable[[], list[StopEvent]]) -> Iterator[None]:
        """Let the caller announce some stops."""
        self._attended.append(stops)
        try:
            with self._leaving_the_prompt():
                yield
        finally:
            self._attended.remove(stops)

    # -- endpoints that are waited for

    def attend(self, runtime: Runtime, future: Future[Any]) -> None:
        """Ask while the main thread waits for a future whose ranks have stopped.

        Raises:
            KeyboardInterrupt: the prompt was interrupted.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        conversation = Conversation(self, Sink(self._shell))

        def stops() -> list[StopEvent]:
            return DebugPrompts(runtime).stops(request=future.id)

        with self._attending(stops), HeldInterrupts() as interrupts:
            while not future.done() and (stopped := stops()):
                conversation.poll(stopped, interrupts)
                if interrupts.count:
                    break
                future.wait(_POLL_S / 5)
        if interrupts.count:
            raise KeyboardInterrupt

    # -- %mesh debug

    def open(self, whole: ProcMesh, mesh: ProcMesh, selector: str) -> None:
        """Open the prompt of the ranks of a mesh that have stopped, else of a rank that has failed.

        Raises:
            UsageProblem: there is nothing to debug, or the frontend accepts no input.
            RemoteInterrupt: the prompt was interrupted.
        """
        if not self.may_ask():
            raise UsageProblem(f"%mesh debug: {_NO_STDIN}")
        if self._is_held():
            raise UsageProblem("%mesh debug: another cell is asking for input; answer there, or interrupt it")
        sink = Sink(self._shell)
        if mesh.stops():
            self._converse(mesh, None, sink)
            return
        alive = [rank for rank in whole.ranks if rank not in whole.deaths()]
        errors = _errors(whole, alive)
        found = {rank: errors[rank] for rank in mesh.ranks if rank in errors}
        if not found and mesh.stops():  # a rank has just reached its breakpoint
            self._converse(mesh, None, sink)
            return
        if not found:
            raise UsageProblem(f"%mesh debug: nothing to debug on {selector}: {_whereabouts(whole, mesh, errors)}")
        # Errors of ranks that were released or interrupted are consequences.
        causes = [rank for rank, error in found.items() if error.kind == "exception"] or list(found)
        rank = min(causes)
        others = f"; also failed: {format_ranks(set(found) - {rank})}" if len(found) > 1 else ""
        error = found[rank]
        sink.write("stdout", f"[{rank}] {error.headline} ({error.where}){others}\n")
        one = whole[[whole.ranks.index(rank)]]
        self._converse(one, one.post_mortem(error.request), sink)

    def _converse(self, mesh: ProcMesh, post_mortem: Future[Any] | None, sink: Sink) -> None:
        conversation = Conversation(self, sink)
        with self._leaving_the_prompt(), HeldInterrupts() as interrupts:
            while not (post_mortem.done() if post_mortem is not None else not mesh.stops()):
                if interrupts.count:
                    if post_mortem is not None:
                        post_mortem.interrupt()
                        post_mortem.wait(_LOOK_S)
                        raise RemoteInterrupt("left the debugger")
                    waiting = [stop.rank for stop in mesh.stops()]
                    raise RemoteInterrupt(
                        f"left the prompt; {format_ranks(waiting)} still wait{'s' * (len(waiting) == 1)} there: "
                        f"%mesh debug returns to it, %mesh interrupt {mesh.name} ends what they run"
                    )
                stops = mesh.stops()
                if post_mortem is not None:
                    stops = [stop for stop in stops if stop.request == post_mortem.id]
                conversation.poll(stops, interrupts)
                if post_mortem is not None:
                    post_mortem.wait(_POLL_S)
                else:
                    time.sleep(_POLL_S / 5)
        if post_mortem is not None:
            try:
                post_mortem.get()
            except MonarchError as error:
                raise UsageProblem(f"%mesh debug: {error}".partition("\n")[0]) from None

    # -- stops that no foreground wait attends to

    def _handle(self, event: object) -> None:
        """Queue a stop; called on the thread that leads the runtime's loop."""
        if isinstance(event, StopEvent) and event.begins:
            with self._lock:
                if event not in self._unannounced:  # it arrived while `watch` was starting
                    self._unannounced.append(event)
            self._drive(self, self._announce)

    def _announce(self, now: float) -> bool:
        """Announce where background code has stopped."""
        with self._lock:
            if self._unannounced and now - self._unannounced[-1].since < TOGETHER_S:
                return True
            unannounced, self._unannounced = self._unannounced, []
        known = {stop for stops in list(self._attended) for stop in stops()}
        unannounced = [stop for stop in unannounced if stop not in known and stop.description != "a post-mortem"]
        waiting = [stop for stop in unannounced if self._runtime_of(stop) is not None]
        for text, stops in grouped(waiting, _describe_place):
            if not self._is_anybody_there:
                self.skip_breakpoints(stops)
                continue
            mesh, rank = stops[0].mesh, stops[0].rank
            line = f"{mesh}{label(stops)} stopped at breakpoint: {text}; %mesh debug {mesh}[{rank}] opens the prompt\n"
            sink = self._sink_of(stops[0])
            if sink is not None:
                sink.write("stdout", line)
            else:
                print(printable(line), end="", flush=True)
        return False

    # -- asking

    def may_ask(self) -> bool:
        """Whether the frontend accepts input in the running cell; True if it has not said."""
        kernel = getattr(self._shell, "kernel", None)
        return bool(getattr(kernel, "_allow_stdin", True))

    def ask(self, prompt: str, stop: StopEvent, interrupts: HeldInterrupts) -> str | None:
        """Ask for a line of input.

        Returns:
            The line, which ends in a newline, or is empty at the end of the input. None if the prompt was interrupted, the
            rank no longer waits for the line, or another cell asks.

        Raises:
            StdinNotImplementedError: the frontend accepts no input.
        """
        runtime = self._runtime_of(stop)
        if runtime is None or self._is_held() or not self._prompt.acquire(blocking=False):
            return None
        try:
            self._holder = threading.get_ident(), runtime, stop.request
            return self._ask(prompt, stop, interrupts)
        finally:
            self._prompt.release()

    def _is_held(self) -> bool:
        """Whether a cell of another thread has its prompt open, or is between two prompts."""
        thread, runtime, request = self._holder or (0, None, 0)
        return (
            runtime is not None
            and thread != threading.get_ident()
            and bool(DebugPrompts(runtime).stops(request=request))
        )

    @contextlib.contextmanager
    def _leaving_the_prompt(self) -> Iterator[None]:
        """Release the prompt for other cells at the end."""
        try:
            yield
        finally:
            if self._holder is not None and self._holder[0] == threading.get_ident():
                self._holder = None

    def _ask(self, prompt: str, stop: StopEvent, interrupts: HeldInterrupts) -> str | None:
        main = threading.current_thread() is threading.main_thread()
        seen = interrupts.count

        def still_there(now: float) -> bool:
            with self._lock:
                if self._asking is not still_there:
                    return False
                if self._runtime_of(stop) is not None:
                    return True
                self._asking, self._is_gone = None, True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return False

        self._is_gone = False
        line = ""
        try:
            with interrupts.let_through():
                if main:
                    self._asking = still_there
                    self._drive(still_there, still_there)
                try:
                    line = input(prompt) + "\n"
                except EOFError:
                    pass
                finally:
                    self._stop_looking()
        except KeyboardInterrupt:
            self._stop_looking()
            # If the rank is gone, the signal was ours.
            interrupts.count = seen if self._is_gone else max(interrupts.count, seen + 1)
            return None
        return None if self._is_gone else line

    def _stop_looking(self) -> None:
        with self._lock:
            self._asking = None

    def skip_breakpoints(self, stops: Iterable[StopEvent]) -> None:
        """Let stopped code continue without asking the user."""
        for stop in stops:
            if (runtime := self._runtime_of(stop)) is not None:
                DebugPrompts(runtime).skip(stop, _NO_STDIN)

    def answer(self, stop: StopEvent, line: str) -> None:
        """Send a rank the line that it waits for."""
        if (runtime := self._runtime_of(stop)) is not None:
            DebugPrompts(runtime).answer(stop, line)


def _describe_place(stop: StopEvent) -> str:
    """Describe where code stopped, and what runs there unless the place already says so."""
    return stop.where if stop.where.startswith(f"{stop.description},") else f"{stop.where} ({stop.description})"


def _errors(mesh: ProcMesh, ranks: Sequence[int]) -> dict[int, KeptError]:
    """Return the latest error that each rank keeps for a post-mortem, by rank; without ranks that do not answer in time."""
    futures = {rank: mesh.look(rank, ListErrors) for rank in ranks}
    deadline = time.monotonic() + _LOOK_S
    found: dict[int, KeptError] = {}
    for rank, future in futures.items():
        if future.wait(max(0.0, deadline - time.monotonic())) and (errors := future.get()):
            found[rank] = errors[-1]
    return found


def _whereabouts(whole: ProcMesh, mesh: ProcMesh, errors: dict[int, KeptError]) -> str:
    """Say which other ranks can be debugged."""
    name = whole.name
    dead = sorted(set(mesh.ranks) & set(whole.deaths()))
    stopped = [stop.rank for stop in whole.stops()]
    why = f"{format_ranks(dead)} {'is' if len(dead) == 1 else 'are'} dead" if dead else "no rank has failed or stopped"
    if len(mesh.ranks) < len(whole.ranks):
        why = why.replace("no rank has", "its last cell or call has not") if len(mesh.ranks) == 1 else why
    if stopped:
        return f"{why}; {format_ranks(stopped)} stopped: %mesh debug {name}[{stopped[0]}]"
    if errors:
        return f"{why}; {format_ranks(errors)} failed: %mesh debug {name}[{min(errors)}]"
    return why if dead else f"{why} since its last cell or call"
