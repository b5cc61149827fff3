"""The interface between the controller and launchers, which obtain hosts from an engine and start an agent on each.

Theory of operation
===================

This package schedules nothing. An engine (Ray, Slurm, Kubernetes, sshd ...) obtains machines, and starts and stops processes on
them. A *launcher* asks the engine for hosts, and to run one process on each: `agent_command`, with an `AgentConfig`. The agent
then connects to the controller, or the controller dials the agent if its config has no addresses. From then on the launcher
only reports what the engine knows and the controller can't see (why a host is not up yet, how it ended, what it wrote), and
gives hosts back.

The config holds secrets. It goes through a channel of the engine that other users can't read: standard input, or the
environment variable `AGENT_VARIABLE`; never arguments, or files that others can read.

Any thread may call a launcher, also the one that runs the controller's loop, which must not block. So a launcher does
everything that takes longer than a few milliseconds on its own thread, and its methods return what is known so far.

Every launcher passes the tests of `tests/launch/test_conformance.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from monarch_kernel.net.wire.config import EVERYWHERE, AgentConfig

__all__ = ["HostHandle", "Launcher", "agent_command", "listens_at", "module_command"]


class HostHandle(Protocol):
    """A host that a launcher was asked for."""

    @property
    def address(self) -> str:
        """The address at which the controller dials the agent, once known; empty if the agent dials the controller."""
        ...

    @property
    def node(self) -> str:
        """The engine's name of the machine, once known; empty if its launcher does not take names back (`COMMON`)."""
        ...

    def poll(self) -> str | None:
        """Return None while the host runs or may still come up, else why it ended or can't come up, as text. Must not block."""
        ...

    def log_tail(self) -> tuple[str, ...]:
        """Return the last lines, at most 20, that the agent wrote, or the engine about it. Must not block."""
        ...

    def close(self, timeout_s: float) -> None:
        """Give the host back to the engine in any state, and release the resources of the handle.

        An agent that is shutting down has ``timeout_s`` seconds before it is killed. May be called twice.
        """
        ...


class Launcher(Protocol):
    """Obtains hosts from an engine."""

    name: str
    """The name of the engine, as in ``--on``."""

    def launch(self, configs: Sequence[AgentConfig]) -> Sequence[HostHandle]:
        """Ask for one host for each config; return at once, with one handle for each config, in order.

        `HostHandle.poll` reports later failures. May be called again at any time, for hosts that replace others.

        Raises:
            LaunchError: the engine can't be reached, or can never provide that many hosts; the text says what to do, in
                numbers.
        """
        ...

    def progress(self) -> str:
        """Return what the engine says about hosts that are not up yet, such as ``Slurm: Resources``; empty if nothing.

        Must not block.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """Give all remaining hosts back, and stop the launcher's threads and processes; leave nothing in the engine."""
        ...


def listens_at(launcher: Launcher) -> str:
    """Return the address of the interface at which hosts of a launcher, and the controller for them, listen.

    It is the attribute ``listens_at`` of the launcher. A launcher without it has hosts on other machines, which may connect by
    any interface.
    """
    return str(getattr(launcher, "listens_at", EVERYWHERE))


def module_command(module: str, *arguments: str, python: str = "") -> list[str]:
    """Return the command that calls ``main`` of a module of this package, in a new process.

    ``python -m`` would do so with the working directory first on the path: a ``types.py`` beside the notebook would be
    imported in place of the library, by Python itself before our code runs.

    Args:
        module: the module.
        arguments: the arguments that it finds in ``sys.argv``.
        python: the interpreter; by default this one.
    """
    code = f"import sys; sys.path = [path for path in sys.path if path]; from {module} import main; main()"
    return [python or sys.executable, "-c", code, *arguments]


def agent_command(python: str = "") -> tuple[str, ...]:
    """Return the command to run on a host; it reads its config from the environment (`AGENT_VARIABLE`) or standard input.

    Args:
        python: interpreter of the host; by default the path of this one.
    """
    return tuple(module_command("monarch_kernel.bootstrap", "agent", python=python))
