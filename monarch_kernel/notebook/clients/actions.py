"""What the command line and the server for agents ask of a kernel."""

from __future__ import annotations

import re
import shlex
from typing import Any

from monarch_kernel.notebook.clients.connection import Connection
from monarch_kernel.notebook.clients.kernels import ClientError
from monarch_kernel.notebook.syntax.arguments import Known
from monarch_kernel.notebook.syntax.lines import UsageProblem
from monarch_kernel.notebook.syntax.options import parse_loop
from monarch_kernel.notebook.syntax.selector import pick_ranks

__all__ = ["HEAL_S", "about", "control_loop", "ranks_of", "split_selector"]

HEAL_S = 300.0
"""How long ranks may take to be replaced; on other machines a host may have to be started."""

_SELECTOR = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<ranks>[^\[\]]*)\])?")


def about(kernel: Connection) -> dict[str, Any]:
    """Describe a kernel, as JSON."""
    file = kernel.file
    return {
        "kernel": str(file.path),
        "id": file.id,
        "notebook": file.notebook,
        "version": kernel.about.get("implementation_version", ""),
    }


def control_loop(kernel: Connection, name: str, words: list[str]) -> str:
    """Control the loop of a mesh with the words that ``%mesh loop`` takes.

    Raises:
        ClientError: the words are not valid, or the loop refuses the command.
    """
    try:
        wanted = parse_loop(" ".join(map(shlex.quote, [name, *words])), Known([name], lambda word: word == name))
    except UsageProblem as problem:
        raise ClientError(str(problem).replace("%mesh", "mesh", 1)) from None
    if wanted.command:
        return kernel.loop(name, wanted.command, count=wanted.count)
    return "\n".join(kernel.loop(name, "set", knob=knob, value=value) for knob, value in wanted.knobs.items())


def ranks_of(kernel: Connection, selector: str) -> list[int] | None:
    """Return the ranks that a selector names, such as ``t[0,2]`` or ``t[0:4]``; None for all.

    Raises:
        ClientError: the mesh has no such ranks.
    """
    name, ranks = split_selector(selector)
    mesh = kernel.mesh(name)
    if ranks is None:
        return None
    count = sum(mesh["counts"].values())
    try:
        return pick_ranks(ranks, range(count))
    except UsageProblem:
        raise ClientError(f"{selector}: write ranks of {name} as 0,2 or 1-3 or 0:4, from 0 to {count - 1}") from None


def split_selector(selector: str) -> tuple[str, str | None]:
    """Return the name of a mesh and its ranks as written; None for all.

    Raises:
        ClientError: it is no selector.
    """
    found = _SELECTOR.fullmatch(selector)
    if found is None:
        raise ClientError(f"{selector!r} is no mesh: write its name, or some of its ranks as t[0] or t[0:4]")
    return found["name"], found["ranks"]
