"""What the commands of ``%mesh`` do."""

from __future__ import annotations

import builtins

from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.agent.processes import gpu_ids
from monarch_kernel.notebook.display import LiveView
from monarch_kernel.notebook.meshes import Meshes
from monarch_kernel.notebook.options import COMMANDS, UsageProblem, one_name, parse_up, tokens
from monarch_kernel.notebook.usage import command_help, mesh_help
from monarch_kernel.ui.text import meshes_text

__all__ = ["MeshCommands"]


class MeshCommands:
    """One method per command, named like it; each takes the rest of the line."""

    def __init__(self, shell: InteractiveShell, meshes: Meshes) -> None:
        self._shell = shell
        self._meshes = meshes

    def run(self, line: str) -> None:
        """Do what a line says; list the meshes if it is empty.

        Raises:
            UsageProblem: it says nothing that can be done.
        """
        words = tokens(line)
        if not words:
            print(meshes_text([entry.mesh.view() for entry in self._meshes]))
            return
        command = words[0]
        if command not in COMMANDS:
            raise UsageProblem(f"%mesh: unknown command {command!r}; one of {', '.join(COMMANDS)} (%mesh? says more)")
        if words[1:] in (["--help"], ["-h"]):
            words = ["help", command]
            line = " ".join(words)
        getattr(self, words[0])(line.split(None, 1)[1] if len(words) > 1 else "")

    def up(self, rest: str) -> None:
        """Bring a mesh up; its name becomes a variable."""
        options = parse_up(rest, len(gpu_ids()))
        if hasattr(builtins, options.name):
            raise UsageProblem(f"%mesh up: {options.name!r} is a builtin of Python; choose another name")
        bound = self._shell.user_ns.get(options.name)
        known = self._meshes.names
        if options.name in self._shell.user_ns and options.name not in known and type(bound).__name__ != "ProcMesh":
            raise UsageProblem(
                f"%mesh up: {options.name!r} is a variable already (a {type(bound).__name__}); choose another name"
            )
        entry = self._meshes.up(options)
        self._shell.user_ns[options.name] = entry.mesh

    def help(self, rest: str) -> None:
        """Say what a command takes, or all of them."""
        words = tokens(rest)
        print(command_help(words[0]) if words else mesh_help())

    def show(self, rest: str) -> None:
        """Show the live view of a mesh, or of all, once more."""
        name = one_name(tokens(rest), "show", self._meshes.names, optional=True)
        shown = [self._meshes.get(name)] if name else list(self._meshes)
        if not shown:
            print(meshes_text([]))
        for entry in shown:
            entry.view = LiveView()
            entry.view.show(entry.mesh.view())

    def interrupt(self, rest: str) -> None:
        """Interrupt what a mesh runs."""
        entry = self._meshes.get(one_name(tokens(rest), "interrupt", self._meshes.names, optional=False))
        entry.mesh.interrupt()

    def down(self, rest: str) -> None:
        """End a mesh, or all of them."""
        words = tokens(rest)
        names = (
            self._meshes.names if words == ["--all"] else [one_name(words, "down", self._meshes.names, optional=False)]
        )
        for name in names:
            entry = self._meshes.get(name)
            count = self._meshes.down(name)
            if self._shell.user_ns.get(name) is entry.mesh:
                del self._shell.user_ns[name]
            print(f"{name}: {count} rank{'s' * (count != 1)} ended")
