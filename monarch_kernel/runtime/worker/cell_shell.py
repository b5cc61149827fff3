"""Runs the user's cells on a rank, in IPython's shell.

Theory of operation. `CellShell.run` does not use ``run_cell`` of IPython's shell. It uses the same input transformers, compiler
flags and events, but compiles a cell as one unit (so a cell with a syntax error runs nothing), returns the failure instead of
printing it, and keeps no history. A cell of plain Python goes past the transformers, which would not change it
(`runtime.worker.plain_cells`). Magics that run code (``%%capture``, ``%run``) still use ``run_cell``; if that wants to
print a traceback, the shell keeps the error, and the cell fails.

Everything here happens in the main thread of the rank. A cell is interrupted by a signal whose handler raises
KeyboardInterrupt there. If the signal arrives just before the thread blocks (in ``sleep``, in the event loop), the handler
runs only when that call returns. So the sender of an interrupt repeats the signal until the handler has run.

Invariants:

1. ``run`` always returns a `CellOutcome`, for ``SystemExit`` and ``KeyboardInterrupt`` too.
2. Between two runs only the namespace, ``_`` and the last error keep a user's object alive. The last error (for a post-mortem)
   is dropped when the next run starts. There is no output cache: it would hold tensors.
3. Printed text has left this process's buffers before ``run`` returns.
4. ``close`` cancels tasks that cells left running, then undoes all changes to the process.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import os
import sys
import types
import weakref
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from IPython.core.compilerop import PyCF_MASK
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

from monarch_kernel.runtime.diagnostics.earlier_classes import classes_to_be_redefined, instances_text
from monarch_kernel.runtime.diagnostics.unreduced_gradients import unreduced_text
from monarch_kernel.runtime.worker.cell_outcome import (
    CellOutcome,
    cell_failure,
    followed_by_semicolon,
    forget_last_error,
)
from monarch_kernel.runtime.worker.ipython_shell import Publish, RankShell, flush, prepare
from monarch_kernel.runtime.worker.plain_cells import may_be_plain

__all__ = ["CellShell"]

_CANCEL_S = 2.0
_INLINE_BACKEND = "module://matplotlib_inline.backend_inline"


class CellShell:
    """Runs cells in one namespace, which is the rank's ``__main__``; a process has at most one such shell.

    Args:
        namespace: Names that cells find defined.
        publish: Called with the data and metadata of each ``display``, figure and the like. If a cell updates or
            clears what it displayed, ``metadata["monarch_kernel"]`` says so: ``display_id``, ``update``,
            ``clear_output`` (True: with the next output).
        main: The module of earlier cells; by default a new one.
        raise_if_interrupted: Raises KeyboardInterrupt if the cell has been interrupted.

    Attributes:
        namespace: The names that cells see and define.
        hidden: The names in it that IPython put there.

    Raises:
        RuntimeError: This process has an IPython shell already.
    """

    def __init__(
        self,
        namespace: Mapping[str, Any],
        publish: Publish,
        main: types.ModuleType | None = None,
        raise_if_interrupted: Callable[[], object] = lambda: None,
    ) -> None:
        prepare(main)
        shell = InteractiveShell.instance()
        if not isinstance(shell, RankShell) or shell.emit is not None:
            raise RuntimeError("this process has an IPython shell already; cells need a separate process")
        if importlib.util.find_spec("matplotlib_inline") is not None:
            os.environ.setdefault("MPLBACKEND", _INLINE_BACKEND)
        self._shell = shell
        self.namespace: dict[str, Any] = shell.user_ns
        self.hidden = frozenset(shell.user_ns)
        self.namespace.update(namespace)
        self._shell.loop_runner = self._run_in_loop
        self._shell.open(publish)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unreduced: weakref.WeakSet[Any] = weakref.WeakSet()  # models that a cell has described
        self._last_error: BaseException | None = None
        self._raise_if_interrupted = raise_if_interrupted
        self._transformers = _transformers(shell)

    @property
    def last_error(self) -> BaseException | None:
        """The exception that ended the last cell, with its frames, until the next cell starts; None if it succeeded."""
        return self._last_error

    def run(self, code: str, number: int) -> CellOutcome:
        """Run a cell.

        Args:
            code: The user's text; may contain IPython's syntax.
            number: The number of the cell, which names its code in tracebacks: ``<remote cell [number]>``.
        """
        self._forget()
        shell = self._shell
        shell.execution_count = number
        name = f"<remote cell [{number}]>"
        try:
            value, bundle, metadata = self._run(code, name)
            flush()
        except BaseException as error:  # the border of the process: any exception of a cell is its outcome
            return self._failed(error, name)
        if shell.shown:
            return self._failed(shell.shown[0], name)
        return CellOutcome(value, bundle, None, metadata)

    def show(self, value: Any, is_quiet: bool, name: str) -> CellOutcome:
        """Return the outcome of a cell that ran elsewhere and has this value."""
        self._forget()
        shell = self._shell
        try:
            shell.remember(value)
            bundle, metadata = ({}, {}) if is_quiet else shell.represent(value)
            flush()
        except BaseException as error:  # the border of the process: the user's representations may raise anything
            return self._failed(error, name)
        if shell.shown:
            return self._failed(shell.shown[0], name)
        return CellOutcome(value, bundle, None, metadata)

    def close(self) -> None:
        """Cancel tasks that cells left running, and undo all changes to the process; the namespace stays as it is."""
        self._forget()
        if self._loop is not None:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_S))
            asyncio.set_event_loop(None)
            self._loop.close()
            self._loop = None
        self._shell.close()

    # One cell.

    def _run(self, code: str, name: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        shell = self._shell
        shell.sources.keep(name, code)
        tree = _parsed(shell, code, name) if may_be_plain(code) and _transformers(shell) == self._transformers else None
        if tree is not None:
            source = code if code.endswith("\n") else f"{code}\n"
        else:
            source = _transformed(shell, code)
            shell.sources.keep(name, _as_written(code, source))
        if code.startswith("%%"):
            shell.sources.keep("<timed exec>", code.partition("\n")[2])  # %%time names the body of its cell so
        # Only the arguments that all versions take.
        info = ExecutionInfo(code, False, False, True, None)
        info.transformed_cell = source
        result = ExecutionResult(info)
        shell.events.trigger("pre_execute")
        shell.events.trigger("pre_run_cell", info)
        try:
            self._raise_if_interrupted()  # IPython would show an exception of a hook, and go on
            units, last_is_value, quiet = _compiled(shell, source, name, tree)
            value = self._executed(units)
            if not last_is_value:
                value = None
            result.result = value
            pages = shell.take_pages()
            if value is None or quiet:
                return value, pages, {}
            if pages:
                shell.display_pub.publish(pages)
            shell.remember(value)
            bundle, metadata = shell.represent(value)
            return value, bundle, metadata
        except BaseException as error:
            result.error_in_exec = error
            raise
        finally:
            shell.last_execution_succeeded = result.success
            shell.events.trigger("post_execute")
            shell.events.trigger("post_run_cell", result)
            del result  # this frame is reachable from the error's, and must not hold the error

    def _executed(self, units: list[types.CodeType]) -> Any:
        namespace = self.namespace
        value: Any = None
        before = classes_to_be_redefined(units, namespace)
        try:
            if any(unit.co_flags & inspect.CO_COROUTINE for unit in units):
                value = self._run_in_loop(_awaited(units, namespace))
            else:
                for unit in units:
                    value = eval(unit, namespace)
        finally:
            unreduced = unreduced_text(namespace, self._unreduced)
        # Of a cell that fails in a backward, the error says more.
        texts = (instances_text(before, namespace) if before else "", unreduced)
        if text := "\n".join(filter(None, texts)):
            print(text, file=sys.stderr)
        return value

    def _run_in_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the loop that all cells share, so that tasks and connections live on from cell to cell."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        loop = self._loop
        caught: list[BaseException] = []
        task = loop.create_task(_caught(coroutine, caught))
        try:
            value = loop.run_until_complete(task)
        except KeyboardInterrupt as interrupt:
            # The signal arrived while the loop slept or ran another task. Its traceback shows the loop; that of the
            # cancelled task shows where the user's code waited. A task may refuse to be cancelled: do not wait forever.
            task.cancel()
            loop.run_until_complete(asyncio.wait({task}, timeout=_CANCEL_S))
            if caught and isinstance(caught[0], asyncio.CancelledError):
                interrupt.__traceback__ = caught.pop().__traceback__
            raise interrupt
        if caught:
            raise caught.pop()
        return value

    # Failures.

    def _failed(self, error: BaseException, name: str) -> CellOutcome:
        self._last_error = error
        return CellOutcome(failure=cell_failure(error, name, self._flush))

    def _flush(self) -> None:
        if pages := self._shell.take_pages():
            self._shell.display_pub.publish(pages)
        flush()

    def _forget(self) -> None:
        """Drop the last error, which keeps its frames and so their tensors alive."""
        self._shell.shown.clear()
        self._shell.pages.clear()
        if self._shell.last_execution_result is not None:  # of a nested cell
            self._shell.last_execution_result = None
        if self._last_error is None:
            return
        self._last_error = None
        forget_last_error()


async def _awaited(units: list[types.CodeType], namespace: dict[str, Any]) -> Any:
    value: Any = None
    for unit in units:
        value = eval(unit, namespace)
        if unit.co_flags & inspect.CO_COROUTINE:
            value = await value
    return value


async def _caught(coroutine: Coroutine[Any, Any, Any], errors: list[BaseException]) -> Any:
    """Await a coroutine, and put its error aside: a task that holds its error is in a cycle with the error's frames."""
    try:
        return await coroutine
    except BaseException as error:  # the caller that runs the loop raises it again
        errors.append(error)


# From text to code.


def _transformed(shell: RankShell, code: str) -> str:
    """Turn IPython's syntax into Python, with each line where the user wrote it."""
    source: str = shell.transform_cell(code)  # type: ignore[no-untyped-call]
    if code.isspace():
        return source
    # IPython drops empty lines at the start, which would shift the lines of tracebacks.
    return "\n" * (_leading_lines(code) - _leading_lines(source)) + source


def _leading_lines(text: str) -> int:
    return text.count("\n", 0, len(text) - len(text.lstrip()))


def _as_written(code: str, source: str) -> str:
    """Choose the text that tracebacks show: the user's own, where its lines are those of the compiled source."""
    same_lines = code.rstrip("\n").count("\n") == source.rstrip("\n").count("\n")
    return code if same_lines or source.lstrip().startswith("get_ipython().run_cell_magic(") else source


def _transformers(shell: RankShell) -> list[list[Any]]:
    """List the transformers of the text of cells; the user may add some."""
    manager: Any = shell.input_transformer_manager
    return [
        [*manager.cleanup_transforms],
        [*manager.line_transforms],
        [*manager.token_transformers],
        [*shell.input_transformers_post],
    ]


def _parse(shell: RankShell, source: str, name: str) -> ast.Module:
    compiler: Any = shell.compile
    tree: ast.Module = compile(source, name, "exec", ast.PyCF_ONLY_AST | (compiler.flags & PyCF_MASK), True)
    return tree


def _parsed(shell: RankShell, code: str, name: str) -> ast.Module | None:
    """Parse a cell that may be plain Python; return None if it is not."""
    try:
        return _parse(shell, code, name)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _compiled(
    shell: RankShell, source: str, name: str, tree: ast.Module | None
) -> tuple[list[types.CodeType], bool, bool]:
    """Compile a cell, from its tree if it is parsed already.

    Returns:
        The units to execute in order; whether the last one gives the cell's value; whether a ``;`` hides that.
    """
    compiler: Any = shell.compile
    if tree is None:
        tree = _parse(shell, source, name)
    quiet = bool(tree.body) and followed_by_semicolon(source, tree.body[-1])
    tree = shell.transform_ast(tree)  # type: ignore[no-untyped-call]
    body, mode = tree.body, shell.ast_node_interactivity
    if mode == "last_expr_or_assign" and body and (target := _assigned(body[-1])):
        body.append(ast.fix_missing_locations(ast.Expr(ast.Name(target, ast.Load()))))
    value = body.pop() if mode != "none" and body and isinstance(body[-1], ast.Expr) else None
    parts: list[tuple[ast.mod, str]] = []
    if mode == "all":
        parts.append((ast.Interactive(body), "single"))
    elif mode == "last" and value is None:
        parts += [(ast.Module(body[:-1], []), "exec"), (ast.Interactive(body[-1:]), "single")]
    else:
        parts.append((ast.Module(body, []), "exec"))
    if isinstance(value, ast.Expr):
        parts.append((ast.Expression(value.value), "eval"))
    # Compile all units before any runs: a cell with `return` in its last line must do nothing, rather than all but that.
    with compiler.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if shell.autoawait else 0):
        return [compiler(part, name, how) for part, how in parts], value is not None, quiet


def _assigned(statement: ast.stmt) -> str | None:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        targets = [statement.target]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None
