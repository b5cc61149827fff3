"""Describes names on the ranks, and gives hints for a name that is defined on the other side. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch_kernel.base.text import printable
from monarch_kernel.errors import format_ranks

__all__ = ["described", "elsewhere_hint", "pull_hint", "push_hint"]

_LONG = ("Docstring", "Source")


def described(description: Mapping[str, str], *, color: bool) -> str:
    """Format a description, title -> text, in the style of IPython."""
    short = [title for title in description if title not in _LONG]
    width = max(map(len, short), default=0) + 2
    lines = []
    for title in [*short, *(title for title in description if title in _LONG)]:
        text = printable(description[title])
        head = f"{title}:".ljust(width)
        if color:
            head = f"\x1b[31m{head}\x1b[39m"
        lines.append(f"{head.rstrip()}\n{text}" if "\n" in text else f"{head}{text}")
    return "\n".join(lines)


def push_hint(name: str, kind: str, mesh: str) -> str:
    """Say how to make a name of the notebook available on the ranks.

    Args:
        name: the name in the user's code.
        kind: ``module``, ``function``, ``class``, or the type of a value.
        mesh: name of the mesh on which it is not defined.
    """
    if kind == "module":
        return f"{name} is a module in this notebook, not on the ranks: import it in a %%remote cell"
    if kind in ("function", "class"):
        return (
            f"{name} is a {kind} in this notebook, not on the ranks: define it in a %%remote cell, or push it: "
            f'{mesh}["{name}"] = {name}'
        )
    return f'{name} is in this notebook ({kind}), not on the ranks: {mesh}["{name}"] = {name} pushes it'


def elsewhere_hint(name: str, mesh: str, having: Sequence[int]) -> str:
    """Say which ranks of a mesh define a name that the selected ranks do not."""
    return f"{name} is on {format_ranks(having)} of {mesh} only"


def pull_hint(name: str, places: Sequence[tuple[str, Sequence[int], bool]]) -> str:
    """Say how to use a name that is defined on ranks and not in the notebook.

    Args:
        name: the name in the user's code.
        places: at least one mesh, each with its ranks that define the name, and whether these are all its ranks.
    """
    where = ", ".join(f"on {format_ranks(ranks)} of {mesh}" for mesh, ranks, _ in places)
    mesh, ranks, whole = places[0]
    selector = mesh if whole else f"{mesh}[{list(ranks)}]"
    return (
        f'{name} is {where}, not in this notebook: {selector}["{name}"] pulls it, a %%remote {selector} cell runs there'
    )
