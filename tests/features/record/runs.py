"""Writes records of small runs, without processes."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from monarch_kernel.features.live.loops import LoopRecord
from monarch_kernel.features.record.messages import Noted, StateNoted, Step
from monarch_kernel.features.record.reading import RecordReader
from monarch_kernel.features.record.recorder import Recorder
from monarch_kernel.features.record.tables import FILE
from monarch_kernel.net.wire.messages import Knob, Logged

__all__ = ["REQUEST", "TRAIN", "batch", "log", "loop_of", "write_run"]

REQUEST = 77
TRAIN = "for step in live.loop(6):\n    live.log(loss=train(step, live.knob('lr', 0.1)))"


def loop_of(
    request: int = REQUEST, *, ranks: int = 2, follows: tuple[int, int] | None = None, first: int = 0
) -> LoopRecord:
    """A loop that ranks have joined."""
    loop = LoopRecord(request, 1, "t", "cell [2]", 6, 0.0, follows=follows, first=first)
    for rank in range(ranks):
        loop.ranks[rank + 1] = rank
        loop.pace.joined(rank + 1)
    loop.knobs["lr"] = Knob("lr", 0.1, None, None)
    return loop


def log(recorder: Recorder, loop: LoopRecord, step: int, values: Sequence[float]) -> None:
    """Log a loss, one value for each rank."""
    for rank, value in enumerate(values):
        recorder.loop_reported(loop, rank, {"loss": (Logged(step, value, 1, value),)})


def batch(recorder: Recorder, loop: LoopRecord, step: int, digests: Sequence[bytes]) -> None:
    """Note the batches of a step, one for each rank."""
    for rank, digest in enumerate(digests):
        recorder.noted(rank, Noted(*loop.key, (Step(step, {"batch": digest}),)))


def write_run(
    folder: Path,
    *,
    code: str = TRAIN,
    torch: str = "",
    batch_of: int | None = None,
    loss_from: int | None = None,
    turns: Sequence[tuple[int, float]] = ((2, 0.5),),
    parameters: bytes = b"p" * 8,
    name: str = "t",
    outcome: str = "ok",
    reached: int = 6,
    behind: int = 6,
    loops: int = 1,
) -> RecordReader:
    """Write the record of a run of two ranks and 6 steps.

    Args:
        folder: its folder.
        code: the code of its second cell.
        torch: a version of torch; empty for the real one.
        batch_of: the step whose batch on rank 1 is another one.
        loss_from: the step from which the loss is another one.
        turns: steps and values of the knob ``lr``.
        parameters: the digest at the end, of both ranks.
        name: the mesh.
        outcome: how the second cell ended; empty if it did not.
        reached: the steps of the loop that all ranks have done; rank 0 may have started another one.
        behind: the step from which rank 1 has reported nothing.
        loops: the loops of the second cell, of which only the first has steps.
    """
    recorder = Recorder(folder)
    first = recorder.cell_started("torch.manual_seed(0)", 1, name, "0-1")
    recorder.cell_ended(first, "ok")
    cell = recorder.cell_started(code, 2, name, "0-1")
    recorder.cell_sent(cell, REQUEST)
    for rank in (0, 1):
        recorder.state_noted(rank, StateNoted(cell, {"torch": b"s" * 8}, {"torch": b"state" * 10}, {}))
    loop = loop_of()
    recorder.loop_started(loop)
    for step, value in turns:
        loop.pace.horizon = step
        loop.pace.change("lr", value)
    for step in range(min(6, reached + 1)):
        ranks = 2 if step < behind else 1
        batch(recorder, loop, step, [b"a" * 8, (b"x" if step == batch_of else b"b") * 8][:ranks])
        shift = 0.5 if loss_from is not None and step >= loss_from else 0.0
        log(recorder, loop, step, [1 / (step + 1) + shift, 2 / (step + 1) + shift][:ranks])
    for rank in (0, 1):
        recorder.noted(
            rank, Noted(*loop.key, (Step(reached, {"parameters": parameters}),), ("TensorDataset, 12 rows",))
        )
    for rank in (1, 2):
        loop.pace.left(rank, reached)
        if outcome:
            recorder.loop_left(loop)
    for number in range(2, loops + 1):
        recorder.loop_started(LoopRecord(REQUEST, number, "t", "cell [2]", 6, 0.0))
    recorder.cell_output(cell, "[0-1] trained\n")
    if outcome:
        recorder.cell_ended(cell, outcome)
    recorder.close()
    if torch:
        connection = sqlite3.connect(folder / FILE)
        connection.execute("UPDATE run SET value = ? WHERE key = 'package:torch'", (torch,))
        connection.commit()
        connection.close()
    return RecordReader(folder)
