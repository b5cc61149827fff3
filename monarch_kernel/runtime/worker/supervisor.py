"""Performs the effects of an `OwnershipTree`: messages to other processes about actors that are spawned, stopped or fail.

Theory of operation
===================

An actor that ends sends `StopActor` to what it has spawned and, if it failed, `ActorEnded` to the process of its owner. The
transport reports the death of a process (`ProcessStatus`; in the controller `HostGone`), which counts once.

An owner handles a failure on its own thread: a mark goes to the front of its mailbox, and the wait that the thread is in
wakes (`Executor.attend`). An async owner gets a task. An owner that does not handle the failure ends, by an exception out
of that wait or by the cancellation of its task. Failures that reach the program go to `FailureReporter`, which calls the hook
on a separate thread. Failures of what a cell on a rank has spawned go there as `Unhandled`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from monarch_kernel.errors import Failure, MeshFailure
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import ActorEnded, StopActor
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.ids import origin_of
from monarch_kernel.runtime.rpc.ownership import (
    PROGRAM,
    Effect,
    NotifyOwner,
    OwnershipTree,
    Process,
    Stop,
    StopOrphan,
    TellOwner,
    Watch,
)
from monarch_kernel.runtime.worker.executor import Executor

__all__ = ["Supervisor"]


class SupervisorOwner(Protocol):
    """The part of a process's actor server that the supervisor uses."""

    proc: int
    client: Client
    actors: dict[int, Executor]

    def submit(self, function: Callable[[], None]) -> None:
        """Run a function on the I/O thread; calls of one thread run in order."""
        ...

    def watch(self, process: Process) -> None:
        """Call `Supervisor.gone` when a process has ended; on the I/O thread."""
        ...

    def gone(self, process: Process) -> None:
        """Handle the end of a process that was watched; on the I/O thread."""
        ...

    def end_actor(self, actor: int, reason: str) -> None:
        """Stop an actor that works here; on the I/O thread."""
        ...

    def attend(self) -> None:
        """Report a failure of a mesh that the program of this process, and no actor, has spawned; the program can take it."""
        ...


class Supervisor:
    """Keeps the family of a process, and performs its effects; any thread may call its methods."""

    def __init__(self, actor_server: SupervisorOwner) -> None:
        self._workplace = actor_server
        self._family = OwnershipTree()
        self._lock = threading.Lock()

    # -- for owners

    def spawned(self, actor: int, name: str, owner: int, procs: Sequence[int], mesh: Any) -> None:
        """Register a mesh of actors that is spawned here; call this before the message is sent."""

        def spawn(family: OwnershipTree) -> list[Effect]:
            effects = family.spawned(actor, name, owner, procs, mesh)
            deaths = self._workplace.client.deaths(
                procs
            )  # known only since a moment ago, else nothing would be spawned
            return effects + family.refused(actor, deaths) if deaths else effects

        self._submit(spawn)

    def respawned(self, actor: int, proc: int) -> None:
        """Note that an actor spawned here is made again, in a process that replaces the former one; on the I/O thread."""
        self._do(lambda family: family.respawned(actor, proc))

    def stopped(self, actor: int, procs: Sequence[int]) -> None:
        """Note that code here stops a mesh of actors; it may be the owner of the mesh or not."""
        self._submit(lambda family: family.stopped(actor, procs))

    def take(self, owner: int) -> MeshFailure | None:
        """Return the oldest failure of the meshes that an owner has spawned, for it to handle; None if there are no more."""
        with self._lock:
            return self._family.take(owner)

    # -- for actors that work here

    def hosts(self, actor: int, owner: Process) -> None:
        """Register an actor that starts to work here; on the I/O thread."""
        self._do(lambda family: family.hosts(actor, owner))

    def ended(
        self, actor: int, failure: Failure | None = None, cause: MeshFailure | None = None, request: int = 0
    ) -> list[Future[None]]:
        """Handle the end of an actor that works here: a request stopped it, or it failed.

        Returns:
            Futures that resolve when the actors that it had spawned are over, too.
        """

        def change(family: OwnershipTree) -> list[Effect]:
            owner = family.hosted.get(actor)
            effects = family.ended(actor, failure, cause)
            if failure is None and request and owner is not None and origin_of(request) == owner.proc:
                effects = [effect for effect in effects if not isinstance(effect, TellOwner)]  # it has requested it
            return effects

        return self._do(change)

    # -- events elsewhere, on the I/O thread

    def child_ended(self, message: ActorEnded, process: Process) -> None:
        """Handle a process's report of an actor that was spawned here."""
        if message.failure is None:
            self._workplace.client.forget_spawn(message.actor, (process.proc,))
        else:
            self._workplace.client.actor_ended(message.actor, process.proc)
        self._do(lambda family: family.child_ended(message.actor, process, message.failure, message.cause))

    def up(self, process: Process) -> None:
        """Note that a process is up."""
        self._do(lambda family: family.process_up(process))

    def gone(self, process: Process, death: Failure) -> bool:
        """Handle the end of a process; returns whether meshes of this process's program failed with it."""
        with self._lock:
            effects = self._family.process_gone(process, death)
            has_failed = self._family.has_news(PROGRAM)
        self._perform(effects)
        self._workplace.gone(process)
        return has_failed

    # -- inside

    def _submit(self, change: Callable[[OwnershipTree], list[Effect]]) -> None:
        """For the user's code, which an interrupt can stop anywhere."""

        def item() -> None:
            self._do(change)

        self._workplace.submit(item)

    def _do(self, change: Callable[[OwnershipTree], list[Effect]]) -> list[Future[None]]:
        with self._lock:
            effects = change(self._family)
        return self._perform(effects)

    def _perform(self, effects: Sequence[Effect]) -> list[Future[None]]:
        place, over = self._workplace, []
        for effect in effects:
            if isinstance(effect, NotifyOwner):
                if effect.owner == PROGRAM:
                    place.attend()
                elif (executor := place.actors.get(effect.owner)) is not None and executor.attend is not None:
                    executor.attend()
            elif isinstance(effect, Stop):
                place.client.forget_spawn(effect.actor, effect.procs)
                over += [self._stop(effect, proc) for proc in effect.procs]
            elif isinstance(effect, TellOwner):
                self._tell(effect)
            elif isinstance(effect, StopOrphan):
                place.end_actor(effect.actor, effect.reason)
            elif isinstance(effect, Watch) and effect.process.proc != place.proc:
                place.watch(effect.process)
        return over

    def _stop(self, effect: Stop, proc: int) -> Future[None]:
        """Send each process a separate request: if one of several were dead, none would get a common one."""
        return self._workplace.client.request(
            (proc,),
            lambda id: pack(StopActor(id, effect.actor, effect.reason)),
            "",
            lambda answers: None,
            quiet=True,
        )

    def _tell(self, effect: TellOwner) -> None:
        message = ActorEnded(effect.actor, effect.failure, effect.cause)
        place, process = self._workplace, effect.process
        if process.proc == place.proc:
            place.submit(lambda: self.child_ended(message, process))
        else:
            place.client.tell((process.proc,), pack(message))
