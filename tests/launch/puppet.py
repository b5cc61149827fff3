"""A program in place of the host agent that does what it is told, and the desk of its controller: for what starts agents.

It reads its config as the agent does, dials or listens, says who it is, and does what it is told in lines: ``end CODE``, ``say
TEXT``, ``run COMMAND``, ``stay`` (whatever SIGTERM says). When the connection breaks it dials again, and ends with 3 after its
grace period.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monarch_kernel.net.wire.config import AGENT_VARIABLE, AgentConfig

__all__ = ["Agent", "Desk", "make_python"]

LONG_S = 60.0


class Agent:
    """A puppet that has come to the desk."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rw")
        connection.settimeout(LONG_S)
        self.hello: dict[str, Any] = json.loads(self._file.readline())
        self.host: int = self.hello["host"]
        self.pid: int = self.hello["pid"]
        self.address: str = self.hello["address"]

    def tell(self, line: str) -> str:
        """Have it do something, and give what it answers."""
        self._file.write(line + "\n")
        self._file.flush()
        return self._file.readline().rstrip()

    def is_cut_off(self) -> bool:
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._file.close()
        self._connection.close()


class Desk:
    """Where puppets are waited for."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LONG_S)
        self.port: int = self._listener.getsockname()[1]
        self.agents: list[Agent] = []

    def config(self, host: int = 1, *, addresses: tuple[str, ...] | None = None, grace_s: float = 2.0) -> AgentConfig:
        if addresses is None:
            addresses = (f"tcp://127.0.0.1:{self.port}",)
        return AgentConfig(host, "the secret token", addresses, grace_s=grace_s)

    def configs(self, n: int, first: int = 1) -> list[AgentConfig]:
        return [self.config(host) for host in range(first, first + n)]

    def greet(self) -> Agent:
        """Wait for the next one; one that has only knocked is passed over."""
        while True:
            connection, _ = self._listener.accept()
            try:
                agent = Agent(connection)
            except ValueError:
                connection.close()
                continue
            self.agents.append(agent)
            return agent

    def dial(self, address: str) -> Agent:
        self.agents.append(Agent(dial(address)))
        return self.agents[-1]

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self._listener.close()


@contextmanager
def desk() -> Iterator[Desk]:
    desk = Desk()
    try:
        yield desk
    finally:
        desk.close()


def make_python(folder: Path, *, name: str = "python", body: str = "") -> str:
    """Make an interpreter for which the module of the agent is the puppet; or one that runs ``body`` first."""
    path = folder / name
    path.write_text(
        f"#!/bin/sh\n{body}\n"
        f'[ "$1" = -m ] && exec {sys.executable} {Path(__file__).resolve()} "$@"\nexec {sys.executable} "$@"\n'
    )
    path.chmod(0o700)
    return str(path)


def main() -> None:
    config = AgentConfig.decode(os.environb.get(AGENT_VARIABLE.encode()) or sys.stdin.buffer.read())
    host = config.host + int(os.environ[config.number_from] if config.number_from else 0)
    listener = None
    if not config.addresses:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(config.grace_s)
        print(f"MONARCH-AGENT {listener.getsockname()[1]}", flush=True)
    print(f"the puppet for host {host} is up", flush=True)
    deadline = time.monotonic() + config.grace_s
    while time.monotonic() < deadline:
        for address in config.addresses or ("",):
            try:
                serve(listener.accept()[0] if listener else dial(address), host, address)
            except OSError:
                continue
            deadline = time.monotonic() + config.grace_s
            break
        time.sleep(0.05)
    print("the controller is gone", flush=True)
    sys.exit(3)


def dial(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), 0.5)


def serve(connection: socket.socket, host: int, address: str) -> None:
    """Do what is said on a connection, until it breaks."""
    connection.settimeout(None)
    umask = os.umask(0)
    os.umask(umask)
    hello = {"host": host, "pid": os.getpid(), "sid": os.getsid(0), "address": address, "umask": umask}
    hello |= {"argv": sys.argv[1:], "env": dict(os.environ)}
    with connection, connection.makefile("rw") as file:
        file.write(json.dumps(hello) + "\n")
        file.flush()
        for line in file:
            verb, _, rest = line.rstrip().partition(" ")
            answer = "done"
            if verb == "end":
                print(f"ends with {rest}", flush=True)
                os._exit(int(rest))
            elif verb == "say":
                print(rest, flush=True)
            elif verb == "stay":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            elif verb == "run":
                run = subprocess.run(rest, shell=True, capture_output=True, text=True)
                answer = (run.stdout + run.stderr).strip().replace("\n", " ")
            file.write(answer + "\n")
            file.flush()


if __name__ == "__main__":
    main()
