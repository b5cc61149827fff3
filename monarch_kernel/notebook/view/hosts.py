"""Describes in text what hosts and ranks wait for while they come up, which ones did not come up, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch_kernel.base.events import HostsView, HostView
from monarch_kernel.base.text import format_seconds
from monarch_kernel.errors import Failure, format_ranks
from monarch_kernel.launch.registry import ENGINES

__all__ = ["coming_text", "engine_title", "missing_ranks_text", "missing_text", "up_text"]

_MAX_REASONS = 8
_MAX_LINES = 8


def engine_title(name: str) -> str:
    """Return the name of an engine for use in sentences."""
    engine = ENGINES.get(name)
    return name if engine is None else engine.title


def coming_text(mesh: str, view: HostsView, waited_s: float, what: str = "host") -> str:
    """Say what a mesh waits for: ``t: 2 of 4 hosts up; waiting for Slurm: Resources (12 s)``."""
    up, total = view.count("up"), len(view.hosts)
    awaited = view.waits_for or engine_title(view.engine)
    return f"{mesh}: {up} of {total} {what}{'s' * (total != 1)} up; waiting for {awaited} ({format_seconds(waited_s)})"


def up_text(mesh: str, view: HostsView, waited_s: float, what: str = "host") -> str:
    """Say how many hosts came up: ``t: 4 of 4 hosts up, after 12 s``."""
    up, total = view.count("up"), len(view.hosts)
    return f"{mesh}: {up} of {total} {what}{'s' * (total != 1)} up, after {format_seconds(waited_s)}"


def missing_text(mesh: str, view: HostsView, names: Sequence[str], waited_s: float, *, said: str = "") -> str:
    """List the hosts that did not come up, and why.

    Args:
        mesh: name of the mesh.
        view: the hosts when the wait ended.
        names: names of the hosts; if empty, hosts are numbered.
        waited_s: how long the mesh waited, in seconds.
        said: the engine's last message about hosts that were not up.
    """
    by_reason: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for i, host in enumerate(view.hosts):
        if host.state != "up":
            by_reason.setdefault((host.why or "is not up", host.log[-_MAX_LINES:]), []).append(i)
    missing = sum(map(len, by_reason.values()))
    total = len(view.hosts)
    lines = [
        f"{mesh}: {missing} of {total} host{'s' * (total != 1)} did not come up, after {format_seconds(waited_s)}"
        + (f" (waiting for {said})" if said else "")
        + "; all were released"
    ]
    for (why, log), which in list(by_reason.items())[:_MAX_REASONS]:
        named = _named(which, view.hosts, names)
        lines.append(f"  {why}" if why.startswith((f"{named} ", f"{named}:")) else f"  {named}: {why}")
        lines += [f"    | {line}" for line in log]
    if len(by_reason) > _MAX_REASONS:
        rest = sum(map(len, list(by_reason.values())[_MAX_REASONS:]))
        lines.append(f"  and {rest} more")
    return "\n".join(lines)


def missing_ranks_text(mesh: str, total: int, failures: Mapping[int, Failure], waited_s: float) -> str:
    """List the ranks that did not come up, and why.

    Args:
        mesh: name of the mesh.
        total: number of ranks requested.
        failures: flat rank -> its failure.
        waited_s: how long the mesh waited, in seconds.
    """
    by_reason: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for rank, failure in sorted(failures.items()):
        by_reason.setdefault((failure.message, failure.last_lines), []).append(rank)
    lines = [
        f"{mesh}: {len(failures)} of {total} rank{'s' * (total != 1)} did not come up, "
        f"after {format_seconds(waited_s)}; all were stopped"
    ]
    for (why, log), which in list(by_reason.items())[:_MAX_REASONS]:
        lines.append(f"  rank{'s' * (len(which) != 1)} {format_ranks(which) if len(which) != 1 else which[0]}: {why}")
        lines += [f"    | {line}" for line in log]
    if len(by_reason) > _MAX_REASONS:
        lines.append(f"  and {sum(map(len, list(by_reason.values())[_MAX_REASONS:]))} more")
    return "\n".join(lines)


def _named(which: Sequence[int], hosts: Sequence[HostView], names: Sequence[str]) -> str:
    """Name hosts by their names, or else by their indices."""
    known = [names[i] if names else hosts[i].name for i in which]
    if all(known) and len(known) <= _MAX_REASONS:
        return ", ".join(known)
    return f"host{'s' * (len(which) != 1)} {format_ranks(which) if len(which) != 1 else which[0]}"
