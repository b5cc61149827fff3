"""Names of process groups for users.

Torch's names of groups are numbers, or hashes of the ranks. A label is the axis of a device mesh, or the description that the
user gave (``group_desc``), or else the ranks of the group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from monarch_kernel.errors import format_ranks

__all__ = ["label_of"]

_DEFAULT = "default_pg"
_NONE = ("", "undefined")
_MAX_RANKS = 60  # characters
_MAX_DESCRIPTION = 150  # characters of a description that a program gives to a group


def label_of(name: str, about: str, members: Sequence[int] = ()) -> str:
    """Return the label of a process group; empty for the default one.

    Args:
        name: torch's name of the group.
        about: torch's description of it.
        members: its global ranks, if torch does not know the group yet.
    """
    if about == _DEFAULT:
        return ""
    if len(about) > _MAX_DESCRIPTION:  # torch's name, which all ranks know, tells apart groups that begin alike
        about = f"{about[:_MAX_DESCRIPTION]}… {name}"
    if about not in _NONE:
        return about.removeprefix("mesh_")
    without = _without_description()
    ranks = tuple(sorted(members)) or without.get(name, ())
    if not ranks:
        return name
    text = format_ranks(ranks)
    if len(text) > _MAX_RANKS:
        return f"{len(ranks)} ranks ({name})"
    is_only = not any(other != name and its == ranks for other, its in without.items())
    return text if is_only else f"{text} ({name})"


def _without_description() -> dict[str, tuple[int, ...]]:
    """The groups of this process that have no description: torch's name -> the global ranks."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return {}
    world = distributed._world
    names = dict(world.pg_names)
    return {
        str(names[group]): tuple(sorted(ranks))
        for group, ranks in dict(world.pg_group_ranks).items()
        if group in names and group.group_desc in _NONE
    }
