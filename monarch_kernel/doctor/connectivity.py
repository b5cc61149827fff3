"""Checks of how processes reach each other: cross-process memory access, sockets of a session, TCP. Each check tries it."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from monarch_kernel.doctor.children import ask_python
from monarch_kernel.doctor.report import Finding, Sign
from monarch_kernel.runtime.controller.stale_sessions import make_directory

__all__ = ["MEMORY_S", "addresses", "loopback", "memory_access", "process_descriptors", "session_socket"]

MEMORY_S = 10.0

_END_S = 5.0
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")

# Two processes with the same parent, like ranks: Yama may forbid siblings what it allows to a parent.
_MEMORY = """
import ctypes, os, sys, time
from monarch_kernel.net.memory import process_memory
ours, theirs = (ctypes.create_string_buffer(1 << 20) for _ in range(2))
ready, end = os.pipe(), os.pipe()
owner = os.fork()
if not owner:
    process_memory.allow(os.getppid())
    theirs.raw = b"m" * len(theirs)
    os.write(ready[1], b".")
    os.close(end[1])
    os.read(end[0], 1)
    os._exit(0 if theirs.raw == b"w" * len(theirs) else 1)
os.close(ready[1])
os.read(ready[0], 1)
reader = os.fork()
if not reader:
    run = [(ctypes.addressof(ours), len(ours))], [(ctypes.addressof(theirs), len(theirs))]
    try:
        process_memory.read(owner, *run)
        good = ours.raw == b"m" * len(ours)
        ours.raw = b"w" * len(ours)
        process_memory.write(owner, run[1], run[0])
    except OSError as error:
        print(error.strerror, flush=True)
        os._exit(1)
    os._exit(0 if good else 2)
_, read = os.waitpid(reader, 0)
os.close(end[1])
_, wrote = os.waitpid(owner, 0)
print("carried" if read == wrote == 0 else "the data was corrupted", flush=True)
"""


def memory_access() -> Iterator[Finding]:
    """Check that a process can read and write the memory of another process, with one copy and without its help."""
    said = ask_python(_MEMORY, MEMORY_S)
    answers = said.out.splitlines() or [""]
    if not said.trouble and answers[0] == "carried":
        found = "processes can access each other's memory (process_vm_readv): one copy for large values and buffers"
        yield Finding("process memory", Sign.OK, found)
        return
    found = (
        f"processes can't access each other's memory: {said.trouble or answers[0]}; large values and buffers are slower"
    )
    remedy = "in a container: docker run --cap-add SYS_PTRACE (in Kubernetes securityContext.capabilities.add)"
    try:
        scope = int(_PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        scope = 0
    if scope > 1:
        remedy = f"Yama forbids it (kernel.yama.ptrace_scope is {scope}): run sysctl kernel.yama.ptrace_scope=1 as root"
    yield Finding("process memory", Sign.WARNING, found, remedy)


def process_descriptors() -> Iterator[Finding]:
    """Check that pidfd_open reports the end of a process, without polling."""
    command = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:  # it ends with its input
        assert child.stdin is not None
        try:
            fd = os.pidfd_open(child.pid)
        except OSError as error:
            remedy = (
                "the host agent watches ranks with it: use Linux 5.3 or newer, and a seccomp profile that allows it"
            )
            yield Finding("pidfd", Sign.PROBLEM, f"pidfd_open failed: {error.strerror}", remedy)
            return
        try:
            child.stdin.close()
            ended, _, _ = select.select([fd], [], [], _END_S)
        finally:
            os.close(fd)
    if ended:
        yield Finding("pidfd", Sign.OK, "reports the end of a process at once")
    else:
        yield Finding(
            "pidfd",
            Sign.PROBLEM,
            f"did not report the end of a process within {_END_S:g} s",
            "report it, with this list",
        )


def session_socket() -> Iterator[Finding]:
    """Check that there is a directory for sessions, with a short path, and that sockets work in it."""
    from monarch_kernel.net.transport.base import host_peer, rank_peer

    remedy = "the file system may not support sockets: set TMPDIR to a local directory before you start Jupyter"
    try:
        directory, owned = make_directory()
    except OSError as error:
        yield Finding("session sockets", Sign.PROBLEM, str(error), remedy)
        return
    try:
        longest = max((rank_peer(10**6, 100), host_peer(10**6), b"controller"), key=len).decode()
        path = str(directory / longest)
        found = f"in {directory.parent}, with paths of up to {len(os.fsencode(path))} bytes"
        try:
            _exchange(socket.AF_UNIX, path)
        except OSError as error:
            yield Finding("session sockets", Sign.PROBLEM, f"{found}: {error.strerror or error}", remedy)
        else:
            yield Finding("session sockets", Sign.OK, found)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(owned)


def loopback() -> Iterator[Finding]:
    """Check that TCP works within this machine; ranks on it form process groups over TCP."""
    try:
        _exchange(socket.AF_INET, ("127.0.0.1", 0))
    except OSError as error:
        remedy = "ranks form process groups over it: run ip link set lo up, or find what filters loopback packets"
        yield Finding("loopback", Sign.PROBLEM, f"TCP to 127.0.0.1: {error.strerror or error}", remedy)
    else:
        yield Finding("loopback", Sign.OK, "TCP to 127.0.0.1 works")


def addresses() -> Iterator[Finding]:
    """List the addresses at which other machines can connect to this one."""
    from monarch_kernel.runtime.host.network import interface_to, own_addresses

    found = [each for each in own_addresses() if not each.startswith("127.")]
    if found:
        text = f"{', '.join(found)}; outgoing connections use {interface_to(())}"
        yield Finding("addresses", Sign.OK, text)
    else:
        remedy = "only hosts on other machines need one: set up a network, or use --dial or --tunnel"
        yield Finding("addresses", Sign.WARNING, "none at which other machines can connect to this one", remedy)


def _exchange(family: socket.AddressFamily, address: str | tuple[str, int]) -> None:
    """Send a byte from one socket of this process to another."""
    with socket.socket(family) as listener, socket.socket(family) as sender:
        for each in (listener, sender):
            each.settimeout(_END_S)
        listener.bind(address)
        listener.listen(1)
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
        with receiver:
            receiver.settimeout(_END_S)
            sender.sendall(b".")
            if receiver.recv(1) != b".":
                raise OSError("the byte that was sent did not arrive")
