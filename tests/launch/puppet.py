"""A scriptable substitute for the host agent (the puppet), and the test's end of its connection (the desk).

The puppet reads its config like the agent, dials or listens, identifies itself, and obeys lines of text: ``end CODE``, ``say
TEXT``, ``run COMMAND``, ``stay`` (ignore SIGTERM). When the connection breaks it dials again, and exits with 3 after its grace
period.
"""

from __future__ import annotations

import json
import os
import secrets
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
    """The connection to a puppet."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rw")
        connection.settimeout(LONG_S)
        self.hello: dict[str, Any] = json.loads(self._file.readline())
        self.host: int = self.hello["host"]
        self.pid: int = self.hello["pid"]
        self.address: str = self.hello["address"]

    def tell(self, line: str) -> str:
        """Send an order, and return the answer."""
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
    """The server to which puppets connect.

    Attributes:
        token: the token in the configs; no other process of the machine has these words in its command line.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LONG_S)
        self.port: int = self._listener.getsockname()[1]
        self.agents: list[Agent] = []

    def config(self, host: int = 1, *, addresses: tuple[str, ...] | None = None, grace_s: float = 2.0) -> AgentConfig:
        if addresses is None:
            addresses = (f"tcp://127.0.0.1:{self.port}",)
        return AgentConfig(host, self.token, addresses, grace_s=grace_s)

    def configs(self, n: int, first: int = 1) -> list[AgentConfig]:
        return [self.config(host) for host in range(first, first + n)]

    def greet(self) -> Agent:
        """Wait for the next puppet; ignore connections that close at once, such as probes."""
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
    """Create an interpreter that runs the puppet instead of an agent (`agent_command`); it runs ``body`` first."""
    path = folder / name
    path.write_text(
        f"#!/bin/sh\n{body}\n"
        f'[ "$3" = agent ] && exec {sys.executable} {Path(__file__).resolve()} "$@"\nexec {sys.executable} "$@"\n'
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
    """Obey orders on a connection until it breaks."""
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
