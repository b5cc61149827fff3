"""What a user should know of processes that were just started on this machine, as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.runtime.controller.environment import read_at_start

__all__ = ["start_notes"]


def start_notes(mesh: ProcMesh, env: Mapping[str, str]) -> list[str]:
    """Return a line for each kind of variable that does not have its effect in the processes of a mesh on this machine.

    Args:
        mesh: the processes.
        env: the variables that the user has given for them.
    """
    session = mesh._session
    if session is None:
        return []
    changed = session.environment_changes()
    lines = []
    names = [*dict.fromkeys([*changed.values, *changed.removed, *env])]
    if late := read_at_start(names):
        lines.append(
            f"{_listed(late)}: read when a process starts, but ranks are forked from one that had started before; only child "
            "processes of ranks see the change. For ranks, change it with %env, then %mesh down --all and %mesh up"
        )
    if "PYTHONPATH" in names:
        lines.append(
            "PYTHONPATH: only child processes of ranks see the change; ranks import from sys.path of the notebook"
        )
    if changed.left_out:
        lines.append(f"{_listed(changed.left_out)}: not passed on to ranks: too long, or not text in UTF-8")
    return lines


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
