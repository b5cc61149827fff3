"""A stand-in for a host agent, and the server to which it connects, for tests of any launcher."""

from __future__ import annotations

import secrets
import socket
import sys
import threading
from collections.abc import Sequence

from monarch_kernel.net.wire.config import AgentConfig

LONG_S = 60.0

STAND_IN = """
import json, os, socket, sys
config = json.loads(os.environ["MONARCH_AGENT"])
number = config["host"] + int(os.environ[config["number_from"]] if config["number_from"] else 0)
print(f"host {number} starts", flush=True)
host, _, port = config["addresses"][0].removeprefix("tcp://").rpartition(":")
home = socket.create_connection((host, int(port)))
home.sendall(f"{number} {config['token']} {os.getpid()}\\n".encode())
print(f"host {number} is connected", flush=True)
order = home.recv(100)
print(f"host {number} ends: {order.decode() or 'the controller is gone'}", flush=True)
sys.exit(int(order or b"0"))
"""

COMMAND = (sys.executable, "-c", STAND_IN)


class Home:
    """The server to which stand-ins connect, each for its whole life."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._accept, name="home")
        self._thread.start()

    def configs(self, numbers: Sequence[int]) -> list[AgentConfig]:
        """Return configs for hosts with these numbers."""
        address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        return [AgentConfig(host=number, token=self.token, addresses=(address,)) for number in numbers]

    def wait_for(self, numbers: Sequence[int]) -> None:
        """Wait until these hosts have connected."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.pids.keys() >= set(numbers), LONG_S), f"only {sorted(self.pids)}"

    def end(self, number: int, code: int) -> None:
        """Make a host exit with this code."""
        self._connections[number].sendall(str(code).encode())

    def close(self) -> None:
        """Close all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection in self._connections.values():
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection.makefile("rb") as lines:
                said = lines.readline(100).split()
            if len(said) != 3 or said[1] != self.token.encode():
                connection.close()  # from an earlier test that used the same port
                continue
            number, _, pid = said
            with self._changed:
                self._connections[int(number)] = connection
                self.pids[int(number)] = int(pid)
                self._changed.notify_all()
