"""The magics ``%mesh``, ``%%remote`` and ``%autoremote``, for our kernel and any IPython (``%load_ext monarch_kernel``)."""

from __future__ import annotations

import ast
import atexit
import errno
import os
import re
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class, no_var_expand

from monarch_kernel.base.directories import temporary_directory
from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.base.own_log import ForwardingHandler, take_log
from monarch_kernel.errors import AttachError, LaunchError, MonarchError, RanksError, format_ranks
from monarch_kernel.net.wire.shared_classes import CellClasses
from monarch_kernel.notebook.cells.background import BackgroundCell
from monarch_kernel.notebook.cells.cell import RemoteCell
from monarch_kernel.notebook.cells.display import Sink
from monarch_kernel.notebook.cells.held_interrupts import HeldInterrupts
from monarch_kernel.notebook.magics.attach import DetachedMeshes, default_root
from monarch_kernel.notebook.magics.autoremote import CellTransformer, share_classes
from monarch_kernel.notebook.magics.commands import MeshCommands
from monarch_kernel.notebook.magics.compat_spellings import CompatMagics
from monarch_kernel.notebook.magics.complete import make_matcher
from monarch_kernel.notebook.magics.earlier_instances import EarlierInstances
from monarch_kernel.notebook.magics.failures import Failures
from monarch_kernel.notebook.magics.integrations import integrations
from monarch_kernel.notebook.magics.mesh_entry import MeshEntry
from monarch_kernel.notebook.magics.mesh_views import MeshViewFormats, TablesAtRest
from monarch_kernel.notebook.magics.meshes import Meshes, cell_number
from monarch_kernel.notebook.magics.remote_names import RemoteNames
from monarch_kernel.notebook.magics.unhandled import UnhandledFailures
from monarch_kernel.notebook.syntax.lines import UsageProblem, hint, tokens
from monarch_kernel.notebook.syntax.options import RemoteOptions, parse_remote, split_options
from monarch_kernel.notebook.syntax.selector import root_name
from monarch_kernel.notebook.syntax.usage import documented, mesh_help, options_help
from monarch_kernel.runtime.rpc.gather import CellResult

__all__ = ["MeshMagics", "load", "unload"]

_EXTENSION = "_monarch_kernel"
_OF_CELLS = re.compile(r"\s*%%(remote|local|autoremote)(?![\w.])")
_LINE_NUMBER = re.compile(r"\b((?:on|at) line )(\d+)\b")
"""Matches the number of another line in a message of Python's compiler, such as `after 'for' statement on line 1`."""

_REMOTE_USAGE = options_help("%%remote") + "\n\n%remote [SELECTOR] [--OPTION]... EXPRESSION"
_AUTOREMOTE_USAGE = options_help("%autoremote") + "\n\n%autoremote off\n%autoremote"


@magics_class
class MeshMagics(Magics):
    """The magics and the meshes that they bring up."""

    shell: InteractiveShell
    give_log_back: Callable[[], None]

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.meshes = Meshes(shell, DetachedMeshes(default_root(os.environ, temporary_directory())))
        self.transformer = CellTransformer(shell)
        self.view_formats = MeshViewFormats(shell)
        self.tables_at_rest = TablesAtRest(shell, self.meshes)
        self.earlier_instances = EarlierInstances(shell, self.meshes)
        self.compat = CompatMagics(shell, self.meshes)
        self.unhandled = UnhandledFailures(shell, self.meshes)
        self.failures = Failures(shell, self.meshes, self.unhandled)
        self.names = RemoteNames(self.meshes, shell.user_ns, lambda: self.transformer.mode)
        self._commands = MeshCommands(shell, self.meshes, self._show_end, self._run)
        self.meshes.command = self._commands.answer

    @no_var_expand
    @line_magic
    @documented(mesh_help())
    def mesh(self, line: str) -> None:
        """Bring up, inspect and end meshes of ranks."""
        with _UsageErrors():
            self._commands.run(line)

    @no_var_expand
    @line_cell_magic
    @documented(_REMOTE_USAGE)
    def remote(self, line: str, cell: str | None = None) -> BackgroundCell | None:
        """Run a cell, or evaluate an expression, on the ranks of a mesh.

        The ranks have the variables ``rank``, ``world_size``, ``local_rank``, ``device`` and ``mesh`` (a DeviceMesh), and a
        process group. With --background the cell returns a handle immediately: .state, .result(), .cancel(), await.
        """
        with _UsageErrors():
            if _asks_for_help(line):
                print(_REMOTE_USAGE)
                return None
            if cell is None:
                return self._remote_line(line)
            options = parse_remote(line)
            if options.local:  # on the first line, `CellTransformer` handles it
                raise UsageProblem("%%remote --local must be the first line of a cell")
            entry, mesh = self.meshes.select(options.selector, self.shell.user_ns, options.targets)
            # The newline stands for the %%remote line, so that line numbers in errors are those of the notebook's cell.
            code = "\n" + cell
            if self.transformer.takes_local_call(line, cell):
                share_classes(self.shell, CellClasses(cell_number(self.shell), code, self.shell.user_ns))
            return self._run(entry, mesh, code, options)

    @no_var_expand
    @line_cell_magic
    @documented(_AUTOREMOTE_USAGE)
    def autoremote(self, line: str, cell: str | None = None) -> BackgroundCell | None:
        """Run every cell from now on as if it started with ``%%remote``; without arguments, show whether this is on.

        A cell that starts with ``%%local`` or with another of these magics runs in the kernel.
        """
        with _UsageErrors():
            if cell is not None:
                return self._autoremote_cell(line, cell)
            if _asks_for_help(line):
                print(_AUTOREMOTE_USAGE)
            elif words := tokens(line):
                print(self._switch(line.strip(), words))
            else:
                print(self._mode_text())
            return None

    def _switch(self, line: str, words: list[str]) -> str:
        if words == ["off"]:
            self.transformer.mode = None
            return self._mode_text()
        word = words[0]
        near = "" if word == "on" else hint(word, ["on", "off"])
        if near and not self.meshes.is_mesh(root_name(word), self.shell.user_ns):
            have = ", ".join(self.meshes.names) or "none is up"
            raise UsageProblem(f"%autoremote: {word!r} is neither a mesh ({have}) nor on or off{near}")
        options = parse_remote("" if words == ["on"] else line, "%autoremote")
        if options.local:
            raise UsageProblem("%autoremote: --local applies to a single cell; use %%remote --local")
        entry, _ = self.meshes.select(options.selector, self.shell.user_ns, options.targets)
        named = line if options.selector else " ".join([entry.mesh.name, *(word for word in words if word != "on")])
        self.transformer.mode = named
        return self._mode_text()

    def _mode_text(self) -> str:
        mode = self.transformer.mode
        if mode is None:
            return "autoremote is off: cells run in the kernel; %autoremote SELECTOR switches it on"
        return (
            f"autoremote is on: cells run as %%remote {mode}; %%local runs one in the kernel, %autoremote off ends it"
        )

    def _autoremote_cell(self, line: str, cell: str) -> BackgroundCell | None:
        options = parse_remote(line, "%autoremote")
        try:
            entry, mesh = self.meshes.select(options.selector, self.shell.user_ns, options.targets)
        except UsageProblem as problem:
            self.transformer.mode = None
            raise UsageProblem(f"%autoremote {line}: {problem}; autoremote is off now, this cell has not run") from None
        return self._run(entry, mesh, cell, options)

    @no_var_expand
    @cell_magic
    def local(self, line: str, cell: str) -> None:
        """Run a cell in the kernel, also while ``%autoremote`` is on.

        ::

            %%local
            code
        """
        # `CellTransformer` removes the line where it is allowed.
        raise UsageError("%%local must be the first line of a cell")

    def _remote_line(self, line: str) -> BackgroundCell | None:
        before, rest = split_options(line, "%remote")
        selector = next(iter(tokens(rest)), "")
        if self.meshes.is_mesh(root_name(selector), self.shell.user_ns):
            rest = rest[len(selector) :]
        else:
            selector = ""
        after, expression = split_options(rest, "%remote")
        given = " ".join(filter(None, [before, after]))
        options = parse_remote(f"{given} --mesh {selector}" if selector else given, "%remote")
        if options.local:
            raise UsageProblem("%remote: --local applies to cells; use %%remote --local")
        entry, mesh = self.meshes.select(options.selector, self.shell.user_ns, options.targets)
        if not expression:
            what = f" after {selector or given}" if selector or given else ""
            raise UsageProblem(f"%remote: write an expression{what}, such as %remote {entry.mesh.name}[0] rank + 1")
        try:
            self._check_syntax(expression)
        except UsageProblem as problem:
            name = next(iter(tokens(expression)), "")
            if selector or not name.isidentifier():
                raise
            raise UsageProblem(f"{problem}; {name} is no mesh (available: {', '.join(self.meshes.names)})") from None
        return self._run(entry, mesh, expression, options)

    def _run(self, entry: MeshEntry, mesh: Any, code: str, options: RemoteOptions) -> BackgroundCell | None:
        self._check_syntax(code)
        if self.meshes.is_mesh(options.out, {}):
            raise UsageProblem(f"--out {options.out} would replace the mesh {options.out}; choose another name")
        with HeldInterrupts(self.meshes.interrupt_others) as interrupts:  # else a cell could stay in the queue for ever
            cell = self._cell(entry, mesh, code, options)
            if options.background:
                values = _values if options.out else _nothing
                handle = BackgroundCell(cell, self.meshes.background, values, self._show_end)
                if options.out:
                    self.shell.user_ns[options.out] = handle
                if interrupts.count:
                    handle.cancel()
                return handle
            results = self._results(entry, cell, options, interrupts)
            if options.out:
                self.shell.user_ns[options.out] = _values(results)
        if interrupts.count:  # after the cell had ended; the user still wants to stop here
            raise KeyboardInterrupt
        return None

    def _cell(self, entry: MeshEntry, mesh: Any, code: str, options: RemoteOptions) -> RemoteCell:
        return self.meshes.cell(
            entry,
            mesh,
            code,
            Sink(self.shell),
            number=cell_number(self.shell),
            want_value=bool(options.out),
            raw=options.raw,
            stream=options.stream,
            timeout_s=options.timeout_s,
            fail_fast=options.fail_fast,
            warn_after_s=options.warn_after_s,
            needs_all=options.needs_all,
        )

    def _results(
        self, entry: MeshEntry, cell: RemoteCell, options: RemoteOptions, interrupts: HeldInterrupts
    ) -> ValueMesh[CellResult]:
        """Run a cell to its end."""
        try:
            return self.meshes.run(entry, cell, interrupts)
        except RanksError as error:
            if options.out and all(report.etype == "PayloadError" for report in error.reports.values()):
                raise UsageProblem(
                    f"%%remote: --out {options.out}: on {format_ranks(error.ranks)} {error.primary.message}; the cell has "
                    "run: end it with a value that can be sent (numbers, arrays, tensors), or drop --out"
                ) from None
            raise

    def _show_end(self, cell: RemoteCell) -> None:
        """Show the values or the error of a background cell below the cell that started it."""
        try:
            cell.show_values()
        except (MonarchError, KeyboardInterrupt) as error:
            self.failures.show_late(error, cell.output.sink)
        self.meshes.background.follow(cell.output)

    def _check_syntax(self, code: str) -> None:
        """Report a syntax error, or a second cell magic of ours, before anything is sent."""
        if second := _OF_CELLS.match(code):
            raise UsageProblem(
                f"%%remote: the code below it begins with %%{second[1]}: write one of them; nothing was sent"
            )
        try:
            source = self.shell.transform_cell(code)
            compile(source, "<remote cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        except SyntaxError as error:
            line = f": {error.text.strip()!r}" if error.text and error.text.strip() else ""
            blank = len(code) - len(code.lstrip("\n"))  # IPython removes blank lines at the top
            where = f"line {error.lineno + blank}" if error.lineno else "somewhere"
            message = _LINE_NUMBER.sub(lambda found: found[1] + str(int(found[2]) + blank), error.msg)
            raise UsageProblem(f"{type(error).__name__} in {where}: {message}{line}; nothing was sent") from None


def _values(results: ValueMesh[CellResult]) -> ValueMesh[Any]:
    return ValueMesh(results.extent, [result.value for result in results.values()])


def _nothing(results: ValueMesh[CellResult]) -> None:
    return None


def _is_misplaced(name: str, line: str) -> None:
    """Stand for a cell magic that is not on the first line of its cell, which IPython takes as the line magic ``%name``."""
    raise UsageError(f"%%{name} must be the first line of a cell; the lines above it have run in the kernel")


def _asks_for_help(line: str) -> bool:
    return line.strip() == "--help"


_LIMITS = {
    errno.EMFILE: "this process has too many open files: raise the limit (ulimit -n) in the shell that starts Jupyter",
    errno.ENFILE: "this machine has too many open files (fs.file-max)",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of the disk is exceeded",
    errno.EROFS: "the file system is read-only",
}


class _UsageErrors:
    """Converts our one-line errors, and limits of this machine, into IPython's UsageError, which has no traceback."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, (UsageProblem, AttachError, LaunchError)):
            raise UsageError(str(error)) from None
        number = getattr(error, "errno", None)  # also of ZeroMQ's errors, which are no OSError
        if isinstance(error, Exception) and number in _LIMITS:
            raise UsageError(f"%mesh: {_LIMITS[number]}: {error}") from error


def load(shell: InteractiveShell) -> MeshMagics:
    """Add the magics to a shell; no effect if the shell has them, as that of our kernel does."""
    loaded: tuple[MeshMagics, object] | None = getattr(shell, _EXTENSION, None)
    if loaded is not None:
        return loaded[0]
    magics = MeshMagics(shell)
    magics.give_log_back = take_log(ForwardingHandler(shell.log))  # in a kernel, the log of the Jupyter server
    for name in magics.magics["cell"]:
        magics.magics["line"][f"%{name}"] = partial(_is_misplaced, name)
    shell.register_magics(magics)
    magics.failures.install()
    magics.unhandled.install()
    matcher = make_matcher(magics.meshes, magics.names)
    shell.Completer.custom_matchers.append(matcher)
    magics.transformer.install()
    magics.view_formats.install()
    magics.tables_at_rest.install()
    magics.earlier_instances.install()
    magics.compat.register()
    for integration in integrations():
        integration.install(magics.meshes)
    atexit.register(magics.meshes.close)
    setattr(shell, _EXTENSION, (magics, matcher))
    return magics


def unload(shell: InteractiveShell) -> None:
    """Remove the magics and end the meshes."""
    magics, matcher = getattr(shell, _EXTENSION, (None, None))
    if magics is None:
        return
    for entry in magics.meshes:
        if shell.user_ns.get(entry.mesh.name) is entry.mesh:
            del shell.user_ns[entry.mesh.name]
    close: Callable[[], None] = magics.meshes.close
    atexit.unregister(close)
    magics._commands.editor_ports.close()
    close()  # background cells show their results first
    delattr(shell, _EXTENSION)
    shell.Completer.custom_matchers.remove(matcher)
    magics.transformer.remove()
    magics.view_formats.remove()
    magics.tables_at_rest.remove()
    magics.earlier_instances.remove()
    magics.compat.remove()
    for integration in integrations():
        integration.remove(magics.meshes)
    magics.failures.remove()
    magics.unhandled.remove()
    magics.give_log_back()
    for kind, names in magics.magics.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
