"""Messages between the controller and host agents: processes, output, readings, logs; and the hello of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from monarch_kernel.net.wire.messages.base import Message
from monarch_kernel.net.wire.messages.cells import Owed

__all__ = [
    "Attach",
    "Backlog",
    "ClockRead",
    "ConnectHost",
    "Detach",
    "Detached",
    "ForgetHost",
    "Goodbye",
    "Hello",
    "HostHello",
    "KillRanks",
    "LogRead",
    "Lost",
    "Output",
    "OutputChunk",
    "Preload",
    "RankSpec",
    "ReadClock",
    "ReadLog",
    "Reading",
    "Readings",
    "Software",
    "StartRanks",
    "UseParent",
]


# controller -> rank and host agent


class Attach(Message, frozen=True):
    """A new controller has taken the place of one that ended: say hello again, and what it missed.

    ``epoch`` counts the controllers; one that has been answered is not answered again.
    """

    token: str
    controller_pid: int
    epoch: int


# rank -> controller


class Hello(Message, frozen=True):
    """First message of a rank, also to another rank, and its answer to `Attach`.

    ``token`` proves that it belongs to this session; ``address`` is where it listens to other ranks; ``shares`` whether it can
    open what other processes of its machine have in shared memory.
    """

    token: str
    proc: int
    pid: int
    device: str
    owed: tuple[Owed, ...] = ()
    address: str = ""
    shares: bool = False


# controller -> host agent


class RankSpec(msgspec.Struct, array_like=True, frozen=True):
    """All that a new rank needs to know; ``env`` is added to its environment before user code runs.

    Of a host that the controller does not know ``threads`` is 0 and ``device`` may be "auto": then the host settles them, and
    takes of ``cwd`` and ``sys_path`` what it has, too.
    ``incarnation`` counts the processes that this one comes after, each of which died in this place.
    ``bootstrap`` is a pickled function that it runs before any actor, with the text of its cells; empty for none.
    ``record`` is the file in which a rank that may outlive its controller says what it runs, on a host elsewhere a name in the
    agent's directory; empty for others.
    """

    proc: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    axes: tuple[tuple[str, int], ...]
    mesh: str
    device: str
    threads: int
    env: dict[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    record: str = ""
    incarnation: int = 0
    bootstrap: bytes = b""

    def succeeded(self, incarnation: int) -> RankSpec:
        """The same place for another process."""
        return msgspec.structs.replace(self, incarnation=incarnation)

    def recorded_in(self, directory: str) -> RankSpec:
        """With its record in this directory."""
        return msgspec.structs.replace(self, record=f"{directory}/{self.record}")

    def settled(self, device: str, env: dict[str, str]) -> RankSpec:
        """With what its host has found."""
        return msgspec.structs.replace(self, device=device, env=env)


class StartRanks(Message, frozen=True):
    """Start processes; one that takes the place of another is asked for when the other's `Lost` has come."""

    specs: tuple[RankSpec, ...]


class KillRanks(Message, frozen=True):
    """End processes: politely, and after ``grace_s`` seconds for certain; with ``keep_logs`` others will take their places."""

    procs: tuple[int, ...]
    grace_s: float
    keep_logs: bool = False


class ConnectHost(Message, frozen=True):
    """These processes, which ranks of yours have to do with, are on a host; dial it there, if there are addresses."""

    host: int
    addresses: tuple[str, ...]
    peers: tuple[bytes, ...]


class ForgetHost(Message, frozen=True):
    """A host that yours has had to do with is gone: what is for it is dropped, and it is dialled no more."""

    host: int


class UseParent(Message, frozen=True):
    """Take the way to the controller by another agent from now on, which can be dialled at these addresses."""

    parent: int
    addresses: tuple[str, ...]


class Preload(Message, frozen=True):
    """Have these modules imported, as soon as there is nothing else to do, in the process that new ranks are forked from."""

    modules: tuple[str, ...]


class ReadClock(Message, frozen=True):
    """Say what time it is; ``sent`` is when this was asked, in seconds since 1970 by the controller's clock."""

    sent: float


class ReadLog(Message, frozen=True):
    """Answer with what is kept of a rank's output: the youngest part, of about ``max_nbytes`` bytes."""

    id: int
    proc: int
    max_nbytes: int


class Detach(Message, frozen=True):
    """From now on keep everything when the controller ends, and wait for the next one: ``keep_s`` seconds, or for ever if 0."""

    id: int
    keep_s: float


class Goodbye(Message, frozen=True):
    """The controller leaves: end everything as in `KillRanks` and leave, too; or ``keep`` it for the next controller."""

    keep: bool = False
    grace_s: float = 0.0


# host agent -> controller


class Software(msgspec.Struct, array_like=True, frozen=True):
    """What a machine runs our processes with: version and path of Python, versions of packages (empty: not installed)."""

    python: str
    executable: str
    packages: dict[str, str]


class HostHello(Message, frozen=True):
    """First message of a host agent, and its answer to `Attach`: with (proc, incarnation) of its ranks that were replaced.

    ``addresses`` are where other hosts can dial it, the best first; empty where none has to. ``software`` is what it runs,
    which has to agree with the controller's.
    """

    token: str
    host: int
    hostname: str
    pid: int
    cpus: int
    gpus: int
    incarnations: tuple[tuple[int, int], ...] = ()
    addresses: tuple[str, ...] = ()
    software: Software | None = None


class ClockRead(Message, frozen=True):
    """It is ``at``, in seconds since 1970 by this host's clock; ``sent`` as it was asked."""

    sent: float
    at: float


class LogRead(Message, frozen=True):
    """What was asked for as ``id`` of a rank's output (`runtime.host.logs.log_records` reads it)."""

    id: int
    data: bytes


class Detached(Message, frozen=True):
    """Answers `Detach`."""

    id: int


class OutputChunk(msgspec.Struct, array_like=True, frozen=True):
    """Text that one rank wrote; ``end`` is the last mark that was read, or how many bytes were read where there is none.

    ``request`` is what started the processes that wrote it, of a pipe that was left to these; 0 for the rank's own pipe.
    ``also`` are other ranks of the host that wrote the same: the number and the ``end`` of each.
    """

    proc: int
    stream: Literal["stdout", "stderr"]
    text: str
    end: int
    dropped_lines: int = 0
    request: int = 0
    also: tuple[tuple[int, int], ...] = ()

    def of_each(self) -> Iterator[OutputChunk]:
        """The chunk of each rank that wrote this."""
        if not self.also:
            yield self
            return
        for proc, end in ((self.proc, self.end), *self.also):
            yield OutputChunk(proc, self.stream, self.text, end, self.dropped_lines, self.request)


class Output(Message, frozen=True):
    """What ranks wrote since the last such message; of each in the order in which it was read."""

    chunks: tuple[OutputChunk, ...]


class Backlog(Message, frozen=True):
    """What ranks wrote while there was no controller; a chunk for each stream at least, for its ``end``."""

    chunks: tuple[OutputChunk, ...]


class Reading(msgspec.Struct, array_like=True, frozen=True):
    """Memory (resident, bytes) and processor use (percent of one core) of a rank; and of its GPU, if that is known."""

    proc: int
    rss_nbytes: int
    cpu_percent: float
    gpu_nbytes: int = 0
    gpu_total_nbytes: int = 0
    gpu_percent: float = 0.0


class Readings(Message, frozen=True):
    """A reading of every rank of a host, and how many strangers it has refused by now."""

    ranks: tuple[Reading, ...]
    strangers: int = 0


class Lost(Message, frozen=True):
    """A rank's process ended, or could not be started (``reason``)."""

    proc: int
    exit_code: int
    signal: int
    reason: str
    last_lines: tuple[str, ...]
    rss_nbytes: int
