"""A crowd of ranks that are nothing but their answers: what is left of an operation is what the controller itself does.

`Crowd` is a transport. What is sent is taken apart as a rank would, once for all that get the same; the answers wait to be
received. So the time of an operation is the processor time of the controller: its state, its loop, its codec, its API.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from monarch_kernel.actor.procs import ProcMesh
from monarch_kernel.controller.runtime import Runtime
from monarch_kernel.mesh import Extent, Region
from monarch_kernel.transport.base import Peer, host_peer, is_rank, proc_of, rank_peer
from monarch_kernel.wire.codec import Frame, dump, join, pack, split
from monarch_kernel.wire.messages import (
    Call,
    Hello,
    HostHello,
    Message,
    Output,
    OutputChunk,
    Payload,
    Ping,
    RankSpec,
    Result,
    Run,
    Spawn,
    StartRanks,
)

__all__ = ["Crowd", "gather_crowd"]

TOKEN = "crowd"


class Crowd:
    """Hosts and ranks behind one transport.

    Attributes:
        line: what every rank writes for a cell.
        sent: messages that the controller has sent.
        received: messages that it has received.
        folds: whether a host says once what its ranks have written alike.
    """

    refused = 0

    def __init__(self) -> None:
        self.line = ""
        self.sent = self.received = 0
        self.folds = True
        self._arrived: deque[tuple[Peer, list[Frame]]] = deque()
        self._last: Sequence[Frame] = ()
        self._asked: list[Message] = []
        self._answer: list[Frame] = []
        self._written = 0
        self._wrote: set[int] = set()
        self._of_host: dict[int, list[int]] = {}

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Take a message, and answer it."""
        self.sent += 1
        if parts is not self._last:
            self._last = parts
            self._take_apart(parts)
        if not is_rank(peer):
            for message in self._asked:
                self._hear(message, int(peer[1:]))
        elif self._answer:
            if self._written:
                self._wrote.add(proc_of(peer))
            self._arrived.append((peer, self._answer))
        return True

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Give the next answer."""
        if self._wrote:
            self._write()
        self.received += bool(self._arrived)
        return self._arrived.popleft() if self._arrived else None

    def wait(self, timeout_s: float | None) -> None:
        """Return at once if an answer is there, or else soon."""
        if not self._arrived and not self._wrote:
            time.sleep(0.001 if timeout_s is None else min(timeout_s, 0.001))

    def flush(self) -> None:
        """Nothing: all goes at once."""

    def route(self, peer: Peer, host: int) -> None:
        """Nothing: all are here."""

    def heard(self) -> set[int]:
        """All hosts are heard of."""
        return set(self._of_host)

    def dial(self, host: int, address: str) -> None:
        """Nothing."""

    def give_up(self, host: int) -> None:
        """Nothing."""

    def forget(self, peer: Peer) -> None:
        """Nothing."""

    def wake(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def say(self, peer: Peer, message: Message) -> None:
        """Have a message arrive."""
        self._arrived.append((peer, join([pack(message)])))

    def _take_apart(self, parts: Sequence[Frame]) -> None:
        self._asked = [message for message, _ in split(parts)]
        self._written = 0
        answers: list[Message] = []
        for message in self._asked:
            if isinstance(message, (Call, Ping, Run, Spawn)) and message.id:
                if isinstance(message, Run) and self.line:
                    self._written = 2 * message.id + 1
                payload = dump(1)[0] if isinstance(message, Call) else Payload()
                answers.append(Result(message.id, payload, {}, (self._written, 0), -1))
        self._answer = join([pack(answer) for answer in answers]) if answers else []

    def _hear(self, message: Message, host: int) -> None:
        if isinstance(message, StartRanks):
            for spec in message.specs:
                self._of_host.setdefault(host, []).append(spec.proc)
                self.say(rank_peer(spec.proc), Hello(TOKEN, spec.proc, 1000 + spec.proc, "cpu"))

    def _write(self) -> None:
        """Hosts say what their ranks wrote, ahead of the answers."""
        wrote, self._wrote = self._wrote, set()
        for host, procs in self._of_host.items():
            writers = [proc for proc in procs if proc in wrote]
            if writers:
                self._arrived.appendleft((host_peer(host), join([pack(Output(self._chunks(writers)))])))

    def _chunks(self, procs: Sequence[int]) -> tuple[OutputChunk, ...]:
        return tuple(OutputChunk(proc, "stdout", self.line, self._written) for proc in procs)


def gather_crowd(hosts: int, per_host: int) -> tuple[Crowd, Runtime, ProcMesh]:
    """Bring a mesh of that many up; gives its transport, its controller and the mesh."""
    crowd = Crowd()
    runtime = Runtime(crowd, TOKEN)
    world = hosts * per_host
    procs = runtime.new_procs(world)
    extent = Extent({"hosts": hosts, "procs": per_host})
    for host in range(1, hosts + 1):
        runtime.enter(partial(runtime._state.add_host, host))
        crowd.say(host_peer(host), HostHello(TOKEN, host, f"host{host}", 1, 64, 0))
        specs = [
            RankSpec(
                proc=procs[rank],
                rank=rank,
                world_size=world,
                local_rank=rank % per_host,
                local_world_size=per_host,
                axes=tuple(extent.items()),
                mesh="crowd",
                device="cpu",
                threads=1,
                env={},
                cwd="/",
                sys_path=(),
            )
            for rank in range((host - 1) * per_host, host * per_host)
        ]
        runtime.start_ranks(host, specs)
    mesh = ProcMesh(runtime, Region.whole(extent), procs, "crowd", time.monotonic(), extent)
    mesh.initialized.get()
    return crowd, runtime, mesh
