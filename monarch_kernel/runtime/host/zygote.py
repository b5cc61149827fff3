"""The zygote: a process that imports torch once, and forks ranks.

It is single-threaded and never touches CUDA, a store or a process group, so that its forks are intact. It reads requests from a
packet socket that it shares with the host agent: one packet for each rank, with the write ends of the rank's output pipes; the
last packet of a group is marked. For each group it forks a helper, which forks the ranks, reports their pids and ends. The
agent, a subreaper, then becomes the parent of the ranks and learns how they end. A rank that must have nothing imported yet
(`RankSpec.python`) replaces its fork by a new process of an interpreter.

If the agent is killed, the Linux kernel kills the ranks, but not the processes that they have started. The zygote kills those:
it notices the agent's end, knows the process groups from a packet (`OrphanGroups`), and finds the processes in other groups
by their environment (`runtime.host.descendants`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from monarch_kernel.base.own_log import LogFileHandler, take_log
from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import module_command
from monarch_kernel.net.wire.config import SAME, ForkReport, ForkRequest, FreshRank, OrphanGroups, Preloads
from monarch_kernel.net.wire.messages import RankSpec
from monarch_kernel.runtime.host.descendants import kill_marked, mark_rank
from monarch_kernel.runtime.host.preemption import block_stop_signal

__all__ = ["HUGE_PAGES", "Zygote", "run_fresh", "serve"]

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Makes torch use huge pages for large tensors: other processes read them twice as fast, and they are allocated faster."""

_PACKET_NBYTES = 1 << 20
_Run = Callable[[RankSpec, Sequence[str], str, int, str], None]


class Zygote:
    """The agent's end: starts the zygote process and requests ranks from it.

    Args:
        entry: ``module:function`` that a forked rank runs with its spec, the addresses, the token, the helper's pid and the
            secret of its marks.
        preload: modules to import before the first fork; for ``module:function`` the function is also called.
        preload_later: modules to import one at a time, only while the zygote is idle.
        addresses: the address of the controller, empty if it is on another machine, and that of the agent.
        token: token of the ranks' hello.
        log: file that the zygote writes to; ranks have their own pipes.
        leftover: directory that the zygote removes after the agent has ended without removing it.
    """

    def __init__(
        self,
        entry: str,
        preload: Sequence[str],
        preload_later: Sequence[str],
        addresses: tuple[str, str],
        token: str,
        log: str,
        leftover: str = "",
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PACKET_NBYTES)
        self.socket = ours
        self._log = log
        with theirs, open(log, "ab") as sink:
            self._process = subprocess.Popen(
                module_command("monarch_kernel.bootstrap", "zygote", str(theirs.fileno())),
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**HUGE_PAGES, **os.environ},
            )
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(
                json.dumps([entry, list(preload), list(preload_later), list(addresses), token, leftover]).encode()
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process is still running."""
        return self._process.poll() is None

    def fork(self, specs: Sequence[RankSpec], fds: Sequence[tuple[int, int]], secrets: Sequence[str]) -> None:
        """Request ranks; ``fds`` are their file descriptors 1 and 2, ``secrets`` the secrets of their marks."""
        for i, (spec, pair, secret) in enumerate(zip(specs, fds, secrets)):
            packet = ForkRequest(spec, i == len(specs) - 1, secret).encode()
            socket.send_fds(self.socket, [packet], list(pair))

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules while the zygote is idle; modules that can't be imported are skipped."""
        with contextlib.suppress(OSError):  # it has ended, or imports something: ranks import what they need
            self.socket.send(Preloads(tuple(modules)).encode(), socket.MSG_DONTWAIT)

    def send_groups(self, groups: Sequence[int]) -> bool:
        """Send the process groups that it must end if the agent is killed; return False if it can't receive them now."""
        try:
            self.socket.send(OrphanGroups(tuple(groups)).encode(), socket.MSG_DONTWAIT)
        except BlockingIOError:  # it imports something
            return False
        except OSError:  # it has ended, which `report` will return next
            return True
        return True

    def report(self) -> ForkReport | None:
        """Read a report; None once the zygote has ended."""
        try:
            packet = self.socket.recv(_PACKET_NBYTES)
        except ConnectionError:
            return None
        return ForkReport.decode(packet) if packet else None

    def close(self) -> tuple[str, ...]:
        """End the process if it is still running; return the last lines of its log."""
        self.socket.close()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError), open(self._log, errors="replace") as log:
            return tuple(log.read().splitlines()[-20:])
        return ()


def serve(fd: int) -> NoReturn:
    """Run as the zygote, which ends when the agent closes its end."""
    entry, preload, preload_later, addresses, token, leftover = json.loads(sys.stdin.buffer.read())
    log = os.dup(2)
    take_log(LogFileHandler(log))  # also for the forks, in which descriptor 2 belongs to the user's code
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    block_stop_signal()
    _load(preload)
    module, function = entry.split(":")
    forked: _Run = getattr(importlib.import_module(module), function)

    def run(spec: RankSpec, addresses: Sequence[str], token: str, helper: int, secret: str) -> None:
        if spec.python:
            _start_fresh(spec, entry, log, [*addresses, token, str(helper), secret])
        forked(spec, addresses, token, helper, secret)

    channel = socket.socket(fileno=fd)
    group: list[tuple[ForkRequest, Sequence[int]]] = []
    inherited: Sequence[int] = ()
    requested: list[str] = []
    while True:
        while (preload_later or requested) and not group and not select.select([channel], [], [], 0)[0]:
            if preload_later:
                _load([preload_later.pop(0)])
            else:
                with contextlib.suppress(Exception):  # ranks that need it report why it can't be imported
                    _load([requested.pop(0)])
        try:
            packet, fds, _, _ = socket.recv_fds(channel, _PACKET_NBYTES, 2)
        except ConnectionResetError:  # the agent has ended before it read all reports
            packet = b""
        if not packet:
            for pgid in inherited:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pgid, signal.SIGKILL)
            kill_marked()
            if leftover:
                shutil.rmtree(leftover, ignore_errors=True)
            _leave(0)  # to finalize an interpreter that has torch takes half a second, for which the agent would wait
        request = ForkRequest.decode(packet)
        if isinstance(request, OrphanGroups):
            inherited = request.groups
            continue
        if isinstance(request, Preloads):
            requested += [name for name in request.modules if name not in sys.modules]
            continue
        group.append((request, fds))
        if request.last:
            helper = os.fork()
            if helper == 0:
                _fork_group(channel, group, run, addresses, token)
            for _, pair in group:
                for end in pair:
                    os.close(end)
            group.clear()
            os.waitpid(helper, 0)


def _start_fresh(spec: RankSpec, entry: str, log: int, arguments: Sequence[str]) -> NoReturn:
    """Become a new process of an interpreter, in which nothing is imported, with the same pid, marks and descriptors.

    Variables that libraries read when they are imported then have their effect. The spec and the secrets go through a file in
    memory, since other users can see a command line.
    """
    fd = os.memfd_create("monarch-rank", 0)
    os.write(fd, FreshRank(spec, entry, log, tuple(arguments)).encode())
    os.lseek(fd, 0, os.SEEK_SET)
    os.set_inheritable(log, True)
    environment = {name: value for name, value in os.environ.items() if name not in spec.unset} | spec.env
    command = module_command(
        "monarch_kernel.bootstrap", "rank", str(fd), python="" if spec.python == SAME else spec.python
    )
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise LaunchError(f"{command[0]} can't be run: {error.strerror}") from None


def run_fresh(fd: int) -> None:
    """Run as the rank that the zygote has described in this file."""
    with open(fd, "rb") as file:
        rank = FreshRank.decode(file.read())
    os.set_inheritable(rank.log, False)
    take_log(LogFileHandler(rank.log))
    module, function = rank.entry.split(":")
    run: _Run = getattr(importlib.import_module(module), function)
    *addresses, token, helper, secret = rank.arguments
    try:
        run(rank.spec, addresses, token, int(helper), secret)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _leave(code: int) -> NoReturn:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _load(names: Sequence[str]) -> None:
    gc.disable()  # nearly all that modules make stays: a search of torch's for garbage takes 0.2 s and frees 1 MiB
    try:
        for name in names:
            module_name, _, prepare = name.partition(":")
            module = importlib.import_module(module_name)
            if prepare:
                getattr(module, prepare)()
    finally:
        gc.freeze()  # forks share these pages as long as the collector does not write to them
        gc.enable()


def _fork_group(
    channel: socket.socket,
    group: Sequence[tuple[ForkRequest, Sequence[int]]],
    run: _Run,
    addresses: Sequence[str],
    token: str,
) -> None:
    """Fork the ranks, report their pids and end; runs in the helper and never returns."""
    helper = os.getpid()
    try:
        for request, fds in group:
            proc = request.spec.proc
            try:
                pid = os.fork()
            except OSError as error:
                channel.send(ForkReport(proc, 0, f"fork failed: {error}").encode())
                continue
            if pid == 0:
                _become_rank(channel, group, request, fds, run, addresses, token, helper)
            channel.send(ForkReport(proc, pid).encode())
    finally:
        os._exit(0)


def _become_rank(
    channel: socket.socket,
    group: Sequence[tuple[ForkRequest, Sequence[int]]],
    request: ForkRequest,
    fds: Sequence[int],
    run: _Run,
    addresses: Sequence[str],
    token: str,
    helper: int,
) -> None:
    """Set up the rank's descriptors, close the zygote's and run; runs in the new process and never returns."""
    code = 1
    try:
        os.setsid()
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        channel.close()
        for _, pair in group:
            for end in pair:
                os.close(end)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        mark_rank(request.spec.proc, request.spec.incarnation)
        run(request.spec, addresses, token, helper, request.secret)
        code = 0
    except BaseException:  # an exception that is not caught here would run the zygote's loop a second time
        traceback.print_exc()
    finally:
        _leave(code)
