"""Actors in the controller's own process.

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
    Barrier,
    Call,
    CloseBuffer,
    Conclude,
    EndExport,
    EndStream,
    Failed,
    GetStacks,
    Interrupt,
    ListModules,
    Message,
    OpenBuffer,
    OpenStreams,
    Payload,
    Ping,
    PortSend,
    PostMortem,
    Probe,
    Pull,
    Push,
    ReadBuffer,
    Reload,
    Result,
    Run,
    Spawn,
    StopActor,
    StoreCall,
    Sync,
    Unhandled,
    WriteBuffer,
)
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.unhandled import FailureReporter
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC
from monarch_kernel.runtime.rpc.ownership import Process
from monarch_kernel.runtime.worker.actor_server import ActorServer

__all__ = ["FOR_ACTORS", "LocalActorServer"]

CLEANUP_S = 2.0
_FOR_RANKS = (Apply, Conclude, ListModules, Pull, Push, Reload, Run, Sync)

FOR_ACTORS: frozenset[type[Message]] = frozenset(
    {
        ActorEnded,
        Call,
        CloseBuffer,
        EndExport,
        EndStream,
        Barrier,
        Interrupt,
        GetStacks,
        OpenBuffer,
        OpenStreams,
        Ping,
        PortSend,
        PostMortem,
        Probe,
        ReadBuffer,
        Spawn,
        StopActor,
        StoreCall,
        Unhandled,
        WriteBuffer,
        *_FOR_RANKS,
    }
)
"""Messages that ranks and this process itself may send to the actors here; those that only ranks can handle are refused."""


class LocalActorsOwner(Client, Protocol):
    """The part of the runtime that the actors use."""

    unhandled: FailureReporter

    def send_answer(self, id: int, packed: Packed) -> None:
        """Send an answer to the process that made the request."""
        ...


class LocalActorServer(ActorServer):
    """Runs the actors of the controller's own process: those spawned on ``this_proc()``, and services that exist once per name.

    Attributes:
        services: Maps the number of a service, an actor that every process can call, to the function that makes its spawn
            message. The function runs at the first call.
    """

    def __init__(self, runtime: LocalActorsOwner, driver: Driver[Any]) -> None:
        super().__init__(CONTROLLER_PROC, driver, runtime)
        self.services: dict[int, Callable[[], tuple[Spawn, Sequence[Frame]]]] = {}
        self._runtime = runtime
        self._driver = driver

    def send_answer(self, id: int, packed: Packed) -> None:
        """Send an answer to the process that made the request; for any thread."""
        self._runtime.send_answer(id, packed)

    def send_answer_now(self, id: int, packed: Packed) -> None:
        """Send an answer to the process that made the request; for the I/O thread."""
        self._runtime.send_answer(id, packed)

    def name(self) -> str:
        """The name of this process in error messages."""
        return "the controller"

    def submit(self, function: Callable[[], None]) -> None:
        """Run a function on the I/O thread; calls of one thread run in order."""
        self._runtime.submit(function)

    def watch(self, process: Process) -> None:
        """Report the death of a process to the supervisor, if it has ended already; on the I/O thread.

        The runtime reports later deaths of all processes.
        """
        death = self._runtime.deaths((process.proc,)).get(process.proc)
        if death is not None:
            self.supervisor.gone(process, death)

    def attend(self) -> None:
        """Report that something the program spawned has failed."""
        self._runtime.unhandled.call()

    def handle(self, message: Message, frames: Sequence[Frame], peer: Peer) -> bool:
        """Handle a message about actors; refuse what only ranks can do."""
        if isinstance(message, Unhandled):
            self._runtime.unhandled.add(message.failure)
        elif isinstance(message, Ping):
            self.send_answer_now(message.id, pack(Result(message.id, Payload())))
        elif isinstance(message, GetStacks):
            payload, parts = dump(Doing(self.activities()), "what the actors do")
            self.send_answer_now(message.id, pack(Result(message.id, payload), parts))
        elif isinstance(message, _FOR_RANKS):
            why = "code and variables are for ranks; this is the process of the program itself, which has only actors"
            if message.id:
                self.send_answer_now(message.id, pack(Failed(message.id, describe(RuntimeError(why)))))
        else:
            return super().handle(message, frames, peer)
        return True

    def call_unknown(self, message: Call | StopActor, frames: Sequence[Frame]) -> None:
        """Make a service at its first call."""
        make = self.services.get(message.actor)
        if make is None or message.actor in self.actors:
            super().call_unknown(message, frames)
            return
        super().handle(*make(), CONTROLLER)
        super().handle(message, frames, CONTROLLER)

    def close(self) -> None:
        """End the actors and their threads."""

        def submit(tell: Callable[[], None]) -> None:
            def item(now: float) -> list[Effect]:
                tell()
                return []

            self._driver.submit(item)

        self.retire(submit, CLEANUP_S)
        for executor in self.executors():
            executor.over = True
            executor.waiter.set()
