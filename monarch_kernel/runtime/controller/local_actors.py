"""The controller's own process as a place where actors work.

The program's own process is place 0. It serves `this_proc` in a script or notebook, one actor per name
(`get_or_spawn_controller`), and the service that starts and ends processes for ranks (`actor.process_service`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from monarch_kernel.net.transport.base import CONTROLLER, Peer
from monarch_kernel.net.transport.driver import Driver
from monarch_kernel.net.wire.codec import Frame, Packed, dump, pack
from monarch_kernel.net.wire.messages import (
    ActorEnded,
    Apply,
    Call,
    CloseLoan,
    Conclude,
    EndLoan,
    EndStream,
    Failed,
    Fence,
    Interrupt,
    ListModules,
    Look,
    Message,
    OpenLoan,
    OpenStreams,
    Payload,
    Ping,
    PortSend,
    PostMortem,
    Probe,
    Pull,
    Push,
    ReadLoan,
    Reload,
    Result,
    Run,
    Spawn,
    StopActor,
    StoreCall,
    Sync,
    Unhandled,
    WriteLoan,
)
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.unhandled import Faults
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.rpc.client import Asker
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC
from monarch_kernel.runtime.rpc.ownership import Process
from monarch_kernel.runtime.worker.actor_server import Workplace

__all__ = ["FOR_ACTORS", "ControllerWorkplace"]

CLEANUP_S = 2.0
_FOR_RANKS = (Apply, Conclude, ListModules, Pull, Push, Reload, Run, Sync)

FOR_ACTORS: frozenset[type[Message]] = frozenset(
    {
        ActorEnded,
        Call,
        CloseLoan,
        EndLoan,
        EndStream,
        Fence,
        Interrupt,
        Look,
        OpenLoan,
        OpenStreams,
        Ping,
        PortSend,
        PostMortem,
        Probe,
        ReadLoan,
        Spawn,
        StopActor,
        StoreCall,
        Unhandled,
        WriteLoan,
        *_FOR_RANKS,
    }
)
"""What ranks, and this process itself, may ask of the actors here; the last are refused."""


class Owner(Asker, Protocol):
    """What the workplace needs of the runtime."""

    faults: Faults

    def do(self, function: Callable[[], None]) -> None:
        """Have something done with the baton held, in order per thread."""
        ...

    def send_answer(self, id: int, packed: Packed) -> None:
        """Send an answer to the process that has made its request."""
        ...


class ControllerWorkplace(Workplace):
    """Where the actors of the controller's own process work: those spawned on ``this_proc()``, and those one per name.

    Attributes:
        services: numbers of actors that are there for every process -> what makes them, when they are first called.
    """

    def __init__(self, runtime: Owner, driver: Driver[Any]) -> None:
        super().__init__(CONTROLLER_PROC, driver, runtime)
        self.services: dict[int, Callable[[], tuple[Spawn, Sequence[Frame]]]] = {}
        self._runtime = runtime
        self._driver = driver

    def send_answer(self, id: int, packed: Packed) -> None:
        """Send an answer to the process that has made its request; for any thread."""
        self._runtime.send_answer(id, packed)

    def send_answer_now(self, id: int, packed: Packed) -> None:
        """The same, with the baton held."""
        self._runtime.send_answer(id, packed)

    def name(self) -> str:
        """How to call the process in an error."""
        return "the controller"

    def submit(self, function: Callable[[], None]) -> None:
        """Have something done with the baton held, in order per thread."""
        self._runtime.do(function)

    def watch(self, process: Process) -> None:
        """Have the supervisor told when a process has ended, as it is of all; with the baton held."""
        death = self._runtime.deaths((process.proc,)).get(process.proc)
        if death is not None:
            self.supervisor.gone(process, death)

    def attend(self) -> None:
        """Something has failed that the program has spawned."""
        self._runtime.faults.call()

    def hear(self, message: Message, frames: Sequence[Frame], peer: Peer) -> bool:
        """Take a message about actors; what ranks alone can do is refused."""
        if isinstance(message, Unhandled):
            self._runtime.faults.add(message.failure)
        elif isinstance(message, Ping):
            self.send_answer_now(message.id, pack(Result(message.id, Payload())))
        elif isinstance(message, Look):
            payload, parts = dump(Doing(self.activities()), "what the actors do")
            self.send_answer_now(message.id, pack(Result(message.id, payload), parts))
        elif isinstance(message, _FOR_RANKS):
            why = "code and variables are for ranks; this is the process of the program itself, which has actors only"
            if message.id:
                self.send_answer_now(message.id, pack(Failed(message.id, describe(RuntimeError(why)))))
        else:
            return super().hear(message, frames, peer)
        return True

    def call_unknown(self, message: Call | StopActor, frames: Sequence[Frame]) -> None:
        """Make a service that has not been called yet."""
        make = self.services.get(message.actor)
        if make is None or message.actor in self.actors:
            super().call_unknown(message, frames)
            return
        super().hear(*make(), CONTROLLER)
        super().hear(message, frames, CONTROLLER)

    def close(self) -> None:
        """End the actors, and their threads."""

        def submit(tell: Callable[[], None]) -> None:
            def item(now: float) -> list[Effect]:
                tell()
                return []

            self._driver.submit(item)

        self.retire(submit, CLEANUP_S)
        for executor in self.executors():
            executor.over = True
            executor.waiter.set()
