"""The rank's side of actors: an executor each, sync ones on a thread of their own, async ones on an event loop of their own.

A sync actor's thread drives the socket while it waits, so a call needs no hand-over. An async actor's thread runs its loop;
messages are handed to it by whoever drives the socket. Either way one message is handled at a time, in order.

An exception in an endpoint that owes an answer is the answer. Without one (broadcast, ``__init__``), and for whatever is no
Exception, the actor dies: it answers everything that comes later with the failure that ended it. The process lives on.

However an actor ends, it ends in this order: concurrent calls are cancelled and their callers told; what it had spawned is
stopped; ``__cleanup__`` runs.

Of a failure of what it has spawned an actor is told by ``__supervise__``: on its own thread, between two messages or while an
endpoint waits for something; an async one as a task on its loop. If it does not handle that it ends, and with it what runs.
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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from monarch_kernel.actor.actor import WITH_PORT, Actor, EndpointSpec, endpoints_among, endpoints_of
from monarch_kernel.actor.actor_mesh import living_actors
from monarch_kernel.actor.context import ActorInstance, Context, belongs_to, running
from monarch_kernel.actor.hosting.event_loop import run_loop
from monarch_kernel.actor.hosting.responses import Responses
from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.mesh import Extent, Point, Region
from monarch_kernel.errors import Failure, MeshFailure, SupervisionError, format_ranks
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.net.wire.codec import Frame, dump_call, load
from monarch_kernel.net.wire.messages import Call, Spawn, StopActor
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.handles import opened_for
from monarch_kernel.runtime.worker.actor_server import Workplace
from monarch_kernel.runtime.worker.executor import Executor

__all__ = ["ActorHost", "was_stopped"]

_FIRST = "__first_"

CHILDREN_S = 5.0
"""How long an actor waits for what it had spawned to be stopped before it cleans up, in seconds."""

RETIRING_S = 0.3
"""The same, where its process ends, too."""


class _Ends(BaseException):
    """Raised where an endpoint waits for something, when the actor ends meanwhile."""


class Life(Protocol):
    """What an actor with async endpoints does on a loop of its own."""

    async def live(self, message: Spawn, cls: type, args: Any, kwargs: Any) -> None:
        """Make the actor, and hand messages to it until it ends."""
        ...

    async def broken(self, error: BaseException) -> None:
        """The loop was ended by what its life or a task of the user's raised."""
        ...


class ActorHost:
    """One actor on this rank: what makes it, hands messages to it, and ends it; on its own thread.

    Attributes:
        workplace: of the process.
        executor: the actor's mailbox and thread.
        actor: its number.
        cls: its class, as it was spawned; ``is_async`` says whether its endpoints are, from when ``begun`` is set.
        instance: the actor; None before it has been made, and when it has ended.
        specs: its endpoints.
        about: what it is called, and where it is.
        whole: the context of calls to all of its mesh.
        responses: what it answers through ports.
        death: what everything is answered with since it has failed.
        cause: the exception that ended it, until it has been told to ``__cleanup__``.
        children: what resolves when those that it had spawned are over.
    """

    def __init__(
        self,
        workplace: Workplace,
        rank: int,
        proc_mesh: ProcMesh,
        message: Spawn,
        executor: Executor,
        make_life: Callable[[ActorHost], Life],
    ) -> None:
        self._make_life = make_life
        self.workplace = workplace
        self.executor = executor
        self._region = Region.unpack(message.region)
        self._at = rank  # in the mesh of processes as spawned, from which regions count
        point = self._region.locate(rank)
        assert point is not None
        self._point: Point = point
        self.about = ActorInstance(message.name, message.actor, point, proc_mesh._with_region(self._region), rank)
        self.whole = Context(self.about, point)
        self._parts: dict[str, Context] = {}
        self.actor = message.actor
        self.cls: type = object
        self.is_async = False
        self.begun = threading.Event()
        self._turns = itertools.count()
        self._is_renewed = False
        self.instance: Any = None
        self._cleans_up = False
        self.specs: dict[str, EndpointSpec] = {}
        self._methods: dict[str, Any] = {}
        self.responses = Responses(workplace, executor)
        self.death: Failure | None = None
        self.cause: BaseException | None = None
        self._untold: list[MeshFailure] = []
        self.children: list[Future[None]] = []
        executor.attend = executor.call
        executor.handlers |= {Spawn: self._spawn, Call: self._call, StopActor: self._stop}
        executor.retire = self._retire
        executor.takes_port = self.takes_port
        self._thread = threading.Thread(target=self._work, name=f"monarch-actor-{message.name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        belongs_to(threading.current_thread(), self.whole)  # for callbacks that other threads put on its loop
        with opened_for(self.workplace.asker):  # handles that come as arguments
            self.executor.run()

    def context_of(self, region: tuple[Any, ...] | None) -> Context:
        if region is None:
            return self.whole
        key = repr(region)
        known = self._parts.get(key)
        if known is None:
            point = Region.unpack(region).locate(self._at)
            assert point is not None
            if len(self._parts) > 256:
                self._parts.clear()
            known = self._parts[key] = Context(self.about, point)
        return known

    def method(self, name: str) -> Any:
        """An endpoint, or a plain method that the caller takes for one."""
        found = self._methods.get(name)
        if found is None:
            found = self._methods[name] = getattr(self.instance, name.removesuffix(WITH_PORT))
        return found

    def takes_port(self, name: str) -> bool:
        spec = self.specs.get(name)
        return name.endswith(WITH_PORT) if spec is None else spec.takes_port

    # -- its class changes

    @property
    def name(self) -> str:
        """What the actor is called."""
        return self.about.name

    @property
    def ended(self) -> bool:
        """Whether the actor was stopped or has died."""
        return self.death is not None or self.executor.over

    def endpoints_with(self, bases: Sequence[type]) -> dict[str, EndpointSpec]:
        """The endpoints that the actor would have if its class had these bases, in the order in which Python asks them.

        Raises:
            ValueError: they would not fit together.
        """
        return endpoints_among(self.cls, bases, frozenset())

    def renew(self) -> None:
        """Take the endpoints of its class as it is now."""
        if self.instance is not None:
            self.specs = endpoints_of(type(self.instance), frozenset())
            self._methods = {name: getattr(self.instance, name) for name in self.specs}
            self._is_renewed = True
            if hasattr(self.instance, "__cleanup__") and not self._cleans_up:
                self._cleans_up = True
                self.workplace.note_cleanup()

    def put_first(self, function: Callable[[], Any]) -> Waiter:
        """Have something run on the actor before whatever waits; it must not raise. Gives what is to be served then."""
        name = f"{_FIRST}{next(self._turns)}"

        def run() -> Any:
            self._methods.pop(name, None)
            return function()

        self._methods[name] = run
        payload, frames = dump_call((), {}, ())
        self.executor.mailbox.appendleft((Call(0, self.about.actor_id, name, None, payload), frames))
        return self.executor.waiter

    def lacks(self, message: Call) -> bool:
        """Answer a call of an endpoint that the class has no more, if it is one; a broadcast must not end the actor."""
        name = message.method
        if not self._is_renewed or name in self._methods or hasattr(self.instance, name.removesuffix(WITH_PORT)):
            return False
        have = ", ".join(sorted(self.specs)) or "none"
        kind = type(self.instance).__name__
        gone = AttributeError(f"{kind} has no endpoint {name!r} any more: its class has been reloaded; it has: {have}")
        self.workplace.fail(self.executor, message.id, gone)
        if not message.id:
            print(f"a broadcast was dropped: {gone}", file=sys.stderr)
        return True

    # -- how it ends

    def die(self, error: BaseException | Failure, cause: MeshFailure | None = None) -> Failure:
        """From now on everything is answered with the failure that ended it, and the owner is told."""
        failure = error if isinstance(error, Failure) else describe(error)
        name = self.about.name
        if self.death is None:
            self.death = replace(failure, kind="stopped", message=f"{failure.message} (this ended actor {name!r})")
            self.cause = error if isinstance(error, BaseException) else None
            self.children = self.workplace.supervisor.ended(self.about.actor_id, failure, cause)
            self.workplace.note_death(self.about.actor_id, self.death)
            return failure
        return self.death

    def _patience_s(self) -> float:
        """For how long to wait until what it has spawned has ended; their processes may end with ours, and tell nobody."""
        return RETIRING_S if self.workplace.is_retiring else CHILDREN_S

    def _wait_for_children(self) -> None:
        deadline = time.monotonic() + self._patience_s()
        for child in self.children:
            child.wait(max(0.0, deadline - time.monotonic()))

    async def await_children(self) -> None:
        if self.children:
            await asyncio.wait([child.as_asyncio() for child in self.children], timeout=self._patience_s())

    def clean_up(self, error: BaseException | None) -> Any:
        """The last that the actor does."""
        self.responses.is_ending = True
        actor, self.instance = self.instance, None
        self._methods.clear()
        cleanup = getattr(actor, "__cleanup__", None)
        if cleanup is None:
            return None
        running.set(self.whole)
        return cleanup(error)

    def let_go(self, why: Failure) -> None:
        """The actor has cleaned up: end what it owes, and what it has lent."""
        self.responses.end(why)
        self.workplace.asker.lendings.end_all_of(self.about.actor_id)

    def report_cleanup(self, error: BaseException) -> None:
        """A failure after the one that ended the actor, which its caller knows already, is told where it can be read."""
        print(f"__cleanup__ of actor {self.about.name!r} failed, too:", file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__)

    def _retire(self) -> threading.Thread | None:
        """The process ends: clean up, if there is something to clean up. What runs is interrupted, what waits is dropped."""
        if not self._cleans_up:
            return None
        executor = self.executor
        if self.instance is not None:  # else it is at it
            executor.mailbox.clear()
            executor.strike_all()
        executor.post(StopActor(0, self.about.actor_id, "the process was stopped"), ())
        return self._thread

    # -- what it has spawned

    def next_failure(self) -> MeshFailure | None:
        if self.death is not None or self.executor.over:
            return None
        return self._untold.pop(0) if self._untold else self.workplace.supervisor.take(self.about.actor_id)

    def judge(self, failure: MeshFailure, is_handled: object, error: BaseException | None) -> bool:
        """Whether the actor goes on after a failure of what it has spawned."""
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
            self.cause = SupervisionError(text, reports)  # for __cleanup__, which wants an exception
        else:
            self.die(error, failure)
        return False

    def _look(self) -> None:
        """Handle what has failed, on the actor's thread; within an endpoint that waits, if one runs.

        Raises:
            _Ends: the actor has ended, and so does the endpoint.
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
                        self._untold.append(failure)  # it was the endpoint that was interrupted
                        raise
                    error = raised
                finally:
                    running.reset(before)
                    if not is_within:
                        executor.leave_user_code()
            if not self.judge(failure, is_handled, error):
                if is_within:
                    raise _Ends
                self._end()

    # -- sync

    def _spawn(self, message: Spawn, frames: Sequence[Frame]) -> None:
        executor = self.executor
        for file, text in message.sources:
            lines = text.splitlines(keepends=True)
            linecache.cache[file] = (len(text), None, lines, file)  # no time of change: checkcache() leaves it alone
        if self.workplace.broken is not None:
            self.workplace.fail(executor, message.id, self.die(self.workplace.broken))
            self.begun.set()
            return
        try:
            with executor.user_code():
                cls, args, kwargs = load(message.payload, frames)
                cls = pickle.loads(message.renewed) if message.renewed else cls
                self.specs = endpoints_of(cls, frozenset())
                self.cls, self.is_async = cls, any(spec.is_async for spec in self.specs.values())
                self.begun.set()
            if self.is_async:
                life = self._make_life(self)
                run_loop(life.live(message, cls, args, kwargs), life.broken)
                return
            running.set(self.whole)
            with executor.user_code():
                executor.raise_if_struck()
                self.make(cls, args, kwargs)
                if inspect.isawaitable(self.restore(message, cls, self.specs)):
                    raise TypeError(f"{cls.__name__}.__restore__ is async, and its endpoints are not")
            self.workplace.reply(message.id)
        except BaseException as error:  # whatever __init__ raises ends the actor, not the process
            self.workplace.fail(executor, executor.current, self.die(error))
            self.begun.set()

    def make(self, cls: type, args: Any, kwargs: Any) -> None:
        self.instance = cls(*args, **kwargs)
        self._cleans_up = hasattr(cls, "__cleanup__")
        if self._cleans_up:
            self.workplace.note_cleanup()
        self.specs = endpoints_of(type(self.instance), frozenset())  # it may have been reloaded meanwhile
        self._methods = {name: getattr(self.instance, name) for name in self.specs}
        if self.executor.waiter.leads:
            self.executor.look = self._look

    def restore(self, message: Spawn, cls: type[Actor], specs: dict[str, EndpointSpec]) -> Any:
        """Let an actor that comes in the place of another take its state from those that live on.

        If some of these die, and it fails for that, it is asked again, with those that are left.
        """
        restore = getattr(self.instance, "__restore__", None)
        if message.living is None or restore is None:
            return None
        asker, living = self.workplace.asker, message.living

        def attempt() -> Any:
            return restore(living_actors(asker, message, living, cls, specs))

        def fewer_live() -> bool:
            nonlocal living
            before, deaths = living, asker.deaths([proc for _, proc in living])
            living = tuple(place for place in living if place[1] not in deaths)
            return len(living) < len(before)

        async def finish(work: Awaitable[Any]) -> None:
            while True:
                try:
                    await work
                    return
                except SupervisionError:
                    if not fewer_live():
                        raise
                    work = attempt()

        while True:
            try:
                work = attempt()
                return finish(work) if inspect.isawaitable(work) else None
            except SupervisionError:
                if not fewer_live():
                    raise

    def _call(self, message: Call, frames: Sequence[Frame]) -> None:
        executor, id = self.executor, message.id
        if self.death is not None:
            self.workplace.fail(executor, id, self.death)
            return
        if not message.method:  # whoever holds a handle may want to know whether it is up
            self.workplace.reply(id)
            return
        if self.lacks(message):
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
            executor.raise_if_struck()
            value = method(*args, **kwargs)
            executor.leave_user_code()
            if id and not takes_port:
                self.workplace.reply(id, value)
        except BaseException as error:
            executor.leave_user_code()
            self.failed(id, error, executor.interrupted == id, self.takes_port(message.method))
        if self.death is not None:
            self._end()

    def failed(self, id: int, error: BaseException, was_interrupted: bool, took_port: bool) -> None:
        """An endpoint has raised: that is its answer, or, where nobody waits for one, the actor's end."""
        if took_port and not self.responses.take(id):
            id = 0
        stopped = isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))
        answer: BaseException | Failure = error
        if self.death is not None:  # another call has ended it, and so this one
            answer = self.death
        elif id and was_interrupted and stopped:
            answer = replace(describe(KeyboardInterrupt()), kind="interrupted")
        elif not id or not isinstance(error, Exception):
            answer = self.die(error)
        self.workplace.fail(self.executor, id, answer, error)

    def _end(self) -> None:
        """Clean up after a failure; what that raises in turn is written to stderr."""
        error, self.cause = self.cause, None  # its frames hold what the actor held
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
        self.let_go(self.death)

    def _stop(self, message: StopActor, _: Sequence[Frame]) -> None:
        executor = self.executor
        executor.over = True
        try:
            if self.death is None:
                self.children = self.workplace.supervisor.ended(self.about.actor_id, request=message.id)
                self._wait_for_children()
                with executor.user_code():
                    work = self.clean_up(None)
                    if inspect.isawaitable(work):
                        asyncio.run(_wait_for(work))
                self.let_go(was_stopped(message))
        except BaseException as error:
            self.workplace.fail(executor, message.id, error)
        else:
            if message.id:
                self.workplace.reply(message.id)


async def _wait_for(work: Any) -> Any:
    return await work


def was_stopped(message: StopActor) -> Failure:
    """What calls are answered with that an actor had not answered when it was stopped."""
    return Failure("stopped", "ActorStopped", message.reason, host=socket.gethostname(), pid=os.getpid())
