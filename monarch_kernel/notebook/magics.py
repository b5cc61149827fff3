"""``%mesh``, ``%%remote`` and ``%remote``, for our kernel and for any other IPython (``%load_ext monarch_kernel``)."""

from __future__ import annotations

import ast
import atexit
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand

from monarch_kernel.actor.meshes import CellResult
from monarch_kernel.errors import LaunchError, MonarchError, RanksError, format_ranks
from monarch_kernel.mesh import ValueMesh
from monarch_kernel.notebook.background import BackgroundCell
from monarch_kernel.notebook.cells import RemoteCell
from monarch_kernel.notebook.commands import MeshCommands
from monarch_kernel.notebook.complete import make_matcher
from monarch_kernel.notebook.display import Sink, show_bundles
from monarch_kernel.notebook.hints import local_hint, remote_hints, show_with_hint
from monarch_kernel.notebook.meshes import Entry, Meshes, root_name
from monarch_kernel.notebook.names import RemoteNames
from monarch_kernel.notebook.options import (
    RemoteOptions,
    UsageProblem,
    parse_remote,
    tokens,
)
from monarch_kernel.ui.errors import error_block

__all__ = ["MeshMagics", "load", "unload"]

_EXTENSION = "_monarch_kernel"


@magics_class
class MeshMagics(Magics):
    """The magics, and the meshes they bring up."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.meshes = Meshes()
        self.names = RemoteNames(self.meshes, shell.user_ns)
        self._commands = MeshCommands(shell, self.meshes)

    @no_var_expand
    @line_magic
    def mesh(self, line: str) -> None:
        """Bring meshes of ranks up and down, and look at them.

        ::

            %mesh                            the meshes that are up
            %mesh up [NAME] -n N             bring up N ranks (processes) on this machine; NAME becomes a variable
                     --gpus N                ranks with a GPU each
                     --device auto|cuda|cpu  auto: GPUs where there are enough (default)
                     --axes dp=2,tp=4        name the axes; else the one axis is gpus
                     --env K=V               add to the ranks' environment; may be repeated
                     --on local              who provides the machines
            %mesh show [NAME]                the live view
            %mesh interrupt NAME             interrupt what the ranks run; their state is kept
            %mesh down NAME | --all          end the ranks
        """
        with _UsageErrors():
            self._commands.run(line)

    @no_var_expand
    @line_cell_magic
    def remote(self, line: str, cell: str | None = None) -> BackgroundCell | None:
        """Run a cell, or evaluate an expression, on the ranks of a mesh.

        ::

            %%remote [SELECTOR] [--out NAME] [--background] [--raw] [--timeout S]
            code

            %remote [SELECTOR] EXPRESSION

        SELECTOR is a mesh or a slice of one: ``trainers``, ``trainers[0]``, ``trainers[0:4]``,
        ``trainers.slice(dp=0)``; left out, it is the mesh last brought up. The ranks' variables ``rank``,
        ``world_size``, ``local_rank``, ``device`` and ``mesh`` (a DeviceMesh) are there, and so is a process group.

        --out NAME    NAME becomes a ValueMesh of the value of the cell's last expression on every rank
        --background  return at once, with a handle: .state, .result(), .cancel(), await; --out names it
        --raw         show each rank's lines for themselves, equal ones too
        --timeout S   interrupt the ranks after S seconds
        """
        with _UsageErrors():
            if cell is None:
                self._remote_line(line)
                return None
            options = parse_remote(line)
            entry, mesh = self.meshes.select(options.selector, self.shell.user_ns)
            # One line down, so that line numbers in errors are those of the notebook's cell, with its %%remote line.
            return self._run(entry, mesh, "\n" + cell, options)

    def _remote_line(self, line: str) -> None:
        words = line.split(None, 1)
        if not words:
            raise UsageProblem("%remote: write an expression, such as %remote trainers[0:2] torch.cuda.mem_get_info()")
        first = tokens(line)[0]
        name = root_name(first)
        selector = ""
        if self.meshes.is_mesh(name, self.shell.user_ns):
            selector, line = first, line.strip()[len(first) :]
        entry, mesh = self.meshes.select(selector, self.shell.user_ns)
        if not line.strip():
            raise UsageProblem(f"%remote: write an expression after {first}")
        self._run(entry, mesh, line.strip(), RemoteOptions(selector))

    def _run(self, entry: Entry, mesh: Any, code: str, options: RemoteOptions) -> BackgroundCell | None:
        self._check_syntax(code)
        cell = self.meshes.cell(
            entry,
            mesh,
            code,
            Sink(self.shell),
            number=self._cell_number(),
            want_value=bool(options.out),
            raw=options.raw,
            timeout_s=options.timeout_s,
        )
        if options.background:
            values = _values if options.out else _nothing
            handle = BackgroundCell(cell, self.meshes.background, values, self._show_end)
            if options.out:
                self.shell.user_ns[options.out] = handle
            return handle
        try:
            results = self.meshes.run(entry, cell)
        except RanksError as error:
            if options.out and all(report.etype == "PayloadError" for report in error.reports.values()):
                raise UsageProblem(
                    f"%%remote: --out {options.out}: on {format_ranks(error.ranks)} {error.primary.message}; the cell has "
                    "run: end it with a value that can be sent (numbers, arrays, tensors), or drop --out"
                ) from None
            raise
        if options.out:
            self.shell.user_ns[options.out] = _values(results)
        _show_values(cell, results)
        return None

    def _show_end(self, cell: RemoteCell) -> None:
        """Show what a cell in the background came to, where it was started."""
        try:
            _show_values(cell, cell.result())
        except (MonarchError, KeyboardInterrupt) as error:
            lines = _error_lines(self.shell, error)
            cell.output.sink.error(type(error).__name__, str(error), lines)
        self.meshes.background.follow(cell.output)

    def _cell_number(self) -> int:
        """Number of the cell that runs, as the notebook shows it; ``execution_count`` may be one ahead already."""
        history = self.shell.history_manager
        return max(1, len(history.input_hist_parsed) - 1) if history is not None else self.shell.execution_count

    def _check_syntax(self, code: str) -> None:
        """Find a syntax error before anything is sent."""
        try:
            source = self.shell.transform_cell(code)
            compile(source, "<remote cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        except SyntaxError as error:
            line = f": {error.text.strip()!r}" if error.text and error.text.strip() else ""
            blank = len(code) - len(code.lstrip("\n"))  # IPython takes blank lines at the top away
            where = f"line {error.lineno + blank}" if error.lineno else "somewhere"
            raise UsageProblem(f"{type(error).__name__} in {where}: {error.msg}{line}; nothing was sent") from None


def _values(results: ValueMesh[CellResult]) -> ValueMesh[Any]:
    return ValueMesh(results.extent, [result.value for result in results.values()])


def _nothing(results: ValueMesh[CellResult]) -> None:
    return None


def _show_values(cell: RemoteCell, results: ValueMesh[CellResult]) -> None:
    bundles = [(rank, result.bundle) for rank, result in zip(cell.mesh.ranks, results.values(), strict=True)]
    show_bundles(cell.output.sink, bundles)


class _UsageErrors:
    """Turns our one-line problems into IPython's, which are shown without a traceback."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, (UsageProblem, LaunchError)):
            raise UsageError(str(error)) from None


def _show_error(
    shell: InteractiveShell,
    kind: type[MonarchError | NameError],
    error: MonarchError | NameError,
    tb: TracebackType,
    tb_offset: int | None = None,
) -> list[str]:
    """Show an error of ours in its own words, one of ranks as a block per distinct error, and the local line that met it.

    A name that is not defined is looked for on the other side, too.
    """
    if isinstance(error, NameError):
        magics: MeshMagics = getattr(shell, _EXTENSION)[0]
        show_with_hint(shell, kind, error, tb, local_hint(error, magics.meshes))
        return []
    lines = _error_lines(shell, error)
    local = [frame for frame in traceback.extract_tb(tb) if _is_local_code(frame.filename)]
    if local and local[-1].line and not local[-1].line.startswith("get_ipython()"):
        lines[1:1] = [f"    at line {local[-1].lineno} of this cell: {local[-1].line}"]
    shell._showtraceback(kind, error, lines)
    return lines


def _error_lines(shell: InteractiveShell, error: BaseException) -> list[str]:
    if isinstance(error, RanksError):
        magics: MeshMagics = getattr(shell, _EXTENSION)[0]
        hints = remote_hints(error, magics.meshes, shell.user_ns)
        lines = error_block(error, color=getattr(shell, "colors", "nocolor").lower() != "nocolor")
        return [*lines, "", *hints] if hints else lines
    return f"{type(error).__name__}: {error}".split("\n")


def _is_local_code(filename: str) -> bool:
    return "ipykernel_" in filename or filename.startswith(("<ipython-input", "Cell In"))


def load(shell: InteractiveShell) -> MeshMagics:
    """Add the magics to a shell."""
    magics = MeshMagics(shell)
    shell.register_magics(magics)
    shell.set_custom_exc((MonarchError, NameError), _show_error)
    matcher = make_matcher(magics.meshes, magics.names)
    shell.Completer.custom_matchers.append(matcher)
    atexit.register(magics.meshes.close)
    setattr(shell, _EXTENSION, (magics, matcher))
    return magics


def unload(shell: InteractiveShell) -> None:
    """Take the magics away, and end the meshes."""
    magics, matcher = getattr(shell, _EXTENSION, (None, None))
    if magics is None:
        return
    delattr(shell, _EXTENSION)
    for entry in magics.meshes:
        if shell.user_ns.get(entry.mesh.name) is entry.mesh:
            del shell.user_ns[entry.mesh.name]
    close: Callable[[], None] = magics.meshes.close
    atexit.unregister(close)
    close()
    shell.Completer.custom_matchers.remove(matcher)
    shell.set_custom_exc((), None)
    for kind, name in (("line", "mesh"), ("line", "remote"), ("cell", "remote")):
        shell.magics_manager.magics[kind].pop(name, None)
