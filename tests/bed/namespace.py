"""Network namespaces of the Linux kernel, each of which ends with the process that holds it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence

__all__ = ["Namespace", "why_not"]

_CLONE_NEWNET = 0x40000000
_OURS = "/proc/self/ns/net"
_PROGRAMS = ("ip", "nsenter", "unshare", "cat")


class Namespace:
    """Interfaces, addresses and routes that only processes in the namespace see; nothing of it has a name on the machine.

    A holder process keeps it. The holder reads from a pipe of this process, so it ends at `close`, or however this process
    ends.

    Attributes:
        pid: pid of the holder.
    """

    def __init__(self) -> None:
        self._holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.pid = self._holder.pid
        deadline = time.monotonic() + 60
        while not self._is_apart():
            if self._holder.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise OSError("a network namespace can't be made")
            time.sleep(0.001)
        self.ip("link", "set", "lo", "up")

    def _is_apart(self) -> bool:
        try:
            return os.readlink(f"/proc/{self.pid}/ns/net") != os.readlink(_OURS)
        except (FileNotFoundError, ProcessLookupError):  # the holder has ended
            return False

    def command(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Give the command that runs a program in the namespace, under the pid of the command."""
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *argv)

    def run(self, *argv: str) -> None:
        """Run a program in the namespace, and wait for its end."""
        subprocess.run(self.command(argv), check=True, capture_output=True, text=True)

    def ip(self, *argv: str) -> None:
        """Run `ip` of iproute2 in the namespace."""
        self.run("ip", *argv)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move this thread, and the threads and processes that it starts meanwhile, into the namespace."""
        before = os.open(_OURS, os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter(self.pid)
            try:
                yield
            finally:
                _set_namespace(before)
        finally:
            os.close(before)

    def close(self) -> None:
        """End the holder; the namespace is gone when all processes in it have ended."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait()


def enter(pid: int) -> None:
    """Move this thread into the namespace of a process."""
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_namespace(fd)
    finally:
        os.close(fd)


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns() is new in Python 3.12
    if libc.setns(fd, _CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def why_not() -> str:
    """Tell why no network namespace can be made here; empty if one can."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"there is no {', '.join(missing)}: `make engines` installs iproute2"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    tried = "ip link add name a type veth peer name b && echo 1 > /proc/sys/net/ipv4/ip_forward"
    done = subprocess.run(["unshare", "--net", "sh", "-c", tried], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"network namespaces and their interfaces can't be made (it takes CAP_NET_ADMIN): {done.stderr.strip()}"
    return ""
