"""What processes of ours tell each other before, or beside, the wire: launcher to agent, agent to zygote, kernel to kernel."""

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
    "AgentConfig",
    "Bequest",
    "Elsewhere",
    "ForkReport",
    "ForkRequest",
    "LinkKeys",
    "Manifest",
    "Preloads",
    "Recipe",
]

LISTENS = "MONARCH-AGENT"
"""An agent that is to be dialled writes this to its standard output, and the port."""

AGENT_VARIABLE = "MONARCH_AGENT"
"""Environment variable with an agent's configuration, for engines that give no standard input."""

DETACHED = "detached"
"""File in the directory of a mesh that has no controller now; says since when."""

LEAST_SILENCE_S = 0.5
"""A host that is well may be silent for half of this between two signs of life."""

KEPT_FILES = (DETACHED, "lock", "manifest")
"""Files that an agent leaves there when it has waited long enough for a controller."""


class LinkKeys(msgspec.Struct, frozen=True):
    """A CURVE key pair, in Z85, that all hosts of a session have, and nobody else: who has it may connect."""

    public: str
    secret: str


class AgentConfig(msgspec.Struct, frozen=True):
    """What a host agent must know, as JSON: in the environment (`AGENT_VARIABLE`), or else on its standard input.

    Attributes:
        host: number of the host in the session.
        token: proves to the controller that the agent and its ranks belong to the session.
        addresses: where the controller listens, the best first. On its own machine one, ``ipc://``; elsewhere ``tcp://``, of
            which the first that answers is taken. Empty: the agent listens, and writes ``MONARCH-AGENT PORT`` to its stdout.
        keys: of the connections between machines; None on the controller's own machine.
        directory: private directory of the session; empty: the agent makes one.
        has_own_directory: whether it has, and so removes it.
        controller_pid: the agent ends when this process does; 0 where the controller is on another machine.
        log: file that the zygote's output is appended to; empty: one in the directory.
        life: how many controllers the session has had before.
        number_from: environment variable whose number is added to ``host``, for engines that start many agents alike.
        beat_s: how often the agent says that it is alive, in seconds.
        grace_s: how long it waits for a controller that has fallen silent, in seconds, before it ends all.
        is_idle: whether nothing is got ready for ranks before the first is asked for.
        is_light: whether ranks are forked without torch, IPython and all else that takes memory.
    """

    host: int
    token: str
    addresses: tuple[str, ...]
    keys: LinkKeys | None = None
    directory: str = ""
    has_own_directory: bool = False
    controller_pid: int = 0
    log: str = ""
    life: int = 0
    number_from: str = ""
    beat_s: float = 0.25
    grace_s: float = 10.0
    is_idle: bool = False
    is_light: bool = False

    def numbered(self, number: int) -> AgentConfig:
        """The same for the agent with this number of several that were started alike."""
        return msgspec.structs.replace(self, host=self.host + number, number_from="")

    def placed(self, directory: str) -> AgentConfig:
        """The same with a directory of the agent's own."""
        log = self.log or f"{directory}/zygote.log"
        return msgspec.structs.replace(self, directory=directory, log=log, has_own_directory=True)

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> AgentConfig:
        """From JSON."""
        return msgspec.json.decode(data, type=cls)


class ForkRequest(msgspec.Struct, frozen=True, tag=True):
    """Agent to zygote: fork this rank, and, if ``last``, all that were asked for; ``secret`` is that of its marks.

    The secret is not in the `RankSpec`, which the controller knows, and which may be written to a file.
    """

    spec: RankSpec
    last: bool
    secret: str

    def encode(self) -> bytes:
        """As one packet."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> ForkRequest | Bequest | Preloads:
        """From one packet of the agent's, whichever it is."""
        return msgspec.msgpack.decode(data, type=ForkRequest | Bequest | Preloads)


class Bequest(msgspec.Struct, frozen=True, tag=True):
    """Agent to zygote: should I be killed, end these process groups; it replaces the one before."""

    groups: tuple[int, ...]

    def encode(self) -> bytes:
        """As one packet."""
        return msgspec.msgpack.encode(self)


class Preloads(msgspec.Struct, frozen=True, tag=True):
    """Agent to zygote: import these modules when there is nothing else to do."""

    modules: tuple[str, ...]

    def encode(self) -> bytes:
        """As one packet."""
        return msgspec.msgpack.encode(self)


class ForkReport(msgspec.Struct, frozen=True):
    """Zygote to agent: a rank runs as ``pid``, or could not be forked."""

    proc: int
    pid: int
    error: str = ""

    def encode(self) -> bytes:
        """As one packet."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> ForkReport:
        """From one packet."""
        return msgspec.msgpack.decode(data, type=cls)


class Recipe(msgspec.Struct, frozen=True):
    """How a launcher was made, so that another process can make one that asks for the like; holds no secrets.

    Attributes:
        engine: as in ``--on``.
        options: fields of the engine's options -> values.
        common: what else its launcher was given (`launch.registry.COMMON`).
    """

    engine: str
    options: dict[str, Any] = {}
    common: dict[str, Any] = {}


class Elsewhere(msgspec.Struct, frozen=True):
    """How the hosts of a mesh are found again: they find us, by the port that they know, and the keys.

    Attributes:
        engine: who has given them.
        keys: of the connections.
        port: where the controller listens.
        lost_after_s: after how many seconds of silence a host is lost.
        places: number of the host of each rank.
        known: hosts with smaller numbers have belonged to the mesh; those that do no more are told to end.
        nodes: number of a host -> what its engine calls the machine, for engines that have to be told.
        recipe: by which another host is asked for; None if nobody can.
    """

    engine: str
    keys: LinkKeys
    port: int
    lost_after_s: float
    places: tuple[int, ...]
    known: int
    nodes: dict[int, str] = {}
    recipe: Recipe | None = None


class Manifest(msgspec.Struct, frozen=True):
    """What a kernel must know to take up a mesh that outlived another one; a file of its directory, as JSON.

    Attributes:
        version: of this package, that brought it up: ranks of another version may speak otherwise.
        name: of the mesh.
        token: of the session.
        born: when it was brought up, in seconds since the epoch of the clock.
        epoch: how many controllers it has had after the first.
        host: number of the agent.
        agent_pid: pid of the agent.
        agent_started: when the agent's process started, in ticks since the machine did: pids are used again.
        specs: of the ranks.
        gpus: as asked for with ``--gpus``.
        device: as asked for with ``--device``.
        env: as asked for with ``--env``.
        keep_s: how long it is kept without a kernel, in seconds; 0 for ever.
        elsewhere: of a mesh on hosts of an engine, how they are found again; None for one on this machine.
    """

    version: str
    name: str
    token: str
    born: float
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
        """The same with ranks on other hosts."""
        assert self.elsewhere is not None
        elsewhere = msgspec.structs.replace(self.elsewhere, places=places, known=known, nodes=nodes)
        return msgspec.structs.replace(self, elsewhere=elsewhere)

    def at_epoch(self, epoch: int) -> Manifest:
        """The same for a later controller."""
        return msgspec.structs.replace(self, epoch=epoch)

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """From JSON.

        Raises:
            ValueError: it is no manifest of this version.
        """
        return msgspec.json.decode(data, type=cls)
