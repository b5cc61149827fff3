"""Messages between the controller and host agents about processes, output, readings and logs; and the hello of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from monarch_kernel.net.wire.messages.base import Message
from monarch_kernel.net.wire.messages.cells import OpenRequest

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
    "HostEnding",
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
    """Report that a new controller replaces one that ended; answered with the hello, and with what the new one has missed.

    ``epoch`` counts the controllers. The receiver answers each epoch only once.
    """

    token: str
    controller_pid: int
    epoch: int


# rank -> controller


class Hello(Message, frozen=True):
    """The first message of a rank to the controller or to another rank, and its answer to `Attach`.

    ``token`` proves that the rank belongs to this session. It listens for other ranks at ``address``. ``shares`` says whether
    it can open shared memory of other processes on its machine. ``open_requests`` has its open requests. ``up_s`` says how many
    seconds ago it came up; 0 in the first message.
    """

    token: str
    proc: int
    pid: int
    device: str
    open_requests: tuple[OpenRequest, ...] = ()
    address: str = ""
    shares: bool = False
    up_s: float = 0.0


# controller -> host agent


class RankSpec(msgspec.Struct, array_like=True, frozen=True):
    """The description of a new rank.

    If the controller does not know the host, ``threads`` is 0 and ``device`` may be "auto". The host then chooses both, and
    uses ``cwd`` and the entries of ``sys_path`` only if they exist there.

    Attributes:
        env: Variables that are added to its environment before user code runs.
        incarnation: The number of processes that had this place before, each of which died.
        bootstrap: A pickled function that the rank runs before any actor, with the text of its cells; empty for none.
        record: The file in which a rank that may outlive its controller says what it runs; on another machine, a name in the
            directory of the agent. Empty for other ranks.
        unset: Variables that are removed from its environment before ``env`` is added.
        python: The interpreter that it starts with, as a new process; ``same`` for that of the host. Empty for a rank that is
            forked, which has the modules that are imported already.
        all_output: Whether all that it writes is sent, and it waits while the controller is slower; else a flood is cut.
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
    unset: tuple[str, ...] = ()
    python: str = ""
    all_output: bool = False

    def succeeded(self, incarnation: int) -> RankSpec:
        """Return the spec of the process that replaces this one."""
        return msgspec.structs.replace(self, incarnation=incarnation)

    def recorded_in(self, directory: str) -> RankSpec:
        """Return this spec with its record in a directory."""
        return msgspec.structs.replace(self, record=f"{directory}/{self.record}")

    def ended(self) -> RankSpec:
        """Return this spec without what only starts a process."""
        return msgspec.structs.replace(self, env={}, sys_path=(), bootstrap=b"", unset=())

    def settled(self, device: str, env: dict[str, str], threads: int) -> RankSpec:
        """Return this spec with the device, the environment and the number of threads that were chosen for it."""
        return msgspec.structs.replace(self, device=device, env=env, threads=threads)


class StartRanks(Message, frozen=True):
    """Start processes. The controller starts a replacement only after the `Lost` of the process that it replaces."""

    specs: tuple[RankSpec, ...]


class KillRanks(Message, frozen=True):
    """End processes: send SIGTERM, and SIGKILL after ``grace_s`` seconds. ``keep_logs`` keeps their logs for replacements."""

    procs: tuple[int, ...]
    grace_s: float
    keep_logs: bool = False


class ConnectHost(Message, frozen=True):
    """Report the host of ``peers``, processes with which ranks of the receiver exchange messages.

    If there are addresses, the receiver connects to that host at one of them.
    """

    host: int
    addresses: tuple[str, ...]
    peers: tuple[bytes, ...]


class ForgetHost(Message, frozen=True):
    """Report that a host is gone: the receiver drops messages for it, and no longer connects to it."""

    host: int


class UseParent(Message, frozen=True):
    """Connect to the agent ``parent`` at these addresses, and reach the controller through it from now on."""

    parent: int
    addresses: tuple[str, ...]


class Preload(Message, frozen=True):
    """Import modules in the zygote, the process from which new ranks are forked, as soon as it is idle."""

    modules: tuple[str, ...]


class ReadClock(Message, frozen=True):
    """Ask for the time; ``sent`` is the time of the request by the controller's clock, in seconds since 1970."""

    sent: float


class ReadLog(Message, frozen=True):
    """Ask for the stored output of a rank; answered with its newest part, of about ``max_nbytes`` bytes (`LogRead`).

    With ``stack``, ask for the stacks of its threads instead, as `faulthandler` writes them, or for the state of a process that
    can't run. With ``only_state``, ask for that state alone.
    """

    id: int
    proc: int
    max_nbytes: int
    stack: bool = False
    only_state: bool = False


class Detach(Message, frozen=True):
    """When the controller ends, keep everything, and wait ``keep_s`` seconds for the next one; forever if that is 0."""

    id: int
    keep_s: float


class Goodbye(Message, frozen=True):
    """Report that the controller exits: end all ranks as in `KillRanks`, and exit; or ``keep`` them for the next controller."""

    keep: bool = False
    grace_s: float = 0.0


# host agent -> controller


class Software(msgspec.Struct, array_like=True, frozen=True):
    """The software on a machine: version and path of Python, and versions of packages (empty: not installed)."""

    python: str
    executable: str
    packages: dict[str, str]


class HostHello(Message, frozen=True):
    """The first message of a host agent, and its answer to `Attach`.

    ``incarnations`` has (proc, incarnation) of each rank that replaces another. Other hosts can connect to ``addresses``, the
    best first; empty if no host needs to. ``software`` must agree with the software of the controller.
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
    """Answer `ReadClock`: the time ``at`` by this host's clock, in seconds since 1970; ``sent`` is that of the request."""

    sent: float
    at: float


class LogRead(Message, frozen=True):
    """Answer the `ReadLog` with this ``id``; `runtime.host.logs.log_records` reads the data."""

    id: int
    data: bytes


class Detached(Message, frozen=True):
    """Answer `Detach`."""

    id: int


class OutputChunk(msgspec.Struct, array_like=True, frozen=True):
    """Text that one rank wrote.

    Attributes:
        end: The last mark that was read; the number of bytes that were read if the pipe has no marks.
        request: For a pipe that a cell has left to its child processes: the request that started them. 0 for the rank's pipe.
        also: (proc, end) of each other rank of the host that wrote the same text.
    """

    proc: int
    stream: Literal["stdout", "stderr"]
    text: str
    end: int
    dropped_lines: int = 0
    request: int = 0
    also: tuple[tuple[int, int], ...] = ()

    def of_each(self) -> Iterator[OutputChunk]:
        """Yield the chunk of each rank that wrote this."""
        if not self.also:
            yield self
            return
        for proc, end in ((self.proc, self.end), *self.also):
            yield OutputChunk(proc, self.stream, self.text, end, self.dropped_lines, self.request)


class Output(Message, frozen=True):
    """Report the output of ranks since the last `Output`; the chunks of each rank are in the order in which they were read."""

    chunks: tuple[OutputChunk, ...]


class Backlog(Message, frozen=True):
    """Report the output of ranks while there was no controller: at least one chunk for each stream, for its ``end``."""

    chunks: tuple[OutputChunk, ...]


class Reading(msgspec.Struct, array_like=True, frozen=True):
    """Resident memory (bytes) and CPU use (percent of one core) of a rank, and the same of its GPU, if known."""

    proc: int
    rss_nbytes: int
    cpu_percent: float
    gpu_nbytes: int = 0
    gpu_total_nbytes: int = 0
    gpu_percent: float = 0.0


class HostEnding(Message, frozen=True):
    """Report that something has asked the host agent to end: it starts no more ranks, and ends after those that it has."""


class Readings(Message, frozen=True):
    """Report a reading of every rank of a host, and how many connections of unauthenticated peers it has refused so far."""

    ranks: tuple[Reading, ...]
    refused_connections: int = 0


class Lost(Message, frozen=True):
    """Report that the process of a rank has ended, or could not be started (``reason``).

    For a rank that was killed, ``oom_kills`` says which counter of the out-of-memory killer rose, and ``low_memory`` how little
    memory was free; empty if there is no such evidence.
    """

    proc: int
    exit_code: int
    signal: int
    reason: str
    last_lines: tuple[str, ...]
    rss_nbytes: int
    oom_kills: str = ""
    low_memory: str = ""
