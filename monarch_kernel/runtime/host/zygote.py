"""The zygote: a process that has imported torch once, and forks ranks.

It is single-threaded and never touches CUDA, a store or a process group, so that its forks are whole. It reads requests from
a socket of packets that it shares with the host agent: one packet a rank, with the write ends of the rank's output pipes,
the last one marked. For each such group it forks a helper, which forks the ranks, reports their pids and ends: the ranks
then belong to the agent (a subreaper), which sees how they end.

Should the agent be killed, the Linux kernel kills the ranks, but not what they have started. That is left to the zygote, which
sees the agent's end, and knows by a packet (`Bequest`) which process groups there are.
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

from monarch_kernel.base.own_log import LogFileHandler, take_log
from monarch_kernel.net.wire.config import Bequest, ForkReport, ForkRequest, Preloads
from monarch_kernel.net.wire.messages import RankSpec

__all__ = ["HUGE_PAGES", "Zygote", "serve"]

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Has torch ask for huge pages for large tensors: other processes read those twice as fast, and fresh ones are there sooner."""

_PACKET_NBYTES = 1 << 20
_Run = Callable[[RankSpec, Sequence[str], str, int, str], None]


class Zygote:
    """The agent's end: starts the zygote process and asks it for ranks.

    Args:
        entry: ``module:function`` that a forked rank runs with its spec, the addresses, the token, the helper's pid and the
            secret of its marks.
        preload: modules to import before the first fork; of ``module:function`` the function is called, too.
        preload_later: the same, one at a time, and only when there is nothing else to do.
        addresses: where the controller listens, empty if on another machine, and where the agent does.
        token: for the ranks' hello.
        log: file that the zygote writes to; ranks have pipes of their own.
        leftover: directory that the zygote removes when the agent has ended and could not.
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
                [sys.executable, "-m", "monarch_kernel.bootstrap", "zygote", str(theirs.fileno())],
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
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def fork(self, specs: Sequence[RankSpec], fds: Sequence[tuple[int, int]], secrets: Sequence[str]) -> None:
        """Ask for ranks; ``fds`` are their file descriptors 1 and 2, ``secrets`` those of their marks."""
        for i, (spec, pair, secret) in enumerate(zip(specs, fds, secrets)):
            packet = ForkRequest(spec, i == len(specs) - 1, secret).encode()
            socket.send_fds(self.socket, [packet], list(pair))

    def preload(self, modules: Sequence[str]) -> None:
        """Have modules imported when there is nothing else to do; one that can't be is left out."""
        with contextlib.suppress(OSError):  # it has ended, or imports something: ranks import what they need
            self.socket.send(Preloads(tuple(modules)).encode(), socket.MSG_DONTWAIT)

    def bequeath(self, groups: Sequence[int]) -> bool:
        """Say which process groups it has to end, should we be killed; False if it can't be told now."""
        try:
            self.socket.send(Bequest(tuple(groups)).encode(), socket.MSG_DONTWAIT)
        except BlockingIOError:  # it imports something
            return False
        except OSError:  # it has ended, as we are about to be told
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
        """End the process if it still runs; gives the last lines of its log."""
        self.socket.close()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError), open(self._log, errors="replace") as log:
            return tuple(log.read().splitlines()[-20:])
        return ()


def serve(fd: int) -> None:
    """Be the zygote, until the agent closes its end."""
    entry, preload, preload_later, addresses, token, leftover = json.loads(sys.stdin.buffer.read())
    take_log(LogFileHandler(os.dup(2)))  # also for the forks, where 2 is what the user's code writes to
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _load(preload)
    module, function = entry.split(":")
    run: _Run = getattr(importlib.import_module(module), function)
    channel = socket.socket(fileno=fd)
    group: list[tuple[ForkRequest, Sequence[int]]] = []
    inherited: Sequence[int] = ()
    asked: list[str] = []
    while True:
        while (preload_later or asked) and not group and not select.select([channel], [], [], 0)[0]:
            if preload_later:
                _load([preload_later.pop(0)])
            else:
                with contextlib.suppress(Exception):  # ranks that want it say why it can't be imported
                    _load([asked.pop(0)])
        packet, fds, _, _ = socket.recv_fds(channel, _PACKET_NBYTES, 2)
        if not packet:
            for pgid in inherited:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pgid, signal.SIGKILL)
            if leftover:
                shutil.rmtree(leftover, ignore_errors=True)
            return
        request = ForkRequest.decode(packet)
        if isinstance(request, Bequest):
            inherited = request.groups
            continue
        if isinstance(request, Preloads):
            asked += [name for name in request.modules if name not in sys.modules]
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


def _load(names: Sequence[str]) -> None:
    for name in names:
        module_name, _, prepare = name.partition(":")
        module = importlib.import_module(module_name)
        if prepare:
            getattr(module, prepare)()
    gc.collect()
    gc.freeze()  # forks share these pages as long as the collector does not write to them


def _fork_group(
    channel: socket.socket,
    group: Sequence[tuple[ForkRequest, Sequence[int]]],
    run: _Run,
    addresses: Sequence[str],
    token: str,
) -> None:
    """In the helper: fork the ranks, report, end. Never returns."""
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
    """In the new process: take its descriptors, let go of the zygote's, run. Never returns."""
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
        run(request.spec, addresses, token, helper, request.secret)
        code = 0
    except BaseException:  # the process's border: what is not caught here would run the zygote's loop a second time
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
