"""The client of a rank: sends its requests to other processes, and performs the effects of `runtime.rpc.peer_requests`.

Theory of operation
===================

Meshes and endpoints need a client that carries their requests (`runtime.rpc.client`). The controller's is `Runtime`, a
rank's is here. Handles travel as ids and the marks of their endpoints, without code, and get the client of the process that
opens them (`runtime.rpc.handles`). So one class of handles serves everywhere.

A rank connects a DEALER to the ROUTER of another rank, sends `Hello` with the token, and then requests. Answers come back
on the same link. A process sends to itself through its own transport, so that nothing is shared by accident. The id of a
request says which process made it, and so where the answer goes; the id of an actor says where its owner is
(`runtime.rpc.ids`).

A `Call` may arrive before the `Spawn` of its actor, if another process sends that. The rank keeps the call and sends a
`Barrier` to the process that made the actor. When the answer comes, all that was sent before has arrived, and an actor that
is not there then never will be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import CONTROLLER, Peer, PeerTransport, incarnation_of, proc_of, rank_peer
from monarch_kernel.net.transport.driver import Driver, Waiter
from monarch_kernel.net.wire.codec import Frame, Packed, pack
from monarch_kernel.net.wire.messages import Failed, Hello, ProcessStatus, RankSpec, Result
from monarch_kernel.runtime.buffers.transfers import data_paths_of
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.client_base import ClientBase, Supervising
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC, numbers, origin_of
from monarch_kernel.runtime.rpc.ownership import Process
from monarch_kernel.runtime.rpc.peer_requests import Connect, Disconnect, PeerEffect, Peers, Respawned
from monarch_kernel.runtime.rpc.requests import Resolve, Send
from monarch_kernel.runtime.rpc.respawn_log import MakeSpawn
from monarch_kernel.runtime.rpc.waits import Wait
from monarch_kernel.runtime.worker.executor import working
from monarch_kernel.runtime.worker.supervisor import Supervisor

__all__ = ["RankItem", "WorkerClient"]

T = TypeVar("T")

RankItem = Packed | Callable[[], object]
"""An item that a rank submits to its driver: a message for the controller, or a function to run on the I/O thread."""

RELEASE_EVERY_S = 1.0


class WorkerClient(ClientBase):
    """Sends requests to other processes for the code on a rank, and says hello to them.

    Args:
        spec: The spec of the rank.
        driver: The driver of its transport.
        transport: The transport, which is connected to the controller.
        hello: The message that introduces the rank to others.

    Attributes:
        refused: The number of messages of peers that did not present the token.
        slow_wait_hook: Called with waits that last.
    """

    def __init__(self, spec: RankSpec, driver: Driver[RankItem], transport: PeerTransport, hello: Hello) -> None:
        name = rank_peer(spec.proc, spec.incarnation)
        ids = numbers(spec.incarnation, spec.proc)
        self._state = Peers(spec.proc, name, ids)
        super().__init__(spec.proc, self._state.requests, ids, transport.meters)
        self.refused = 0
        self.paths = data_paths_of(self)
        self._driver = driver
        self._transport = transport
        self._hello = pack(hello)
        self._token = hello.token
        self._futures: dict[int, Future[Any]] = {}
        self._origins: dict[int, Peer] = {spec.proc: name}  # the peers that have said hello, and this rank itself
        self._admitted: set[Peer] = {name}
        self._for_news: list[tuple[Peer, Callable[[], None]]] = []
        self._is_releasing = False
        self.slow_wait_hook: Callable[[Wait], float | None] = lambda wait: None
        self.supervisor: Supervisor | None = None

    @property
    def _supervising(self) -> Supervising:
        assert self.supervisor is not None
        return self.supervisor

    # -- for any thread

    def request(
        self,
        procs: Sequence[int],
        make: Callable[[int], Packed | Sequence[Packed]],
        description: str,
        finish: Callable[[Sequence[Answer]], T],
        rank: int | None = None,
        *,
        quiet: bool = False,
        spawned: tuple[int, MakeSpawn] | None = None,
    ) -> Future[T]:
        """Request one answer from each process; if one of them is dead, nothing is sent."""
        id = next(self._ids)
        future = self._futures[id] = Future(self, id, finish, rank, description, procs)
        packed = make(id)
        self._driver.submit(
            lambda: self._perform(self._state.request(id, procs, packed, time.monotonic(), description, spawned))
        )
        return future

    def ask(
        self, procs: Sequence[int], make: Callable[[int], Packed], finish: Callable[[Sequence[Answer]], T]
    ) -> Future[T]:
        """Request something that processes answer at once, even if they are busy."""
        return self.request(procs, make, "", finish, quiet=True)

    def tell(self, procs: Sequence[int], packed: Packed) -> None:
        """Send processes a message that has no answer."""
        self._driver.submit(lambda: self._perform(self._state.tell(procs, packed)))

    def tell_all(self, packed: Packed) -> None:
        """Do nothing: only the controller knows all processes."""

    def wait(self, waiter: Waiter, timeout_s: float | None) -> bool:
        """Wait until ``waiter`` is ready, driving the transport meanwhile."""
        executor = working.get()
        if executor is not None and executor.thread_id == threading.get_ident():
            return executor.wait(waiter, timeout_s)
        return self._driver.wait(waiter, timeout_s)

    def interrupt(self, id: int, *, abort: bool = False) -> None:
        """Interrupt a request where it has not been answered."""
        self._driver.submit(lambda: self._perform(self._state.requests.interrupt(id, abort=abort)))

    def cancel(self, id: int) -> None:
        """End a request for its caller, and interrupt it where it has not been answered."""
        self._driver.submit(lambda: self._perform(self._state.cancel(id, time.monotonic())))

    def attend(self, future: Future[Any]) -> None:
        """Do nothing: only the program attends to ranks that have stopped in the debugger."""

    def on_slow_wait(self, wait: Wait) -> float | None:
        """Handle a wait that lasts, on the thread that waits. Returns when to report it again, in seconds."""
        return self.slow_wait_hook(wait)

    def submit(self, do: Callable[[], object]) -> None:
        """Run a function on the I/O thread, soon."""
        self._driver.submit(do)

    def deaths(self, procs: Sequence[int]) -> dict[int, Failure]:
        """Those of these processes that are known to have ended, and how."""
        return self._state.deaths(procs)

    # -- on the I/O thread

    def watch(self, process: Process) -> None:
        """Report to the supervisor when a process has ended; at once if it has."""
        proc = process.proc
        if proc == CONTROLLER_PROC:  # this rank ends with it, or another controller replaces it
            return
        self._perform(self._state.meet(proc))
        death = self._state.deaths((proc,)).get(proc)
        if death is None and self._state.incarnation(proc) > process.incarnation:
            death = Failure("lost", "RankDied", "it ended, and was replaced")
        if death is not None and self.supervisor is not None:
            self.supervisor.gone(process, death)

    def handle_status(self, news: ProcessStatus) -> None:
        """Handle the controller's news that a process is up, or has ended."""
        self._perform(self._state.news(news, time.monotonic()))
        if self.supervisor is not None:
            process = Process(news.proc, news.incarnation)
            if news.death is None:
                self.supervisor.up(process)
                if news.incarnation:
                    for kept, _ in self._state.requests.respawn_log.of((news.proc,)):
                        self.supervisor.respawned(kept.actor, news.proc)
            else:
                death = replace(news.death, kind="stopped") if news.is_replaced else news.death
                self.supervisor.gone(process, death)
        waiting, self._for_news = self._for_news, []
        for peer, then in waiting:
            self.when_met(peer, then)

    def controller_is_new(self) -> None:
        """Handle a new controller that replaces the last one."""
        self._transport.forget(CONTROLLER)
        self._perform(self._state.controller_is_new(time.monotonic()))

    def when_met(self, peer: Peer, then: Callable[[], None]) -> None:
        """Call a function once all messages that wait for a peer to be up are sent; at once if there are none."""
        if peer != CONTROLLER and self._state.is_ahead(proc_of(peer), incarnation_of(peer)):
            self._for_news.append((peer, then))
        else:
            then()

    def admit(self, peer: Peer, hello: Hello) -> None:
        """Admit a peer that presents the token under its own name; messages of others are dropped."""
        if hello.token != self._token or proc_of(peer) != hello.proc:
            self.refused += 1
            return
        self._admitted.add(peer)
        known = self._origins.get(hello.proc)
        if known is None or incarnation_of(known) < incarnation_of(peer):
            if known is not None:
                self._admitted.discard(known)
            self._origins[hello.proc] = peer

    def is_admitted(self, peer: Peer) -> bool:
        """Whether a peer has presented the token, or this rank has connected to it."""
        return peer in self._admitted

    def answered(self, peer: Peer, message: Result | Failed, frames: Sequence[Frame]) -> None:
        """Handle the answer of a process to a request of this rank."""
        self._perform(self._state.answered(proc_of(peer), message, frames, time.monotonic()))

    def send_answer(self, id: int, packed: Packed) -> None:
        """Answer a request of a peer."""
        peer = self._origins.get(origin_of(id))
        if peer is not None:
            self._driver.send(peer, packed)

    def _perform(self, effects: Sequence[PeerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._driver.send(effect.peer, effect.packed)
            elif isinstance(effect, Resolve):
                future = self._futures.pop(effect.id, None)
                if future is not None:
                    future.resolve(effect.answers, effect.in_step)
            elif isinstance(effect, Connect):
                self._admitted.add(effect.peer)
                self._transport.connect(effect.peer, effect.address)
                self._driver.send(effect.peer, self._hello)
            elif isinstance(effect, Respawned):
                if self.supervisor is not None:
                    self.supervisor.respawned(effect.actor, effect.proc)
            elif isinstance(effect, Disconnect):
                self._admitted.discard(effect.peer)
                self._transport.disconnect(effect.peer)
        if self._state.requests.has_failed and not self._is_releasing:
            self._is_releasing = True
            timer = threading.Timer(RELEASE_EVERY_S, self._driver.submit, [self._release])
            timer.daemon = True
            timer.start()

    def _release(self) -> None:
        self._is_releasing = False
        self._perform(self._state.requests.release_waiting(time.monotonic()))
