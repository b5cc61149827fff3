"""Measure what counting costs a collective that C++ starts: ``python -m benchmarks.collectives``.

A model whose gradients DistributedDataParallel reduces in one bucket or in seventeen runs backward, in a process group of one
rank, so that a reduction exchanges nothing. The difference is what sixteen more buckets cost. It is measured in ranks, where
collectives are counted, and in processes of torch alone, in turns. Times are processor time of the thread that runs backward.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from monarch_kernel.actor import ProcMesh, shutdown_context, this_host
from monarch_kernel.train.process_group.worker import GroupStore

STEPS = 300
MORE = 16
BUILD = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range({more} + 1)))
def bucket_s(group):
    def backward_s(bucket_cap_mb):
        wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_cap_mb)
        found = []
        for _ in range({steps}):
            loss = wrapped(torch.ones(1, 64)).sum()
            began = time.thread_time()
            loss.backward()
            found.append(time.thread_time() - began)
        return sorted(found)[len(found) // 2]
    return (backward_s(0.01) - backward_s(1000)) / {more}
"""
ALONE = """
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(bucket_s(dist.group.WORLD))
"""


def in_a_rank(mesh: ProcMesh) -> float:
    """Seconds of a bucket in a rank."""
    (result,) = mesh.run_cell("bucket_s(dist.group.WORLD)", want_value=True).get().values()
    return float(result.value)


def in_torch_alone() -> float:
    """Seconds of a bucket in a process that has no part of this package."""
    code = BUILD.format(steps=STEPS, more=MORE) + ALONE
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    pairs: int = parser.parse_args().pairs
    mesh = this_host().spawn_procs({"dp": 1}, device="cpu", name="c")
    mesh.run_cell(BUILD.format(steps=STEPS, more=MORE)).get()
    store = GroupStore()
    store.form(mesh).get()
    counted, alone = zip(*((in_a_rank(mesh), in_torch_alone()) for _ in range(pairs)))
    costs = [1e6 * (one - other) for one, other in zip(counted, alone)]
    print(f"a bucket in a rank:      {1e6 * statistics.median(counted):6.1f} us")
    print(f"a bucket in torch alone: {1e6 * statistics.median(alone):6.1f} us")
    print(f"counting costs:          {statistics.median(costs):6.1f} us, {min(costs):.1f} to {max(costs):.1f}")
    mesh.stop().get()
    store.close()
    shutdown_context().get()


if __name__ == "__main__":
    main()
