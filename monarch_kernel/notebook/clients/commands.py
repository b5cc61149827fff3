"""What ``python -m monarch_kernel mesh`` does: looks at the meshes of a running kernel, and changes them, from another process.

With ``--json`` each command prints one JSON object. Its fields are those of the frames (`MeshFrame`), and docs/agents.md lists
them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

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

__all__ = ["run_mesh"]


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
    if kernels or options.json or not problems:
        _print({"kernels": kernels, "problems": problems}, text, options)
    if not options.json:
        for problem in problems:
            print(f"monarch_kernel: left out: {printable(problem)}", file=sys.stderr)
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
