"""How fast memory of another process is read and written, beside a copy within one: ``python -m benchmarks.buffers``."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as in ranks; before torch is imported

import torch

from benchmarks.machine import processor_name
from monarch_kernel.actor import Actor, endpoint, shutdown_context, this_host
from monarch_kernel.rdma import Buffer, RDMABuffer

__all__ = ["main"]


def rates(operation: Callable[[], object], nbytes: int, repeat: int) -> list[float]:
    """GB/s of each repetition; one before them is not counted."""
    found: list[float] = []
    for _ in range(repeat + 1):
        begun = time.perf_counter()
        operation()
        found.append(nbytes / (time.perf_counter() - begun) / 1e9)
    return found[1:]


class Owner(Actor):
    """Lends a tensor."""

    @endpoint
    def lend(self, count: int) -> Buffer:
        return RDMABuffer(torch.ones(count))


class Reader(Actor):
    """Copies within its process, reads and writes."""

    @endpoint
    def measure(self, buffer: Buffer, repeat: int) -> dict[str, list[float]]:
        mine, other = torch.ones(buffer.shape), torch.zeros(buffer.shape)
        other.fill_(2)  # its pages are there
        return {
            "copy within a process": rates(lambda: other.copy_(mine), buffer.nbytes, repeat),
            "read from another": rates(lambda: buffer.read_into(other).get(), buffer.nbytes, repeat),
            "written into another": rates(lambda: buffer.write_from(mine).get(), buffer.nbytes, repeat),
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table: GB/s by size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args(argv)
    procs = this_host().spawn_procs({"gpus": 2})
    owner, reader = procs.slice(gpus=0).spawn("owner", Owner), procs.slice(gpus=1).spawn("reader", Reader)
    print("| GB/s: median (least, most) | " + " | ".join(f"{mib} MiB" for mib in options.sizes_mib) + " |")
    print("|---|" + "---:|" * len(options.sizes_mib))
    rows: dict[str, list[str]] = {}
    for mib in options.sizes_mib:
        buffer = owner.lend.call_one((mib << 20) // 4).get()
        for what, found in reader.measure.call_one(buffer, options.repeat).get().items():
            cell = f"{statistics.median(found):.1f} ({min(found):.1f}, {max(found):.1f})"
            rows.setdefault(what, []).append(cell)
        buffer.drop().get()
    for what, cells in rows.items():
        print(f"| {what} | " + " | ".join(cells) + " |")
    print(f"\n{processor_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    shutdown_context().get()


if __name__ == "__main__":
    main()
