"""The seam between the controller and whatever obtains hosts: an engine that has machines, and starts our agent on them.

Theory of operation
===================

We schedule nothing. An engine (Ray, Slurm, Kubernetes, sshd ...) obtains machines, places what runs there and takes it away; a
*launcher* asks it for hosts, and has it run one process on each: `agent_command`, with an `AgentConfig`. The agent then
connects to the controller by itself, or is dialled, if its config has no addresses. From then on the launcher is needed only
to say what an engine knows and we can't see: why a host is not there yet, how it ended, what it wrote; and to give hosts back.

The config holds secrets. It goes by a channel of the engine's that others can't read: standard input, or the environment
variable `AGENT_VARIABLE`; never by arguments, or by files that others can read.

A launcher is called from any thread, also from the one that drives the controller's loop, which must not wait. So whatever
takes longer than a few milliseconds is done on a thread of the launcher's own, and the methods give what is known by then.

Every launcher passes the tests of `tests/launch/test_conformance.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from monarch_kernel.net.wire.config import AgentConfig

__all__ = ["HostHandle", "Launcher", "agent_command"]


class HostHandle(Protocol):
    """One host that was asked for."""

    @property
    def address(self) -> str:
        """Where the controller has to dial the agent, once that is known; empty where the agent dials."""
        ...

    @property
    def node(self) -> str:
        """What the engine calls the machine, once that is known; empty where its launcher need not be told (`COMMON`)."""
        ...

    def poll(self) -> str | None:
        """None while it runs, or may still come; else why it has ended or will never come, in words. Must not wait."""
        ...

    def log_tail(self) -> tuple[str, ...]:
        """The last lines that the agent itself, or the engine about it, has written; at most 20. Must not wait."""
        ...

    def close(self, timeout_s: float) -> None:
        """Give the host back to the engine, whatever state it is in, and release what the handle held.

        An agent that is ending by itself has ``timeout_s`` seconds for it, then it is forced. May be called twice.
        """
        ...


class Launcher(Protocol):
    """Obtains hosts from an engine."""

    name: str
    """Of the engine, as in ``--on``."""

    def launch(self, configs: Sequence[AgentConfig]) -> Sequence[HostHandle]:
        """Ask for one host for each of these; returns at once, a handle for each in their order.

        What goes wrong later is told by `HostHandle.poll`. May be called again at any time, for hosts that replace others.

        Raises:
            LaunchError: the engine can't be reached, or will never have that many; the text says what to do, in numbers.
        """
        ...

    def progress(self) -> str:
        """What the engine says of hosts that are not up yet, in a few words, such as ``Slurm: Resources``; empty for nothing.

        Must not wait.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """Give back all that handles have not, and end what the launcher runs; nothing is left in the engine afterwards."""
        ...


def agent_command(python: str = "") -> tuple[str, ...]:
    """What is run on a host; its config is in the environment (`AGENT_VARIABLE`), or is read from its standard input.

    Args:
        python: interpreter of the host; left out, the path of this one.
    """
    return (python or sys.executable, "-m", "monarch_kernel.bootstrap", "agent")
