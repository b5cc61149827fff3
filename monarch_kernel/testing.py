"""Fakes for tests of this package and of users: an in-memory network, hosts without machines, and ranks that a test controls.

All speak the real protocol, so the controller can't tell the difference. A rank that answers::

    hub = MemoryHub()
    runtime = Runtime(hub.connect(), token="t")
    host = add_host(runtime, launcher := FakeLauncher())
    runtime.start_ranks(host, [rank_spec(1)])
    rank = FakeRank(hub, 1, token="t")
    rank.hello()
    future = runtime.request([1], lambda id: pack(Ping(id)), "ping", list)
    (ping,) = rank.receive_some()
    rank.answer(ping.id, 42)
    runtime.close()
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Literal

from monarch_kernel.errors import Failure
from monarch_kernel.launch.base import Launcher
from monarch_kernel.net.transport.base import CONTROLLER, Peer, host_peer, rank_peer
from monarch_kernel.net.transport.loopback import MemoryHub, MemoryTransport
from monarch_kernel.net.wire.codec import Frame, dump, join, pack, split
from monarch_kernel.net.wire.config import AgentConfig
from monarch_kernel.net.wire.messages import (
    Failed,
    Hello,
    HostHello,
    Interrupt,
    Lost,
    Message,
    Output,
    OutputChunk,
    Payload,
    RankSpec,
    Release,
    Result,
)
from monarch_kernel.runtime.controller.runtime import Runtime

__all__ = [
    "FakeAgent",
    "FakeHost",
    "FakeLauncher",
    "FakePeer",
    "FakeRank",
    "MemoryHub",
    "MemoryTransport",
    "add_host",
    "rank_spec",
]


def rank_spec(proc: int, *, rank: int = 0, world_size: int = 1, mesh: str = "procs") -> RankSpec:
    """Describe a rank of a mesh with one axis, ``ranks``, on one host."""
    return RankSpec(
        proc=proc,
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        axes=(("ranks", world_size),),
        mesh=mesh,
        device="cpu",
        threads=1,
        env={},
        cwd="/",
        sys_path=(),
    )


class FakeHost:
    """Handle of a host without a machine; it runs until `end`.

    Attributes:
        token: what the agent would present.
        closed: whether the controller has released the handle.
    """

    address = ""
    node = ""

    def __init__(self, token: str) -> None:
        self.token = token
        self.closed = False
        self._reason: str | None = None

    def end(self, reason: str) -> None:
        """End the host, for this reason."""
        self._reason = reason

    def poll(self) -> str | None:
        """Return None until `end`; then its reason."""
        return self._reason

    def log_tail(self) -> tuple[str, ...]:
        """Return the last lines of the log, which is empty."""
        return ()

    def close(self, timeout_s: float) -> None:
        """Record that the handle was released."""
        self.closed = True


class FakeLauncher:
    """Launches hosts without machines.

    Attributes:
        hosts: number of the host -> its handle.
    """

    def __init__(self) -> None:
        self.hosts: dict[int, FakeHost] = {}

    name = "fake"

    def launch(self, configs: Sequence[AgentConfig]) -> list[FakeHost]:
        """Return handles; no agent comes up unless the test makes one."""
        self.hosts |= {config.host: FakeHost(config.token) for config in configs}
        return [self.hosts[config.host] for config in configs]

    def progress(self) -> str:
        """Return an empty text."""
        return ""

    def close(self, timeout_s: float) -> None:
        """Close all handles."""
        for host in self.hosts.values():
            host.close(timeout_s)


def add_host(runtime: Runtime, launcher: Launcher, token: str = "t") -> int:
    """Launch the agent of one host; returns the number of the host."""
    return runtime.host_pool.add(launcher, lambda host: AgentConfig(host, token, ("ipc://nowhere",)))[0]


class FakePeer:
    """A peer on the network that sends whatever the test wants.

    Args:
        hub: the network.
        name: of the peer.

    Attributes:
        seen: all messages received so far.
    """

    def __init__(self, hub: MemoryHub, name: Peer) -> None:
        self.name = name
        self.transport = hub.connect(name)
        self.seen: list[Message] = []
        self._frames: dict[int, tuple[Frame, ...]] = {}

    def send_raw(self, *parts: Frame) -> None:
        """Send frames as they are, even if they are not a message."""
        self.transport.send(CONTROLLER, parts)

    def send(self, message: Message, frames: tuple[Frame, ...] = ()) -> None:
        """Send a message."""
        self.send_raw(*join([pack(message, frames)]))

    def receive(self) -> list[Message]:
        """Return the messages delivered since the last call; does not wait."""
        new: list[Message] = []
        while (received := self.transport.recv()) is not None:
            for message, frames in split(received[1]):
                new.append(message)
                self._frames[id(message)] = tuple(frames)
        self.seen += new
        return new

    def receive_some(self, timeout_s: float = 10.0) -> list[Message]:
        """Wait until messages are delivered, and return them.

        Raises:
            TimeoutError: no message arrived.
        """
        deadline = time.monotonic() + timeout_s
        while not (new := self.receive()):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self.name.decode()} received nothing within {timeout_s} s")
            self.transport.wait(left)
        return new

    def frames_of(self, message: Message) -> tuple[Frame, ...]:
        """The frames that came with a message of `seen`."""
        return self._frames[id(message)]


class FakeRank(FakePeer):
    """A rank that answers on demand.

    Args:
        hub: the network.
        proc: number of its process.
        token: proves that it belongs to the session.
    """

    def __init__(self, hub: MemoryHub, proc: int, token: str) -> None:
        super().__init__(hub, rank_peer(proc))
        self.proc = proc
        self._token = token

    def hello(self) -> None:
        """Report that the process is up."""
        self.send(Hello(self._token, self.proc, os.getpid(), "cpu"))

    def answer(
        self,
        id: int,
        value: object = None,
        *,
        written: tuple[int, int] = (0, 0),
        collectives: int = -1,
        groups: int = -1,
    ) -> None:
        """Answer a request with a value."""
        payload, frames = dump(value) if value is not None else (Payload(), ())
        self.send(Result(id, payload, {}, written, collectives, groups), frames)

    def fail(self, id: int, message: str, etype: str = "ValueError", *, written: tuple[int, int] = (0, 0)) -> None:
        """Answer a request with an exception of the user's."""
        failure = Failure("exception", etype, message, host="fake", pid=os.getpid())
        self.send(Failed(id, failure, written))

    def serve(self, timeout_s: float = 10.0) -> threading.Thread:
        """Say hello, and answer every request with its id, on a thread that ends with the transport or the time."""
        thread = threading.Thread(target=self._serve, args=[time.monotonic() + timeout_s], daemon=True)
        thread.start()
        return thread

    def _serve(self, deadline: float) -> None:
        self.hello()
        while not self.transport.closed and time.monotonic() < deadline:
            for message in self.receive():
                id: int = 0 if isinstance(message, (Interrupt, Release)) else getattr(message, "id", 0)
                if id:
                    self.answer(id, id)
            self.transport.wait(max(0.0, deadline - time.monotonic()))


class FakeAgent(FakePeer):
    """A host agent that reports on demand.

    Args:
        hub: the network.
        host: its number.
        token: proves that it belongs to the session.
    """

    def __init__(self, hub: MemoryHub, host: int, token: str) -> None:
        super().__init__(hub, host_peer(host))
        self.host = host
        self._token = token

    def hello(self) -> None:
        """Report that the agent is up."""
        self.send(HostHello(self._token, self.host, f"fake{self.host}", os.getpid(), 1, 0))

    def lost(
        self, proc: int, *, exit_code: int = 0, signal: int = 0, reason: str = "", last_lines: tuple[str, ...] = ()
    ) -> None:
        """Report the end of a rank's process."""
        self.send(Lost(proc, exit_code, signal, reason, last_lines, 0))

    def output(self, proc: int, text: str, end: int, *, stream: Literal["stdout", "stderr"] = "stdout") -> None:
        """Report what a rank wrote; ``end`` counts the bytes of that stream so far."""
        self.send(Output((OutputChunk(proc, stream, text, end),)))
