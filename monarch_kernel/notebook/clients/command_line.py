"""The commands ``mesh`` and ``mcp`` of the command line, and their options.

This module loads only the standard library, as `monarch_kernel.cli` does, because the doctor must run where a required
package is missing.
"""

from __future__ import annotations

import argparse
from typing import Any

from monarch_kernel.base import numbers

__all__ = ["add_mcp", "add_mesh", "run_mcp", "run_mesh"]


def add_mesh(commands: Any) -> None:
    """Add ``mesh`` to the commands of the command line."""
    command = commands.add_parser(
        "mesh",
        help="look at the meshes of a running kernel, and change them",
        description="Look at the meshes of a kernel that runs on this machine, for example in a notebook, and change them. The "
        "kernel may be busy.",
    )
    actions = command.add_subparsers(dest="action", title="actions", metavar="ACTION", required=True)

    def add(name: str, text: str, mesh: str = "") -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}."
        )
        if mesh:
            action.add_argument("mesh", metavar=mesh, nargs="?" if mesh.startswith("[") else None)
        action.add_argument("--kernel", default="", metavar="K", help="the kernel: its notebook, id or connection file")
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(refuse=action.error)
        return action

    add("list", "list the kernels that run, and their meshes")
    add("show", "show the ranks, loops, waits and errors of a mesh, of some ranks, or of all meshes", "[NAME[RANKS]]")
    add("stacks", "show what every rank does now", "NAME[RANKS]")
    logs = add("logs", "show what ranks have written", "NAME[RANKS]")
    logs.add_argument(
        "--lines", type=numbers.count, default=200, metavar="N", help="the last N lines of a rank (%(default)s)"
    )
    add("traceback", "show the last failures of ranks", "NAME[RANKS]")
    profile = add(
        "profile", "record some steps; show where their time goes, and which rank the others wait for", "NAME[RANKS]"
    )
    profile.add_argument(
        "--steps", type=numbers.count, default=5, metavar="N", help="the number of steps (%(default)s)"
    )
    profile.add_argument(
        "--seconds", type=numbers.seconds, default=10.0, metavar="S", help="the most it may take (%(default)s)"
    )
    add("record", "say what the record of the run holds")
    loop = add("loop", "control the live loop of a mesh, or set its knobs", "NAME")
    loop.add_argument("words", nargs="+", metavar="pause | resume | step [N] | stop | KNOB=VALUE")
    interrupt = add("interrupt", "interrupt what ranks run; they keep their state", "NAME[RANKS]")
    interrupt.add_argument("--abort", action="store_true", help="abort process groups, too")
    add("heal", "start new processes in place of dead ranks", "NAME[RANKS]")


def add_mcp(commands: Any) -> None:
    """Add ``mcp`` to the commands of the command line."""
    command = commands.add_parser(
        "mcp",
        help="serve the meshes of a running kernel to an agent",
        description="Speak the Model Context Protocol on standard input and output: an agent can look at the meshes of a "
        "kernel that runs on this machine. Without --allow-changes it can change nothing.",
    )
    command.add_argument("--kernel", default="", metavar="K", help="the kernel: its notebook, id or connection file")
    command.add_argument(
        "--allow-changes", action="store_true", help="let the agent set knobs, pause loops, interrupt and heal ranks"
    )


def run_mesh(options: argparse.Namespace) -> int:
    """Run a command, and return the exit code.

    Raises:
        ClientError: it can't be done; the text says why.
    """
    from monarch_kernel.notebook.clients import commands

    return commands.run_mesh(options)


def run_mcp(options: argparse.Namespace) -> int:
    """Serve an agent until it closes the connection.

    Raises:
        ClientError: the package of the protocol is missing.
    """
    from monarch_kernel.notebook.clients.agent_server import serve

    serve(options.kernel, allow_changes=options.allow_changes)
    return 0
