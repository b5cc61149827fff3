"""A shell on a host, in the terminal of the program."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from monarch_kernel.actor import Actor, HostMesh, concurrent_endpoint

__all__ = ["shell"]

_PART_NBYTES = 64 << 10
_END_OF_INPUT = b"\x04"
_HANGUP_S = 2.0
"""How long the shell may go on after the end of its input, in seconds."""
_SIZE = (24, 80)


def shell(host_mesh_singleton: HostMesh, *, env: Mapping[str, str] | None = None, workdir: str | None = None) -> int:
    """Run a shell on a host with this program's standard input and output, and return its exit status.

    The shell ends two seconds after the end of the input, if it does not end before.

    Args:
        host_mesh_singleton: a mesh of one host.
        env: further variables for the shell; ``SHELL`` chooses it.
        workdir: its directory; by default that of this program, where it exists on the host.

    Raises:
        ValueError: the mesh has several hosts.
    """
    if host_mesh_singleton.size() != 1:
        raise ValueError(
            f"shell() needs a mesh of one host, not of {host_mesh_singleton.size()}: take one with slice()"
        )
    return asyncio.run(_serve(host_mesh_singleton, dict(env or {}), workdir))


class _Shell(Actor):
    """A shell in a separate terminal."""

    @concurrent_endpoint
    async def start(
        self, env: dict[str, str], workdir: str | None, default: str, size: tuple[int, int], hangup_s: float
    ) -> None:
        """Start the shell."""
        self._hangup_s = hangup_s
        if workdir is None and os.path.isdir(default):
            workdir = default
        self._master, slave = pty.openpty()
        self.resize_to(size)
        env = {**os.environ, **env}
        command = [env.get("SHELL") or "/bin/sh", "-i"]
        try:
            self._process = subprocess.Popen(
                command, stdin=slave, stdout=slave, stderr=slave, env=env, cwd=workdir, preexec_fn=_take_terminal
            )
        finally:
            os.close(slave)
        os.set_blocking(self._master, False)

    @concurrent_endpoint
    async def read(self) -> bytes:
        """Return output; nothing means that all programs have left the terminal."""
        async for _ in _ready(self._master):
            try:
                return os.read(self._master, _PART_NBYTES)
            except BlockingIOError:
                continue
            except OSError:  # no program has the terminal open
                break
        return b""

    @concurrent_endpoint
    async def write(self, data: bytes) -> None:
        """Pass input on; nothing means that no more will come."""
        await self._write(data or _END_OF_INPUT)
        if not data:
            loop = asyncio.get_running_loop()
            loop.call_later(self._hangup_s, self._hang_up)

    async def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._master, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.01)  # the shell does not read
            except OSError:  # it has ended
                return

    def _hang_up(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(os.tcgetpgrp(self._master), signal.SIGHUP)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGHUP)

    @concurrent_endpoint
    async def resize(self, size: tuple[int, int]) -> None:
        """Set the size of the terminal: rows and columns."""
        self.resize_to(size)

    def resize_to(self, size: tuple[int, int]) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

    @concurrent_endpoint
    async def wait(self) -> int:
        """Return the exit status of the shell."""
        while (status := self._process.poll()) is None:
            await asyncio.sleep(0.01)
        return status

    async def __cleanup__(self, error: BaseException | None) -> None:
        if hasattr(self, "_process") and self._process.poll() is None:
            self._hang_up()
            self._process.kill()
            self._process.wait()
        if hasattr(self, "_master"):
            os.close(self._master)


def _take_terminal() -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a program that was started by nohup ignores it, as do all below it
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


async def _serve(hosts: HostMesh, env: dict[str, str], workdir: str | None) -> int:
    source, sink = sys.stdin.fileno(), sys.stdout.fileno()
    procs = hosts.spawn_procs()
    try:
        actor: Any = procs.spawn("shell", _Shell)
        env.setdefault("TERM", os.environ.get("TERM", "xterm-256color"))
        await actor.start.call_one(env, workdir, os.getcwd(), _size_of(source), _HANGUP_S)
        with _raw(source), _on_resize(lambda: actor.resize.broadcast(_size_of(source))):
            typing = asyncio.ensure_future(_send_input(source, actor))
            try:
                while data := await actor.read.call_one():
                    _write_all(sink, data)
                return int(await actor.wait.call_one())
            finally:
                typing.cancel()
                await asyncio.gather(typing, return_exceptions=True)
    finally:
        await procs.stop()


async def _send_input(source: int, actor: Any) -> None:
    async for _ in _ready(source):
        data = os.read(source, _PART_NBYTES)
        await actor.write.call_one(data)
        if not data:
            return


async def _ready(fd: int) -> AsyncIterator[None]:
    """Yield each time that a descriptor has something to read."""
    loop = asyncio.get_running_loop()
    while True:
        ready = loop.create_future()
        try:
            loop.add_reader(fd, _set, ready)
        except PermissionError:  # a file, which is always ready
            yield
            continue
        try:
            await ready
        finally:
            loop.remove_reader(fd)
        yield


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _size_of(fd: int) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(fd)
    except OSError:  # no terminal
        return _SIZE
    return size.lines, size.columns


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    """Let a terminal, if it is one, pass all keys on."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    tty.setraw(fd, termios.TCSADRAIN)  # and keep what was typed before
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _on_resize(resize: Any) -> Iterator[None]:
    try:
        before = signal.signal(signal.SIGWINCH, lambda *_: resize())
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
