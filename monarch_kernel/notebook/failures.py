"""How a notebook shows errors of ours: when they are raised, when they come late, and when ``%tb`` shows the last one again."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from functools import partial
from types import TracebackType

from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.errors import MonarchError, RanksError
from monarch_kernel.notebook.hints import local_hint, remote_hints
from monarch_kernel.notebook.meshes import Meshes
from monarch_kernel.running.display import Sink
from monarch_kernel.ui.errors import error_block

__all__ = ["Failures"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Failures:
    """Shows errors in our own words: one of ranks as a block per distinct error, each with what helps against it."""

    def __init__(self, shell: InteractiveShell, meshes: Meshes) -> None:
        self._shell = shell
        self._meshes = meshes

    def install(self) -> None:
        """From now on these are shown here: errors of ours, names that may be on the other side, and interrupts."""
        self._shell.set_custom_exc((MonarchError, NameError, KeyboardInterrupt), self._show_raised)

    def remove(self) -> None:
        """Leave all errors to IPython."""
        self._shell.set_custom_exc((), None)

    def show_late(self, error: BaseException, sink: Sink) -> None:
        """Show the error of a cell in the background where that was started."""
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
        if isinstance(error, NameError):
            self._show_with_hint(error, tb)
            return []
        if isinstance(error, KeyboardInterrupt):
            _drop_own_end(tb)
            shell.showtraceback((kind, error, tb), running_compiled_code=True)
            return []
        lines = self._remember(error, tb)
        shell._showtraceback(kind, error, lines)
        return lines

    def _remember(self, error: BaseException, tb: TracebackType | None) -> list[str]:
        """Make it the error that ``%tb`` shows, and have its lines."""
        local = [frame for frame in traceback.extract_tb(tb) if _is_local_code(frame.filename)]
        place = ""
        if local and local[-1].line and not local[-1].line.startswith("get_ipython()"):
            place = f"    at line {local[-1].lineno} of this cell: {local[-1].line}"
        render = partial(self._lines, error, place)
        if isinstance(error, MonarchError):  # RemoteInterrupt has its own
            error._render_traceback_ = render  # type: ignore[attr-defined]
        # What IPython does with the errors that it shows itself.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, tb
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        return render()

    def _lines(self, error: BaseException, place: str) -> list[str]:
        hints: list[str] = []
        if isinstance(error, RanksError):
            lines = error_block(
                error,
                color=getattr(self._shell, "colors", "nocolor").lower() != "nocolor",
                verbose=self._shell.InteractiveTB.mode == "Verbose",
            )
            hints = remote_hints(error, self._meshes, self._shell.user_ns)
        else:
            lines = f"{type(error).__name__}: {error}".split("\n")
        if place:
            lines.insert(1, place)
        return [*lines, "", *hints] if hints else lines

    def _show_with_hint(self, error: NameError, tb: TracebackType) -> None:
        """Show an error as IPython does, with one more line at its end if ranks have the name."""
        shell, kind = self._shell, type(error)
        if hint := local_hint(error, self._meshes):

            def render() -> list[str]:
                return [*shell.InteractiveTB.structured_traceback(kind, error, tb), hint]

            error._render_traceback_ = render  # type: ignore[attr-defined]
        try:
            shell.showtraceback((kind, error, tb), running_compiled_code=True)
        finally:
            with suppress(AttributeError):
                del error._render_traceback_  # type: ignore[attr-defined]  # it holds the frames, by way of the traceback


def _drop_own_end(tb: TracebackType) -> None:
    """Take away what an interrupt met below the user's code: the handler of the signal, the inside of a magic of ours."""
    last = tb
    each: TracebackType | None = tb
    is_own = False
    while each is not None:
        file = each.tb_frame.f_code.co_filename
        is_own = (is_own or file.startswith(_PACKAGE)) and not _is_local_code(file)
        if not is_own:
            last = each
        each = each.tb_next
    last.tb_next = None


def _is_local_code(filename: str) -> bool:
    return "ipykernel_" in filename or filename.startswith(("<ipython-input", "Cell In"))
