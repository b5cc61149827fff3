"""Configurations that processes pass to each other outside messages: launcher to agent, agent to zygote, kernel to kernel."""

from __future__ import annotations

from typing import Any

import msgspec

from monarch_kernel.net.wire.messages import RankSpec

__all__ = [
    "AGENT_VARIABLE",
    "DETACHED",
    "KEPT_FILES",
    "LEAST_SILENCE_S",
    "LISTENS",
    "SAME",
    "AgentConfig",
    "Elsewhere",
    "ForkReport",
    "ForkRequest",
    "FreshRank",
    "LinkKeys",
    "Manifest",
    "OrphanGroups",
    "Preloads",
    "Recipe",
]

LISTENS = "MONARCH-AGENT"
"""An agent that waits for the controller to dial writes this to its standard output, and the port."""

AGENT_VARIABLE = "MONARCH_AGENT"
"""Environment variable with an agent's configuration, for engines that give no standard input."""

DETACHED = "detached"
"""File in the directory of a mesh without a controller; it says since when there has been none."""

LEAST_SILENCE_S = 0.5
"""Minimum for the silence after which a host is lost: a healthy host may be silent for half of it between two beats."""

KEPT_FILES = (DETACHED, "lock", "manifest")
"""Files that an agent leaves in the directory when it has waited long enough for a controller."""


SAME = "same"
"""In `RankSpec.python`: the interpreter of the host."""

LOOPBACK, EVERYWHERE = "127.0.0.1", "*"
"""The interfaces at which a host listens: only for this machine, or for all that can reach it."""


class LinkKeys(msgspec.Struct, frozen=True):
    """A CURVE key pair, in Z85, that only the hosts of a session have: a process with the pair may connect."""

    public: str
    secret: str


class AgentConfig(msgspec.Struct, frozen=True):
    """Configuration of a host agent, as JSON: in the environment (`AGENT_VARIABLE`), or else on its standard input.

    Attributes:
        host: number of the host in the session.
        token: proves to the controller that the agent and its ranks belong to the session.
        addresses: where the controller listens, the best first. On its own machine one, ``ipc://``; elsewhere ``tcp://``, of
            which the first that answers is used. Empty: the agent listens, and writes ``MONARCH-AGENT PORT`` to its stdout.
        keys: of the connections between machines; None on the controller's own machine.
        directory: private directory of the session; empty: the agent makes one.
        has_own_directory: whether the agent made the directory, and so removes it.
        controller_pid: the agent ends when this process does; 0 if the controller is on another machine.
        log: file to which the zygote's output is appended; empty: a file in the directory.
        epoch: the number of controllers that the session had before.
        number_from: environment variable whose number is added to ``host``, for engines that start many agents alike.
        beat_s: interval of the agent's beats, in seconds.
        grace_s: how long it waits for a controller that has fallen silent, in seconds, before it ends everything.
        is_idle: whether the agent prepares nothing for ranks before the first request for one.
        listens_at: the address of the interface where the agent listens for other hosts.
        is_light: whether ranks are forked without torch, IPython and other modules that take memory.
    """

    host: int
    token: str
    addresses: tuple[str, ...]
    keys: LinkKeys | None = None
    directory: str = ""
    has_own_directory: bool = False
    controller_pid: int = 0
    log: str = ""
    epoch: int = 0
    number_from: str = ""
    beat_s: float = 0.25
    grace_s: float = 10.0
    is_idle: bool = False
    is_light: bool = False
    listens_at: str = EVERYWHERE

    def numbered(self, number: int) -> AgentConfig:
        """Return the configuration of one of several agents that were started alike, by its number."""
        return msgspec.structs.replace(self, host=self.host + number, number_from="")

    def placed(self, directory: str) -> AgentConfig:
        """Return the configuration with a directory that belongs to the agent."""
        log = self.log or f"{directory}/zygote.log"
        return msgspec.structs.replace(self, directory=directory, log=log, has_own_directory=True)

    def encode(self) -> bytes:
        """Encode as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> AgentConfig:
        """Decode from JSON."""
        return msgspec.json.decode(data, type=cls)


class ForkRequest(msgspec.Struct, frozen=True, tag=True):
    """Agent to zygote: fork this rank, and, if ``last``, all that were requested; ``secret`` is that of its marks.

    The secret is not in the `RankSpec`, which the controller knows, and which may be written to a file.
    """

    spec: RankSpec
    last: bool
    secret: str

    def encode(self) -> bytes:
        """Encode as one packet."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> ForkRequest | OrphanGroups | Preloads:
        """Decode a packet of the agent, of any kind."""
        return msgspec.msgpack.decode(data, type=ForkRequest | OrphanGroups | Preloads)


class FreshRank(msgspec.Struct, frozen=True):
    """A fork of the zygote to the interpreter that it becomes: what to run there.

    Attributes:
        spec: the rank.
        entry: ``module:function`` that runs it.
        log: the descriptor of the zygote's log.
        arguments: the further arguments of the function, as text.
    """

    spec: RankSpec
    entry: str
    log: int
    arguments: tuple[str, ...]

    def encode(self) -> bytes:
        """Encode as bytes."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> FreshRank:
        """Decode the bytes."""
        return msgspec.msgpack.decode(data, type=FreshRank)


class OrphanGroups(msgspec.Struct, frozen=True, tag=True):
    """Agent to zygote: if the agent is killed, end these process groups; replaces the previous list."""

    groups: tuple[int, ...]

    def encode(self) -> bytes:
        """Encode as one packet."""
        return msgspec.msgpack.encode(self)


class Preloads(msgspec.Struct, frozen=True, tag=True):
    """Agent to zygote: import these modules when idle."""

    modules: tuple[str, ...]

    def encode(self) -> bytes:
        """Encode as one packet."""
        return msgspec.msgpack.encode(self)


class ForkReport(msgspec.Struct, frozen=True):
    """Zygote to agent: a rank runs as ``pid``, or could not be forked."""

    proc: int
    pid: int
    error: str = ""

    def encode(self) -> bytes:
        """Encode as one packet."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> ForkReport:
        """Decode from one packet."""
        return msgspec.msgpack.decode(data, type=cls)


class Recipe(msgspec.Struct, frozen=True):
    """How a launcher was made, so that another process can make a launcher with the same options; holds no secrets.

    Attributes:
        engine: as in ``--on``.
        options: fields of the engine's options -> values.
        common: the launcher's other options (`launch.registry.COMMON`).
    """

    engine: str
    options: dict[str, Any] = {}
    common: dict[str, Any] = {}


class Elsewhere(msgspec.Struct, frozen=True):
    """How another kernel finds the hosts of a mesh: they connect to it, by the port that they know, and the keys.

    Attributes:
        engine: the engine that started them.
        keys: of the connections.
        port: where the controller listens.
        lost_after_s: after how many seconds of silence a host is lost.
        places: number of the host of each rank.
        known: hosts with smaller numbers have belonged to the mesh; those that no longer do are ordered to end.
        nodes: number of a host -> name of the machine for its engine, for engines that need it.
        recipe: for requesting another host; None if that is not possible.
        listens_at: the address of the interface where the controller listens.
    """

    engine: str
    keys: LinkKeys
    port: int
    lost_after_s: float
    places: tuple[int, ...]
    known: int
    nodes: dict[int, str] = {}
    recipe: Recipe | None = None
    listens_at: str = EVERYWHERE


class Manifest(msgspec.Struct, frozen=True):
    """What a kernel must know to attach to a mesh that outlived another kernel; a file of its directory, as JSON.

    Attributes:
        version: of the package that brought the mesh up: the protocol of ranks of another version may differ.
        name: of the mesh.
        token: of the session.
        epoch: number of controllers that it has had after the first.
        host: number of the agent.
        agent_pid: pid of the agent.
        agent_started: when the agent's process started, in ticks since boot: pids are reused.
        specs: of the ranks.
        gpus: the value of ``--gpus``.
        device: the value of ``--device``.
        env: the values of ``--env``.
        keep_s: how long it is kept without a kernel, in seconds; 0 for no limit.
        elsewhere: for a mesh on hosts of an engine, how they are found again; None for a mesh on this machine.
    """

    version: str
    name: str
    token: str
    epoch: int
    host: int
    agent_pid: int
    agent_started: int
    specs: tuple[RankSpec, ...]
    gpus: bool
    device: str
    env: dict[str, str]
    keep_s: float = 0.0
    elsewhere: Elsewhere | None = None

    def placed(self, places: tuple[int, ...], known: int, nodes: dict[int, str]) -> Manifest:
        """Return the manifest with ranks on other hosts."""
        assert self.elsewhere is not None
        elsewhere = msgspec.structs.replace(self.elsewhere, places=places, known=known, nodes=nodes)
        return msgspec.structs.replace(self, elsewhere=elsewhere)

    def at_epoch(self, epoch: int) -> Manifest:
        """Return the manifest for a later controller."""
        return msgspec.structs.replace(self, epoch=epoch)

    def encode(self) -> bytes:
        """Encode as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Decode from JSON.

        Raises:
            ValueError: it is not a manifest of this version.
        """
        return msgspec.json.decode(data, type=cls)
