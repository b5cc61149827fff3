"""The costs of the parts that the simulation does not run, each measured on this machine in the same run."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import psutil
import zmq

from benchmarks.scale import Echo
from monarch_kernel.actor.host_mesh import HostMesh, serve_ranks, shutdown_context
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.launch.local import LocalLauncher
from monarch_kernel.net.transport.unix_packets import PacketListener, PacketSocket
from monarch_kernel.net.wire.stream_marks import FIRST_MARK, MarkReader, mark_bytes, new_secret
from monarch_kernel.runtime.controller.session import current_session
from monarch_kernel.runtime.host.output import OutputStream

__all__ = ["Costs", "measure_costs"]

MEGABYTE = 1 << 20
RANKS = 8


@dataclass(frozen=True)
class Costs:
    """Costs in seconds: processor time if noted, otherwise elapsed time with a core for each process.

    Attributes:
        ipc_s: sending or receiving a small message between processes of a host.
        ipc_byte_s: additional cost of each byte of it.
        tcp_s: the same between hosts, encrypted.
        tcp_byte_s: additional cost of each byte of it.
        pipe_s: reading the output of one rank in one cell, by the agent.
        rank_call_s: a call, at a rank (processor time).
        rank_cell_s: a cell that prints, at a rank (processor time).
        agent_up_s: starting an agent until it can fork ranks.
        fork_s: starting a rank.
    """

    ipc_s: float
    ipc_byte_s: float
    tcp_s: float
    tcp_byte_s: float
    pipe_s: float
    rank_call_s: float
    rank_cell_s: float
    agent_up_s: float
    fork_s: float


def _sockets(context: zmq.Context[Any]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for socket in (router, dealer):
        socket.set_hwm(0)
        socket.linger = 0
    public, secret = zmq.curve_keypair()
    router.curve_server = True
    router.curve_secretkey = secret
    dealer.curve_serverkey = public
    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    router.bind("tcp://127.0.0.1:*")
    dealer.connect(router.getsockopt_string(zmq.LAST_ENDPOINT))
    return router, dealer


def _between_hosts(nbytes: int, count: int) -> float:
    """Half of the processor time of one message at its sender and its receiver, with all their threads."""
    context: zmq.Context[Any] = zmq.Context()
    router, dealer = _sockets(context)
    data = bytes(nbytes)
    best = float("inf")
    try:
        dealer.send(b"")
        name = router.recv_multipart()[0]
        for _ in range(5):
            begin = time.process_time()
            for _ in range(count):
                router.send_multipart([name, data], copy=False)
            for _ in range(count):
                dealer.recv(copy=False)
            best = min(best, (time.process_time() - begin) / count / 2)
    finally:
        router.close()
        dealer.close()
        context.term()
    return best


def _within_a_host(nbytes: int, count: int) -> float:
    """The same between an agent and a rank."""
    best = float("inf")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        listener = stack.enter_context(closing(PacketListener(f"{folder}/agent")))
        rank = stack.enter_context(closing(PacketSocket.connect(f"{folder}/agent")))
        agent = listener.accept()
        assert agent is not None
        stack.enter_context(closing(agent))
        parts = [b"C", bytes(nbytes)]
        for _ in range(5):
            begin = time.process_time()
            for _ in range(count):
                agent.send(parts)
                while rank.recv() is None:
                    agent.flush()
            best = min(best, (time.process_time() - begin) / count / 2)
    return best


def _pipe() -> float:
    """An agent's time for the output of one rank in one cell: a line and a mark, and a mark in the other stream."""
    ends = [os.pipe(), os.pipe()]
    secret = new_secret()
    streams = [
        OutputStream(1, "stdout", ends[0][0], MarkReader(secret)),
        OutputStream(1, "stderr", ends[1][0], MarkReader(secret)),
    ]
    best = float("inf")
    for turn in range(200):
        mark = mark_bytes(secret, FIRST_MARK + 2 * turn)
        os.write(ends[0][1], b"the same on all ranks\n" + mark)
        os.write(ends[1][1], mark)
        begin = time.perf_counter()
        for stream in streams:
            stream.read()
            while stream.waiting:
                stream.take(time.monotonic())
        best = min(best, time.perf_counter() - begin)
    for end in ends:
        for fd in end:
            os.close(fd)
    return best


def _spent(pids: Sequence[int], times: int, do: Callable[[], object]) -> float:
    """Mean processor time of these processes for one execution."""

    def sum_up() -> float:
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)

    do()
    before = sum_up()
    for _ in range(times):
        do()
    return (sum_up() - before) / times / len(pids)


def measure_costs() -> Costs:
    """Measure all costs, which takes some seconds."""
    ipc, ipc_large = _within_a_host(100, 2000), _within_a_host(MEGABYTE, 30)
    tcp, tcp_large = _between_hosts(100, 2000), _between_hosts(MEGABYTE, 30)
    pipe = _pipe()
    session = current_session()
    serve_ranks(session)
    begin = time.perf_counter()
    hosts = session.add_hosts(LocalLauncher(session.directory), 1, is_light=True, lost_after_s=60.0)
    mesh = HostMesh(session.runtime, Region.whole(Extent()), hosts)
    try:
        mesh.initialized.get()
        mesh.spawn_procs({"procs": 1}).initialized.get()  # waits until the zygote has imported its modules
        agent_up = time.perf_counter() - begin
        forks = []
        for _ in range(3):
            begin = time.perf_counter()
            procs = mesh.spawn_procs({"procs": RANKS})
            procs.initialized.get()
            forks.append((time.perf_counter() - begin) / RANKS)
        actors = procs.spawn("echo", Echo)
        actors.initialized.get()
        pids = [rank.pid for rank in procs.view().ranks]
        call = _spent(pids, 200, lambda: actors.echo.call(1).get())
        cell = _spent(pids, 200, lambda: procs.run_cell("print(1)", cell=1, listen=lambda event: None).get())
    finally:
        shutdown_context().get()
    return Costs(
        ipc_s=ipc,
        ipc_byte_s=max(0.0, ipc_large - ipc) / MEGABYTE,
        tcp_s=tcp,
        tcp_byte_s=max(0.0, tcp_large - tcp) / MEGABYTE,
        pipe_s=pipe,
        rank_call_s=call,
        rank_cell_s=cell,
        agent_up_s=agent_up,
        fork_s=statistics.median(forks),
    )
