"""Real SSH servers for tests, on ports of this machine, with separate keys and configuration."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.ports import free_ports
from tests.support.waiting import wait_until

__all__ = ["SshFolder", "Sshd", "why_no_sshd"]


def why_no_sshd() -> str:
    """Say why SSH servers can't run on this machine; empty if they can."""
    if not _sshd():
        return "no sshd here: apt-get install openssh-server"
    return ""


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Sshd:
    """A server. Its settings apply to all connections; its sessions get the environment of the test."""

    def __init__(self, folder: SshFolder, name: str, settings: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        (self.port,) = free_ports(1)
        self.key = folder.path / f"host-{name}"
        self._config = folder.path / f"sshd-{name}.conf"
        self._log = folder.path / f"sshd-{name}.log"
        folder.new_key(self.key)
        inherited = ("MONARCH_KERNEL_TEST_MARK", "PYTHONPATH", "TMPDIR", "OMP_NUM_THREADS")
        seen = {key: os.environ[key] for key in inherited if key in os.environ} | dict(environment)
        lines = [
            *settings,
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.key}",
            f"AuthorizedKeysFile {folder.authorized_keys}",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            "PidFile none",
            "MaxStartups 100",
            "SetEnv " + " ".join(f"{key}={value}" for key, value in seen.items()),
        ]
        self._config.write_text("\n".join(lines) + "\n")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start the server, always on the same port."""
        if os.getuid() == 0:
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
        command = _sshd()
        assert command is not None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([command, "-D", "-e", "-f", str(self._config)], stderr=log)
        wait_until(self._answers, f"sshd {self.name}")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as probe:
                return probe.recv(4) == b"SSH-"
        except OSError:
            return False

    def connections(self) -> list[psutil.Process]:
        """Return the processes of its connections."""
        assert self._process is not None
        found = []
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # the connection has ended meanwhile
                if child.name().startswith("sshd"):
                    found.append(child)
        return found

    def break_connections(self) -> int:
        """Kill the processes of all connections, and return their number; the server accepts new connections."""
        servers = self.connections()
        for server in servers:
            with suppress(psutil.NoSuchProcess):  # it ended with its parent
                server.kill()
        return len(servers)

    def stop(self) -> None:
        """Stop the server with SIGSTOP: it accepts no new connections."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the server and its connections at once; processes of the sessions continue."""
        if self._process is None:
            return
        self.stop()  # else it could accept another connection
        self.break_connections()
        self._process.kill()
        self._process.wait()
        self._process = None

    def log(self) -> str:
        return self._log.read_text()


class SshFolder:
    """Keys and configuration of a test user, and servers that accept them; independent of the real user's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key = path / "id"
        self.authorized_keys = path / "authorized_keys"
        self.known_hosts = path / "known_hosts"
        self.config = path / "config"
        self.new_key(self.key)
        self.authorized_keys.write_text(self.key.with_suffix(".pub").read_text())
        self.known_hosts.write_text("")
        self.servers: list[Sshd] = []
        self.write_config()

    def new_key(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)

    def add(self, name: str, settings: Sequence[str] = (), *, known: bool = True, **environment: str) -> Sshd:
        """Start a server, and add it to the configuration under this name."""
        server = Sshd(self, name, settings, environment)
        self.servers.append(server)
        if known:
            self.know(server, server.key)
        self.write_config()
        return server

    def know(self, server: Sshd, key: Path) -> None:
        public = " ".join(key.with_suffix(".pub").read_text().split()[:2])
        with self.known_hosts.open("a") as file:
            file.write(f"[127.0.0.1]:{server.port} {public}\n")

    def write_config(self, *more: str) -> None:
        lines = [f"Host {server.name}\n  Port {server.port}\n  HostName 127.0.0.1" for server in self.servers]
        lines += [
            "Host *",
            f"  User {getpass.getuser()}",
            f"  IdentityFile {self.key}",
            "  IdentitiesOnly yes",
            "  IdentityAgent none",
            f"  UserKnownHostsFile {self.known_hosts}",
            *(f"  {line}" for line in more),
        ]
        self.config.write_text("\n".join(lines) + "\n")

    def close(self) -> None:
        for server in self.servers:
            server.kill()
