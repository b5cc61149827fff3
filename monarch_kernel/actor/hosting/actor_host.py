"""The worker's side of actors: each actor has an executor and a thread; the thread of an async actor runs an event loop.

The thread of a sync actor drives the socket while it waits, so a call needs no switch of threads. The thread of an async actor
runs its loop; the I/O thread passes messages to it. In both cases, the actor handles one message at a time, in order.

If an endpoint raises and the caller waits for an answer, the exception is the answer. If there is no answer (a broadcast,
``__init__``), or the error is not an Exception, the actor dies: it answers all later calls with the failure that ended it. The
process survives.

An actor always ends in this order: its concurrent calls are cancelled, and their callers get an answer; the actors that it has
spawned are stopped; ``__cleanup__`` runs.

When an actor or process that it has spawned fails, the actor runs ``__supervise__``: a sync actor on its thread, between two
messages or while an endpoint waits for something; an async actor as a task on its loop. If ``__supervise__`` does not handle
the failure, the actor ends, and with it its running calls.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import linecache
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import CoroutineType
from typing import Any, Protocol

from monarch_kernel.actor.actor import WITH_PORT, Actor, EndpointSpec, endpoints_among, endpoints_of
from monarch_kernel.actor.context import ActorInstance, Context, Creator, belongs_to, running
from monarch_kernel.actor.hosting.event_loop import run_loop
from monarch_kernel.actor.hosting.responses import Responses
from monarch_kernel.actor.hosting.restoring import restore
from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.mesh import Extent, Point, Region
from monarch_kernel.errors import Failure, MeshFailure, SupervisionError, format_ranks
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.net.wire.codec import Frame, dump_call, load
from monarch_kernel.net.wire.messages import Call, Spawn, StopActor
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.handles import opened_for
from monarch_kernel.runtime.worker.actor_server import ActorServer
from monarch_kernel.runtime.worker.executor import Executor

__all__ = ["ActorHost", "was_stopped"]

_FIRST = "__first_"

CHILDREN_S = 5.0
"""How long an actor waits for the actors that it has spawned to stop before it cleans up, in seconds."""

RETIRING_S = 0.3
"""The same time when the process of the actor ends, too."""


class _Ends(BaseException):
    """Raised in an endpoint that waits for something when its actor ends."""


class LoopRunner(Protocol):
    """The coroutines that an actor with async endpoints runs on its event loop."""

    async def run(self, message: Spawn, cls: type, args: Any, kwargs: Any) -> None:
        """Make the actor, and pass messages to it until it ends."""
        ...

    async def handle_loop_error(self, error: BaseException) -> None:
        """Handle an error in `run` or in a user's task that has ended the loop."""
        ...


class ActorHost:
    """Makes one actor on this rank, passes messages to it, and ends it, on the actor's thread.

    Attributes:
        actor_server: the actor server of the process.
        executor: the mailbox and the thread of the actor.
        actor: the number of the actor.
        owner: the number of the actor that has spawned it; 0 for code outside of actors.
        cls: the class as it was spawned.
        is_async: whether the endpoints are async; valid once ``class_known`` is set.
        class_known: set when the class is known, or when that failed.
        instance: the actor; None before it is made and after it has ended.
        specs: the endpoints.
        about: the name and the location of the actor.
        whole: the context of calls to the whole mesh of the actor.
        responses: the requests that are answered through ports.
        death: the failure that ended the actor, and that answers all later requests.
        cause: the exception that ended the actor, until ``__cleanup__`` gets it.
        children: futures that resolve when the actors and processes that it has spawned have ended.
    """

    def __init__(
        self,
        actor_server: ActorServer,
        rank: int,
        proc_mesh: ProcMesh,
        message: Spawn,
        executor: Executor,
        make_runner: Callable[[ActorHost], LoopRunner],
    ) -> None:
        self._make_runner = make_runner
        self.actor_server = actor_server
        self.executor = executor
        self._region = Region.unpack(message.region)
        self._flat_rank = rank  # in the mesh of processes as spawned, which regions refer to
        point = self._region.locate(rank)
        assert point is not None
        self._point: Point = point
        self.creator = Creator.from_lineage(message.lineage)
        mesh = proc_mesh._with_region(self._region)
        self.about = ActorInstance(message.name, message.actor, point, mesh, rank, self)
        self.whole = Context(self.about, point)
        self._parts: dict[str, Context] = {}
        self.actor = message.actor
        self.cls: type = object
        self.is_async = False
        self.class_known = threading.Event()
        self._turns = itertools.count()
        self._is_renewed = False
        self.instance: Any = None
        self._cleans_up = False
        self.specs: dict[str, EndpointSpec] = {}
        self._methods: dict[str, Any] = {}
        self.responses = Responses(actor_server, executor)
        self.death: Failure | None = None
        self.cause: BaseException | None = None
        self._deferred: list[MeshFailure] = []
        self.children: list[Future[None]] = []
        executor.attend = executor.call
        executor.handlers |= {Spawn: self._spawn, Call: self._call, StopActor: self._stop}
        executor.retire = self._retire
        executor.takes_port = self.takes_port
        self._thread = threading.Thread(target=self._work, name=f"monarch-actor-{message.name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        belongs_to(threading.current_thread(), self.whole)  # for callbacks that other threads schedule on its loop
        with opened_for(self.actor_server.client):  # the client of handles that come as arguments
            self.executor.run()

    def context_of(self, region: tuple[Any, ...] | None) -> Context:
        if region is None:
            return self.whole
        key = repr(region)
        known = self._parts.get(key)
        if known is None:
            point = Region.unpack(region).locate(self._flat_rank)
            assert point is not None
            if len(self._parts) > 256:
                self._parts.clear()
            known = self._parts[key] = Context(self.about, point)
        return known

    def method(self, name: str) -> Any:
        """Return the method of an endpoint, or the plain method of `as_endpoint`."""
        found = self._methods.get(name)
        if found is None:
            found = self._methods[name] = getattr(self.instance, name.removesuffix(WITH_PORT))
        return found

    def takes_port(self, name: str) -> bool:
        spec = self.specs.get(name)
        return name.endswith(WITH_PORT) if spec is None else spec.takes_port

    # -- reload of the class

    @property
    def name(self) -> str:
        """The name of the actor."""
        return self.about.name

    @property
    def ended(self) -> bool:
        """Whether the actor has stopped or died."""
        return self.death is not None or self.executor.over

    def endpoints_with(self, bases: Sequence[type]) -> dict[str, EndpointSpec]:
        """Return the endpoints that the actor would have with these bases, which are in method resolution order.

        Raises:
            ValueError: the endpoints would conflict.
        """
        return endpoints_among(self.cls, bases, frozenset())

    def renew(self) -> None:
        """Use the endpoints of the class as it is now."""
        if self.instance is not None:
            self.specs = endpoints_of(type(self.instance), frozenset())
            self._methods = {name: getattr(self.instance, name) for name in self.specs}
            self._is_renewed = True
            self._note_cleanup()

    def put_first(self, function: Callable[[], Any]) -> Waiter:
        """Run a function on the actor before the waiting messages. The function must not raise.

        Returns:
            The waiter that the caller must serve.
        """
        name = f"{_FIRST}{next(self._turns)}"

        def run() -> Any:
            self._methods.pop(name, None)
            return function()

        self._methods[name] = run
        payload, frames = dump_call((), {}, ())
        self.executor.mailbox.appendleft((Call(0, self.about.actor_id, name, None, payload), frames))
        return self.executor.waiter

    def answer_if_removed(self, message: Call) -> bool:
        """Answer a call of an endpoint that the reloaded class no longer has; drop a broadcast, which must not end the actor.

        Returns:
            Whether the endpoint is missing.
        """
        name = message.method
        if not self._is_renewed or name in self._methods or hasattr(self.instance, name.removesuffix(WITH_PORT)):
            return False
        have = ", ".join(sorted(self.specs)) or "none"
        kind = type(self.instance).__name__
        gone = AttributeError(f"{kind} has no endpoint {name!r} any more: its class has been reloaded; it has: {have}")
        self.actor_server.fail(self.executor, message.id, gone)
        if not message.id:
            print(f"a broadcast was dropped: {gone}", file=sys.stderr)
        return True

    # -- the end of the actor

    def die(self, error: BaseException | Failure, cause: MeshFailure | None = None) -> Failure:
        """End the actor with a failure, which answers all later requests, and notify its owner."""
        failure = error if isinstance(error, Failure) else describe(error)
        name = self.about.name
        if self.death is None:
            self.death = replace(failure, kind="stopped", message=f"{failure.message} (this ended actor {name!r})")
            self.cause = error if isinstance(error, BaseException) else None
            self.children = self.actor_server.supervisor.ended(self.about.actor_id, failure, cause)
            self.actor_server.note_death(self.about.actor_id, self.death)
            return failure
        return self.death

    def _patience_s(self) -> float:
        """Return how long to wait for spawned actors to end. If the process ends, theirs may end with it and not answer."""
        return RETIRING_S if self.actor_server.is_retiring else CHILDREN_S

    def _wait_for_children(self) -> None:
        deadline = time.monotonic() + self._patience_s()
        for child in self.children:
            child.wait(max(0.0, deadline - time.monotonic()))

    async def await_children(self) -> None:
        if self.children:
            await asyncio.wait([child.as_asyncio() for child in self.children], timeout=self._patience_s())

    def clean_up(self, error: BaseException | None) -> Any:
        """Run the actor's ``__cleanup__``, and drop the instance."""
        self.responses.is_ending = True
        actor, self.instance = self.instance, None
        self._methods.clear()
        cleanup = getattr(actor, "__cleanup__", None)
        if cleanup is None:
            return None
        running.set(self.whole)
        return cleanup(error)

    def release(self, why: Failure) -> None:
        """Answer the open requests and end the leases of an actor that has cleaned up."""
        self.responses.end(why)
        self.actor_server.client.exports.end_all_of(self.about.actor_id)

    def stop_itself(self, reason: str) -> None:
        """Stop the actor after its current message."""
        self.actor_server.client.submit(lambda: self.actor_server.stop_actor(self.actor, reason))

    def drop(self) -> None:
        """Drop the instance, because the process ends."""
        self.instance = None
        self._methods.clear()

    def report_cleanup(self, error: BaseException) -> None:
        """Write a failure of ``__cleanup__`` to stderr; the caller already has the failure that ended the actor."""
        print(f"__cleanup__ of actor {self.about.name!r} failed, too:", file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__)

    def _retire(self) -> threading.Thread | None:
        """Clean up, if necessary, because the process ends. Interrupts running calls, and drops waiting ones."""
        if not self._cleans_up:
            return None
        executor = self.executor
        if self.instance is not None:  # otherwise the cleanup is already running
            executor.mailbox.clear()
            executor.interrupt_all()
        executor.post(StopActor(0, self.about.actor_id, "the process was stopped"), ())
        return self._thread

    # -- supervision of spawned actors

    def next_failure(self) -> MeshFailure | None:
        if self.death is not None or self.executor.over:
            return None
        return self._deferred.pop(0) if self._deferred else self.actor_server.supervisor.take(self.about.actor_id)

    def end_unless_handled(self, failure: MeshFailure, is_handled: object, error: BaseException | None) -> bool:
        """End the actor if it did not handle a failure of a spawned actor or process; return whether it goes on."""
        if is_handled and error is None:
            return True
        if error is None:
            which = f"{failure.mesh_name}{format_ranks(failure.crashed_ranks)}"
            root = failure.root_cause.primary.headline()
            text = f"actor {self.about.name!r} did not handle the failure of {which}: {root}"
            unhandled = Failure("exception", "UnhandledFailure", text, host=socket.gethostname(), pid=os.getpid())
            self.die(unhandled, failure)
            places = Extent({"ranks": max(failure.reports) + 1})
            reports = {Point(rank, places): report for rank, report in failure.reports.items()}
            self.cause = SupervisionError(text, reports)  # for __cleanup__, which takes an exception
        else:
            self.die(error, failure)
        return False

    def _supervise(self) -> None:
        """Supervise failures on the actor's thread. If an endpoint runs and waits, this runs inside of it.

        Raises:
            _Ends: the actor has ended, so the endpoint must end, too.
        """
        executor = self.executor
        is_within, supervise = executor.in_user_code, getattr(self.instance, "__supervise__", None)
        while (failure := self.next_failure()) is not None:
            is_handled, error = None, None
            if supervise is not None:
                before = running.set(self.whole)
                executor.in_user_code = True
                try:
                    is_handled = supervise(failure)
                    if inspect.isawaitable(is_handled):
                        is_handled = asyncio.run(_wait_for(is_handled))
                except BaseException as raised:
                    executor.came_back(raised)
                    if is_within and executor.current and executor.interrupted == executor.current:
                        self._deferred.append(failure)  # the interrupt was for the endpoint
                        raise
                    error = raised
                finally:
                    running.reset(before)
                    if not is_within:
                        executor.leave_user_code()
            if not self.end_unless_handled(failure, is_handled, error):
                if is_within:
                    raise _Ends
                self._end()

    # -- sync

    def _spawn(self, message: Spawn, frames: Sequence[Frame]) -> None:
        executor = self.executor
        for file, text in message.sources:
            lines = text.splitlines(keepends=True)
            linecache.cache[file] = (len(text), None, lines, file)  # checkcache() keeps entries without mtime
        if self.actor_server.broken is not None:
            self.actor_server.fail(executor, message.id, self.die(self.actor_server.broken))
            self.class_known.set()
            return
        try:
            with executor.user_code():
                cls, args, kwargs = load(message.payload, frames)
                cls = pickle.loads(message.renewed) if message.renewed else cls
                self.specs = endpoints_of(cls, frozenset())
                self.cls, self.is_async = cls, any(spec.is_async for spec in self.specs.values())
                self.class_known.set()
            if self.is_async:
                runner = self._make_runner(self)
                run_loop(runner.run(message, cls, args, kwargs), runner.handle_loop_error)
                return
            running.set(self.whole)
            with executor.user_code():
                executor.raise_if_interrupted()
                self.make(cls, args, kwargs)
                if inspect.isawaitable(self.restore(message, cls, self.specs)):
                    raise TypeError(
                        f"{cls.__name__}.__restore__ is async, and its endpoints are not: make all of them async, or none"
                    )
            self.actor_server.reply(message.id)
            executor.is_made = True
        except BaseException as error:  # any error in __init__ ends the actor, not the process
            executor.is_made = True
            self.actor_server.fail(executor, executor.current, self.die(error))
            self.class_known.set()

    def make(self, cls: type, args: Any, kwargs: Any) -> None:
        self.instance = cls(*args, **kwargs)
        self.specs = endpoints_of(type(self.instance), frozenset())  # the class may have been reloaded meanwhile
        self._note_cleanup()
        self._methods = {name: getattr(self.instance, name) for name in self.specs}
        if self.executor.waiter.leads:
            self.executor.look = self._supervise

    def _note_cleanup(self) -> None:
        """Make the end of the process wait for ``__cleanup__``, and for calls that overlap: they handle their cancellation."""
        overlaps = any(spec.is_concurrent for spec in self.specs.values())
        if not self._cleans_up and (overlaps or hasattr(self.instance, "__cleanup__")):
            self._cleans_up = True
            self.actor_server.note_cleanup()

    def restore(self, message: Spawn, cls: type[Actor], specs: dict[str, EndpointSpec]) -> Any:
        """Call ``__restore__`` of an actor that replaces another; returns what it must await, if it is async."""
        return restore(self.instance, self.actor_server.client, message, cls, specs)

    def _call(self, message: Call, frames: Sequence[Frame]) -> None:
        executor, id = self.executor, message.id
        if self.death is not None:
            self.actor_server.fail(executor, id, self.death)
            return
        if not message.method:  # a handle asks whether the actor is up
            self.actor_server.reply(id)
            return
        if self.answer_if_removed(message):
            return
        executor.kept = None
        try:
            running.set(self.context_of(message.region))
            args, kwargs = load(message.payload, frames)
            method = self.method(message.method)
            takes_port = self.takes_port(message.method)
            if takes_port:
                args = (self.responses.port(id), *args)
            executor.in_user_code = True
            executor.raise_if_interrupted()
            value = method(*args, **kwargs)
            executor.leave_user_code()
            if type(value) is CoroutineType and inspect.iscoroutinefunction(method):
                value.close()
                raise TypeError(
                    f"{message.method} is an async def method, and this actor has no event loop: its endpoints are sync"
                )
            if id and not takes_port:
                self.actor_server.reply(id, value)
        except BaseException as error:
            executor.leave_user_code()
            self.failed(id, error, executor.interrupted == id, self.takes_port(message.method))
        if self.death is not None:
            self._end()

    def failed(self, id: int, error: BaseException, was_interrupted: bool, took_port: bool) -> None:
        """Handle an error of an endpoint: it answers the call, or it ends the actor if the call has no answer."""
        if took_port and not self.responses.take(id):
            id = 0
        stopped = isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))
        answer: BaseException | Failure = error
        if self.death is not None:  # another call has ended the actor, and with it this call
            answer = self.death
        elif id and was_interrupted and stopped:
            answer = replace(describe(KeyboardInterrupt()), kind="interrupted")
        elif not id or not isinstance(error, Exception):
            answer = replace(self.die(error), is_fatal=True)
        self.actor_server.fail(self.executor, id, answer, error)

    def _end(self) -> None:
        """Clean up after a failure. An error in the cleanup is written to stderr."""
        error, self.cause = self.cause, None  # its frames keep the actor's objects alive
        if hasattr(self.instance, "__cleanup__"):
            self._wait_for_children()
        try:
            with self.executor.user_code():
                work = self.clean_up(error)
                if inspect.isawaitable(work):
                    asyncio.run(_wait_for(work))
        except BaseException as problem:
            self.report_cleanup(problem)
        assert self.death is not None
        self.release(self.death)

    def _stop(self, message: StopActor, _: Sequence[Frame]) -> None:
        executor = self.executor
        executor.over = True
        try:
            if self.death is None:
                self.children = self.actor_server.supervisor.ended(self.about.actor_id, request=message.id)
                self._wait_for_children()
                with executor.user_code():
                    work = self.clean_up(None)
                    if inspect.isawaitable(work):
                        asyncio.run(_wait_for(work))
                self.release(was_stopped(message))
        except BaseException as error:
            self.actor_server.fail(executor, message.id, error)
        else:
            if message.id:
                self.actor_server.reply(message.id)


async def _wait_for(work: Any) -> Any:
    return await work


def was_stopped(message: StopActor) -> Failure:
    """Return the failure that answers the open calls of a stopped actor."""
    return Failure("stopped", "ActorStopped", message.reason, host=socket.gethostname(), pid=os.getpid())
