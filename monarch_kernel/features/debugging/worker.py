"""pdb on a rank: its commands run here, in the thread of the code that it debugs; its prompt is in the notebook.

Theory of operation. ``breakpoint()`` and ``pdb.set_trace()`` make a `RankPdb`, whose input and output are a `_Console`.
When pdb wants a line, the console sends `Stopped`, with all output of pdb, and the thread sleeps until the I/O thread receives
`DebugInput`. So nothing reads standard input, and the other ranks go on, or wait in a collective. The same console
serves post-mortems.

Only the controller knows whether there is a user to ask. If there is none, it answers with `SkipBreakpoint`: then the rank
prints the reason, and the code goes on. The rank itself skips only breakpoints for which it can open no prompt: in threads
that run no request of ours, in forked children, and in broadcasts, which can't be interrupted.

An interrupt is handled out of band: it finds the thread asleep in its console, and is raised there. pdb would take
KeyboardInterrupt for the end of a command; this one lets it through, because it is for the cell. Code is traced only until
it returns to its caller in this package (`RankPdb.dispatch_return`, `RankDebugger.end`), so a user does not step into our
code.
"""

from __future__ import annotations

import builtins
import getpass
import io
import itertools
import os
import pdb
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any

from monarch_kernel.base.events import KeptError
from monarch_kernel.net.transport.base import CONTROLLER
from monarch_kernel.net.wire.codec import Frame, dump, pack
from monarch_kernel.net.wire.messages import Continued, DebugInput, ListErrors, Message, Result, SkipBreakpoint, Stopped
from monarch_kernel.runtime.diagnostics.failures import is_machinery, is_of_debugger, is_user
from monarch_kernel.runtime.diagnostics.source_names import short_cell
from monarch_kernel.runtime.worker.executor import Executor, Kept
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["RankDebugger"]

_MAX_TEXT = 200_000
_COROUTINE = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR
_SKIPPED = ("monarch_kernel", "monarch_kernel.*", "IPython.*", "traitlets.*")
_REFUSED = {
    "interact": "it would read standard input, which a rank does not have; write !statement, or %%remote in a cell",
    "run": "run the cell again",
    "restart": "run the cell again",
    "debug": "use step",
}


@register
class RankDebugger:
    """Stops the user's code on this rank at a prompt; installs itself as the rank's debugger.

    Attributes:
        at_interrupt: Functions that an interrupt calls with the id of its request, on the thread that receives it.
        at_trace_end: Functions that a thread calls which this debugger has stopped tracing.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._turns = itertools.count(1)
        self._asked: dict[int, _Question] = {}
        self.at_interrupt: list[Callable[[int], object]] = []
        self.at_trace_end: list[Callable[[], object]] = []
        rank.debugger = self
        rank.extend(
            {DebugInput: self._handle_messages, SkipBreakpoint: self._handle_messages, ListErrors: self._list_errors}
        )
        rank.at_new_controller.append(self._ask_again)
        builtins.input = _no_input
        getpass.getpass = _no_getpass
        sys.breakpointhook = self._on_breakpoint
        pdb.set_trace = self._on_breakpoint
        pdb.post_mortem = self._on_post_mortem
        pdb.Pdb = type("Pdb", (RankPdb,), {"new_console": staticmethod(self._new_console)})  # type: ignore[misc,assignment]

    # -- for the rank

    def interrupt(self, id: int) -> bool:
        """Raise KeyboardInterrupt in the code of a request, if it waits at a prompt; returns whether it does."""
        for notify in self.at_interrupt:
            notify(id)
        with self._lock:
            question = self._asked.pop(id, None)
        if question is None:
            return False
        question.is_interrupted = True
        question.answered.set()
        return True

    def _handle_messages(self, message: DebugInput | SkipBreakpoint, _: Sequence[Frame]) -> None:
        """Pass a typed line to the code that waits for it."""
        with self._lock:
            question = self._asked.get(message.id)
            if question is None or question.stopped.turn != message.turn:
                return
            del self._asked[message.id]
        if isinstance(message, SkipBreakpoint):
            question.refused = message.why
        else:
            question.line = message.line
        question.answered.set()

    def _ask_again(self, open_requests: Collection[int]) -> None:
        """Report open prompts to a new controller, whose user has not seen them.

        A prompt of a request whose answer the new controller does not wait for, such as a post-mortem, ends: it would get no
        line.
        """
        with self._lock:
            asked = {id: question.stopped for id, question in self._asked.items()}
        for id in asked.keys() - set(open_requests):
            self.interrupt(id)
        for id, stop in asked.items():
            if id in open_requests:
                again = Stopped(id, stop.turn, stop.where, stop.text, stop.prompt, begins=True, written=stop.written)
                self._rank.driver.send(CONTROLLER, pack(again))

    def _list_errors(self, message: ListErrors, _: Sequence[Frame]) -> None:
        """Answer with the errors that are kept for a post-mortem, oldest first."""
        found = []
        for executor in (self._rank.main, *list(self._rank.actors.values())):
            kept = executor.kept
            if kept is not None:
                where = kept.failure.user_frame
                text = _place(where.file, where.line, where.function) if where else _raised_at(kept.error)
                found.append(KeptError(kept.request, kept.failure.kind, kept.failure.headline(), text))
        payload, frames = dump(sorted(found, key=lambda error: error.request))
        self._rank.send_answer_now(message.id, pack(Result(message.id, payload), frames))

    def post_mortem(self, executor: Executor, kept: Kept) -> None:
        """Let the user look at a failed request, until they leave the prompt."""
        assert kept.error.__traceback__ is not None
        RankPdb(console=_Console(self, executor)).look_at(kept.error.__traceback__)

    def end(self) -> None:
        """Stop tracing this thread, which leaves the user's code."""
        sys.settrace(None)
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            frame.f_trace = None
            frame = frame.f_back
        for notify in self.at_trace_end:
            notify()

    # -- for user code

    def _on_breakpoint(self, *args: Any, header: str | None = None, **options: Any) -> None:
        """Replaces ``breakpoint()`` and ``pdb.set_trace()``."""
        frame = sys._getframe(1)
        console = self._new_console()
        if console.refused:
            self.pass_over(frame, console.refused)
            return
        if header is not None:
            console.write(header + "\n")
        RankPdb(console=console).set_trace(frame)

    def _on_post_mortem(self, t: Any = None) -> None:
        """Replaces ``pdb.post_mortem()`` and ``pdb.pm()``."""
        error = sys.exc_info()[1] if t is None else t
        trace = getattr(error, "__traceback__", error)
        if not isinstance(trace, TracebackType):
            raise ValueError("A valid traceback must be passed if no exception is being handled")
        console = self._new_console()
        if console.refused:
            self.pass_over(sys._getframe(1), console.refused)
        else:
            RankPdb(console=console).look_at(trace)

    def _new_console(self) -> _Console:
        """Make a console for this thread; ``refused`` says why it can't be used."""
        if os.getpid() != self._pid:
            return _Console(self, None, "this is a child process of the rank")
        thread = threading.get_ident()
        for executor in (self._rank.main, *list(self._rank.actors.values())):
            if executor.thread_id == thread:
                return _Console(self, executor, "" if executor.current else "a broadcast can't stop; use call()")
        return _Console(self, None, "only a cell or an endpoint can stop, not a thread that it has started")

    def pass_over(self, frame: FrameType, why: str) -> None:
        """Print that code goes on where it should have stopped."""
        code = frame.f_code
        where = _place(code.co_filename, frame.f_lineno, code.co_name)
        print(f"breakpoint at {where} was skipped: {why}", file=sys.stderr)

    # -- for consoles

    def ask(self, executor: Executor, stopped: Stopped) -> _Question:
        """Send the debugger's output, and wait for a line.

        Raises:
            KeyboardInterrupt: The request must end instead.
        """
        question = _Question(stopped)
        with self._lock:
            if executor.interrupted == stopped.id:
                raise KeyboardInterrupt
            self._asked[stopped.id] = question
        try:
            self.send(stopped)
            question.answered.wait()
        finally:
            with self._lock:
                self._asked.pop(stopped.id, None)
        if question.is_interrupted:
            raise KeyboardInterrupt
        return question

    def send(self, message: Message) -> None:
        """Send the controller a message."""
        self._rank.driver.submit(pack(message))

    def next_turn(self) -> int:
        """Return a number for a prompt."""
        return next(self._turns)

    def marks(self) -> tuple[int, int]:
        """Mark the output of the program so far."""
        return self._rank.marks()[0]


class _Question:
    """A prompt that waits for its line."""

    def __init__(self, stopped: Stopped) -> None:
        self.stopped = stopped
        self.answered = threading.Event()
        self.line = ""
        self.refused = ""
        self.is_interrupted = False


class _Console(io.TextIOBase):
    """The standard input and output of a debugger.

    Attributes:
        executor: The executor whose code is debugged.
        where: The line that comes next.
        refused: Why no user can be asked; empty if perhaps one can.
    """

    def __init__(self, debugger: RankDebugger, executor: Executor | None, refused: str = "") -> None:
        self.debugger = debugger
        self.executor = executor
        self.refused = refused
        self.where = ""
        self._request = executor.current if executor is not None else 0
        self._said: list[str] = []
        self._is_running = True

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str, /) -> int:
        """Keep the debugger's output until it asks for a line."""
        self._said.append(text)
        return len(text)

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        """Ask for a line; the unfinished last line of the output is the prompt."""
        text, newline, prompt = self._take().rpartition("\n")
        if self.executor is None or self.refused:
            return "continue\n"
        debugger, begins = self.debugger, self._is_running
        stopped = Stopped(
            self._request, debugger.next_turn(), self.where, text + newline, prompt, begins, debugger.marks()
        )
        self._is_running = False
        question = debugger.ask(self.executor, stopped)
        self.refused = question.refused
        return "continue\n" if question.refused else question.line

    def leave(self) -> None:
        """Report that the code goes on."""
        said = self._take()
        if said.strip():  # no prompt will show it
            print(said.rstrip("\n"), file=sys.__stdout__)
        if not self._is_running:
            self._is_running = True
            self.debugger.send(Continued(self._request, self.debugger.marks()))

    def _take(self) -> str:
        said, self._said = "".join(self._said), []
        return said if len(said) <= _MAX_TEXT else said[:_MAX_TEXT] + "\n… the rest is left out\n"


_Pdb = pdb.Pdb


class RankPdb(_Pdb):
    """pdb that talks through a console, hides this package's code, and lets interrupts through."""

    new_console: Callable[[], _Console]

    def __init__(self, *streams: Any, console: _Console | None = None, **options: Any) -> None:
        self.console = console or self.new_console()
        stream: Any = self.console
        super().__init__(stdin=stream, stdout=stream, skip=_SKIPPED, nosigint=True)
        self._outermost: FrameType | None = None

    def look_at(self, trace: TracebackType) -> None:
        """Open a prompt where an error was raised, until the user leaves it."""
        self.reset()
        self.interaction(None, trace)
        self.console.leave()

    def set_trace(self, frame: FrameType | None = None, **options: Any) -> None:
        """Stop at the next line of a frame; by default the caller's."""
        frame = frame or sys._getframe(1)
        self._outermost = frame
        while (above := self._outermost.f_back) is not None and not is_machinery(above.f_code.co_filename):
            self._outermost = above
        if self.console.executor is not None:
            self.console.executor.is_traced = True
        super().set_trace(frame, **options)

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        """Leave when the outermost frame returns: its caller is not the user's code."""
        again = super().dispatch_return(frame, arg)
        if frame is self._outermost and not frame.f_code.co_flags & _COROUTINE:
            self.set_continue()
            sys.settrace(None)
            return None
        return again

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """Stop where a function returns."""
        try:
            super().user_return(frame, return_value)
        finally:  # in a cell, pdb's own variable would appear among the user's
            frame.f_globals.pop("__return__", None)

    def user_exception(self, frame: FrameType, exc_info: Any) -> None:
        """Stop where an exception passes."""
        try:
            super().user_exception(frame, exc_info)
        finally:
            frame.f_globals.pop("__exception__", None)

    def setup(self, f: FrameType | None, tb: TracebackType | None) -> Any:
        """Select a frame, or a traceback."""
        done = super().setup(f, tb)
        self.console.where = _where(self.stack[: self.curindex + 1])
        return done

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """The stack from the user's own code to the call of the debugger."""
        stack, index = super().get_stack(f, t)
        if f is None:  # code that was interrupted at a prompt failed there
            stack = _without_debugger(stack) or stack
            index = min(index, len(stack) - 1)
        first = next((i for i, (frame, _) in enumerate(stack) if _is_users(frame)), 0)
        first = min(first, index)
        return stack[first:], index - first

    def set_continue(self) -> None:
        """Continue."""
        super().set_continue()
        self.console.leave()

    def set_quit(self) -> None:
        """Raise BdbQuit in the code that is debugged."""
        super().set_quit()
        self.console.leave()

    def _cmdloop(self) -> None:
        self.cmdloop()  # the base class takes KeyboardInterrupt for the end of a command

    def do_quit(self, arg: str) -> bool:
        """Quit: the cell or call fails with BdbQuit."""
        self._user_requested_quit = True
        self.set_quit()
        return True

    do_q = do_exit = do_quit

    def onecmd(self, line: str) -> bool:
        """Run a command."""
        command = self.parseline(line)[0] or ""
        if command in _REFUSED:
            self.error(f"{command} is not available on a rank: {_REFUSED[command]}")
            return False
        if self.console.refused and self.curframe is not None:
            self.console.debugger.pass_over(self.curframe, self.console.refused)
        return super().onecmd(line)


def _no_input(prompt: object = "", /) -> str:
    """Replace `input` even if no cell has run and IPython is not in use."""
    from monarch_kernel.runtime.worker.ipython_shell import no_input

    return no_input(prompt)


def _no_getpass(*args: Any, **options: Any) -> str:
    from monarch_kernel.runtime.worker.ipython_shell import no_getpass

    return no_getpass(*args, **options)


def _is_users(frame: FrameType) -> bool:
    return not is_machinery(frame.f_code.co_filename) and is_user(frame)


def _without_debugger(steps: Iterable[tuple[FrameType, int]]) -> list[tuple[FrameType, int]]:
    return list(itertools.takewhile(lambda step: not is_of_debugger(step[0]), steps))


def _raised_at(error: BaseException) -> str:
    steps = _without_debugger(traceback.walk_tb(error.__traceback__))
    return _where(steps) if steps else ""


def _where(stack: Sequence[tuple[FrameType, int]]) -> str:
    """The innermost line of the user's own code."""
    frame, line = next((step for step in reversed(stack) if _is_users(step[0])), stack[-1])
    return _place(frame.f_code.co_filename, line, frame.f_code.co_name)


def _place(file: str, line: int, function: str) -> str:
    return f"{os.path.basename(short_cell(file))}, line {line}" + (
        f", in {function}" if not function.startswith("<") else ""
    )
