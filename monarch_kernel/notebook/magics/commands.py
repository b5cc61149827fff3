"""Implements the commands of ``%mesh``."""

from __future__ import annotations

import builtins
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.mesh import Point
from monarch_kernel.base.text import were
from monarch_kernel.doctor.report import finding_text, summary
from monarch_kernel.doctor.run_checks import ITEM_WIDTH, checks, examine
from monarch_kernel.errors import RecordError, RemoteError, RemoteInterrupt, format_ranks
from monarch_kernel.features.editing.sources import check_syntax
from monarch_kernel.notebook.cells.background import BackgroundCell
from monarch_kernel.notebook.cells.cell import RemoteCell
from monarch_kernel.notebook.cells.cell_names import in_notebook, with_cell_names
from monarch_kernel.notebook.cells.display import Sink
from monarch_kernel.notebook.cells.held_interrupts import HeldInterrupts
from monarch_kernel.notebook.cells.interrupt_progress import inspect_ranks
from monarch_kernel.notebook.magics.attach import resumed_cells, show_missed
from monarch_kernel.notebook.magics.bring_up_hosts import request_text
from monarch_kernel.notebook.magics.editor_ports import EditorPorts
from monarch_kernel.notebook.magics.kernel_cells import KernelCells
from monarch_kernel.notebook.magics.loops import control_loop
from monarch_kernel.notebook.magics.mesh_entry import MeshEntry
from monarch_kernel.notebook.magics.meshes import Meshes
from monarch_kernel.notebook.magics.viewers import ViewerCommand
from monarch_kernel.notebook.output.folding import render
from monarch_kernel.notebook.output.logs import log_lines
from monarch_kernel.notebook.syntax.arguments import Known, refuse_flags
from monarch_kernel.notebook.syntax.lines import UsageProblem, hint, tokens
from monarch_kernel.notebook.syntax.options import (
    COMMANDS,
    LogsOptions,
    RemoteOptions,
    one_name,
    one_selector,
    parse_check,
    parse_debug,
    parse_doctor,
    parse_interrupt,
    parse_logs,
    parse_loop,
    parse_profile,
    parse_record,
    parse_rollback,
    parse_sync,
    parse_tensorboard,
    parser_of,
    unknown_command,
)
from monarch_kernel.notebook.syntax.selector import root_name
from monarch_kernel.notebook.syntax.torchrun import parse_torchrun
from monarch_kernel.notebook.syntax.up_arguments import parse_up
from monarch_kernel.notebook.syntax.usage import command_help, mesh_help
from monarch_kernel.notebook.view.errors import error_block
from monarch_kernel.notebook.view.frames import LOOP_COMMANDS, PROFILE, RECORD
from monarch_kernel.notebook.view.loops import loop_text
from monarch_kernel.notebook.view.stacks import stacks_text
from monarch_kernel.notebook.view.text import meshes_text
from monarch_kernel.runtime.host.gpus import VISIBLE, gpu_ids
from monarch_kernel.runtime.worker.script import run_script
from monarch_kernel.train.record import running
from monarch_kernel.train.snapshots.rewind import roll_back

__all__ = ["MeshCommands"]

_ENDS_S = 2.0
"""A cell that has just been interrupted, or whose loop has just ended, may take this long to end."""

_LOOK_S = 0.1
"""How often to look whether a loop that was stopped still has steps to do."""

_AFTER_LOOP_S = 10.0
"""How long a cell may take to end after its loop."""


def _has_ended(cell: RemoteCell, mesh: ProcMesh) -> bool:
    """Wait for the end of a cell that has just been stopped, or whose loop is being stopped; returns whether it has ended."""
    if cell.is_over.wait(_ENDS_S):
        return True
    was_stopping = False
    while any(loop.is_stopping for loop in mesh.loops):
        was_stopping = True
        if cell.is_over.wait(_LOOK_S):
            return True
    return was_stopping and cell.is_over.wait(_AFTER_LOOP_S)


def _read_file(name: str) -> str | None:
    """Return the text of a file that lists hosts; None if there is no such file."""
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(f"%mesh up: --hosts {name} can't be read: {error}") from None


def _checked_script(path: str, known: Known) -> str:
    """Return the absolute path of a script that Python can compile."""
    script = Path(path).expanduser().absolute()
    if root_name(path) == path.partition("[")[0] and not script.exists():
        raise known.unknown_word("torchrun", path, "a script")
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except OSError as error:
        raise UsageProblem(f"%mesh torchrun: {path} can't be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UsageProblem(f"{type(error).__name__} in {path}{where}: {error.args[0]}; nothing was sent") from None
    return str(script)


RunCell = Callable[[MeshEntry, ProcMesh, str, RemoteOptions], BackgroundCell | None]
"""Runs code as a cell on a mesh."""


class MeshCommands:
    """The commands of ``%mesh``: one method per command, named after it; each takes the rest of the line.

    Attributes:
        editor_ports: the ports at which editors find ranks to debug.
    """

    def __init__(
        self, shell: InteractiveShell, meshes: Meshes, show_end: Callable[[RemoteCell], None], run_cell: RunCell
    ) -> None:
        self._shell = shell
        self._meshes = meshes
        self._show_end = show_end
        self._run_cell = run_cell
        self._kernel_cells = KernelCells(shell)
        self.editor_ports = EditorPorts()

    def run(self, line: str) -> None:
        """Run the command of a line; list the meshes if the line is empty.

        Raises:
            UsageProblem: the command is unknown or can't be run.
        """
        words = tokens(line)
        if not words:
            print(meshes_text([entry.mesh.view() for entry in self._meshes]))
            detached = self._meshes.detached.text(self._meshes.names)
            if detached:
                print(detached)
            return
        command = words[0]
        if command not in COMMANDS:
            raise unknown_command(words, self._known())
        if words[1:] in (["--help"], ["-h"]):
            words = ["help", command]
            line = " ".join(words)
        elif command != "torchrun" and parser_of(f"%mesh {command}") is None:
            refuse_flags(command, words[1:])
        getattr(self, words[0])(line.split(None, 1)[1] if len(words) > 1 else "")

    def _known(self) -> Known:
        return Known(self._meshes.names, lambda name: self._meshes.is_mesh(name, self._shell.user_ns))

    def up(self, rest: str) -> None:
        """Bring up a mesh; its name becomes a variable."""
        options = parse_up(rest, len(gpu_ids()), _read_file, lambda named: len(gpu_ids(named)), os.environ.get(VISIBLE))
        if options.dry_run:
            print(request_text(options))
            return
        self._check_variable(options.name, "up", "choose another name")
        self._meshes.up(options)

    def help(self, rest: str) -> None:
        """Show the arguments of a command, or of all commands."""
        words = tokens(rest)
        print(command_help(words[0]) if words else mesh_help())

    def doctor(self, rest: str) -> None:
        """Check the requirements of the kernel; print a line as soon as each check is done."""
        findings = []
        for finding in examine(checks(quick=parse_doctor(rest))):
            findings.append(finding)
            print(finding_text(finding, ITEM_WIDTH), flush=True)
        print(f"\n{summary(findings)}")

    def _check_variable(self, name: str, command: str, remedy: str) -> None:
        """Check that a name may become a variable."""
        if hasattr(builtins, name):
            raise UsageProblem(f"%mesh {command}: {name!r} is a builtin of Python; choose another name")
        bound = self._shell.user_ns.get(name)
        if name in self._shell.user_ns and name not in self._meshes.names and type(bound).__name__ != "ProcMesh":
            raise UsageProblem(f"%mesh {command}: {name!r} is already a variable (a {type(bound).__name__}); {remedy}")

    def attach(self, rest: str) -> None:
        """Attach a mesh that outlived its kernel; its name becomes a variable again."""
        words = tokens(rest)
        if len(words) != 1:
            raise UsageProblem(f"%mesh attach: name one detached mesh; {self._meshes.detached.available_text()}")
        self._check_variable(words[0], "attach", f"del {words[0]} first")
        entry, attached = self._meshes.attach(words[0])
        sink = Sink(self._shell)
        show_missed(attached, sink)
        self._meshes.show(entry)
        for cell in resumed_cells(attached, entry.cell_queue, sink):
            handle = BackgroundCell(cell, self._meshes.background, lambda results: None, self._show_end, cell.born)
            if not handle.done():
                handle._ipython_display_()
        self._meshes.attend_to_stops(entry)  # shown below the cell that has stopped

    def show(self, rest: str) -> None:
        """Show the live view of a mesh, or of all meshes, again."""
        name = one_name(tokens(rest), "show", self._meshes.names, optional=True)
        shown = [self._meshes.get(name)] if name else list(self._meshes)
        if not shown:
            print(meshes_text([]))
        for entry in shown:
            self._meshes.show(entry)

    def logs(self, rest: str) -> None:
        """Show what ranks have written."""
        options = parse_logs(rest)
        entry, mesh = self._meshes.select(options.selector, self._shell.user_ns)
        for stream, text in _logs(entry, mesh, options):
            print(text, end="", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)

    def interrupt(self, rest: str) -> None:
        """Interrupt what a mesh or a slice of it runs; ``--abort`` also aborts process groups."""
        words, abort = parse_interrupt(rest)
        entry, mesh = self._part(words, "interrupt")
        print(self._meshes.interrupt(entry, mesh, abort=abort))

    def sync(self, rest: str) -> None:
        """Send edited modules to a mesh or a slice of it, and reload the imported ones there and here."""
        selector, what = parse_sync(rest, self._known())
        _, mesh = self._meshes.select(selector, self._shell.user_ns)
        try:
            check_syntax(mesh.sources(what))
        except SyntaxError as error:
            where = f"{error.filename}, line {error.lineno}" if error.lineno else str(error.filename)
            raise UsageProblem(f"{type(error).__name__} in {where}: {error.msg}; nothing was sent") from None
        except (OSError, ValueError) as error:
            nor = "" if selector or not what else f"; nor is {what} a mesh (available: {', '.join(self._meshes.names)})"
            raise UsageProblem(f"%mesh sync: {error}{nor}") from None
        print(mesh.sync(what))

    def stacks(self, rest: str) -> None:
        """Show what every rank of a mesh or of a slice of it does now; of all meshes if none is named."""
        words = tokens(rest)
        parts = [self._part(words, "stacks")] if words else [(entry, entry.mesh) for entry in self._meshes]
        if not parts:
            print(meshes_text([]))
        for entry, mesh in parts:
            print(_stacks(entry, mesh))

    def check(self, rest: str) -> None:
        """Compare the replicas of modules and tensors between the ranks of a mesh or of a slice of it."""
        selector, names, axis = parse_check(rest, self._known())
        entry, mesh = self._meshes.select(selector, self._shell.user_ns)
        for cell in list(entry.cell_queue.cells):
            if not cell.ranks.isdisjoint(mesh.ranks) and not _has_ended(cell, mesh):
                raise UsageProblem(
                    f"%mesh check: cell [{cell.number}] is running and may change what is compared: wait for its end, or write "
                    "live.check(every=500) in its live loop"
                )
        try:
            print(mesh.check(*names, axis=axis))
        except (KeyError, NameError, ValueError) as error:
            missing = next((name for name in names if repr(name) in error.args[0]), "")
            of_ranks = {name for known in mesh.names().values() for name in known}
            near = hint(missing, [*of_ranks, *([] if selector else self._meshes.names)])
            raise UsageProblem(f"%mesh check: {error.args[0]}{near}") from None

    def traffic(self, rest: str) -> None:
        """Show the traffic to and from the ranks of a mesh or of a slice of it; of all meshes if none is named."""
        words = tokens(rest)
        parts = [self._part(words, "traffic")] if words else [(entry, entry.mesh) for entry in self._meshes]
        if not parts:
            print(meshes_text([]))
        for _, mesh in parts:
            display(mesh.traffic())

    def profile(self, rest: str) -> None:
        """Record what the ranks of a mesh or of a slice of it do, and show where the time goes."""
        options = parse_profile(rest)
        _, mesh = self._meshes.select(options.selector, self._shell.user_ns)
        folder = Path(options.to).expanduser().parent
        if not folder.is_dir():
            raise UsageProblem(f"%mesh profile: --to {options.to}: there is no folder {folder}")
        try:
            found = mesh.profile(options.steps, seconds=options.seconds, memory=options.memory)
            if options.to:
                found.save(options.to, in_notebook)
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageProblem(f"%mesh profile: {error}") from None
        print(found.text(in_notebook))

    def torchrun(self, rest: str) -> None:
        """Run a script in the ranks of a mesh, with the environment variables of torchrun."""
        options = parse_torchrun(rest, self._known())
        entry, mesh = self._meshes.select(options.selector, self._shell.user_ns)
        if not mesh.is_whole:
            raise UsageProblem(
                f"%mesh torchrun: a script runs on all ranks, which are its world; write {entry.mesh.name}, without an index"
            )
        script = options.script if options.is_module else _checked_script(options.script, self._known())
        handle = self._run_cell(
            entry,
            mesh,
            f"__import__({run_script.__module__!r}, fromlist=['run_script']).run_script("
            f"{script!r}, {list(options.arguments)!r}, is_module={options.is_module})",
            RemoteOptions(raw=options.raw, background=options.background, needs_all=True),
        )
        if handle is not None:
            handle._ipython_display_()

    def loop(self, rest: str) -> None:
        """Show the progress of a mesh's live loop (``live.loop``), control the loop, or set its knobs."""
        options = parse_loop(rest, self._known())
        _, mesh = self._meshes.select(options.selector, self._shell.user_ns)
        loops = mesh.loops
        if not loops:
            raise UsageProblem(f"no rank of {mesh.name} has started a loop: for step in live.loop(...)")
        going = [loop for loop in loops if loop.view().state != "over"] or loops
        if options.command or options.knobs:
            print(control_loop(going[-1], options.command or "set", count=options.count, knobs=options.knobs))
        else:
            print("\n".join(loop_text(loop.view()) for loop in going))

    def rollback(self, rest: str) -> None:
        """Restore the state of ranks before a step from their snapshot of it (``live.snapshot``)."""
        selector, step = parse_rollback(rest, self._known())
        entry, mesh = self._meshes.select(selector, self._shell.user_ns)
        if not mesh.is_whole:
            raise UsageProblem(
                f"%mesh rollback: all ranks roll back together; write {entry.mesh.name}, without an index"
            )
        for cell in list(entry.cell_queue.cells):
            if not _has_ended(cell, mesh):
                raise UsageProblem(
                    f"%mesh rollback: cell [{cell.number}] is running; end its loop with %mesh loop stop, or the whole cell "
                    f"with %mesh interrupt {mesh.name}"
                )
        step = roll_back(mesh, step)
        print(f"{mesh.name}: all ranks are back before step {step:,}; the next live.loop continues from there")

    def tensorboard(self, rest: str) -> None:
        """Write what the loops of a mesh log (``live.log``) for TensorBoard."""
        selector, folder = parse_tensorboard(rest, self._known())
        if not selector and folder in self._meshes.names and not os.path.isdir(folder):
            raise UsageProblem(
                f"%mesh tensorboard: {folder} is a mesh; write a folder, too, such as {folder} runs/{folder}"
            )
        _, mesh = self._meshes.select(selector, self._shell.user_ns)
        try:
            path = mesh.tensorboard(folder)
        except (ModuleNotFoundError, OSError, ValueError) as error:
            raise UsageProblem(f"%mesh tensorboard: {error}") from None
        if path is None:
            print(f"{mesh.name}: its loops are no longer written for TensorBoard")
        else:
            print(f"{mesh.name}: its loops are written to {path}, each to a separate folder")
            print(f"to see them: %load_ext tensorboard, then %tensorboard --logdir {shlex.quote(str(path))}")

    def record(self, rest: str) -> None:
        """Record what runs from now on, or close the record; without arguments, say what it holds."""
        folder = parse_record(rest)
        try:
            if folder == "close":
                self._kernel_cells.end()
                print(running.stop() or "no record runs")
            elif folder:
                recorder = running.start(folder)
                self._kernel_cells.begin(recorder)
                print(f"recording into {recorder.folder}; %mesh record shows what it holds, %mesh record close ends it")
            else:
                print(running.status())
        except RecordError as error:
            raise UsageProblem(f"%mesh record: {error}") from None

    def heal(self, rest: str) -> None:
        """Start new processes in place of dead ranks of a mesh or of a slice of it; by default, of the last mesh."""
        self._replace(rest, "heal", restart=False)

    def restart(self, rest: str) -> None:
        """End the ranks of a mesh or of a slice of it, and start new processes in their places."""
        if not tokens(rest):
            raise UsageProblem("%mesh restart: specify the ranks: a mesh or a slice of one, such as t, t[0], t[0:4]")
        self._replace(rest, "restart", restart=True)

    def _replace(self, rest: str, command: str, *, restart: bool) -> None:
        entry, mesh = self._meshes.select(one_selector(rest, command), self._shell.user_ns)
        print(self._meshes.replace_ranks(entry, mesh, restart=restart))

    def _part(self, words: list[str], command: str) -> tuple[MeshEntry, ProcMesh]:
        """Return the mesh, or the slice of one, that a command names."""
        names = self._meshes.names
        if len(words) == 1 and words[0] not in names:
            name = root_name(words[0])
            if name in names or self._meshes.is_mesh(name, self._shell.user_ns):
                return self._meshes.select(words[0], self._shell.user_ns)
        entry = self._meshes.get(one_name(words, command, names, optional=False))
        return entry, entry.mesh

    def debug(self, rest: str) -> None:
        """Open pdb on a rank, where it failed or stopped at a breakpoint; ``--dap`` lets an editor debug the rank."""
        selector, is_editor = parse_debug(rest)
        entry, mesh = self._meshes.select(selector, self._shell.user_ns)
        if is_editor:
            print(self.editor_ports.open(mesh))
            return
        self._meshes.debugger.open(entry.mesh, mesh, selector or mesh.name)

    def down(self, rest: str) -> None:
        """End a mesh, or all meshes; an interrupt takes effect only after the mesh that is being ended."""
        words = tokens(rest)
        if len(words) == 1 and words[0] not in self._meshes.names and self._meshes.detached.has(words[0]):
            names = words
        elif words == ["--all"]:
            names = self._meshes.names
        else:
            names = [one_name(words, "down", self._meshes.names, optional=False)]
        n_ended = 0
        with HeldInterrupts(self._meshes.interrupt_others) as interrupts:
            while n_ended < len(names) and not interrupts.count:
                self._down(names[n_ended])
                n_ended += 1
        if interrupts.count:
            ended, left = names[:n_ended], names[n_ended:]
            text = f"; {', '.join(ended)} {'has' if len(ended) == 1 else 'have'} ended all the same" if ended else ""
            text += f"; {', '.join(left)} {'is' if len(left) == 1 else 'are'} still up" if left else ""
            raise RemoteInterrupt(f"interrupted{text}")

    def _down(self, name: str) -> None:
        """End one mesh and print a message."""
        if name not in self._meshes.names:
            count = self._meshes.detached.down(name)
            print(_ended(name, count) if count else f"{name}: none of its hosts has come up; it was removed")
            return
        print(self._end(name))

    def _end(self, name: str) -> str:
        entry = self._meshes.get(name)
        self.editor_ports.close(entry.mesh)
        count = self._meshes.down(name)
        if self._shell.user_ns.get(name) is entry.mesh:
            del self._shell.user_ns[name]
        if self._kernel_cells.is_on and not self._meshes.names:
            self._kernel_cells.end()
            return f"{_ended(name, count)}\n{running.stop()}"
        return _ended(name, count)

    # -- commands of viewers, which call from other threads

    def answer(self, request: ViewerCommand) -> str:
        """Carry out a viewer's command, and return what the ``%mesh`` command of that name would print.

        Raises:
            UsageProblem: there is no such mesh, rank or loop, or the command can't be applied to it.
        """
        if request.command == RECORD:
            return running.status() if self._meshes.names else "no mesh is up, so no record runs"
        if request.mesh not in self._meshes.names:
            raise UsageProblem(f"mesh {request.mesh!r} is down")
        entry = self._meshes.get(request.mesh)
        mesh = entry.mesh
        if request.command in LOOP_COMMANDS:
            loops = [loop for loop in mesh.loops if loop.key == request.loop]
            if not loops:
                raise UsageProblem("the loop is over")
            return control_loop(
                loops[0], request.command, count=request.number or 1, knobs={request.knob: request.value}
            )
        if request.ranks is not None:
            if not request.ranks or not set(request.ranks) <= set(mesh.ranks):
                raise UsageProblem(f"{request.mesh} has no ranks {format_ranks(set(request.ranks) - set(mesh.ranks))}")
            mesh = mesh[sorted(set(request.ranks))]
        if request.command == "interrupt":
            return self._meshes.interrupt(entry, mesh, abort=request.abort)
        if request.command in ("heal", "restart"):
            return self._meshes.replace_ranks(entry, mesh, restart=request.command == "restart")
        if request.command == "down":
            return self._end(request.mesh)
        if request.command == "stacks":
            return _stacks(entry, mesh)
        if request.command == "logs":
            lines = LogsOptions("", request.number or LogsOptions.lines)
            return "".join(text for _, text in _logs(entry, mesh, lines))
        if request.command == PROFILE:
            try:
                return mesh.profile(request.number or 5, seconds=request.seconds).text(in_notebook)
            except (RuntimeError, ValueError) as error:
                raise UsageProblem(str(error)) from None
        return _traceback(mesh)


def _ended(name: str, count: int) -> str:
    return f"{name}: {count} rank{'s' * (count != 1)} ended"


def _stacks(entry: MeshEntry, mesh: ProcMesh) -> str:
    """Describe what ranks do now."""
    return stacks_text(entry.mesh.view(), inspect_ranks(entry.mesh), mesh.ranks)


def _logs(entry: MeshEntry, mesh: ProcMesh, options: LogsOptions) -> list[tuple[str, str]]:
    """Return what ranks have written, as pairs of stream and text."""
    logs = mesh.logs()
    marks = list(entry.cell_queue.marks)
    same = "".join([" --stderr" * options.stderr, " --raw" * options.raw])
    command = f"%mesh logs {options.selector or mesh.name}{same}" if options.counts_earlier else ""
    lines = log_lines(logs, marks, n_lines=options.lines, stderr=options.stderr, raw=options.raw, command=command)
    if not lines:
        name, ranks = f"{mesh.name}{format_ranks(logs)}", entry.mesh.view().ranks
        if all(ranks[rank].state == "stopped" for rank in logs):
            return [("stdout", f"{name} {were(len(logs))} stopped: the output of stopped ranks is not kept\n")]
        return [("stdout", f"{name} has written nothing{' to stderr' * options.stderr}\n")]
    return list(render(lines))


def _traceback(mesh: ProcMesh) -> str:
    """Format the last failures of ranks as their cell shows them."""
    extent = mesh.whole.extent
    failures = {Point(rank, extent): with_cell_names(failure) for rank, failure in mesh.last_failures().items()}
    if not failures:
        return f"{mesh.name}{format_ranks(mesh.ranks)}: no failure since the last success"
    # The first line of the block is that of the exception; here no exception was raised.
    _, *block = error_block(RemoteError(mesh.name, failures), color=False)
    what = "last failure" if len(failures) == 1 else "last failures"
    return "\n".join([f"{mesh.name}{format_ranks(point.rank for point in failures)}: {what}", *block])
