"""Measure reads and writes of another process's memory, beside a copy within a process: ``python -m benchmarks.buffers``."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as in ranks; must be set before torch is imported

import torch

from benchmarks.machine import processor_name
from monarch_kernel.actor import Actor, HostMesh, ProcMesh, endpoint, shutdown_context, this_host
from monarch_kernel.actor.channels import client_here
from monarch_kernel.actor.host_mesh import serve_ranks
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.launch.local import LocalLauncher
from monarch_kernel.net.memory.layout import memory_of
from monarch_kernel.rdma import Buffer, RDMABuffer
from monarch_kernel.runtime.buffers.streams import Invitation, Stream, StreamListener, reach
from monarch_kernel.runtime.controller.session import current_session

__all__ = ["main"]


def rates(operation: Callable[[], object], nbytes: int, repeat: int) -> list[float]:
    """GB/s of each repetition, after a warm-up."""
    found: list[float] = []
    for _ in range(repeat + 1):
        started_at = time.perf_counter()
        operation()
        found.append(nbytes / (time.perf_counter() - started_at) / 1e9)
    return found[1:]


class Owner(Actor):
    """Exports a tensor."""

    @endpoint
    def lend(self, count: int, device: str = "cpu") -> Buffer:
        return RDMABuffer(torch.ones(count, device=device))

    @endpoint
    def has_gpu(self) -> bool:
        return torch.cuda.is_available()

    @endpoint
    def listen(self, nbytes: int, is_encrypted: bool) -> tuple[object, ...]:
        """Listen on a socket that answers each byte with a block of ``nbytes``; gives its address."""
        block = memoryview(bytearray(b"x" * nbytes))
        if is_encrypted:
            listener = StreamListener(lambda stream: send_again(stream, block), lambda: ["127.0.0.1"])
            return tuple(listener.invite(1))
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=send_plainly, args=(server, block), daemon=True).start()
        return server.getsockname()


class Reader(Actor):
    """Copies memory within its process, and reads and writes memory of another."""

    @endpoint
    def measure(self, buffer: Buffer, repeat: int, device: str) -> dict[str, list[float]]:
        mine, other = torch.ones(buffer.shape, device=device), torch.zeros(buffer.shape, device=device)
        other.fill_(2)  # allocates its pages

        def copy() -> None:
            other.copy_(mine)
            if other.is_cuda:
                torch.cuda.synchronize()

        return {
            "copy within a process": rates(copy, buffer.nbytes, repeat),
            "read from another": rates(lambda: buffer.read_into(other).get(), buffer.nbytes, repeat),
            "written into another": rates(lambda: buffer.write_from(mine).get(), buffer.nbytes, repeat),
        }

    @endpoint
    def measure_paths(self, buffer: Buffer, repeat: int) -> dict[str, list[float]]:
        into = torch.zeros(buffer.shape).fill_(2)
        found: dict[str, list[float]] = {}
        for name in ("network", "messages"):
            path = client_here().paths[name]
            for what, is_write in (("read from", False), ("written into", True)):
                carry = partial(path.carry, buffer._handle, memory_of(into), is_write=is_write)
                found[f"{what} another host, by {name}"] = rates(carry, buffer.nbytes, repeat)
        return found

    @endpoint
    def measure_socket(self, where: tuple[Any, ...], nbytes: int, is_encrypted: bool, repeat: int) -> list[float]:
        into = memoryview(bytearray(b"x" * nbytes))
        if is_encrypted:
            invitation = Invitation(*where)
            _, stream = reach(invitation, invitation.tokens[0], 5.0, lambda: False)
            with contextlib.closing(stream):

                def receive() -> None:
                    stream.send(b"x")
                    stream.receive_into(into)

                return rates(receive, nbytes, repeat)
        with socket.create_connection(where) as connection:

            def receive_plainly() -> None:
                connection.sendall(b"x")
                done = 0
                while done < nbytes:
                    done += connection.recv_into(into[done:])

            return rates(receive_plainly, nbytes, repeat)


def cell_of(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f}, {max(found):.2f})"


def send_again(stream: Stream, block: memoryview) -> None:
    while True:
        stream.receive_into(memoryview(bytearray(1)), 60.0)
        stream.send(block)


def send_plainly(server: socket.socket, block: memoryview) -> None:
    with server, server.accept()[0] as connection:
        while connection.recv(1):
            connection.sendall(block)


def elsewhere(count: int) -> ProcMesh:
    """A rank on each of several hosts, which are agents of this machine that connect as if they were remote."""
    session = current_session()
    serve_ranks(session)
    numbers = session.add_hosts(LocalLauncher(session.directory), count, lost_after_s=60.0)
    return HostMesh(session.runtime, Region.whole(Extent({"hosts": count})), numbers).spawn_procs({"gpus": 1})


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table: GB/s by size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument(
        "--device",
        default="cpu",
        help="cuda: two processes on one GPU, for example with --sizes-mib 1024; hosts are not measured",
    )
    options = parser.parse_args(argv)
    procs = this_host().spawn_procs({"gpus": 2})
    owner, reader = procs.slice(gpus=0).spawn("owner", Owner), procs.slice(gpus=1).spawn("reader", Reader)
    if options.device != "cpu" and not owner.has_gpu.call_one().get():
        print("skipped: there is no CUDA device here")
        shutdown_context().get()
        return
    print("| GB/s: median (least, most) | " + " | ".join(f"{mib} MiB" for mib in options.sizes_mib) + " |")
    print("|---|" + "---:|" * len(options.sizes_mib))
    rows: dict[str, list[str]] = {}
    for mib in options.sizes_mib:
        buffer = owner.lend.call_one((mib << 20) // 4, options.device).get()
        for what, found in reader.measure.call_one(buffer, options.repeat, options.device).get().items():
            rows.setdefault(what, []).append(cell_of(found))
        buffer.drop().get()
    hosts = elsewhere(2)
    owner, reader = hosts.slice(hosts=0).spawn("owner", Owner), hosts.slice(hosts=1).spawn("reader", Reader)
    for mib in options.sizes_mib if options.device == "cpu" else ():
        nbytes = mib << 20
        buffer = owner.lend.call_one(nbytes // 4).get()
        measured = reader.measure_paths.call_one(buffer, options.repeat).get()
        buffer.drop().get()
        for what, is_encrypted in (("one socket, with the same encryption", True), ("one socket, plain", False)):
            where = owner.listen.call_one(nbytes, is_encrypted).get()
            measured[what] = reader.measure_socket.call_one(where, nbytes, is_encrypted, options.repeat).get()
        for what, found in measured.items():
            rows.setdefault(what, []).append(cell_of(found))
    for what, cells in rows.items():
        print(f"| {what} | " + " | ".join(cells) + " |")
    print(f"\n{processor_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    shutdown_context().get()


if __name__ == "__main__":
    main()
