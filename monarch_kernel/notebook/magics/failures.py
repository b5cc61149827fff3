"""Shows our errors in the notebook: raised ones, late ones of background cells, and the last one again for ``%tb``."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from functools import partial
from types import TracebackType

from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.base.location import PACKAGE
from monarch_kernel.errors import MonarchError, RanksError
from monarch_kernel.notebook.cells.cell_names import located, with_cell_names
from monarch_kernel.notebook.cells.display import Sink
from monarch_kernel.notebook.magics.meshes import Meshes
from monarch_kernel.notebook.magics.name_hints import gpu_hint, heal_hint, local_hint, remote_hints, without_heal
from monarch_kernel.notebook.magics.unhandled import UnhandledFailures
from monarch_kernel.notebook.view.errors import error_block
from monarch_kernel.runtime.worker.slow_requests import PLACES, Places

__all__ = ["Failures"]

_MISUSE = (AttributeError, IndexError, KeyError, NameError, SyntaxError, TimeoutError, TypeError, ValueError)
"""Built-in errors that our functions raise to refuse a call."""

_OUTSIDE = (
    "KeyboardInterrupt: the interrupt came before the code of this cell, between two of its statements, or in a magic"
)

_IPYTHON = os.sep + os.path.join("IPython", "core") + os.sep


class Failures:
    """Shows our errors without IPython's traceback: those of ranks as a block per distinct error, with hints."""

    def __init__(self, shell: InteractiveShell, meshes: Meshes, unhandled: UnhandledFailures) -> None:
        self._shell = shell
        self._meshes = meshes
        self._unhandled = unhandled

    def install(self) -> None:
        """Start to show our errors, refused calls, missing names and interrupts."""
        PLACES.located = located
        self._shell.set_custom_exc((MonarchError, *_MISUSE, KeyboardInterrupt), self._show_raised)

    def remove(self) -> None:
        """Let IPython show all errors again."""
        PLACES.located = Places().located
        self._shell.set_custom_exc((), None)

    def show_late(self, error: BaseException, sink: Sink) -> None:
        """Show the error of a background cell below the cell that started it."""
        lines = self._remember(error, error.__traceback__)
        sink.error(type(error).__name__, str(error), lines)

    def _show_raised(
        self,
        shell: InteractiveShell,
        kind: type[BaseException],
        error: BaseException,
        tb: TracebackType,
        tb_offset: int | None = None,
    ) -> list[str]:
        try:
            return self._show_one(shell, kind, error, tb)
        except KeyboardInterrupt:  # IPython would disable a handler that raises
            print("\nKeyboardInterrupt", file=sys.stderr)
            return []

    def _show_one(
        self, shell: InteractiveShell, kind: type[BaseException], error: BaseException, tb: TracebackType
    ) -> list[str]:
        if isinstance(error, KeyboardInterrupt):
            _drop_own_end(tb)
            if type(error) is KeyboardInterrupt and not any(_is_shown(frame) for frame in traceback.extract_tb(tb)):
                error._render_traceback_ = lambda: [_OUTSIDE]  # type: ignore[attr-defined]
            shell.showtraceback((kind, error, tb), running_compiled_code=True)
            return []
        if not isinstance(error, MonarchError):
            self._show_plainly(error, tb)
            return []
        lines = self._remember(error, tb)
        shell._showtraceback(kind, error, lines)
        return lines

    def _remember(self, error: BaseException, tb: TracebackType | None) -> list[str]:
        """Make this the error that ``%tb`` shows, and return its lines."""
        local = [frame for frame in traceback.extract_tb(tb) if _is_local_code(frame.filename)]
        place = ""
        if local and local[-1].line and not local[-1].line.startswith("get_ipython()"):
            place = f"    at line {local[-1].lineno} of this cell: {local[-1].line}"
        render = partial(self._lines, error, place)
        if isinstance(error, MonarchError):  # RemoteInterrupt has its own renderer
            error._render_traceback_ = render  # type: ignore[attr-defined]
        # As IPython does for the errors that it shows itself.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, tb
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        return render()

    def _lines(self, error: BaseException, place: str) -> list[str]:
        hints: list[str] = []
        if isinstance(error, RanksError):
            for report in error.reports.values():
                self._unhandled.note_shown(report)
            healing = heal_hint(error.reports.values(), self._meshes)
            lines = error_block(
                _with_cell_names(error, without_heal(error.what) if healing else error.what),
                color=getattr(self._shell, "colors", "nocolor").lower() != "nocolor",
                verbose=self._shell.InteractiveTB.mode == "Verbose",
            )
            hints = remote_hints(error, self._meshes, self._shell.user_ns)
            if healing:
                hints.append(healing)
            if hint := gpu_hint(error.reports.values(), self._meshes):
                hints.append(hint)
        else:
            lines = f"{type(error).__name__}: {error}".split("\n")
        if place:
            lines.insert(1, place)
        return [*lines, "", *hints] if hints else lines

    def _show_plainly(self, error: BaseException, tb: TracebackType) -> None:
        """Show an error as IPython does, down to the line that called us; with a hint if ranks have the missing name."""
        shell, kind = self._shell, type(error)
        hint = local_hint(error, self._meshes) if isinstance(error, NameError) else ""
        shown = _without_our_frames(tb)
        if (
            isinstance(error, SyntaxError) and shown is not tb
        ):  # IPython has a special display for these, with all frames
            lines = shell.InteractiveTB.structured_traceback(kind, error, shown)
            shell._showtraceback(kind, error, lines)
            return
        if hint or shown is not tb:

            def render() -> list[str]:
                lines: list[str] = shell.InteractiveTB.structured_traceback(kind, error, shown)
                return [*lines, hint] if hint else lines

            error._render_traceback_ = render  # type: ignore[attr-defined]
        try:
            shell.showtraceback((kind, error, tb), running_compiled_code=True)
        finally:
            with suppress(AttributeError):
                del error._render_traceback_  # type: ignore[attr-defined]  # it keeps the frames alive through the traceback


def _with_cell_names(error: RanksError, what: str) -> RanksError:
    """Return the error with frames that name the notebook's local cells by their numbers, and another first line."""
    reports = {point: with_cell_names(failure) for point, failure in error.reports.items()}
    return type(error)(what, reports, error.results)


def _without_our_frames(tb: TracebackType) -> TracebackType:
    """Cut a traceback that ends in our code after the line that called us; the message says why we refuse the call.

    Such an error of a magic is a bug of ours, and its whole traceback is shown.
    """
    steps = []
    step: TracebackType | None = tb
    while step is not None:
        steps.append(step)
        step = step.tb_next
    files = [each.tb_frame.f_code.co_filename for each in steps]
    theirs = [i for i, file in enumerate(files) if not file.startswith(PACKAGE)]
    if not theirs or theirs[-1] == len(steps) - 1 or _IPYTHON in files[theirs[-1]]:
        return tb
    shown = None
    for each in reversed(steps[: theirs[-1] + 1]):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown or tb


def _drop_own_end(tb: TracebackType) -> None:
    """Remove the frames of an interrupt below the user's code: the signal handler, and the inside of our magics."""
    last = tb
    each: TracebackType | None = tb
    is_own = False
    while each is not None:
        file = each.tb_frame.f_code.co_filename
        is_own = (is_own or file.startswith(PACKAGE)) and not _is_local_code(file)
        if not is_own:
            last = each
        each = each.tb_next
    last.tb_next = None


def _is_shown(frame: traceback.FrameSummary) -> bool:
    """Whether a frame of an interrupt says where the user's code was: not the call of a cell's magic."""
    is_magic = (frame.line or "").startswith("get_ipython().run_cell_magic(")
    return _is_local_code(frame.filename) and not is_magic


def _is_local_code(filename: str) -> bool:
    return "ipykernel_" in filename or filename.startswith(("<ipython-input", "Cell In"))
