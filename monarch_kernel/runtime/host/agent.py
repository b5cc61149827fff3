"""The host agent: starts ranks through the zygote, watches them, reads their output, and ends them.

Theory of operation
===================

The agent has one thread and one selector. It never imports torch and never unpickles. On the controller's machine, messages
between the controller and ranks do not pass through the agent; on other machines they do (`net.hosts.gateway`). It watches

- the sockets of the gateway: requests to start and end ranks, and messages to forward;
- the zygote's socket: pids of new ranks, or the end of the zygote;
- a pidfd per rank, which is readable when the process has ended. The agent then collects its status, because the Linux kernel
  has made the agent its parent;
- two pipes per rank: its output;
- the socket at which ranks hand over copies of their connections to each other, which stay open for a while when a rank dies
  (`FdKeeper`);
- a pidfd of the controller, on the same machine. When the controller ends, the agent ends everything at once and removes the
  session's directory. On another machine, the controller sends heartbeats. It counts as gone when it has been silent for
  `AgentConfig.grace_s` and the connection to it is not known to be up.

After the message `Detach`, the agent continues without a controller instead. It reads the output of ranks, so that they do not
block, and keeps the last part of it (`Backlog`), until another kernel binds the address and sends `Attach`. The file
``detached`` shows this state to ranks and to kernels that look for such meshes.

Each rank leads its own session and process group. When a rank ends, the agent sends SIGTERM to the rest of its group and to the
processes that have left the group (`Descendants`), and kills them after `GROUP_GRACE_S`. If the agent itself dies, the Linux
kernel kills the ranks, and the zygote kills what they have started. For that, the agent always sends the zygote the current
groups (`OrphanGroups`), and replaces a zygote that dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from monarch_kernel.net.hosts.gateway import Gateway
from monarch_kernel.net.hosts.handshakes import free_descriptors
from monarch_kernel.net.memory.processes import open_pidfd
from monarch_kernel.net.transport.base import CONTROLLER, host_peer, rank_peer
from monarch_kernel.net.wire.codec import WireError, join, pack, split
from monarch_kernel.net.wire.config import DETACHED, KEPT_FILES, LISTENS, LOOPBACK, AgentConfig, ForkReport
from monarch_kernel.net.wire.messages import (
    Attach,
    Backlog,
    ClockRead,
    ConnectHost,
    Detach,
    Detached,
    ForgetHost,
    Goodbye,
    HostEnding,
    HostHello,
    KillRanks,
    LogRead,
    Lost,
    Message,
    Output,
    OutputChunk,
    Preload,
    RankSpec,
    ReadClock,
    ReadLog,
    StartRanks,
    UseParent,
)
from monarch_kernel.net.wire.stream_marks import new_secret
from monarch_kernel.runtime.host.backlog import OutputBacklog
from monarch_kernel.runtime.host.connection_holder import FdKeeper
from monarch_kernel.runtime.host.current_zygote import CurrentZygote
from monarch_kernel.runtime.host.descendants import Descendants
from monarch_kernel.runtime.host.gpus import gpu_ids
from monarch_kernel.runtime.host.logs import RankLog
from monarch_kernel.runtime.host.network import interface_to, listening_addresses
from monarch_kernel.runtime.host.preemption import ENDING, Preemption
from monarch_kernel.runtime.host.processes import (
    become_subreaper,
    children_of,
    signal_rank,
)
from monarch_kernel.runtime.host.rank_meters import RankMeters
from monarch_kernel.runtime.host.rank_output import RankOutput, take_output
from monarch_kernel.runtime.host.rank_process import RankProcess
from monarch_kernel.runtime.host.resources import TooFewGpusError, assign_resources
from monarch_kernel.runtime.host.silent_stacks import answer_for
from monarch_kernel.runtime.host.software import software_here
from monarch_kernel.runtime.host.zygote import Zygote

__all__ = ["HostAgent"]

GROUP_GRACE_S = 1.0
RANK_DESCRIPTORS = 8
"""Descriptors of the agent for one rank: its pipes, those that its cells leave to child processes, its pidfd, its connection.
Connections to other ranks are held if enough descriptors are left (`FdKeeper`)."""

FREE_DESCRIPTORS = 16
"""Descriptors reserved for new connections and short-lived files."""

TIME_OVER_GRACE_S = 2.0
"""How long ranks have to end by themselves when no controller has attached in time."""

CONNECT_S = 60.0
"""How long an agent on another machine tries to connect to the controller."""

_IDLE_S = 1.0


class HostAgent:
    """One machine's part of a session.

    Args:
        config: from the launcher.
        make_zygote: starts a zygote; called again after a zygote has died.
    """

    def __init__(self, config: AgentConfig, make_zygote: Callable[[], Zygote]) -> None:
        become_subreaper()
        self._config = config
        self._selector = selectors.DefaultSelector()
        self._zygote = CurrentZygote(make_zygote, self._selector, self._forked, self._zygote_ended)
        if not config.is_idle:
            self._zygote.start()  # first, because it takes the longest
        self._ranks: dict[int, RankProcess] = {}
        self._descendants = Descendants(GROUP_GRACE_S)
        self._logs_of_dead: dict[int, RankLog] = {}  # kept until their mesh ends
        self._over = False
        self._session_over = False
        self._outlives = False
        self._keep_s = 0.0
        self._is_detached = False
        self._keep_until = 0.0
        self._is_time_over = False
        self._epoch = 0
        self._leave_at: float | None = None
        self._backlog = OutputBacklog()
        self._losses: list[Lost] = []
        self._incarnations: dict[int, int] = {}  # of ranks that replace another one
        self._output = RankOutput(self._ranks, self._selector, self._send, config.directory, self._is_controller_slow)
        self._meters = RankMeters(self._ranks)
        self._keeper = FdKeeper(os.path.join(config.directory, host_peer(config.host).decode()), self._selector)
        self._beat_at = 0.0
        self._interface = "lo" if config.listens_at == LOOPBACK else interface_to(config.addresses)
        self._born = time.monotonic()
        at = config.listens_at
        self._gateway = Gateway(
            config.host, config.directory, config.addresses, config.keys, config.epoch, self._watch_gateway, at
        )
        if not config.addresses:
            print(f"{LISTENS} {self._gateway.port}", flush=True)
        self._handlers: Mapping[type[Message], Callable[[Any], object]] = {
            Attach: self._attach,
            ConnectHost: lambda message: self._gateway.reach(message.host, message.addresses, message.peers),
            Detach: self._outlive_controller,
            ForgetHost: lambda message: self._gateway.part(message.host),
            Goodbye: self._handle_goodbye,
            KillRanks: lambda message: self._kill(message.procs, message.grace_s, keep_logs=message.keep_logs),
            Preload: lambda message: self._zygote.preload(message.modules),
            ReadClock: lambda message: self._send(ClockRead(message.sent, time.time())),
            ReadLog: lambda message: self._send(
                LogRead(message.id, answer_for(message, config.directory, self._ranks))
            ),
            StartRanks: self._start_or_refuse,
            UseParent: lambda message: self._gateway.join(message.parent, message.addresses),
        }
        self._controller_fd = -1
        if config.controller_pid:
            try:
                self._controller_fd = open_pidfd(config.controller_pid)
                self._selector.register(self._controller_fd, selectors.EVENT_READ, self._controller_ended)
            except ProcessLookupError:
                self._end_session()
        self.preemption = Preemption(self._ranks, self._refuse, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run(self) -> None:
        """Run until the session is over."""
        self._say_hello()
        try:
            while not self._over:
                soon_s = self._gateway.turn()
                self._handle_messages()
                if self._over:
                    break
                timeout_s = 0.0 if self._gateway.is_stirred else self._timeout()
                for key, _ in self._selector.select(timeout_s if soon_s is None else min(soon_s, timeout_s)):
                    key.data()
                self._do_what_is_due(time.monotonic())
        finally:
            self._clean_up()

    # -- the controller

    def _watch_gateway(self, fd: int, is_open: bool) -> None:
        if is_open:
            self._selector.register(fd, selectors.EVENT_READ, lambda: None)
        else:
            self._selector.unregister(fd)

    def _say_hello(self) -> None:
        hello = HostHello(
            self._config.token,
            self._config.host,
            socket.gethostname(),
            os.getpid(),
            len(os.sched_getaffinity(0)),
            len(gpu_ids()),
            tuple(self._incarnations.items()),
            listening_addresses(self._config.listens_at, self._gateway.port),
            software_here(),
        )
        self._send(hello)

    def _send(self, message: Message) -> None:
        if isinstance(message, Lost):
            self._losses.append(message)
        if self._is_detached:
            if isinstance(message, Output):
                self._backlog.add(each for chunk in message.chunks for each in chunk.of_each())
            return
        if self._leave_at is None:  # else the controller has left, and closing would wait for delivery
            self._gateway.send(CONTROLLER, join([pack(message)]))

    def _is_controller_slow(self) -> bool:
        """Whether messages wait here for the controller; without one, the last part of the output is kept (`Backlog`)."""
        return not self._is_detached and self._leave_at is None and self._gateway.is_congested

    def _handle_messages(self) -> None:
        if self._gateway.is_given_up:
            print("the controller has given this host up and does not accept it any more: the agent ends", flush=True)
            self._end_session()
        while (received := self._gateway.recv()) is not None:
            try:
                messages = [message for message, _ in split(received[1])]
            except WireError as error:
                print(f"dropped a bad message: {error}", file=sys.stderr, flush=True)
                continue
            for message in messages:
                if (handle := self._handlers.get(type(message))) is not None:
                    handle(message)

    def _start_or_refuse(self, message: StartRanks) -> None:
        (self._refuse if self.preemption.has_started else self._start)(message.specs)

    def _outlive_controller(self, message: Detach) -> None:
        self._outlives = True
        self._keep_s = message.keep_s
        self._send(Detached(message.id))

    def _handle_goodbye(self, message: Goodbye) -> None:
        if message.keep:
            self._controller_ended()
        elif message.grace_s and self._has_forked:
            self._kill(list(self._ranks), message.grace_s)
            self._leave_at = time.monotonic() + message.grace_s + GROUP_GRACE_S
        else:
            self._end_session()

    @property
    def _has_forked(self) -> bool:
        """Whether there is a rank that can end by itself; ranks that are not forked yet can't."""
        return any(rank.pid for rank in self._ranks.values())

    def _end(self) -> None:
        self._over = True
        self._session_over |= self._outlives  # no other process would remove the directory

    def _end_session(self) -> None:
        self._over = self._session_over = True

    # -- without a controller

    def _controller_ended(self) -> None:
        if self._controller_fd >= 0:
            self._selector.unregister(self._controller_fd)
            os.close(self._controller_fd)
            self._controller_fd = -1
        if self._leave_at is not None:
            return
        if not self._outlives or not self._ranks:
            self._end_session()
            return
        self._is_detached = True
        self._keep_until = time.monotonic() + self._keep_s if self._keep_s else float("inf")
        if not write_detached(self._config.directory, time.time()):  # no kernel could ever attach
            print(f"the directory {self._config.directory} is gone: the agent ends", file=sys.stderr, flush=True)
            self._end_session()

    def _attach(self, message: Attach) -> None:
        """Send a new controller everything that the last one knew of this host, and the output and losses since then."""
        if not self._outlives or message.token != self._config.token or message.epoch <= self._epoch:
            return
        if self._is_time_over:
            return
        self._controller_ended()
        self._epoch = message.epoch
        if self._config.controller_pid:
            try:
                self._controller_fd = open_pidfd(message.controller_pid)
            except ProcessLookupError:  # the new controller has ended already
                return
            self._selector.register(self._controller_fd, selectors.EVENT_READ, self._controller_ended)
        self._output.flush(time.monotonic())
        self._is_detached = False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._config.directory, DETACHED))
        self._say_hello()
        streams = [stream for rank in self._ranks.values() for stream in rank.streams]
        ends = [OutputChunk(stream.proc, stream.name, "", stream.reported_to) for stream in streams]
        self._send(Backlog((*self._backlog.take(), *ends)))
        losses, self._losses = self._losses, []
        for loss in losses:
            self._send(loss)

    # -- starting ranks

    def _start(self, requested: Sequence[RankSpec]) -> None:
        specs = [spec for each in requested if (spec := self._assign_resources(each)) is not None]
        specs = list(self._with_room(specs))
        if not specs:
            return
        self._zygote.be_there()
        theirs = []
        secrets = [new_secret() for _ in specs]
        for spec, secret in zip(specs, secrets):
            log = RankLog(self._config.directory, spec.proc, appends=spec.incarnation > 0)
            if spec.incarnation:
                self._incarnations[spec.proc] = spec.incarnation
                self._logs_of_dead.pop(spec.proc, None)
                self._losses = [loss for loss in self._losses if loss.proc != spec.proc]
            streams, ends = self._output.open(spec.proc, secret, log, is_whole=spec.all_output)
            self._ranks[spec.proc] = RankProcess(spec, streams, log)
            self._gateway.expect(rank_peer(spec.proc, spec.incarnation))
            theirs.append(ends)
        try:
            self._zygote.fork(specs, theirs, secrets)
        finally:
            for pair in theirs:
                for end in pair:
                    os.close(end)

    def _refuse(self, specs: Sequence[RankSpec] = ()) -> None:
        """Say that no more ranks are started, as they would end with the agent; first, so that other ranks go elsewhere."""
        self._send(HostEnding())
        for spec in specs:
            self._send(Lost(spec.proc, 0, 0, ENDING, (), 0))

    def _assign_resources(self, spec: RankSpec) -> RankSpec | None:
        """Give a rank its share of this host; report the rank as lost and return None if there are too few GPUs."""
        if spec.record and not os.path.isabs(spec.record):
            spec = spec.recorded_in(self._config.directory)
        try:
            return assign_resources(spec, os.environ, gpu_ids, socket.gethostname(), self._interface)
        except TooFewGpusError as error:
            self._send(Lost(spec.proc, 0, 0, str(error), (), 0))
            return None

    def _with_room(self, specs: Sequence[RankSpec]) -> Sequence[RankSpec]:
        """Return the ranks for which there are enough descriptors; report the others as lost."""
        room = max(0, free_descriptors() - FREE_DESCRIPTORS) // RANK_DESCRIPTORS
        for spec in specs[room:]:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            why = f"the host agent has no file descriptors left for this rank; its limit is {limit}: raise it (ulimit -Hn)"
            self._send(Lost(spec.proc, 0, 0, why, (), 0))
        return specs[:room]

    def _forked(self, report: ForkReport) -> None:
        rank = self._ranks[report.proc]
        if report.error:
            self._lost(rank, 0, 0, report.error)
            return
        rank.forked(report.pid)
        self._zygote.has_forked()
        self._zygote.groups_changed()
        self._selector.register(rank.pidfd, selectors.EVENT_READ, partial(self._ended, rank))
        if rank.stopping is not None:  # it was stopped before it was forked
            self._kill([report.proc], rank.stopping, keep_logs=rank.keeps_log)

    def _zygote_ended(self, log: tuple[str, ...]) -> None:
        for rank in [rank for rank in self._ranks.values() if not rank.pid]:
            self._lost(rank, 0, 0, "the process that ranks are forked from (it imports torch) ended", log)

    def _groups(self) -> set[int]:
        """The process groups that the zygote ends if the agent is killed."""
        return {rank.pid for rank in self._ranks.values() if rank.pid} | self._descendants.groups

    # -- ending ranks

    def _kill(self, procs: Sequence[int], grace_s: float, *, keep_logs: bool = False) -> None:
        now = time.monotonic()
        for proc in procs:
            rank = self._ranks.get(proc)
            if rank is None:
                if (log := self._logs_of_dead.pop(proc, None)) is not None:
                    log.remove()
                continue
            rank.stopping = grace_s
            rank.keeps_log = keep_logs
            if rank.pid:
                self._descendants.note(rank)
                rank.stop(grace_s, now)

    def _ended(self, rank: RankProcess) -> None:
        status = rank.collect()
        if status is None:
            return
        for stream in rank.streams:
            if stream.fd >= 0:
                stream.read()
        self._lost(rank, *status, "")

    def _lost(self, rank: RankProcess, exit_code: int, signum: int, reason: str, log: tuple[str, ...] = ()) -> None:
        now = time.monotonic()
        del self._ranks[rank.spec.proc]
        self._zygote.groups_changed()
        name = rank_peer(rank.spec.proc, rank.spec.incarnation)
        self._gateway.turn()  # forwards its last messages before its end
        self._gateway.forget(name)
        with contextlib.suppress(OSError):  # the socket at which it listened to other ranks
            os.unlink(os.path.join(self._config.directory, name.decode()))
        chunks = list(take_output(rank.streams, now, last=True))
        if chunks:
            self._send(Output(tuple(chunks)))
        own = [
            stream for stream in rank.streams if not stream.request
        ]  # the others are those of children of earlier cells
        last_lines = log or tuple(line for stream in own for line in stream.tail()[-12:])
        killed = signum == signal.SIGKILL and rank.stopping is None
        evidence = (self._meters.oom.kills(), self._meters.oom.low_memory()) if killed else ("", "")
        self._send(Lost(rank.spec.proc, exit_code, signum, reason, last_lines, rank.rss_nbytes, *evidence))
        self._output.close(rank.streams)
        if rank.stopping is None or rank.keeps_log:
            rank.log.close()
            self._logs_of_dead[rank.spec.proc] = rank.log
        else:
            rank.log.remove()
        if rank.pidfd >= 0:
            self._selector.unregister(rank.pidfd)
            os.close(rank.pidfd)
        if rank.pid:
            self._descendants.rank_ended(rank.pid, now)

    # -- time

    def _timeout(self) -> float:
        if (due_s := self._output.due_in(time.monotonic())) is not None:
            return due_s
        is_killing = any(rank.kill_at is not None for rank in self._ranks.values())
        if self._descendants.is_ending or is_killing or self._keeper.is_waiting or self._output.is_late:
            return 0.05
        return min(_IDLE_S, self._config.beat_s)

    def _do_what_is_due(self, now: float) -> None:
        if now >= self._beat_at:
            self._beat_at = now + self._config.beat_s
            self._gateway.beat(now)
            heard_at = self._gateway.controller_seen_at
            silent_until = self._born + CONNECT_S if heard_at is None else heard_at + self._config.grace_s
            is_silent = not self._config.controller_pid and not self._is_detached and now >= silent_until
            if is_silent and not self._gateway.has_controller:  # else it only can't send: other code holds its GIL
                if (
                    self._leave_at is None
                ):  # the reason, which a live controller reads when it learns of the agent's end
                    silent_s = now - (self._born if heard_at is None else heard_at)
                    print(f"received nothing from the controller for {silent_s:.1f} s: it counts as dead", flush=True)
                self._controller_ended()
        is_needed = bool(self._ranks) or self._descendants.is_ending
        self._zygote.do_what_is_due(now, is_needed=is_needed, groups=self._groups)
        if self._leave_at is not None and (
            now >= self._leave_at or not (self._has_forked or self._descendants.is_ending)
        ):
            self._end_session()
            return
        self._output.tick(now)
        if self._meters.is_due(now):
            if (readings := self._meters.read(now, self._gateway.refused_connections)) is not None:
                self._send(readings)
            if self._is_detached and not os.path.isdir(self._config.directory):
                self._end_session()  # no controller could ever attach
        if self._is_detached and now >= self._keep_until and self._leave_at is None:
            print(
                f"no controller attached within the {self._keep_s:g} s for which ranks are kept: the agent ends",
                flush=True,
            )
            self._is_time_over = True
            self._kill(list(self._ranks), TIME_OVER_GRACE_S)
            self._leave_at = now + TIME_OVER_GRACE_S + GROUP_GRACE_S
        self.preemption.do_what_is_due(now)
        self._keeper.do_what_is_due(now)
        self._output.follow_late()
        for rank in self._ranks.values():
            rank.kill_if_due(now)
        if self._descendants.is_ending and self._descendants.end_left(now, self._ranks.values(), self._zygote.pid):
            self._zygote.groups_changed()

    # -- the end

    def _clean_up(self) -> None:
        for rank in self._ranks.values():
            if rank.pid:
                signal_rank(rank.pid, signal.SIGKILL)
        for pgid in self._descendants.groups:
            signal_rank(pgid, signal.SIGKILL)
        self._zygote.close()
        while True:  # also kill ranks that the zygote forked meanwhile
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                _kill_children()
                time.sleep(0.002)
        for rank in self._ranks.values():
            rank.remove_segments()
        self._gateway.close()
        if self._controller_fd >= 0:
            os.close(self._controller_fd)
        self._remove_directory()

    def _remove_directory(self) -> None:
        has_own = self._config.has_own_directory
        if self._is_time_over and not has_own:
            remove_all_but_kept_files(self._config.directory)
        elif self._session_over or has_own:  # else the controller is alive, and may launch another agent
            shutil.rmtree(self._config.directory, ignore_errors=True)
            if self._outlives and not has_own:
                with contextlib.suppress(OSError):  # there are other meshes
                    os.rmdir(os.path.dirname(self._config.directory))


def _kill_children() -> None:
    for pid in children_of(os.getpid()):
        signal_rank(pid, signal.SIGKILL)


def write_detached(directory: str, since: float) -> bool:
    """Write the file `DETACHED`, with a time in seconds since 1970; False if something has removed the directory."""
    path = os.path.join(directory, DETACHED)
    try:
        with open(f"{path}.new", "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            json.dump({"since": since}, file)
        os.replace(f"{path}.new", path)
    except FileNotFoundError:
        return False
    return True


def remove_all_but_kept_files(directory: str) -> None:
    """Remove all files except `KEPT_FILES`, which describe the mesh and the time since when it had no controller."""
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:  # something has removed the directory
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name not in KEPT_FILES:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
