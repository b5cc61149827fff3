"""What the command line and the server for agents ask of a kernel."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_kernel.errors import format_ranks
from monarch_kernel.notebook.clients.connection import Connection
from monarch_kernel.notebook.clients.kernels import ClientError
from monarch_kernel.notebook.syntax.arguments import Known
from monarch_kernel.notebook.syntax.lines import UsageProblem
from monarch_kernel.notebook.syntax.options import LOOP_ACTIONS, LoopOptions, parse_loop
from monarch_kernel.notebook.syntax.selector import pick_ranks

__all__ = [
    "ALL_RANKS",
    "HEAL_S",
    "LOOP",
    "about",
    "control_loop",
    "of_ranks",
    "ranks_of",
    "read_loop",
    "show_mesh",
    "split_selector",
    "whole_mesh",
]

HEAL_S = 300.0
"""How long ranks may take to be replaced; on other machines a host may have to be started."""

ALL_RANKS = "a loop is controlled on all of its ranks together"
"""Why a command of loops takes no ranks."""

LOOP = "mesh loop"
"""The command whose words errors of loops are about."""

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


def read_loop(selector: str, words: Sequence[str]) -> LoopOptions:
    """Read the words that ``%mesh loop`` takes; there must be an action or a knob.

    Raises:
        ClientError: the words are not valid, or the selector names ranks.
    """
    name = whole_mesh(selector, ALL_RANKS)
    if not any(word.strip() for word in words):
        raise ClientError(f"{LOOP}: write one of {', '.join(LOOP_ACTIONS)}, or KNOB=VALUE")
    try:
        return parse_loop(" ".join(map(shlex.quote, [name, *words])), Known([name], lambda word: word == name))
    except UsageProblem as problem:
        raise ClientError(str(problem).replace("%mesh loop", LOOP, 1)) from None


def control_loop(kernel: Connection, selector: str, words: Sequence[str]) -> str:
    """Control the loop of a mesh with the words that ``%mesh loop`` takes.

    Raises:
        ClientError: the words are not valid, the selector names ranks, or the loop refuses the command.
    """
    wanted = read_loop(selector, words)
    if wanted.command:
        return kernel.loop(wanted.selector, wanted.command, count=wanted.count)
    return "\n".join(
        kernel.loop(wanted.selector, "set", knob=knob, value=value) for knob, value in wanted.knobs.items()
    )


def show_mesh(kernel: Connection, selector: str) -> dict[str, Any]:
    """Return the frame of a mesh, as `Connection.mesh` does, or of those of its ranks that a selector names.

    Raises:
        ClientError: there is no such mesh, or it has no such ranks.
    """
    name, written = split_selector(selector)
    mesh = kernel.mesh(name)
    return mesh if written is None else of_ranks(mesh, _pick(selector, written, mesh))


def of_ranks(mesh: Mapping[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
    """Return the frame of some ranks of a mesh.

    ``selected`` has these ranks; ``counts``, ``ranks`` and ``errors`` are only theirs, and ``waits`` those that name one of
    them, or no rank. The loops, notes and links stay those of the mesh.

    Args:
        mesh: the frame of the mesh. Of a large one it has only the states of most ranks.
        ranks: the ranks.
    """
    n_ranks = sum(mesh["counts"].values())
    described = {rank["rank"]: dict(rank) for rank in mesh.get("ranks", ())}
    states = mesh.get("states") or [described[rank]["state"] for rank in range(n_ranks)]
    chosen = {rank: described.get(rank, {"rank": rank, "state": states[rank]}) for rank in sorted(ranks)}
    found = {key: value for key, value in mesh.items() if key not in ("states", "in_rate", "out_rate")}
    found |= {"selected": list(chosen), "ranks": list(chosen.values()), "counts": {}}
    for rank in chosen.values():
        found["counts"][rank["state"]] = found["counts"].get(rank["state"], 0) + 1

    def of_these(written: str) -> list[int]:
        return [rank for rank in pick_ranks(written, range(n_ranks)) if rank in chosen] if written else []

    errors = []
    for error in mesh.get("errors", ()):
        if own := of_these(error["ranks"]):
            errors.append({**error, "ranks": format_ranks(own), "rank": own[0], "count": len(own)})
            for each in own:  # the ranks of a large mesh come without their errors
                chosen[each].setdefault("error", error["text"])
    waits = [
        wait
        for wait in mesh.get("waits", ())
        if not wait["ranks"] or of_these(wait["ranks"]) or of_these(wait.get("missing", ""))
    ]
    for key, these in (("errors", errors), ("waits", waits)):
        found.pop(key, None)
        if these:
            found[key] = these
    return found


def ranks_of(kernel: Connection, selector: str) -> list[int] | None:
    """Return the ranks that a selector names, such as ``t[0,2]`` or ``t[0:4]``; None for all.

    Raises:
        ClientError: the mesh has no such ranks.
    """
    name, written = split_selector(selector)
    mesh = kernel.mesh(name)
    return None if written is None else _pick(selector, written, mesh)


def _pick(selector: str, written: str, mesh: Mapping[str, Any]) -> list[int]:
    count = sum(mesh["counts"].values())
    try:
        return pick_ranks(written, range(count))
    except UsageProblem:
        raise ClientError(
            f"{selector}: write ranks of {mesh['name']} as 0,2 or 1-3 or 0:4, from 0 to {count - 1}"
        ) from None


def whole_mesh(selector: str, why: str) -> str:
    """Return the name of a mesh for a command that can't be limited to some ranks.

    Args:
        selector: what the user has written.
        why: why ranks are refused.

    Raises:
        ClientError: it is no name of a mesh, or names ranks.
    """
    name, written = split_selector(selector)
    if written is not None:
        raise ClientError(f"{selector}: {why}; write {name}, without ranks")
    return name


def split_selector(selector: str) -> tuple[str, str | None]:
    """Return the name of a mesh and its ranks as written; None for all.

    Raises:
        ClientError: it is no selector.
    """
    found = _SELECTOR.fullmatch(selector)
    if found is None:
        raise ClientError(f"{selector!r} is no mesh: write its name, or some of its ranks as t[0] or t[0:4]")
    return found["name"], found["ranks"]
