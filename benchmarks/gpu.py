"""Measure what two processes on one GPU cost beside the GPU alone: ``make gpu``, or ``python -m benchmarks.gpu``.

Each figure stands beside its limit on the same machine in the same run: transfers between processes beside the copy within the
device, a step of training on a rank beside the same script under torchrun. Without a GPU the same code runs on the CPU, with
smaller sizes, and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.buffers import Owner, Reader, cell_of, rates
from benchmarks.machine import processor_name
from benchmarks.parallel import MODEL
from monarch_kernel.actor import Actor, ProcMesh, endpoint, shutdown_context, this_host
from monarch_kernel.train.process_group.worker import GroupStore

SIZES = {"10 M": (320, 8), "100 M": (1024, 8), "1 B": (2560, 12)}  # parameters -> width, blocks
STEPS = 25
WARM_UP = 5
STEP = """
import time
def model_of(width, blocks, kind):
    torch.manual_seed(0)
    with torch.device(kind):
        model = GPT(width=width, blocks=blocks)
    return model

def fully(model):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model

def steps_of(model, kind, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times = []
    for step in steps:
        tokens = torch.randint(0, 512, (8, 64), device=kind)
        began = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        if kind == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times
"""
SCRIPT = """
import json
kind = {kind!r}
if kind == "cuda":
    torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
print("times", json.dumps(steps_of(fully(model_of({width}, {blocks}, kind)), kind, range({steps}))))
dist.destroy_process_group()
"""
ON_RANK = """
import gc
from monarch_kernel.parallel import parallelize
units = [f"blocks.{i}" for i in range(blocks)]
example = torch.zeros((1, 64), dtype=torch.long, device=kind)
model = model_of(width, blocks, kind)
model = fully(model) if by == "hand" else parallelize(model, mesh, "fsdp", example=example, units=units, quiet=True)
times = steps_of(model, kind, live.loop(steps) if by == "parallelize and live.loop" else range(steps))
del model
gc.collect()
if kind == "cuda":
    torch.cuda.empty_cache()
times
"""
WAYS = ("hand", "parallelize", "parallelize and live.loop")


class Caller(Actor):
    """Answers calls."""

    @endpoint
    def nothing(self) -> None:
        pass

    @endpoint
    def nbytes(self, tensor: torch.Tensor) -> int:
        return tensor.nbytes


def seconds(operation: Callable[[], object], repeat: int) -> float:
    """The median duration of an operation, after a warm-up."""
    operation()
    found = []
    for _ in range(repeat):
        began = time.perf_counter()
        operation()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def transfers(here: ProcMesh, there: ProcMesh, kind: str, mib: int) -> dict[str, list[float]]:
    """GB/s of copies within a process and between two."""
    owner, reader = here.spawn("owner", Owner), there.spawn("reader", Reader)
    found: dict[str, list[float]] = {}
    for at in dict.fromkeys((kind, "cpu")):
        buffer = owner.lend.call_one((mib << 20) // 4, at).get()
        for what, each in reader.measure.call_one(buffer, 10, kind).get().items():
            found[f"{what} ({kind} process)" if "within" in what else f"{what} process, {at} and {kind}"] = each
        buffer.drop().get()
    return found


def pinned(kind: str, mib: int) -> list[float]:
    """GB/s of a copy from pinned memory of the CPU to the device, in this process."""
    source, into = torch.ones((mib << 20) // 4), torch.empty((mib << 20) // 4, device=kind)
    source = source.pin_memory() if kind == "cuda" else source

    def copy() -> None:
        into.copy_(source, non_blocking=True)
        if kind == "cuda":
            torch.cuda.synchronize()

    return rates(copy, mib << 20, 10)


def copied_state(trainer: ProcMesh, generator: ProcMesh, kind: str, mib: int) -> list[float]:
    """GB/s of `copy_state` for a state of so many MiB in 32 tensors."""
    trainer["mib"], generator["mib"] = mib, mib
    for mesh in (trainer, generator):
        mesh.run(f"state = [torch.ones(mib << 13, device={kind!r}) for _ in range(32)]").get()
    return rates(lambda: generator.copy_state(trainer, "state"), mib << 20, 5)


def training(mesh: ProcMesh, kind: str, size: str, steps: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a step under torchrun and on a rank of the mesh, wrapped by hand and by `parallelize`, in turns."""
    width, blocks = SIZES[size]
    mesh["width"], mesh["blocks"], mesh["steps"] = width, blocks, steps
    found: dict[str, list[float]] = {"torchrun": [], **{f"by {way} on a rank": [] for way in WAYS}}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(MODEL + STEP + SCRIPT.format(kind=kind, width=width, blocks=blocks, steps=steps))
        for _ in range(rounds):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found["torchrun"] += json.loads(done.stdout.split("times")[1])[WARM_UP:]
            for way in WAYS:
                mesh["by"] = way
                times: Any = mesh.run_cell(ON_RANK, want_value=True).get().values()[0].value
                found[f"by {way} on a rank"] += times[WARM_UP:]
    return {name: 1e3 * statistics.median(each) for name, each in found.items()}


def main() -> None:
    """Print a table, and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of torchrun and the mesh")
    parser.add_argument("--json", type=Path, default=Path("build/bench/gpu.json"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kind: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        print("There is no CUDA device: the same code runs on the CPU, with smaller sizes.\n")
    mib, sizes, steps = (1024, list(SIZES), STEPS) if kind == "cuda" else (64, ["10 M"], 8)
    store = GroupStore()
    trainer, generator = (
        this_host().spawn_procs({"gpus": 1}, name=name, device=kind) for name in ("trainer", "generator")
    )
    for mesh in (trainer, generator):
        mesh["kind"] = kind
        mesh.run(MODEL + STEP).get()
        store.form(mesh).get()
    rows: dict[str, Any] = {
        f"{mib} MiB, GB/s: {what}": each for what, each in transfers(trainer, generator, kind, mib).items()
    }
    rows[f"{mib} MiB, GB/s: pinned memory to {kind}, one process"] = pinned(kind, mib)
    rows[f"{mib} MiB, GB/s: copy_state"] = copied_state(trainer, generator, kind, mib)
    caller = trainer.spawn("caller", Caller)
    rows["empty call, us"] = 1e6 * seconds(lambda: caller.nothing.call_one().get(), 1000)
    given = torch.ones(16 << 20, device=kind)
    rows["64 MiB tensor as an argument, GB/s"] = (
        given.nbytes / 1e9 / seconds(lambda: caller.nbytes.call_one(given).get(), 10)
    )
    for size in sizes:
        for name, each in training(trainer, kind, size, steps, options.rounds).items():
            rows[f"FSDP2 step of {size} parameters, ms: {name}"] = each
    for what, each in rows.items():
        print(f"| {what} | {cell_of(each) if isinstance(each, list) else format(each, '.2f')} |")
    device = torch.cuda.get_device_name() if kind == "cuda" else processor_name()
    print(f"\n{device}, {os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    store.close()
    shutdown_context().get()


if __name__ == "__main__":
    main()
