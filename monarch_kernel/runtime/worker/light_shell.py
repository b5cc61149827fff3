"""Runs the cells of a light rank as plain Python, without IPython, until a cell needs that.

Theory of operation. IPython takes ten megabytes and a twentieth of a second of each rank. This is nothing beside torch, but
far too much for a thousand ranks that have neither. Most cells are plain Python and need none of it. So a cell is
compiled as such. If that fails (magics, ``!cmd``, ``await``), or if the cell names something that IPython provides, a
`CellShell` takes over in the same namespace, for this cell and all later ones. It also takes over to show a value that is more
than a number or a short text. A cell runs once, in one of the two, and its effects are the same.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
import re
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from monarch_kernel.errors import Failure
from monarch_kernel.runtime.diagnostics.earlier_classes import classes_to_be_redefined, instances_text
from monarch_kernel.runtime.worker.cell_outcome import (
    CellOutcome,
    cell_failure,
    followed_by_semicolon,
    forget_last_error,
)

if TYPE_CHECKING:
    from monarch_kernel.runtime.worker.cell_shell import CellShell
    from monarch_kernel.runtime.worker.ipython_shell import Publish

__all__ = ["LightShell"]

_KEPT_SOURCES = 500
_MAX_SHOWN = 200
_PLAIN = (bool, int, float, complex, str, bytes)
_OF_IPYTHON = re.compile(r"i?python|display|input|getpass|matplotlib|exit|quit|_\b|\bIn\b|\bOut\b", re.IGNORECASE)
"""Matches names that IPython provides or changes; a match in another sense only costs memory."""


class LightShell:
    """Runs cells in one namespace, which is the rank's ``__main__``.

    Args:
        namespace: Names that cells find defined.
        publish: For displays; see `CellShell`.
        own_code: Context that holds back interrupts: a package that is imported by half can't be used.
        raise_if_interrupted: See `CellShell`.

    Attributes:
        namespace: The names that cells see and define.
        hidden: The names in it that are not the user's.
    """

    def __init__(
        self,
        namespace: Mapping[str, Any],
        publish: Publish,
        own_code: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        raise_if_interrupted: Callable[[], object] = lambda: None,
    ) -> None:
        self._main = sys.modules["__main__"] = types.ModuleType("__main__")
        self._main.__dict__["__builtins__"] = builtins
        self._publish = publish
        self._own_code = own_code
        self._raise_if_interrupted = raise_if_interrupted
        self._full: CellShell | None = None
        self._last_error: BaseException | None = None
        self._sources: dict[str, None] = {}
        self.namespace: dict[str, Any] = self._main.__dict__
        self.hidden = frozenset(self.namespace)
        self.namespace.update(namespace)

    @property
    def last_error(self) -> BaseException | None:
        """The exception that ended the last cell, with its frames, until the next cell starts."""
        return self._last_error if self._full is None else self._full.last_error

    def run(self, code: str, number: int) -> Any:
        """Run a cell; the outcome has ``value``, ``bundle`` and ``failure``."""
        if self._full is not None:
            return self._full.run(code, number)
        if self._last_error is not None:
            self._last_error = None
            forget_last_error()
        name = f"<remote cell [{number}]>"
        try:
            units, is_quiet = ([], False) if _OF_IPYTHON.search(code) else _compiled(code, name)
        except (SyntaxError, ValueError):
            units = []
        if not units or self._names_a_command(units):
            return self._take_over().run(code, number)
        self._keep(name, code)
        value: Any = None
        try:
            before = classes_to_be_redefined(units, self.namespace)
            for unit in units:
                value = eval(unit, self.namespace)
            if before and (text := instances_text(before, self.namespace)):
                print(text, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            if len(units) == 1 or value is None:
                return CellOutcome()
            if type(value) in _PLAIN and len(shown := repr(value)) <= _MAX_SHOWN:
                self.namespace["_"] = value
                return CellOutcome(value, {} if is_quiet else {"text/plain": shown})
        except BaseException as error:  # the border of the process: any exception of a cell is its outcome
            return CellOutcome(failure=self._failed(error, name))
        return self._take_over().show(value, is_quiet, name)  # only IPython knows its representations

    def close(self) -> None:
        """Undo changes to the process, as far as IPython made them."""
        if self._full is not None:
            self._full.close()

    # One cell.

    def _names_a_command(self, units: list[types.CodeType]) -> bool:
        """Whether a cell is only a name that is not defined, such as ``ls``: perhaps a magic or an alias."""
        unit = units[-1]
        alone = len(units) == 2 and not units[0].co_names and len(unit.co_names) == 1 and len(unit.co_code) <= 8
        return alone and unit.co_names[0] not in self.namespace and not hasattr(builtins, unit.co_names[0])

    def _take_over(self) -> CellShell:
        """Continue with IPython, in the same namespace."""
        with self._own_code():
            from monarch_kernel.runtime.worker.cell_shell import CellShell

            mine = frozenset(self.namespace) - self.hidden
            shown = self.namespace.pop("_", None)
            self._full = full = CellShell({}, self._publish, self._main, self._raise_if_interrupted)
            if shown is not None:
                full.show(shown, True, "")
            self.hidden = full.hidden = full.hidden - mine
        return full

    def _keep(self, name: str, text: str) -> None:
        """Keep the text of the last cells, for tracebacks and ``inspect.getsource``."""
        linecache.cache[name] = (len(text), None, [line + "\n" for line in text.rstrip("\n").split("\n")], name)
        self._sources.pop(name, None)
        self._sources[name] = None
        if len(self._sources) > _KEPT_SOURCES:
            oldest = next(iter(self._sources))
            del self._sources[oldest]
            linecache.cache.pop(oldest, None)

    def _failed(self, error: BaseException, name: str) -> Failure:
        self._last_error = error
        return cell_failure(error, name, _flush)


def _flush() -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()


def _compiled(code: str, name: str) -> tuple[list[types.CodeType], bool]:
    """Compile a cell; returns units to execute, the last of which gives the value, if any, and whether a ``;`` hides that."""
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    is_quiet = last is not None and followed_by_semicolon(code, last)
    units = [compile(tree, name, "exec", dont_inherit=True)]
    if isinstance(last, ast.Expr):
        units.append(compile(ast.Expression(last.value), name, "eval", dont_inherit=True))
    return units, is_quiet
