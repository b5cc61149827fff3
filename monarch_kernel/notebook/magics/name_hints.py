"""Hints for names that are defined on the other side, in the notebook or on ranks, and for ranks that have died."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from monarch_kernel.errors import Failure, RanksError, RemoteError, format_ranks
from monarch_kernel.notebook.magics.meshes import Meshes
from monarch_kernel.notebook.view.interrupts import selector_of
from monarch_kernel.notebook.view.names import elsewhere_hint, pull_hint, push_hint
from monarch_kernel.runtime.diagnostics.inspection import kind_of

__all__ = ["gpu_hint", "heal_hint", "local_hint", "remote_hints", "without_heal"]

_CONTEXT_LOST = re.compile(
    r"CUDA error: (device-side assert triggered|an illegal memory access was encountered|unspecified launch failure"
    r"|an illegal instruction was encountered|misaligned address|invalid program counter|hardware stack error)"
)
_METHOD = re.compile(r"(?:, or|:) heal the mesh \(\.heal\(\)\)| with \.heal\(\)")
_NOT_DEFINED = re.compile(r"name '(\w+)' is not defined")


def remote_hints(error: RanksError, meshes: Meshes, namespace: Mapping[str, Any]) -> list[str]:
    """Return hints for names that a cell did not find on its ranks, and that the notebook or other ranks have."""
    if not isinstance(error, RemoteError):
        return []
    hints: dict[str, None] = {}
    for failure, ranks in error.groups():
        missing = _NOT_DEFINED.match(failure.message) if failure.etype == "NameError" else None
        mesh = next((entry.mesh for entry in meshes if failure.pid in _pids(entry.mesh)), None)
        if missing is None or mesh is None or missing[1].startswith("_"):
            continue
        name = missing[1]
        having = [rank for rank, names in mesh.names().items() if name in names]
        if having:
            hints[elsewhere_hint(name, mesh.name, having)] = None
            if new := [rank for rank in ranks if mesh.view().ranks[rank].restarts]:
                hints[f"{format_ranks(new)} of {mesh.name} started again, in place of processes that ended"] = None
        elif name in namespace:
            hints[push_hint(name, kind_of(namespace[name]), mesh.name)] = None
    return list(hints)


def gpu_hint(reports: Iterable[Failure], meshes: Meshes) -> str:
    """Return a hint after an error that leaves the GPU context of a rank unusable; empty if there was none.

    Each later use of the GPU in that process fails, often with the same text, which names an innocent line.
    """
    hit = {
        failure.pid
        for failure in reports
        if failure.kind == "exception" and any(map(_CONTEXT_LOST.search, (failure.message, *_texts(failure))))
    }
    for entry in meshes:
        alive = set(entry.mesh.ranks) - set(entry.mesh.deaths())
        ranks = [i for i, rank in enumerate(entry.mesh.view().ranks) if rank.pid in hit and i in alive]
        if ranks:
            where = selector_of(entry.mesh.name, ranks, len(entry.mesh.extent))
            contexts = "context of this rank is" if len(ranks) == 1 else f"contexts of {format_ranks(ranks)} are"
            return f"the GPU {contexts} unusable until %mesh restart {where}; the cause may be an earlier line"
    return ""


def _texts(failure: Failure) -> Iterator[str]:
    return (cause.message for cause in failure.chain)


def heal_hint(reports: Iterable[Failure], meshes: Meshes) -> str:
    """Return a hint how to continue after ranks have died or were stopped; empty if none has, or if all were replaced."""
    reports = list(reports)
    died = {failure.pid for failure in reports if failure.kind == "lost"}
    for entry in meshes:
        if any(end.kind == "stopped" and end in reports for end in entry.mesh.deaths().values()):
            name = entry.options.name
            ranks = "the ranks of" if len(entry.mesh) > 1 else "the rank of"
            return f"stop() has ended {ranks} {name}; to have new ones: %mesh down {name}, then %mesh up {name}"
        deaths = {rank: death for rank, death in entry.mesh.deaths().items() if death.pid in died}
        if deaths and all(death.kind == "lost" for death in deaths.values()):
            name = entry.options.name
            new = "a new process" if len(deaths) == 1 else "new processes"
            n_others = len(entry.mesh) - len(deaths)
            others = (
                "; the others keep their state" if n_others > 1 else "; the other keeps its state" if n_others else ""
            )
            return f"%mesh heal {name} puts {new} in place of {format_ranks(deaths)}{others}"
    return ""


def without_heal(what: str) -> str:
    """Drop the method ``.heal()`` from the text of an error that has a `heal_hint` below it: one way out has one spelling."""
    return _METHOD.sub("", what)


def local_hint(error: NameError, meshes: Meshes) -> str:
    """Return a hint for a name that a local cell did not find, and that ranks have; empty if no rank has it."""
    missing = _NOT_DEFINED.match(str(error)) if type(error) is NameError else None
    if missing is None:
        return ""
    places = list(_places(missing[1], meshes))
    return pull_hint(missing[1], places) if places else ""


def _pids(mesh: Any) -> Iterable[int]:
    return (rank.pid for rank in mesh.view().ranks)


def _places(name: str, meshes: Meshes) -> Iterator[tuple[str, list[int], bool]]:
    for entry in meshes:
        ranks = [rank for rank, names in entry.mesh.names().items() if name in names]
        if ranks:
            yield entry.mesh.name, ranks, len(ranks) == len(entry.mesh)
