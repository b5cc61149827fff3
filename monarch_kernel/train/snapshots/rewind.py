"""The controller's part of going back to a snapshot: finds the snapshots of ranks, and chooses one that all ranks have."""

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
"""The snapshots that ranks keep: holder -> owner -> keys; holder and owner are flat ranks."""


class Common(NamedTuple):
    """A snapshot that all ranks can go back to.

    Attributes:
        key: key of the snapshot.
        holders: for each rank, the rank that keeps its snapshot; the rank itself if possible.
    """

    key: Key
    holders: tuple[int, ...]


def holdings(mesh: ProcMesh) -> Future[Holdings]:
    """Ask all ranks for the snapshots that they keep; ranks that do not answer keep none."""
    first = mesh.procs[0] - mesh.ranks[0]

    def finish(answers: Sequence[Answer]) -> Holdings:
        found: dict[int, Mapping[int, Sequence[Key]]] = {}
        for rank, answer in zip(mesh.ranks, answers, strict=True):
            if not isinstance(answer, Failure):
                kept = load(answer.payload, answer.frames)
                found[rank] = {owner - first: [tuple(key) for key in keys] for owner, keys in kept.items()}
        return found

    return mesh.runtime.ask(mesh.procs, lambda id: pack(ListSnapshots(id)), finish)


def common(ranks: Sequence[int], held: Holdings) -> list[Common]:
    """The snapshots that exist for all of some ranks, on the rank itself or on another one, oldest first."""
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
    """Tell all ranks that their next `live.snapshot` restores a snapshot."""
    first = mesh.procs[0] - mesh.ranks[0]
    holders = tuple(first + holder for holder in to.holders)

    def finish(answers: Sequence[Answer]) -> None:
        for rank, answer in zip(mesh.ranks, answers, strict=True):
            if isinstance(answer, Failure):
                raise SnapshotError(f"rank {rank} of {mesh.name} did not accept the rollback: {answer.headline()}")

    return mesh.runtime.ask(mesh.procs, lambda id: pack(Rewind(id, to.key, holders, is_recovery)), finish)


def roll_back(mesh: ProcMesh, step: int | None = None) -> int:
    """Restore the state of ranks before a step, and let their next loop with snapshots resume from there.

    Args:
        mesh: a whole mesh; none of its ranks is dead or in a loop.
        step: the step of the snapshot; None: the newest.

    Returns:
        The step of the snapshot.

    Raises:
        RemoteError: the objects on a rank differ from those of the snapshot.
        SnapshotError: there is no snapshot of this step, or the ranks are in a loop; nothing has changed.
        SupervisionError: a rank is dead.
    """
    running = [loop for loop in mesh.loops if loop.view().state != "over"]
    if running:
        step_now = running[-1].view().step
        raise SnapshotError(f"{mesh.name} is in a loop, at step {step_now:,}; stop it first: %mesh loop stop")
    held = holdings(mesh).get()
    found = common(mesh.ranks, held)
    last = [each for each in found if each.key[:2] == found[-1].key[:2]]
    if not last:
        raise SnapshotError(_nothing_text(mesh, held))
    by_step = {each.key[2]: each for each in last}
    chosen = last[-1] if step is None else by_step.get(step)
    if chosen is None:
        raise SnapshotError(_no_such_step_text(mesh.name, list(by_step), step or 0))
    rewind(mesh, chosen).get()
    mesh.map(put_back_here).get()
    return chosen.key[2]


def _no_such_step_text(name: str, steps: Sequence[int], step: int) -> str:
    """Say which steps of the last loop have a snapshot, for a step that has none.

    Args:
        name: name of the mesh.
        steps: the steps with a snapshot, in order; at least one.
        step: the step that was asked for.
    """
    have = ", ".join(f"{each:,}" for each in steps)
    before = [each for each in steps if each < step]
    use = (
        f"%mesh rollback {name} {before[-1]} takes the newest before it" if before else "live.snapshot(keep=3) keeps 3"
    )
    return f"{name} has no snapshot of step {step:,}; it has: {have} ({use})"


def _nothing_text(mesh: ProcMesh, held: Holdings) -> str:
    without = [rank for rank in mesh.ranks if not any(rank in owned for owned in held.values())]
    if without:
        return (
            f"{mesh.name}: there is no snapshot of {format_ranks(without)}; live.snapshot(model=model, ...) takes some"
        )
    return f"{mesh.name}: the ranks have no snapshot of the same step"
