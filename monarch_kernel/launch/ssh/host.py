"""The handle of an SSH host, from the first connection to the end of its agent."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import shlex
import socket
import threading
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Protocol
from urllib.parse import urlsplit

import asyncssh

from monarch_kernel.launch.ssh.hostlist import SshTarget
from monarch_kernel.launch.ssh.login import Login, LoginFailed, MachineUnreachable, reason
from monarch_kernel.launch.ssh.loop_thread import LoopThread
from monarch_kernel.launch.ssh.scripts import FOLLOW, KILL, PROBE, SHELL, START, VERSION, quoted
from monarch_kernel.launch.text import signal_name
from monarch_kernel.net.wire.config import AgentConfig

__all__ = ["HostOwner", "SshHost"]

_START_S = 60.0
"""How long a host may take to start the agent after the login."""

_ASK_S = 10.0
_TERMINATE_S = 2.0
_RETRY_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0)  # the last one repeats
_LOOPBACK = "127.0.0.1"
_OLDEST_PYTHON = (3, 10)


class HostOwner(Protocol):
    """What a host needs of its launcher."""

    login: Login
    command: tuple[str, ...]
    tunnel: str

    def swap(self, host: SshHost, tried: Sequence[SshTarget]) -> SshTarget | None:
        """Replace the unreachable place of a host by a free one that it has not tried; None if there is none."""
        ...

    def release(self, host: SshHost) -> None:
        """Free the place of a host."""
        ...


class SshHost:
    """An agent that is started over SSH.

    Attributes:
        place: the machine, which may change until the agent starts.
        doing: what the launcher is doing with the machine, as text; empty when the agent runs or has ended.
    """

    def __init__(self, launcher: HostOwner, loop: LoopThread, place: SshTarget, config: AgentConfig) -> None:
        self.place = place
        self.doing = "connecting to"
        self._launcher = launcher
        self._loop = loop
        self._config: dict[str, Any] = json.loads(config.encode())
        self._direct = list(config.addresses)
        self._patience_s = config.grace_s
        self._address = ""
        self._ended: str | None = None
        self._log: deque[str] = deque(maxlen=20)
        self._connection: asyncssh.SSHClientConnection | None = None
        self._remote_port = 0  # of the reverse tunnel, on the host
        self._agent_port = 0  # of the agent, if it listens
        self._local_port = 0  # of the tunnel to that port, on this machine
        self._pid = 0
        self._directory = ""
        self._is_starting = False
        self._is_closing = False
        self._is_gone = False
        self._main: asyncio.Task[Any] | None = None
        self._closing: concurrent.futures.Future[None] | None = None
        self._lock = threading.Lock()

    @property
    def node(self) -> str:
        """The machine, as written in the list of hosts."""
        return str(self.place)

    @property
    def address(self) -> str:
        """The address at which the controller dials the agent; empty if the agent dials."""
        return self._address

    def poll(self) -> str | None:
        """Return None while the agent runs or may still come up, else why it ended."""
        return self._ended

    def log_tail(self) -> tuple[str, ...]:
        """Return the last output of the agent, or of the shell that should have started it."""
        return tuple(self._log)

    def close(self, timeout_s: float) -> None:
        """Wait for the agent to end, kill it after the timeout, and close the connection."""
        self.begin_to_close(timeout_s).result()

    def begin(self) -> None:
        """Connect, and start the agent."""
        self._loop.submit(self._run())

    def begin_to_close(self, timeout_s: float) -> concurrent.futures.Future[None]:
        """Start to close; return a future that completes when that is done."""
        with self._lock:
            if self._closing is None:
                self._closing = concurrent.futures.Future()
                if self._ended is not None and self._main is not None and self._main.done():
                    self._closing.set_result(None)  # not on the loop, which may have ended
                    self._launcher.release(self)
                else:
                    self._closing = self._loop.submit(self._close(timeout_s))
            return self._closing

    # -- on the thread of the loop: coming up

    async def _run(self) -> None:
        self._main = asyncio.current_task()
        try:
            async with self._loop.slots:
                connection = await self._connect_somewhere()
                self.doing = "starting the agent on"
                process = await self._start(connection)
            self.doing = ""
            while (code := await self._follow(process)) == "":
                process = await self._connect_again()
            self._is_gone = True
            self._ended = await self._explain(code)
        except (LoginFailed, _Failed) as failed:
            self._ended = str(failed)
            if self._pid:
                await self._kill()
        except (asyncssh.Error, OSError) as error:
            self._ended = f"{self._subject()}: SSH connection failed: {reason(error)}"
        finally:
            self.doing = ""
            if self._ended is None:
                self._ended = f"{self._subject()}: was given back"
            await self._hang_up()

    async def _connect_somewhere(self) -> asyncssh.SSHClientConnection:
        """Connect to the host, or to a spare one if it can't be reached."""
        tried: list[SshTarget] = []
        failures: list[str] = []
        while True:
            try:
                self._connection = await self._launcher.login.connect(self.place)
                return self._connection
            except MachineUnreachable as failed:
                failures.append(str(failed))
                tried.append(self.place)
                if self._launcher.swap(self, tried) is None:
                    raise _Failed("; ".join(failures)) from failed
                self._log.append(str(failed))
                self.doing = f"{tried[-1]} can't be reached, trying"

    async def _start(self, connection: asyncssh.SSHClientConnection) -> asyncssh.SSHClientProcess[str]:
        addresses = await self._open_ways(connection)
        config = json.dumps({**self._config, "addresses": addresses})
        script = START.format(command=quoted(self._launcher.command))
        if self._is_closing:
            raise asyncio.CancelledError
        self._is_starting = True  # closing waits for this: until the pid is known, the agent can't be killed
        try:
            return await asyncio.wait_for(self._execute(connection, f"{script}\n{config}"), _START_S)
        except asyncio.TimeoutError:
            raise _Failed(
                f"{self._subject()}: the login works, but did not start the agent within {_START_S:g} s{self._said()}"
            ) from None
        finally:
            self._is_starting = False

    async def _open_ways(self, connection: asyncssh.SSHClientConnection) -> list[str]:
        """Open a tunnel; return the addresses for the agent to dial, or none if it must listen."""
        is_auto = self._launcher.tunnel == "auto"
        if self._launcher.tunnel == "never" or not self._direct:
            return self._direct
        try:
            await self._open_reverse_tunnel(connection)
        except asyncssh.ChannelListenError:
            return self._direct if is_auto and await self._is_direct(connection) else []
        return [*(self._direct if is_auto else ()), f"tcp://{_LOOPBACK}:{self._remote_port}"]

    async def _open_reverse_tunnel(self, connection: asyncssh.SSHClientConnection) -> None:
        port = urlsplit(self._direct[-1]).port or 0
        listener = await connection.forward_remote_port(_LOOPBACK, self._remote_port, _LOOPBACK, port)
        self._remote_port = listener.get_port()

    async def _is_direct(self, connection: asyncssh.SSHClientConnection) -> bool:
        """Return whether an agent on the host can dial one of the controller's addresses."""

        async def probe(address: str) -> bool:
            url = urlsplit(address)
            words = (self._launcher.command[0], "-c", PROBE, url.hostname or "", str(url.port))
            return "MONARCH-HERE" in await self._ask(connection, quoted(words))

        return any(await asyncio.gather(*(probe(address) for address in self._direct[:5])))

    async def _open_tunnel(self, connection: asyncssh.SSHClientConnection) -> None:
        """Set the address at which the controller dials an agent that listens."""
        if self._launcher.tunnel == "never":
            peer = connection.get_extra_info("peername")[0]
            self._address = f"tcp://{f'[{peer}]' if ':' in peer else peer}:{self._agent_port}"
            return
        try:
            _, writer = await connection.open_connection(_LOOPBACK, self._agent_port)
        except asyncssh.ChannelOpenError as error:
            raise _Failed(
                f"{self._subject()}: its SSH server forbids port forwarding ({error.reason}), and it can't connect to this "
                f"machine at {', '.join(self._direct) or 'any address'}: set AllowTcpForwarding in its sshd_config, or "
                "open that address"
            ) from error
        writer.close()
        listener = await connection.forward_local_port(_LOOPBACK, self._local_port, _LOOPBACK, self._agent_port)
        self._local_port = listener.get_port()
        self._address = f"tcp://{_LOOPBACK}:{self._local_port}"

    async def _execute(self, connection: asyncssh.SSHClientConnection, text: str) -> asyncssh.SSHClientProcess[str]:
        """Run a script that starts or follows an agent, and wait until it prints the agent's pid."""
        process: asyncssh.SSHClientProcess[str] = await connection.create_process(
            SHELL, request_pty=False, stderr=asyncssh.STDOUT, encoding="utf-8", errors="replace"
        )
        process.stdin.write(f"{text}\n")
        process.stdin.write_eof()
        async for line in process.stdout:
            words = line.split(maxsplit=2)
            if words[:1] == ["MONARCH-SSH"]:
                self._pid, self._directory = int(words[1]), words[2].strip()
                return process
            self._append_log(line)
        raise _Failed(f"{self._subject()}: the login works, but commands do not run{self._said()}")

    # -- while it runs

    async def _follow(self, process: asyncssh.SSHClientProcess[str]) -> str:
        """Read the agent's output until it ends; return its exit code, or an empty text if the connection broke."""
        code = ""
        try:
            async for line in process.stdout:
                if line.startswith("MONARCH-END "):
                    code = line.split()[1]
                    if code != "-":
                        self._log.clear()  # the last lines follow
                elif line.startswith("MONARCH-AGENT ") and not self._agent_port:
                    self._agent_port = int(line.split()[1])
                    assert self._connection is not None
                    await self._open_tunnel(self._connection)
                else:
                    self._append_log(line)
        except (asyncssh.Error, OSError) as error:
            self._log.append(f"SSH connection lost: {reason(error)}")
        return code

    async def _connect_again(self) -> asyncssh.SSHClientProcess[str]:
        """Reconnect, with the same ports, so that the agent needs no new address."""
        self.doing = "reconnecting to"
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._patience_s
        is_needed = self._launcher.tunnel == "always" or bool(self._local_port)
        attempt = 0
        while True:
            await self._hang_up()
            await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
            attempt += 1
            try:
                self._connection = await self._launcher.login.connect(self.place)
                if self._remote_port:
                    await self._open_reverse_tunnel(self._connection)
                if self._local_port:
                    await self._open_tunnel(self._connection)
                script = FOLLOW.format(pid=self._pid, directory=shlex.quote(self._directory))
                process = await asyncio.wait_for(self._execute(self._connection, script), _START_S)
                self.doing = ""
                return process
            except (LoginFailed, asyncssh.Error, asyncssh.ChannelListenError, OSError, asyncio.TimeoutError) as error:
                if is_needed and loop.time() > give_up_at:  # otherwise the agent does not need SSH, and may still run
                    raise _Failed(
                        f"{self._subject()}: SSH connection lost, and reconnecting failed: {reason(error)}"
                    ) from error

    async def _explain(self, code: str) -> str:
        """Say why the agent ended, and what to do."""
        python = self._launcher.command[0]
        agent = f"{self._subject()}: the host agent (pid {self._pid})"
        if code == "-":
            return f"{agent} ended{self._said()}"
        number = int(code)
        if number in (126, 127):
            return (
                f"{self._subject()}: can't run {python}{self._said()}: name a Python on that machine that has monarch_kernel "
                "(python=, --python)"
            )
        if number > 128:
            return f"{agent} was killed by {signal_name(number - 128)}"
        if number:
            if any("No module named" in line for line in self._log):
                return (
                    f"{self._subject()}: {python} lacks a package{self._said()}: install "
                    f"monarch_kernel=={version('monarch_kernel')} for it, or name another Python (python=, --python)"
                )
            found = await self._ask(self._connection, quoted((python, "-c", VERSION)))
            parts = found.strip().split(".")
            if len(parts) == 3 and (int(parts[0]), int(parts[1])) < _OLDEST_PYTHON:
                oldest = ".".join(map(str, _OLDEST_PYTHON))
                return (
                    f"{self._subject()}: {python} is Python {found.strip()}, but {oldest} or newer is required: name another "
                    "Python (python=, --python)"
                )
        return f"{agent} ended with exit code {number}{self._said()}"

    # -- closing

    async def _close(self, timeout_s: float) -> None:
        main = self._main
        assert main is not None
        self._is_closing = True
        while self._is_starting and not main.done():
            await asyncio.wait({main}, timeout=0.02)
        if self._pid and not self._is_gone and not main.done():
            await asyncio.wait({main}, timeout=timeout_s)
            if not main.done():
                await self._kill()
                await asyncio.wait({main}, timeout=1.0)
        while not main.done():  # a cancellation is lost if the awaited task ends at the same moment
            main.cancel()
            await asyncio.wait({main}, timeout=0.2)
        self._launcher.release(self)

    async def _kill(self) -> None:
        """Kill the agent, and check that it is gone."""
        script = KILL.format(pid=self._pid, directory=shlex.quote(self._directory), tenths=int(10 * _TERMINATE_S))
        try:
            if self._connection is None or self._connection.is_closed():
                self._connection = await self._launcher.login.connect(self.place)
            said = await self._ask(self._connection, script)
            if "MONARCH-ALIVE" in said:
                self._log.append(f"{self._subject()}: can't kill the host agent (pid {self._pid})")
        except LoginFailed as error:
            self._log.append(f"can't kill the agent now; it ends by itself: {error}")

    async def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            with contextlib.suppress(asyncio.TimeoutError, asyncssh.Error, OSError):
                await asyncio.wait_for(connection.wait_closed(), 1.0)
            connection.abort()

    # -- helpers

    async def _ask(self, connection: asyncssh.SSHClientConnection | None, script: str) -> str:
        """Run a script and return its output; empty if it fails."""
        if connection is None:
            return ""
        try:
            run = connection.run(
                SHELL, input=f"{script}\n", request_pty=False, stderr=asyncssh.DEVNULL, errors="replace"
            )
            return str((await asyncio.wait_for(run, _ASK_S)).stdout or "")
        except (asyncssh.Error, OSError, asyncio.TimeoutError):
            return ""

    def _append_log(self, line: str) -> None:
        if line.strip():
            self._log.append(line.rstrip())

    def _said(self) -> str:
        return f" ({self._log[-1]})" if self._log else ""

    def _subject(self) -> str:
        return f"{self.place} (from {socket.gethostname()})"


class _Failed(Exception):
    """A host can't come up, or is lost; the text says why."""
