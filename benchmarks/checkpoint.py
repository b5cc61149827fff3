"""Measure how long a checkpoint blocks training, and how long it takes in total: ``python -m benchmarks.checkpoint``."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile

from monarch_kernel.actor import shutdown_context, this_host
from monarch_kernel.train.process_group.worker import GroupStore

RANKS = 2
CELL = """
import os, time, torch, torch.distributed as dist
from torch import nn
from monarch_kernel import checkpoint
from monarch_kernel.train.parallel import parallelize
model = parallelize(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]), mesh, "fsdp", quiet=True)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 1024)).sum().backward(); optimizer.step()
rows = []
for turn in range(turns):
    row = {}
    for wait in (True, False):
        dist.barrier(); began = time.perf_counter()
        saving = checkpoint.save(f"{folder}/{turn}-{wait}", wait=wait, model=model, optimizer=optimizer, step=turn)
        row["save" if wait else "save(wait=False): training stands"] = time.perf_counter() - began
        if saving is not None:
            saving.result(); row["save(wait=False): complete after"] = time.perf_counter() - began
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
    dist.barrier(); began = time.perf_counter()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)
    if rank == 0:
        with open(f"{folder}/plain", "wb") as file:
            torch.save(state, file); file.flush(); os.fsync(file.fileno())
    dist.barrier()
    row["gathered on rank 0, torch.save and fsync"] = time.perf_counter() - began
    rows.append(row)
    for name in os.listdir(folder) if rank == 0 else ():
        os.system(f"rm -rf {folder}/{name}")
rows
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    os.environ["OMP_NUM_THREADS"] = "1"
    store = GroupStore()
    mesh = this_host().spawn_procs({"dp": RANKS}, name="bench", device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        mesh["folder"], mesh["turns"] = folder, turns
        store.form(mesh).get()
        rows = mesh.run_cell(CELL, want_value=True).get().values()[0].value
    print(f"96 MiB of parameters and AdamW's state, {RANKS} ranks by FSDP, {turns} turns, seconds: least, median, most")
    for name in rows[0]:
        times = sorted(row[name] for row in rows)
        print(f"  {name}: {times[0]:.2f}, {statistics.median(times):.2f}, {times[-1]:.2f}")
    store.close()
    shutdown_context().get()


if __name__ == "__main__":
    main()
