"""What is measured of distributed tensors, by which libraries, and the bars; pure."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.machine import PeerPackage
from benchmarks.measures import Bar, Measure

__all__ = ["BARS", "LIBRARIES", "MEASURES", "NOTES", "OPERATIONS", "STEPS"]

LIBRARIES: dict[str, PeerPackage] = {
    "ours": PeerPackage("monarch_kernel.tensor", ""),
    "plain": PeerPackage("torch", ""),
    "spmd": PeerPackage("torch", ""),
    "monarch": PeerPackage("monarch.actor", "torchmonarch"),
    "jax": PeerPackage("jax", "jax"),
    "dask": PeerPackage("dask.array", "dask"),
}

NOTES: dict[str, str] = {
    "ours": "the program is the controller of two or four ranks on this machine.",
    "plain": "plain torch in the program, without any rank.",
    "spmd": "a script of torch's DTensor on gloo, a process for each rank, with the placements of ours; rank 0 measures.",
    "monarch": "torchmonarch's tensor engine, `ProcMesh.activate`.",
    "jax": "one process with this many CPU devices; steps are compiled by `jax.jit`, operations are not.",
    "dask": "`dask.array` on a local cluster of one-threaded workers.",
}

OPERATIONS: dict[str, str] = {
    "add": "x + y",
    "scalar": "x + 1.5",
    "inplace": "x.add_(y)",
    "view": "x.view(16)",
    "addmm": "torch.addmm(b, x, y)",
    "autograd": "w @ y, with autograd",
    "active": "x + y, in activate()",
}
"""Operations on tensors of 4 x 4 -> what the program writes."""

MODEL = "64-{width}-{width}-10, batch {batch}, SGD"


class Step(NamedTuple):
    """A training step, operation by operation.

    Attributes:
        width: Of the hidden layers.
        batch: Of each rank, which has the whole batch.
        bar: Limit of the time, as a multiple of that of plain torch; 0 for none.
    """

    width: int
    batch: int
    ranks: int
    bar: float

    @property
    def key(self) -> str:
        """The name of the measure, which `work.size_of` reads."""
        return f"step_{self.width}_{self.batch}"


STEPS = (Step(64, 32, 1, 0), Step(256, 32, 2, 2.0), Step(512, 256, 1, 1.5), Step(1024, 512, 1, 1.05))
"""Small operations on two ranks share the two cores of a small machine with the program; the bars for larger ones are for one
rank, which may work while the program issues."""

MEASURES: tuple[Measure, ...] = (
    *(
        Measure(
            f"issue_{name}",
            f"issue {code}",
            "us",
            (2,),
            "processor time of the program for one operation on tensors of 4 x 4, all its threads; ranks work meanwhile",
        )
        for name, code in OPERATIONS.items()
    ),
    Measure(
        "until_add",
        "x + y until all ranks have done it",
        "us",
        (2,),
        "time for one of many operations (3,000; JAX 500, Monarch 200), issued one after the other, until the last result "
        "is there",
    ),
    Measure("call_one", "call of an actor", "us", (2,), "time until the answer of one rank, which returns a number"),
    Measure(
        "fetch", "value of a scalar", "us", (2,), "time until the program has the value of a tensor of one element"
    ),
    *(
        Measure(
            step.key,
            f"step of an MLP {MODEL.format(width=step.width, batch=step.batch)}",
            "ms",
            (step.ranks,),
            "time for one of several steps (20; JAX 5, Monarch 3), operation by operation, each rank the whole batch, until "
            "the last loss is there",
        )
        for step in STEPS
    ),
    Measure(
        "recorded",
        f"a recorded step of the MLP {MODEL.format(width=256, batch=128)}",
        "ms",
        (2,),
        "the same, with the step as one recorded or compiled function, and the loss awaited after each step",
    ),
    Measure(
        "cell",
        f"a cell with a step of the MLP {MODEL.format(width=256, batch=128)}",
        "ms",
        (2,),
        "the same step as code of the ranks, one cell for each step",
    ),
    Measure(
        "first",
        "first step of a sharded MLP, AdamW",
        "s",
        (4,),
        "time of the first step in a fresh process, in which placements are found out, until the loss is there",
    ),
    *(
        Measure(
            f"sharded_{name.lower()}",
            f"step of a sharded MLP, {name}",
            "ms",
            (4,),
            "time for one of 10 steps of an MLP 64-512-512-10, batch 256, data parallel by 2 and tensor parallel by 2, until "
            "the loss is there",
        )
        for name in ("SGD", "AdamW")
    ),
    Measure(
        "matmul",
        "(x @ w).sum(), 2,048 x 2,048",
        "ms",
        (4,),
        "time until the program has the sum; x lies in four parts, w is on each rank",
    ),
    Measure(
        "peak",
        "peak of a rank's memory",
        "MiB",
        (4,),
        "growth of the resident memory of a rank during 3 steps with AdamW of an MLP 64-3,072-3,072-10 sharded as above",
    ),
    Measure(
        "left",
        "tensors left on a rank",
        "",
        (2,),
        "tensors on a rank after the program has dropped what the other rows made",
    ),
)

BARS: tuple[Bar, ...] = (
    *(Bar(f"issue_{name}/2", 12.0, "at most") for name in OPERATIONS),
    Bar("until_add/2", 15.0, "at most"),
    Bar("fetch/2", 1.2, "at most x ours", "call_one/2"),
    *(Bar(f"{step.key}/{step.ranks}", step.bar, "at most x plain") for step in STEPS if step.bar),
    Bar("recorded/2", 1.05, "at most x ours", "cell/2"),
    Bar("sharded_sgd/4", 1.15, "at most x spmd"),
    Bar("sharded_adamw/4", 1.15, "at most x spmd"),
    Bar("first/4", 1.2, "at most x spmd"),
    Bar("peak/4", 1.05, "at most x spmd"),
    Bar("left/2", 0.0, "at most"),
)
