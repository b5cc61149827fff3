"""What processes of ours tell each other before, or beside, the wire: launcher to agent, agent to zygote."""

from __future__ import annotations

import msgspec

from monarch_kernel.wire.messages import RankSpec

__all__ = ["AgentConfig", "ForkReport", "ForkRequest"]


class AgentConfig(msgspec.Struct, frozen=True):
    """Read by the agent from its standard input, as JSON.

    Attributes:
        host: number of the host in the session.
        token: proves to the controller that the agent and its ranks belong to the session.
        address: where the controller listens.
        directory: private directory of the session.
        controller_pid: the agent ends when this process does; 0 where the controller is on another machine.
        log: file that the zygote's output is appended to.
    """

    host: int
    token: str
    address: str
    directory: str
    controller_pid: int
    log: str

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> AgentConfig:
        """From JSON."""
        return msgspec.json.decode(data, type=cls)


class ForkRequest(msgspec.Struct, frozen=True):
    """Agent to zygote: fork this rank, and, if ``last``, all that were asked for."""

    spec: RankSpec
    last: bool

    def encode(self) -> bytes:
        """As one packet."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> ForkRequest:
        """From one packet."""
        return msgspec.msgpack.decode(data, type=cls)


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
