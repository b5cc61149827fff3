"""Going back to a snapshot, as the program asks for it: what ranks keep, to which step all can go back, who is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.errors import Failure, SnapshotError, format_ranks
from monarch_kernel.net.wire.codec import load, pack
from monarch_kernel.net.wire.messages import ListSnapshots, Rewind
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.train.snapshots.buddy_store import Key, put_back_here

__all__ = ["Common", "Holdings", "common", "holdings", "rewind", "roll_back"]

Holdings = Mapping[int, Mapping[int, Sequence[Key]]]
"""Who keeps which snapshots of whom: holder -> owner -> keys; all by flat rank."""


class Common(NamedTuple):
    """A snapshot that all can go back to.

    Attributes:
        key: of it.
        holders: by rank: who keeps it, itself if it can.
    """

    key: Key
    holders: tuple[int, ...]


def holdings(mesh: ProcMesh) -> Future[Holdings]:
    """Ask all ranks what they keep; those that do not answer keep nothing."""
    first = mesh.procs[0] - mesh.ranks[0]

    def finish(answers: Sequence[Answer]) -> Holdings:
        found: dict[int, Mapping[int, Sequence[Key]]] = {}
        for rank, answer in zip(mesh.ranks, answers, strict=True):
            if not isinstance(answer, Failure):
                kept = load(answer.payload, answer.frames)
                found[rank] = {owner - first: [tuple(key) for key in keys] for owner, keys in kept.items()}
        return found

    return mesh._runtime.ask(mesh.procs, lambda id: pack(ListSnapshots(id)), finish)


def common(ranks: Sequence[int], held: Holdings) -> list[Common]:
    """The snapshots that each of some ranks has, itself or with another, in the order in which they were taken."""
    keys = [{key for owned in held.values() for key in owned.get(rank, ())} for rank in ranks]
    found = []
    for key in sorted(set.intersection(*keys)) if keys else ():
        holders = [
            rank
            if key in held.get(rank, {}).get(rank, ())
            else next(holder for holder, owned in held.items() if key in owned.get(rank, ()))
            for rank in ranks
        ]
        found.append(Common(key, tuple(holders)))
    return found


def rewind(mesh: ProcMesh, to: Common, *, is_recovery: bool = False) -> Future[None]:
    """Say to all ranks that their next `live.snapshot` puts this back."""
    first = mesh.procs[0] - mesh.ranks[0]
    holders = tuple(first + holder for holder in to.holders)

    def finish(answers: Sequence[Answer]) -> None:
        for rank, answer in zip(mesh.ranks, answers, strict=True):
            if isinstance(answer, Failure):
                raise SnapshotError(f"rank {rank} of {mesh.name} could not be told to go back: {answer.headline()}")

    return mesh._runtime.ask(mesh.procs, lambda id: pack(Rewind(id, to.key, holders, is_recovery)), finish)


def roll_back(mesh: ProcMesh, step: int | None = None) -> int:
    """Put back what ranks had before a step, and have their next loop with snapshots go on from there.

    Args:
        mesh: a whole one; none of its ranks is dead, or in a loop.
        step: the newest snapshot that is not later is taken; None: the newest of all.

    Returns:
        The step.

    Raises:
        RemoteError: what is there now is not what it was.
        SnapshotError: there is no such snapshot, or the ranks are in a loop.
        SupervisionError: a rank is dead.
    """
    running = [loop for loop in mesh.loops if loop.view().state != "over"]
    if running:
        step_now = running[-1].view().step
        raise SnapshotError(f"{mesh.name} is in a loop, at step {step_now:,}; stop it first: %mesh loop stop")
    held = holdings(mesh).get()
    found = common(mesh.ranks, held)
    last = [each for each in found if each.key[:2] == found[-1].key[:2]]
    fitting = [each for each in last if step is None or each.key[2] <= step]
    if not fitting:
        raise SnapshotError(_nothing_text(mesh, held, last, step))
    chosen = fitting[-1]
    rewind(mesh, chosen).get()
    mesh.map(put_back_here).get()
    return chosen.key[2]


def _nothing_text(mesh: ProcMesh, held: Holdings, found: Sequence[Common], step: int | None) -> str:
    if found:
        steps = ", ".join(str(each.key[2]) for each in found)
        return f"{mesh.name} has no snapshot of step {step} or before it; of these: {steps} (live.snapshot(keep=3) keeps 3)"
    without = [rank for rank in mesh.ranks if not any(rank in owned for owned in held.values())]
    if without:
        return f"{mesh.name}: nobody keeps a snapshot of {format_ranks(without)}; live.snapshot(model=model, ...) takes some"
    return f"{mesh.name}: the ranks have no snapshot of the same step"
