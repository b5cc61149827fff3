"""``python -m monarch_kernel mesh``: looks at the meshes of a running kernel, and changes them, from another process.

With ``--json`` each command prints one JSON object. Its fields are those of the frames (`MeshFrame`), and docs/agents.md lists
them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from monarch_kernel.base import numbers
from monarch_kernel.base.text import printable
from monarch_kernel.notebook.clients.actions import (
    HEAL_S,
    about,
    control_loop,
    ranks_of,
    read_loop,
    show_mesh,
    split_selector,
)
from monarch_kernel.notebook.clients.connection import Connection, connect, connect_all
from monarch_kernel.notebook.clients.kernels import ClientError
from monarch_kernel.notebook.clients.texts import list_text, mesh_text

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


def run_mcp(options: argparse.Namespace) -> int:
    """Serve an agent until it closes the connection.

    Raises:
        ClientError: the package of the protocol is missing.
    """
    from monarch_kernel.notebook.clients.agent_server import serve

    serve(options.kernel, allow_changes=options.allow_changes)
    return 0


def run_mesh(options: argparse.Namespace) -> int:
    """Run a command, and return the exit code.

    Raises:
        ClientError: it can't be done; the text says why.
    """
    if options.action in ("list", "show") and getattr(options, "mesh", None) is None:
        return _all(options)
    name = _checked_name(options)
    with connect(options.kernel, name) as kernel:
        if options.action == "show":
            found = show_mesh(kernel, options.mesh)
            _print({**about(kernel), "meshes": [found]}, mesh_text(found), options)
            return 0
        ranks = None if options.action in ("record", "loop") else ranks_of(kernel, options.mesh)
        text = _ask(kernel, name, ranks, options)
        answer = {"command": options.action, "mesh": name, "ranks": ranks, "text": text}
        _print({**about(kernel), **answer}, text, options)
    return 0


def _checked_name(options: argparse.Namespace) -> str:
    """Return the name of the mesh of a command, after its words are checked; wrong ones end the program with exit code 2."""
    if options.action == "record":
        return ""
    try:
        if options.action == "loop":
            return read_loop(options.mesh, options.words).selector
        return split_selector(options.mesh)[0]
    except ClientError as error:
        options.refuse(str(error))
        raise


def _all(options: argparse.Namespace) -> int:
    connections, problems = connect_all(options.kernel)
    kernels: list[dict[str, Any]] = []
    for kernel in connections:
        with kernel:
            try:
                meshes = kernel.meshes()
                if options.action == "show":
                    meshes = [kernel.mesh(mesh["name"]) for mesh in meshes]
            except ClientError as error:
                problems.append(str(error))
            else:
                kernels.append({**about(kernel), "meshes": meshes})
    if options.action == "list":
        keys = ("name", "axes", "where", "since", "counts")
        for each in kernels:
            each["meshes"] = [{key: mesh[key] for key in keys if key in mesh} for mesh in each["meshes"]]
        text = list_text(kernels)
    else:
        text = "\n\n".join(mesh_text(mesh) for each in kernels for mesh in each["meshes"]) or list_text(kernels)
    _print({"kernels": kernels, "problems": problems}, "\n".join([text, *problems]), options)
    return 1 if problems and not kernels else 0


def _ask(kernel: Connection, name: str, ranks: list[int] | None, options: argparse.Namespace) -> str:
    action = options.action
    if action == "record":
        return kernel.ask("record")
    if action == "loop":
        return control_loop(kernel, name, options.words)
    more: dict[str, Any] = {}
    takes_s = HEAL_S if action == "heal" else 60.0
    if action == "logs":
        more["count"] = options.lines
    elif action == "profile":
        more = {"count": options.steps, "seconds": options.seconds}
        takes_s += options.seconds
    elif action == "interrupt":
        more["abort"] = options.abort
    return kernel.ask(action, name, takes_s=takes_s, ranks=ranks, **more)


def _print(data: Mapping[str, Any], text: str, options: argparse.Namespace) -> None:
    print(json.dumps(data, indent=2) if options.json else printable(text).rstrip("\n"), flush=True)
