"""Measure the cost of `parallelize` for a step, against code by hand and against torchrun: ``python -m benchmarks.parallel``.

Two models with the same weights and data take turns in each rank, step by step: one is parallelized by hand (``fully_shard`` on
each block and the model, or ``DistributedDataParallel``), one by `parallelize` in a ``live.loop``, with a knob and a metric. So
other work of the machine affects both alike. The results are medians and quartiles of the differences between successive steps.
Then the version by hand as a script under torchrun, and the one by `parallelize` on the mesh, run in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from monarch_kernel.actor import ProcMesh, shutdown_context, this_host
from monarch_kernel.train.process_group.worker import GroupStore

RANKS = 2
MODEL = """
import os, time, torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

class GPT(nn.Module):
    def __init__(self, width=256, blocks=6, vocabulary=512, length=64):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

def batch(step):
    generator = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
    return torch.randint(0, 512, (4, 64), generator=generator)

def by_hand(strategy):
    torch.manual_seed(0)
    model = GPT()
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

def step_of(model, optimizer, tokens):
    began = time.perf_counter(), time.process_time()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    return time.perf_counter() - began[0], time.process_time() - began[1], loss.item()
"""
PAIRS = """
from monarch_kernel.train.parallel import parallelize
def spread():
    torch.manual_seed(0)
    model = parallelize(GPT(), mesh, strategy, example=batch(0), units=units, quiet=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
hand, ours = by_hand(strategy), spread()
rows = []
for step in live.loop(pairs):
    lr = live.knob("lr", 1e-3)
    tokens, turns = batch(step), [hand, ours]
    took = {}
    for which in (0, 1) if step % 2 else (1, 0):
        dist.barrier()
        took[which] = step_of(*turns[which], tokens)
    live.log(loss=took[1][2])
    rows.append((took[0], took[1]))
rows
"""
ALONE = """
from monarch_kernel.train.parallel import parallelize
torch.manual_seed(0)
model = parallelize(GPT(), mesh, strategy, example=batch(0), units=units, quiet=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
[step_of(model, optimizer, batch(step))[0] for step in live.loop(steps)]
"""
SCRIPT = """
dist.init_process_group("gloo")
model, optimizer = by_hand({strategy!r})
times = [step_of(model, optimizer, batch(step))[0] for step in range({steps})]
if dist.get_rank() == 0:
    print("median", sorted(times[5:])[len(times[5:]) // 2])
dist.destroy_process_group()
"""


def compare(mesh: ProcMesh, strategy: str, pairs: int) -> None:
    """Print the overhead of `parallelize` compared with the same by hand."""
    mesh["strategy"], mesh["pairs"] = strategy, pairs
    mesh["units"] = [f"blocks.{i}" for i in range(6)]  # the units that are wrapped by hand
    results = mesh.run_cell(PAIRS, want_value=True).get().values()
    for what, at in (("wall", 0), ("processor time", 1)):
        base = statistics.median(hand[at] for result in results for hand, _ in result.value)
        more = [ours[at] - hand[at] for result in results for hand, ours in result.value[5:]]
        quartiles = statistics.quantiles(more, n=4)
        said = f"{100 * statistics.median(more) / base:+.2f} % of {1e3 * base:.0f} ms"
        print(
            f"{strategy}: {what} {said}; quartiles {100 * quartiles[0] / base:+.1f} to {100 * quartiles[2] / base:+.1f} %"
        )
    equal = all(hand[2] == ours[2] for result in results for hand, ours in result.value)
    print(f"{strategy}: losses {'equal to the last digit' if equal else 'DIFFER'}, {pairs} steps", flush=True)


def beside_torchrun(mesh: ProcMesh, strategy: str, rounds: int, steps: int) -> None:
    """Print the median times of steps of a script under torchrun, and of `parallelize` on the mesh, in turns."""
    mesh["strategy"], mesh["steps"] = strategy, steps
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(MODEL + SCRIPT.format(strategy=strategy, steps=steps))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={RANKS}",
            str(script),
        ]
        found: dict[str, list[float]] = {"torchrun": [], "mesh": []}
        for _ in range(rounds):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found["torchrun"].append(float(done.stdout.split("median")[1]))
            times = mesh.run_cell(ALONE, want_value=True).get().values()[0].value
            found["mesh"].append(statistics.median(times[5:]))
    for name, medians in found.items():
        print(f"{strategy}: {name} {', '.join(f'{1e3 * each:.0f}' for each in medians)} ms a step", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    store = GroupStore()
    mesh = this_host().spawn_procs({"dp": RANKS}, name="bench", device="cpu")
    mesh.run_cell(MODEL).get()
    store.form(mesh).get()
    for strategy in ("fsdp", "ddp"):
        compare(mesh, strategy, arguments.pairs)
        beside_torchrun(mesh, strategy, arguments.rounds, arguments.steps)
    store.close()
    shutdown_context().get()


if __name__ == "__main__":
    main()
