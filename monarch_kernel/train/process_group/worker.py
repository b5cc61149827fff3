"""torch.distributed in a mesh: provides a default process group for cells, and forms it again after an abort.

Theory of operation
===================

Ranks meet in a store of torch.distributed. The process of rank 0 serves its keys without a port
(`runtime.worker.store_client`): store operations are messages between ranks, which only processes of the session can send. Each
time a group is formed, rank 0 opens a new store (`HostStore`), so that keys of a broken group do no harm. If the process of
rank 0 dies, the group is broken anyway, and the process that replaces it opens the next store. Store operations do not need
the controller, which may be gone.

gloo connects ranks through its own ports, at the address of the interface in ``GLOO_SOCKET_IFNAME``, which the agent sets if
the user has not. Ranks on several hosts first check that the hosts reach each other (`_reach`), because gloo would try for a
long time, with little information in its error.

A rank sets the variables of torchelastic before it forms the group, so that code written for torchrun (and Lightning,
Accelerate, the HF Trainer) finds what it expects. If a script calls ``init_process_group()``, the call finds the existing group
and returns, or, after ``destroy_process_group()``, forms it again in the same store under another prefix. ``env://`` uses this
store, too. Nothing listens at MASTER_PORT, unless a program that a rank starts opens a store there.

A gloo collective that waits for a missing peer can be neither interrupted nor aborted through torch: ``abort()`` returns, and
the caller stays blocked. To end it, another thread takes its connections away (gloo has no abort: pytorch/gloo#388). These
are the descriptors that appear while torch creates a group. NCCL has an abort.

The connections are kept open for a while after gloo has lost them, because the gloo of a peer may be writing to them. If the
write fails, gloo forgets the send, and the code that waits for it hangs forever (`gloo_waits`). The peer aborts its group in
that time, too. If a peer has died, its host agent keeps the connections open for some seconds, in which the other ranks learn
of the death (`runtime.host.connection_holder`).

A rank that refuses a collective (`call_check`) ends the group of that collective in the same way. It tells the other ranks by a
message (`EndGroup`), as the end of a connection would cut the messages between them.

Torch gives groups of different members the same name if they are made at the same time, and different names if only some ranks
have made earlier groups. So the members of a group meet under their ranks, too, and the controller keeps the counts behind the
names equal (`runtime.controller.group_counts`).

A rank that waits for a peer to connect has no socket for it yet. gloo's timeout for this is the group's timeout, which also
applies to later sends and receives, so that a short timeout would end those. To free such a rank, an abort connects to the
rank's own listeners in place of each peer, and closes these connections (`stand_in`): gloo takes each for the peer's
connection, and finds it closed (https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/listener.cc).
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial, wraps
from typing import Any

from monarch_kernel import live
from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.errors import Failure, MeshDownError, RemoteError, format_ranks
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.net.wire.codec import Frame, pack
from monarch_kernel.net.wire.messages import EndGroup, FormGroup, HostStore, RankSpec, SkipGroupNames
from monarch_kernel.runtime.diagnostics.stacks import Collective
from monarch_kernel.runtime.host.connection_holder import FdHolder
from monarch_kernel.runtime.host.network import address_of, interfaces
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.gather import gather, read_value
from monarch_kernel.runtime.rpc.waits import Wait
from monarch_kernel.runtime.worker.collective_aborts import TORCH_ERRORS
from monarch_kernel.runtime.worker.rank import Rank
from monarch_kernel.runtime.worker.store_client import (
    StoreClient,
    is_session_store,
    meeting_in,
    serve_rendezvous,
    torch_store,
    values_set,
)
from monarch_kernel.runtime.worker.timers import later
from monarch_kernel.train.process_group import gloo_aborts, strangers
from monarch_kernel.train.process_group.call_check import CallCheck
from monarch_kernel.train.process_group.collective_counts import BlockedCall, CollectiveMeter
from monarch_kernel.train.process_group.collective_purposes import Purposes
from monarch_kernel.train.process_group.default_arguments import renew_default_groups
from monarch_kernel.train.process_group.destroyed_groups import DestroyedGroups
from monarch_kernel.train.process_group.gloo_waits import end_groups, gloo_of
from monarch_kernel.train.process_group.labels import label_of
from monarch_kernel.train.process_group.native_waits import NativeWaits
from monarch_kernel.train.process_group.pending_calls import PendingCalls
from monarch_kernel.train.process_group.sockets import (
    Socket,
    close,
    copy_of,
    has_closed,
    open_sockets,
    stand_in,
)

__all__ = ["GroupStore", "RankGroup", "blame_deaths"]

_NOTE = "forming the process group"
_JOIN_TIMEOUT = timedelta(seconds=60)
_REACH_S = 10.0
"""How long a rank tries to reach another host."""

_CLOSE_AFTER_S = 3.0
"""How long the connections of an aborted group stay open, unless it is formed again; until then the other ranks abort, too."""

_ENDS_WITHIN_S = 10.0
"""Far longer than it takes to end the waits of an aborted group."""


class GroupStore:
    """The controller's part: makes meshes form their process groups."""

    def __init__(self) -> None:
        self._is_closed = False

    def form(self, mesh: ProcMesh) -> Future[ValueMesh[None]]:
        """Make all ranks of a mesh form their default process group, whatever the state of the last one.

        Raises:
            RuntimeError: the session is ending.
        """
        if self._is_closed:
            raise RuntimeError("can't form a process group: the session is ending")
        return _Forming(mesh).future

    def close(self) -> None:
        """Form no more groups."""
        self._is_closed = True


class _Forming:
    """Forms a group in two steps: its first rank opens a store, then all ranks meet in it. Owns the future of both steps."""

    def __init__(self, mesh: ProcMesh) -> None:
        self._mesh = mesh
        self.client = mesh.runtime
        self.client.queries.n_groups_formed += 1
        self._is_interrupted = False
        self._step: Future[Any]
        self.future: Future[ValueMesh[None]] = Future(self, 0, lambda answers: self._step.get(0))
        first = mesh.process(mesh.ranks[0])
        finish = gather(first.region, _what(mesh), RemoteError, read_value, mesh.spawned_extent)
        self._step = self.client.request(
            first.procs, lambda id: pack(HostStore(id)), _NOTE, lambda answers: finish(answers).item(), quiet=True
        )
        self._step.add_done_callback(self._hosted)

    def _hosted(self) -> None:
        if self._step.exception(0) is not None:
            self.future.resolve((), True)
            return
        store, address, port = self._step.get(0)
        mesh = self._mesh
        message = partial(FormGroup, proc=mesh.procs[0], store=store, address=address, port=port)
        values = gather(mesh.region, _what(mesh), RemoteError, lambda answer: None)

        def finish(answers: Sequence[Answer]) -> ValueMesh[None]:
            return values(blame_deaths(answers))

        try:
            self._step = self.client.request(mesh.procs, lambda id: pack(message(id)), _NOTE, finish, quiet=True)
        except MeshDownError as error:
            self.future.abandon(error)
            return
        self._step.add_done_callback(lambda: self.future.resolve((), self._step.in_step))
        if self._is_interrupted:
            self._step.interrupt()

    # -- as the owner of the future

    def wait(self, waiter: Waiter, timeout_s: float | None) -> bool:
        return self.client.wait(waiter, timeout_s)

    def interrupt(self, id: int, *, abort: bool = False) -> None:
        self._is_interrupted = True
        self._step.interrupt(abort=abort)

    def cancel(self, id: int) -> None:
        self._is_interrupted = True
        self._step.cancel()

    def attend(self, future: Future[Any]) -> None:
        self.client.attend(self._step)

    def on_slow_wait(self, wait: Wait) -> float | None:
        return None


def blame_deaths(answers: Sequence[Answer]) -> Sequence[Answer]:
    """Mark the errors of torch as consequences (``released``) if another rank died while the group was formed.

    A rank may learn of the death first from gloo, because the dead rank's listener refuses its connection, or a rank that is
    already released closes one. Its answer is then an exception, and its release comes too late.
    """
    if not any(isinstance(answer, Failure) and answer.kind == "lost" for answer in answers):
        return answers
    return [
        replace(answer, kind="released")
        if isinstance(answer, Failure) and answer.kind == "exception" and answer.etype in TORCH_ERRORS
        else answer
        for answer in answers
    ]


def _what(mesh: ProcMesh) -> str:
    return f"forming the process group of {mesh.name} failed"


class RankGroup:
    """The rank's part: forms and aborts the process groups of a rank, and installs itself as the rank's group.

    Args:
        rank: the rank.
        agent: path of the host agent's socket.
    """

    def __init__(self, rank: Rank, agent: str) -> None:
        self._rank = rank
        self._spec = rank.spec
        self._sockets: dict[tuple[int, ...], set[Socket]] = {}  # by members of their group; (): the default group
        self._sockets_before: set[Socket] | None = None  # sockets that were open before the group, while it forms
        self._connections: set[Socket] = set()  # of the default group, and of the device mesh that is formed with it
        self._waits = NativeWaits()
        self._purposes = Purposes()
        self._destroyed = DestroyedGroups()
        self._closing: list[socket.socket] = []  # connections of aborted groups
        self._ending: list[threading.Thread] = []  # they end waits in aborted groups
        self._lock = threading.Lock()  # for the attributes above: another thread aborts
        self._holder = FdHolder(agent)
        self._formed = False
        self._aborted = False
        self.has_aborted = False
        self._rounds = 0
        self._formed_ns, self._forms_on = 0, 0  # when the group was formed, and by which thread
        self._hosted = ""  # the store that this rank serves
        self._met_in = ""  # the store in which the ranks of the default group have met
        self._client = StoreClient(rank.peers, rank.spec.proc, "")
        self._store: Any = None  # torch's wrapper, created once: torch's threads may outlive its group
        self._device_mesh: Callable[[], Any] = lambda: None
        self._namespace: dict[str, Any] = {}
        span_hosts = partial(_span_hosts, rank.spec.local_world_size)
        self._check = CallCheck(os.path.dirname(agent), label_of, self._give_up, span_hosts)
        self._meter = CollectiveMeter(rank.peers.meters, label_of, self._check)
        self.messages = self._meter.messages
        self._calls = PendingCalls(rank.spec.world_size, self._meter, self._waits, self._purposes)
        rank.group = self
        rank.extend(
            {HostStore: self._host_store, FormGroup: self._form, SkipGroupNames: self._skip_names}, on_main=True
        )
        rank.extend({EndGroup: self._end_group}, from_ranks=True)

    def namespace(self) -> dict[str, Any]:
        """The initial variables of the user's namespace; does not import torch."""
        spec = self._spec
        torch = sys.modules.get("torch")
        device = spec.device if torch is None else torch.device(*("cuda", 0) if spec.device == "cuda" else ("cpu",))
        if torch is not None and spec.device == "cuda":
            torch.cuda.set_device(device)
        self._namespace = {
            "rank": spec.rank,
            "world_size": spec.world_size,
            "local_rank": spec.local_rank,
            "device": device,
            "live": live,
        }
        return self._namespace

    # -- for the rank

    def pending_s(self, others: Collection[int] = ()) -> float:
        """Age in seconds of the oldest pending collective that none of these threads has started; 0 if there is none.

        Forming the group counts as a collective that its thread has started.
        """
        if self._sockets_before is not None and self._forms_on not in others:
            return max(1e-9, (time.time_ns() - self._formed_ns) / 1e9)
        return self._calls.oldest_s(others)

    def waits_s(self, thread: int) -> float:
        """For how long a thread, given by its `threading.get_ident`, has been in a call of torch.distributed; 0 if in none.

        The flight recorder has no entries for gloo's point-to-point calls, for ``monitored_barrier``, and for stores.
        """
        return self._calls.waits_s(thread)

    def end_key_wait(self, thread: int) -> bool:
        """Make a thread raise an error if it waits for keys of a store of the user's; return whether it does."""
        return self._waits.end_key_wait(thread)

    def pending(self, brief: bool = False) -> tuple[tuple[Collective, ...], dict[str, int]]:
        """Pending collectives, oldest first, and for each process group the number of the last collective started.

        Args:
            brief: whether collectives that torch has recorded may be left out in groups where more were started since the last
                call, so that none of them has been pending since then.
        """
        return self._calls.listed(brief)

    def collectives(self) -> int:
        """Number of collectives started in the default group; -1 without a group, -2 if it is unusable."""
        if self._aborted:
            return -2
        if not self._formed or not (dist := _dist()).is_initialized():
            return -1
        if any(map(has_closed, self._connections)):  # gloo has closed them after a failure, also of a send or receive
            return -2
        return self._meter.collectives_in(dist.group.WORLD)

    def groups(self) -> int:
        """Number of groups made since the default group; their names count up. -1 without a group."""
        if not self._formed or not (dist := _dist()).is_initialized():
            return -1
        return int(dist.distributed_c10d._world.group_count)

    def size(self) -> int:
        """Number of ranks in the default group, which the user may have made of a part of the mesh; 0 without a group."""
        if not self._formed or not (dist := _dist()).is_initialized():
            return 0
        return int(dist.get_world_size())

    def abort(self, dead: int | None = None) -> None:
        """Make pending and later collectives raise, in all groups, or only in those of a dead rank."""
        if "torch.distributed" not in sys.modules:  # no collective was started, and the import takes seconds
            return
        dist = _dist()
        self._meter.aborted(self.pending, dead)
        self._check.withdraw()
        self._aborted = True
        self.has_aborted |= dist.is_initialized() or self._sockets_before is not None
        if self._spec.device == "cuda" and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
        groups = self._groups_with(dead) if dist.is_initialized() else []
        if dist.is_initialized():
            self._waits.any_source.refuse(dist, dead)
        with self._lock:
            ended: set[Socket] = set()
            for members in list(self._sockets):
                if dead is None or not members or dead in members:
                    ended |= self._sockets.pop(members)
            new, size = self._waits.opened(dead)  # by code that waits for its peers, or for keys of a store
            if self._sockets_before is not None:
                new |= open_sockets() - self._sockets_before
                size = self._spec.world_size
            self._client.end(None if self._sockets_before is not None else dead)
            connections: dict[Socket, socket.socket] = {}  # of groups that are formed
            for each in (ended | new) & open_sockets():  # sockets of destroyed groups are closed
                if (connection := copy_of(each)) is not None:
                    self._closing.append(connection)
                    if each not in new:
                        connections[each] = connection
                        continue
                    with contextlib.suppress(OSError):  # the peer has reset it
                        connection.shutdown(socket.SHUT_RDWR)
            if self._closing:
                later(_CLOSE_AFTER_S, close, list(self._closing))
            if connections or groups:
                self._start_ending(groups, connections, are_all=dead is None)
        stand_in(new, size)

    def _groups_with(self, dead: int | None) -> list[Any]:
        """Return what is part of gloo in all groups, or in those of a dead rank."""
        dist = _dist()
        world = dist.distributed_c10d._world
        if dead is None:
            return gloo_of(dist, list(world.pg_map)) + self._destroyed.all()
        return gloo_of(dist, [group for group in list(world.pg_map) if dead in world.pg_group_ranks.get(group, ())])

    def _note_connections(self, members: tuple[int, ...], opened: set[Socket]) -> None:
        """Remember the connections of the default group and the device mesh; the group is broken when one of them is closed."""
        if not members:
            self._connections = set()
        if not members or self._sockets_before is not None:
            for each in opened:
                if (connection := copy_of(each)) is not None:
                    connection.close()
                    self._connections.add(each)

    def _start_ending(
        self, groups: Collection[Any], connections: Mapping[Socket, socket.socket], *, are_all: bool
    ) -> None:
        """End what waits in groups, in another thread. Called with the lock held."""
        args = (_dist(), groups, connections, self._waits, self._calls.in_torch)
        thread = threading.Thread(target=end_groups, args=args, kwargs={"are_all": are_all}, daemon=True)
        thread.start()
        self._ending.append(thread)

    def _give_up(self, members: Sequence[int], tells: bool) -> None:
        """End the groups of these ranks, because this rank refuses a collective in which other ranks may wait.

        Args:
            members: the ranks; all if empty.
            tells: whether to end the groups on the other ranks, too. They do not learn it from their connections, which must
                not end in the middle of a message (`gloo_waits`).
        """
        spec, dist = self._spec, _dist()
        message = EndGroup(self._met_in, self._rounds, tuple(members))
        self._end_group(message, ())
        # The program can make a default group of some ranks, which have other numbers in it.
        if tells and dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (spec.rank, spec.world_size):
            first = spec.proc - spec.rank
            others = set(members or range(spec.world_size)) - {spec.rank}
            self._rank.peers.tell([first + each for each in sorted(others)], pack(message))

    def _end_group(self, message: EndGroup, _: Sequence[Frame]) -> None:
        dist, members = _dist(), message.members
        if (message.store, message.round) != (self._met_in, self._rounds) or not dist.is_initialized():
            return
        self._aborted = True
        world = dist.distributed_c10d._world
        ranks = set(members or range(dist.get_world_size()))
        groups = gloo_of(
            dist, [each for each in list(world.pg_map) if set(world.pg_group_ranks.get(each, ())) == ranks]
        )
        with self._lock:
            connections = {each: copy for each in self._sockets.pop(members, ()) if (copy := copy_of(each)) is not None}
            if connections:
                self._closing += connections.values()
                later(_CLOSE_AFTER_S, close, list(connections.values()))
                self._start_ending(groups, connections, are_all=False)

    def _hold(self, sockets: set[Socket]) -> None:
        """Ask the agent to keep connections open if this process dies."""
        fds = []
        for each in sockets:
            if (connection := copy_of(each)) is not None:
                connection.close()
                fds.append(each.fd)
        self._holder.hold(fds)

    # -- forming

    def _host_store(self, message: HostStore, _: Sequence[Frame]) -> None:
        """Open a store, and drop the previous one, whose clients belong to a group that no longer exists."""
        address = _own_address()
        last, self._hosted = self._hosted, f"group {message.id} {secrets.token_hex(8)}"
        self._rank.submit(partial(self._open_store, self._hosted, last))
        with socket.create_server((address, 0), family=_family(address)) as free:
            port: int = free.getsockname()[1]
        self._rank.reply(message.id, (self._hosted, address, port))

    def _open_store(self, name: str, instead_of: str) -> None:
        """Replace the store that this rank serves. Called on the I/O thread."""
        stores = self._rank.peers.stores
        for id, packed in stores.close(instead_of):
            self._rank.send_answer_now(id, packed)
        stores.open(name)

    def _form(self, message: FormGroup, _: Sequence[Frame]) -> None:
        dist = _dist()

        spec = self._spec
        os.environ.update(
            RANK=str(spec.rank),
            WORLD_SIZE=str(spec.world_size),
            LOCAL_RANK=str(spec.local_rank),
            LOCAL_WORLD_SIZE=str(spec.local_world_size),
            GROUP_RANK=str(spec.rank // spec.local_world_size),
            GROUP_WORLD_SIZE=str(spec.world_size // spec.local_world_size),
            ROLE_RANK=str(spec.rank),
            ROLE_WORLD_SIZE=str(spec.world_size),
            ROLE_NAME="default",
            MASTER_ADDR=message.address,
            MASTER_PORT=str(message.port),
            TORCHELASTIC_RUN_ID=spec.mesh,
            TORCHELASTIC_USE_AGENT_STORE="False",
            TORCHELASTIC_MAX_RESTARTS="0",
            TORCHELASTIC_RESTART_COUNT="0",
            TORCHELASTIC_ERROR_FILE=os.devnull,
        )
        os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")  # all addresses in one request
        self._patch(dist)
        self._leave(dist)
        self._check.forget(dist.distributed_c10d._world.pg_map)
        self._met_in = message.store
        self._client.begin(message.proc, message.store)
        if self._store is None:
            self._store = torch_store(self._client)
        serve_rendezvous(dist.PrefixStore("env", self._store), message.address, message.port)
        self._aborted = self.has_aborted = False
        self._rounds = 0
        self._formed_ns, self._forms_on = time.time_ns(), threading.get_ident()
        self._calls.begin_at(self._formed_ns)
        self._waits.received.forget()
        self.messages.forget()
        self._formed = False
        self._sockets_before = open_sockets()
        try:
            with self._rank.main.user_code():
                self._init(dist.init_process_group, "cpu:gloo,cuda:nccl" if spec.device == "cuda" else "gloo")
                self._add_device_mesh()
                if self._aborted:  # after gloo had all its connections, which are closed now
                    raise RuntimeError("the process group was aborted while it was formed: a peer has died")
                renew_default_groups(dist)
                self._formed = True
                with self._lock:
                    closing, self._closing = self._closing, []
                close(closing)
                self._destroyed.drop()
        finally:
            self._end_forming()
        self._rank.reply(message.id, output=True)

    def _skip_names(self, message: SkipGroupNames, _: Sequence[Frame]) -> None:
        """Name later groups as the other ranks do, which have made groups that this rank has not."""
        world = _dist().distributed_c10d._world
        world.group_count = max(world.group_count, message.count)

    def _end_forming(self) -> None:
        with self._lock:
            self._sockets_before = None

    def _leave(self, dist: Any) -> None:
        """Destroy the group, or the remains of one whose forming was interrupted."""
        if dist.is_initialized():
            if self._sockets or not self._aborted:
                self.abort()  # a peer may be missing: don't wait for it
            self._await_ends()
            dist.destroy_process_group()
            return
        helpers = dist.distributed_c10d
        world = helpers._world
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
            getattr(world, name).clear()
        helpers._unregister_all_process_groups()
        world.group_count = 0  # part of group names, also in the store: ranks with different counts never meet

    def _await_ends(self) -> None:
        """Wait until nothing waits in aborted groups: their destructors wait for gloo's threads."""
        with self._lock:
            ending, self._ending = self._ending, []
        for thread in ending:
            thread.join()

    def _init(self, init: Callable[..., None], backend: str | None, **options: Any) -> None:
        """Form a group under a new prefix, so that it does not take keys of an earlier group for those of its peers."""
        ours = _dist().PrefixStore(f"group/{self._rounds}", self._store)
        if self._sockets_before is not None:
            _meet(self._spec, ours)
        options.update(store=ours, rank=self._spec.rank, world_size=self._spec.world_size)
        init(backend, **options)

    def _add_device_mesh(self) -> None:
        with self._rank.main.own_code():  # an interrupt could leave torch or IPython half imported
            from torch.distributed.device_mesh import init_device_mesh

            namespace = self._namespace_now()
        sizes = tuple(size for _, size in self._spec.axes)
        names = tuple(name for name, _ in self._spec.axes)
        device_mesh = init_device_mesh(self._spec.device, sizes, mesh_dim_names=names)
        known = namespace.get("mesh")
        if known is None or known is self._device_mesh():  # else the user has reassigned it
            namespace["mesh"] = device_mesh
        self._device_mesh = weakref.ref(
            device_mesh
        )  # only the namespace holds it, so that the groups' sockets close with it

    def _namespace_now(self) -> dict[str, Any]:
        return self._rank.shell.namespace

    def _patch(self, dist: Any) -> None:
        """Patch torch: record the sockets that a new group opens, and let ``init_process_group()`` find an existing group."""
        helpers = dist.distributed_c10d
        make, world_size = helpers._new_process_group_helper, self._spec.world_size
        signature = inspect.signature(make)
        if hasattr(make, "monarch_kernel"):
            return
        gloo_aborts.install(dist)  # before what counts messages
        self._waits.any_source.install(dist)
        self._meter.install(dist)
        self._waits.install(dist)
        self._purposes.install()
        self._check.install(dist)
        self._rank.peers.meters.count_unread = lambda: self._meter.count_unread(dist)

        @wraps(make)
        def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = bound.arguments
            members = tuple(given["global_ranks_in_group"] or ())
            if members:  # ranks may make groups of different members at the same time, which torch gives the same name
                given["store"] = dist.PrefixStore(f"members {','.join(map(str, members))}", given["store"])
            before = open_sockets()
            try:
                with (
                    self._client.making(members, given.get("timeout")),
                    self._waits.opening(members, given["group_size"]),
                    values_set() as published,
                ):
                    run = partial(self._meter.run, _call_that_makes(dist, members, given["group_size"], world_size))
                    with meeting_in(partial(strangers.closed_ports, lambda: open_sockets() - before, published)):
                        made = (run if self._formed else _run)(make, *bound.args, **bound.kwargs)
                    group, store = made
                    if store is not None:
                        if published and is_session_store(store) and strangers.has_gloo(dist, group):
                            strangers.admit(group, store, members, open_sockets() - before, published)
                        self._check.add(group, store, members, given["group_size"])
                    return made
            finally:
                opened = open_sockets() - before
                with self._lock:
                    self._sockets.setdefault(members, set()).update(opened)
                self._note_connections(members, opened)
                self._hold(opened)

        new_process_group_helper.monarch_kernel = True  # type: ignore[attr-defined]
        helpers._new_process_group_helper = new_process_group_helper
        original = dist.init_process_group

        @wraps(original)
        def init_process_group(backend: str | None = None, init_method: str | None = None, **options: Any) -> None:
            """Join the default process group; does nothing if the mesh has formed it already."""
            try:
                join(backend, init_method, **options)
            except BaseException:
                self._aborted |= (
                    not dist.is_initialized()
                )  # the mesh forms its group again, even if all ranks have failed
                raise

        def join(backend: str | None = None, init_method: str | None = None, **options: Any) -> None:
            spec = self._spec
            fits = options.get("world_size", -1) in (-1, spec.world_size) and options.get("rank", -1) in (-1, spec.rank)
            if dist.is_initialized():
                if self._formed and fits and options.get("store") is None:
                    return
            elif self._formed and fits and init_method in (None, "env://") and options.get("store") is None:
                self._rounds += 1
                self._client.resume()
                self._init(original, backend, **options)
                return
            original(backend, init_method, **options)

        dist.init_process_group = helpers.init_process_group = init_process_group
        destroy = dist.destroy_process_group

        @wraps(destroy)
        def destroy_process_group(group: Any = None) -> None:
            world = helpers._world
            is_all = group in (None, dist.GroupMember.WORLD)
            self._destroyed.keep(dist, list(world.pg_map) if is_all else [group] if group in world.pg_map else ())
            try:
                destroy(group)
            finally:
                self._holder.let_go()
                self._check.forget(dist.distributed_c10d._world.pg_map)

        dist.destroy_process_group = helpers.destroy_process_group = destroy_process_group


def _span_hosts(per_host: int, members: Sequence[int]) -> bool:
    """Whether ranks are on several hosts; those of one host have successive numbers."""
    return len({member // max(1, per_host) for member in members}) > 1


def _own_address() -> str:
    """The address that gloo uses.

    Raises:
        RuntimeError: the host has no such address.
    """
    address = address_of(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    if not address:
        raise RuntimeError(
            f"host {socket.gethostname()} has no address that others can reach on the network interface "
            f"{os.environ.get('GLOO_SOCKET_IFNAME', '')!r} (GLOO_SOCKET_IFNAME); it has {_interfaces_text()}"
        )
    return address


def _meet(spec: RankSpec, store: Any) -> None:
    """Wait until all ranks are present, and, with several hosts, until the hosts have reached each other.

    Raises:
        ConnectionError: this host can't reach another host.
    """
    _gather_keys(store, "present", spec.rank, range(spec.world_size), "")
    if spec.world_size == spec.local_world_size:
        return
    firsts = range(0, spec.world_size, spec.local_world_size)
    if spec.rank not in firsts:
        store.wait([f"reached/{first}" for first in firsts], _JOIN_TIMEOUT)
        return
    address = _own_address()
    with socket.create_server((address, 0), family=_family(address), backlog=len(firsts)) as listener:
        mine = json.dumps([address, listener.getsockname()[1], socket.gethostname()])
        for first, theirs in zip(firsts, _gather_keys(store, "address", spec.rank, firsts, mine)):
            if first != spec.rank:
                _reach(first, *json.loads(theirs))
        _gather_keys(store, "reached", spec.rank, firsts, "")


def _gather_keys(store: Any, kind: str, rank: int, ranks: Sequence[int], value: str) -> list[bytes]:
    """Set a key of this rank, wait for the keys of all ranks, and return their values."""
    store.set(f"{kind}/{rank}", value)
    keys = [f"{kind}/{each}" for each in ranks]
    store.wait(keys, _JOIN_TIMEOUT)
    return [bytes(each) for each in store.multi_get(keys)]


def _reach(rank: int, address: str, port: int, host: str) -> None:
    """Check that another host can be reached. gloo would try for the timeout of the group, and its error says little.

    Raises:
        ConnectionError: the host can't be reached.
    """
    try:
        socket.create_connection((address, port), _REACH_S).close()
    except OSError as error:
        raise ConnectionError(
            f"host {socket.gethostname()} can't connect to {address} port {port} (rank {rank}, on host {host}): {error}. "
            "The hosts of a process group must reach each other: check the firewalls between them, "
            f"or choose another interface with --env GLOO_SOCKET_IFNAME=..., out of {_interfaces_text()}"
        ) from None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _interfaces_text() -> str:
    return ", ".join(f"{name} ({' '.join(addresses)})" for name, addresses in interfaces().items())


def _dist() -> Any:
    """torch.distributed as `Any`, because few of its names are typed."""
    import torch.distributed

    return torch.distributed


def _call_that_makes(dist: Any, members: tuple[int, ...], size: int, world_size: int) -> BlockedCall:
    """Describe the call that makes a group of a size, which waits for the other members to do the same."""
    if dist.is_initialized():
        number = f"new_group #{dist.distributed_c10d._world.group_count}"
        are_of_mesh = dist.get_world_size() == world_size
        if len(members) in (0, world_size) or not are_of_mesh:
            return BlockedCall(number, "", "")
        return BlockedCall(f"{number} of {format_ranks(members)}", "", "", members=tuple(sorted(members)))
    return BlockedCall("init_process_group", "", "", members=tuple(range(size)) if size == world_size else ())


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
