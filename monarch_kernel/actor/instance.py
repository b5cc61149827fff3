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
import contextlib
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
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from monarch_kernel.actor.actor import WITH_PORT, Actor, EndpointSpec, endpoints_of
from monarch_kernel.actor.context import ActorInstance, Context, running
from monarch_kernel.actor.endpoints import living_actors
from monarch_kernel.actor.loop import AsyncCall, LoopWaiter, Stepped, outcome, run_loop
from monarch_kernel.actor.procs import ProcMesh
from monarch_kernel.actor.response import Responses
from monarch_kernel.asking.future import Future
from monarch_kernel.asking.home import opened_for
from monarch_kernel.describe.report import describe
from monarch_kernel.errors import Failure, MeshFailure, format_ranks
from monarch_kernel.mesh import Point, Region
from monarch_kernel.rank.executor import CALLED, Executor
from monarch_kernel.rank.workplace import Workplace
from monarch_kernel.transport.driver import Waiter
from monarch_kernel.wire.codec import Frame, dump_call, load
from monarch_kernel.wire.messages import Call, PostMortem, Spawn, StopActor

__all__ = ["host_actors"]

_FIRST = "__first_"

CANCEL_S = 2.0
CHILDREN_S = 5.0
RETIRING_S = 0.3
"""How long an actor waits for what it had spawned to be stopped before it cleans up, in seconds."""


class _Ends(BaseException):
    """Raised where an endpoint waits for something, when the actor ends meanwhile."""


def host_actors(workplace: Workplace, rank: int, proc_mesh: ProcMesh) -> None:
    """Let a process host actors.

    Args:
        workplace: of the process.
        rank: its flat rank in the mesh of processes as spawned.
        proc_mesh: that mesh.
    """

    def on_spawn(message: Spawn, executor: Executor) -> None:
        workplace.hosted[message.actor] = _Host(workplace, rank, proc_mesh, message, executor)

    workplace.on_spawn = on_spawn


class _Host:
    """One actor on this rank."""

    def __init__(
        self, workplace: Workplace, rank: int, proc_mesh: ProcMesh, message: Spawn, executor: Executor
    ) -> None:
        self._rank = workplace
        self._executor = executor
        self._region = Region.unpack(message.region)
        self._at = rank  # in the mesh of processes as spawned, from which regions count
        point = self._region.locate(rank)
        assert point is not None
        self._point: Point = point
        self._self = ActorInstance(message.name, message.actor, point, proc_mesh._with_region(self._region), rank)
        self._whole = Context(self._self, point)
        self._parts: dict[str, Context] = {}
        self.actor = message.actor
        self.cls: type = object
        self.is_async = False
        self.begun = threading.Event()
        self._turns = itertools.count()
        self._is_renewed = False
        self._actor: Any = None
        self._cleans_up = False
        self._specs: dict[str, EndpointSpec] = {}
        self._methods: dict[str, Any] = {}
        self._responses = Responses(workplace, executor)
        self._death: Failure | None = None
        self._cause: BaseException | None = None
        self._async_calls: dict[AsyncCall, None] = {}  # in the order in which they began
        self._wake: Callable[[], object] = executor.waiter.set
        self._untold: list[MeshFailure] = []
        self._children: list[Future[None]] = []
        self._supervision: asyncio.Task[None] | None = None
        executor.attend = executor.call
        executor.handlers |= {Spawn: self._spawn, Call: self._call, StopActor: self._stop}
        executor.retire = self._retire
        executor.calls = self._async_calls
        executor.takes_port = self._takes_port
        self._thread = threading.Thread(target=self._work, name=f"monarch-actor-{message.name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        with opened_for(self._rank.asker):  # handles that come as arguments
            self._executor.run()

    def _context(self, region: tuple[Any, ...] | None) -> Context:
        if region is None:
            return self._whole
        key = repr(region)
        known = self._parts.get(key)
        if known is None:
            point = Region.unpack(region).locate(self._at)
            assert point is not None
            if len(self._parts) > 256:
                self._parts.clear()
            known = self._parts[key] = Context(self._self, point)
        return known

    def _method(self, name: str) -> Any:
        """An endpoint, or a plain method that the caller takes for one."""
        found = self._methods.get(name)
        if found is None:
            found = self._methods[name] = getattr(self._actor, name.removesuffix(WITH_PORT))
        return found

    def _takes_port(self, name: str) -> bool:
        spec = self._specs.get(name)
        return name.endswith(WITH_PORT) if spec is None else spec.takes_port

    # -- its class changes

    @property
    def name(self) -> str:
        """What the actor is called."""
        return self._self.name

    @property
    def instance(self) -> Any:
        """The actor; None before it has been made, and when it has ended."""
        return self._actor

    @property
    def ended(self) -> bool:
        """Whether the actor was stopped or has died."""
        return self._death is not None or self._executor.over

    def renew(self) -> None:
        """Take the endpoints of its class as it is now."""
        if self._actor is not None:
            self._specs = endpoints_of(type(self._actor), frozenset())
            self._methods = {name: getattr(self._actor, name) for name in self._specs}
            self._is_renewed = True
            if hasattr(self._actor, "__cleanup__") and not self._cleans_up:
                self._cleans_up = True
                self._rank.note_cleanup()

    def put_first(self, function: Callable[[], Any]) -> Waiter:
        """Have something run on the actor before whatever waits; it must not raise. Gives what is to be served then."""
        name = f"{_FIRST}{next(self._turns)}"

        def run() -> Any:
            self._methods.pop(name, None)
            return function()

        self._methods[name] = run
        payload, frames = dump_call((), {}, ())
        self._executor.mailbox.appendleft((Call(0, self._self.actor_id, name, None, payload), frames))
        return self._executor.waiter

    def _lacks(self, message: Call) -> bool:
        """Answer a call of an endpoint that the class has no more, if it is one; a broadcast must not end the actor."""
        name = message.method
        if not self._is_renewed or name in self._methods or hasattr(self._actor, name.removesuffix(WITH_PORT)):
            return False
        have = ", ".join(sorted(self._specs)) or "none"
        kind = type(self._actor).__name__
        gone = AttributeError(f"{kind} has no endpoint {name!r} any more: its class has been reloaded; it has: {have}")
        self._rank.fail(self._executor, message.id, gone)
        if not message.id:
            print(f"a broadcast was dropped: {gone}", file=sys.stderr)
        return True

    # -- how it ends

    def _die(self, error: BaseException | Failure, cause: MeshFailure | None = None) -> Failure:
        """From now on everything is answered with the failure that ended it, and the owner is told."""
        failure = error if isinstance(error, Failure) else describe(error)
        name = self._self.name
        if self._death is None:
            self._death = replace(failure, kind="stopped", message=f"{failure.message} (this ended actor {name!r})")
            self._cause = error if isinstance(error, BaseException) else None
            self._children = self._rank.supervisor.ended(self._self.actor_id, failure, cause)
            self._rank.note_death(self._self.actor_id, self._death)
            return failure
        return self._death

    def _patience_s(self) -> float:
        """For how long to wait until what it has spawned has ended; their processes may end with ours, and tell nobody."""
        return RETIRING_S if self._rank.is_retiring else CHILDREN_S

    def _wait_for_children(self) -> None:
        deadline = time.monotonic() + self._patience_s()
        for child in self._children:
            child.wait(max(0.0, deadline - time.monotonic()))

    async def _await_children(self) -> None:
        if self._children:
            await asyncio.wait([child.as_asyncio() for child in self._children], timeout=self._patience_s())

    def _clean_up(self, error: BaseException | None) -> Any:
        """The last that the actor does."""
        self._responses.is_ending = True
        actor, self._actor = self._actor, None
        self._methods.clear()
        cleanup = getattr(actor, "__cleanup__", None)
        if cleanup is None:
            return None
        running.set(self._whole)
        return cleanup(error)

    def _report_cleanup(self, error: BaseException) -> None:
        """A failure after the one that ended the actor, which its caller knows already, is told where it can be read."""
        print(f"__cleanup__ of actor {self._self.name!r} failed, too:", file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__)

    def _retire(self) -> threading.Thread | None:
        """The process ends: clean up, if there is something to clean up. What runs is interrupted, what waits is dropped."""
        if not self._cleans_up:
            return None
        executor = self._executor
        if self._actor is not None:  # else it is at it
            executor.mailbox.clear()
            for strike in list(executor.strikes.values()):
                strike()
            if executor.current and not executor.strikes:
                executor.interrupted = executor.current
                executor.strike_thread()
        executor.post(StopActor(0, self._self.actor_id, "the process was stopped"), ())
        return self._thread

    # -- what it has spawned

    def _next_failure(self) -> MeshFailure | None:
        if self._death is not None or self._executor.over:
            return None
        return self._untold.pop(0) if self._untold else self._rank.supervisor.take(self._self.actor_id)

    def _judge(self, failure: MeshFailure, is_handled: object, error: BaseException | None) -> bool:
        """Whether the actor goes on after a failure of what it has spawned."""
        if is_handled and error is None:
            return True
        if error is None:
            which = f"{failure.mesh_name}{format_ranks(failure.crashed_ranks)}"
            text = f"actor {self._self.name!r} did not handle the failure of {which}: {failure.root_cause.headline()}"
            unhandled = Failure("exception", "UnhandledFailure", text, host=socket.gethostname(), pid=os.getpid())
            self._die(unhandled, failure)
        else:
            self._die(error, failure)
        return False

    def _look(self) -> None:
        """Handle what has failed, on the actor's thread; within an endpoint that waits, if one runs.

        Raises:
            _Ends: the actor has ended, and so does the endpoint.
        """
        executor = self._executor
        is_within, supervise = executor.in_user_code, getattr(self._actor, "__supervise__", None)
        while (failure := self._next_failure()) is not None:
            is_handled, error = None, None
            if supervise is not None:
                before = running.set(self._whole)
                executor.in_user_code = True
                try:
                    is_handled = supervise(failure)
                    if inspect.isawaitable(is_handled):
                        is_handled = asyncio.run(_wait_for(is_handled))
                except BaseException as raised:
                    if is_within and executor.current and executor.interrupted == executor.current:
                        self._untold.append(failure)  # it was the endpoint that was interrupted
                        raise
                    error = raised
                finally:
                    running.reset(before)
                    if not is_within:
                        executor.leave_user_code()
            if not self._judge(failure, is_handled, error):
                if is_within:
                    raise _Ends
                self._end()

    def _look_async(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle what has failed as soon as the loop comes to it; called on the loop."""
        if self._supervision is None:
            self._supervision = loop.create_task(self._supervise_all())

    async def _supervise_all(self) -> None:
        try:
            while (failure := self._next_failure()) is not None:
                running.set(self._whole)
                supervise = getattr(self._actor, "__supervise__", None)
                is_handled, error = None, None
                if supervise is not None:
                    is_handled, error = await outcome(partial(supervise, failure))
                if self._death is None and not self._judge(failure, is_handled, error):
                    for call in self._async_calls:
                        call.task.cancel()
                    self._wake()
        finally:
            self._supervision = None

    # -- sync

    def _spawn(self, message: Spawn, frames: Sequence[Frame]) -> None:
        executor = self._executor
        for file, text in message.sources:
            lines = text.splitlines(keepends=True)
            linecache.cache[file] = (len(text), None, lines, file)  # no time of change: checkcache() leaves it alone
        if self._rank.broken is not None:
            self._rank.fail(executor, message.id, self._die(self._rank.broken))
            self.begun.set()
            return
        try:
            with executor.user_code():
                cls, args, kwargs = load(message.payload, frames)
                cls = pickle.loads(message.renewed) if message.renewed else cls
                self._specs = endpoints_of(cls, frozenset())
                self.cls, self.is_async = cls, any(spec.is_async for spec in self._specs.values())
                self.begun.set()
                if self.is_async:
                    run_loop(self._live(message, cls, args, kwargs), self._broken)
                    return
                running.set(self._whole)
                self._make(cls, args, kwargs)
                if inspect.isawaitable(self._restore(message, cls, self._specs)):
                    raise TypeError(f"{cls.__name__}.__restore__ is async, and its endpoints are not")
            self._rank.reply(message.id)
        except BaseException as error:  # whatever __init__ raises ends the actor, not the process
            self._rank.fail(executor, executor.current, self._die(error))
            self.begun.set()

    def _make(self, cls: type, args: Any, kwargs: Any) -> None:
        self._actor = cls(*args, **kwargs)
        self._cleans_up = hasattr(cls, "__cleanup__")
        if self._cleans_up:
            self._rank.note_cleanup()
        self._specs = endpoints_of(type(self._actor), frozenset())  # it may have been reloaded meanwhile
        self._methods = {name: getattr(self._actor, name) for name in self._specs}
        if self._executor.waiter.leads:
            self._executor.look = self._look

    def _restore(self, message: Spawn, cls: type[Actor], specs: dict[str, EndpointSpec]) -> Any:
        """Let an actor that comes in the place of another take its state from those that live on."""
        restore = getattr(self._actor, "__restore__", None)
        if message.living is None or restore is None:
            return None
        return restore(living_actors(self._rank.asker, message, cls, specs))

    def _call(self, message: Call, frames: Sequence[Frame]) -> None:
        executor, id = self._executor, message.id
        if self._death is not None:
            self._rank.fail(executor, id, self._death)
            return
        if not message.method:  # whoever holds a handle may want to know whether it is up
            self._rank.reply(id)
            return
        if self._lacks(message):
            return
        executor.kept = None
        try:
            running.set(self._context(message.region))
            args, kwargs = load(message.payload, frames)
            method = self._method(message.method)
            takes_port = self._takes_port(message.method)
            if takes_port:
                args = (self._responses.port(id), *args)
            executor.in_user_code = True
            value = method(*args, **kwargs)
            executor.leave_user_code()
            if id and not takes_port:
                self._rank.reply(id, value)
        except BaseException as error:
            executor.leave_user_code()
            self._failed(id, error, executor.interrupted == id, self._takes_port(message.method))
        if self._death is not None:
            self._end()

    def _failed(self, id: int, error: BaseException, was_interrupted: bool, took_port: bool) -> None:
        """An endpoint has raised: that is its answer, or, where nobody waits for one, the actor's end."""
        if took_port and not self._responses.take(id):
            id = 0
        stopped = isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))
        answer: BaseException | Failure = error
        if self._death is not None:  # another call has ended it, and so this one
            answer = self._death
        elif id and was_interrupted and stopped:
            answer = replace(describe(KeyboardInterrupt()), kind="interrupted")
        elif not id or not isinstance(error, Exception):
            answer = self._die(error)
        self._rank.fail(self._executor, id, answer, error)

    def _end(self) -> None:
        """Clean up after a failure; what that raises in turn is written to stderr."""
        error, self._cause = self._cause, None  # its frames hold what the actor held
        if hasattr(self._actor, "__cleanup__"):
            self._wait_for_children()
        try:
            with self._executor.user_code():
                work = self._clean_up(error)
                if inspect.isawaitable(work):
                    asyncio.run(_wait_for(work))
        except BaseException as problem:
            self._report_cleanup(problem)
        assert self._death is not None
        self._responses.end(self._death)

    def _stop(self, message: StopActor, _: Sequence[Frame]) -> None:
        executor = self._executor
        executor.over = True
        try:
            if self._death is None:
                self._children = self._rank.supervisor.ended(self._self.actor_id, request=message.id)
                self._wait_for_children()
                with executor.user_code():
                    work = self._clean_up(None)
                    if inspect.isawaitable(work):
                        asyncio.run(_wait_for(work))
                self._responses.end(_stopped(message))
        except BaseException as error:
            self._rank.fail(executor, message.id, error)
        else:
            if message.id:
                self._rank.reply(message.id)

    # -- async

    async def _live(self, message: Spawn, cls: type, args: Any, kwargs: Any) -> None:
        """The life of an async actor, on its own loop."""
        executor = self._executor
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        of_thread, executor.waiter = executor.waiter, LoopWaiter(loop, event)
        self._wake = event.set
        running.set(self._whole)
        try:
            self._make(cls, args, kwargs)
            restored = self._restore(message, cls, self._specs)
            if inspect.isawaitable(restored):
                await restored
            executor.leave_user_code()  # from now on an interrupt cancels the task
            executor.attend = lambda: _call_soon(loop, lambda: self._look_async(loop))
            self._rank.reply(message.id)
            executor.current, executor.taken = 0, (None, ())
            await self._serve(loop, event)
        finally:
            executor.waiter = of_thread

    async def _serve(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Until the actor is stopped or dies; what comes after its death is answered without the loop."""
        executor = self._executor
        while self._death is None and not executor.over:
            event.clear()
            while executor.mailbox and self._death is None:
                if not executor.begin_next():
                    continue
                item, frames = executor.taken
                if isinstance(item, StopActor):
                    await self._stop_async(loop, item)
                    return
                if item is CALLED:
                    self._look_async(loop)
                elif isinstance(item, PostMortem):
                    executor.handlers[PostMortem](item, frames)  # the loop stands still meanwhile
                else:
                    await self._call_async(loop, item, frames)
                executor.current = 0
                executor.taken = item, frames = None, ()
            if not executor.mailbox and self._death is None and not executor.over:
                await event.wait()
        if self._death is not None:
            await self._end_async()

    async def _call_async(self, loop: asyncio.AbstractEventLoop, message: Call, frames: Sequence[Frame]) -> None:
        executor, id = self._executor, message.id
        if not message.method:
            self._rank.reply(id)
            return
        if self._lacks(message):
            return
        executor.kept = None
        try:
            running.set(self._context(message.region))
            args, kwargs = load(message.payload, frames)
            method = self._method(message.method)
            spec = self._specs.get(message.method)
            takes_port = self._takes_port(message.method)
            if takes_port:
                args = (self._responses.port(id), *args)
        except BaseException as error:
            self._failed(id, error, False, False)
            return
        if spec is not None and spec.is_concurrent:
            call = AsyncCall(
                message,
                loop.create_task(outcome(lambda: self._overlap(call, method(*args, **kwargs)))),
                takes_port,
                overlaps=True,
            )
            self._enter(call)
            call.task.add_done_callback(lambda _: self._answer(call))
            await asyncio.sleep(0)  # it runs to its first wait before we go on
            return
        call = AsyncCall(message, loop.create_task(outcome(lambda: method(*args, **kwargs))), takes_port)
        self._enter(call)
        try:
            await call.task  # quicker than asyncio.wait()
        except asyncio.CancelledError:
            if not call.task.done():
                raise
        self._answer(call)
        if executor.is_traced:
            executor.end_tracing()

    def _overlap(self, call: AsyncCall, work: Coroutine[Any, Any, Any]) -> Stepped:
        """Have a call known as the one that this thread runs, whenever it does."""
        executor, before = self._executor, 0
        call.work = work

        def enter() -> None:
            nonlocal before
            before, executor.current = executor.current, call.id

        def leave() -> None:
            executor.current = before
            if executor.is_traced:
                executor.end_tracing()

        return Stepped(work, enter, leave)

    def _enter(self, call: AsyncCall) -> None:
        """From now on an interrupt finds the call; one that came a moment ago is not lost."""
        self._async_calls[call] = None
        if call.id:
            self._executor.strikes[call.id] = call.strike
            if self._executor.interrupted == call.id:
                call.strike()

    def _leave(self, call: AsyncCall) -> bool:
        """Whether nobody else has answered the call; from now on somebody has."""
        if call not in self._async_calls:
            return False
        del self._async_calls[call]
        self._executor.strikes.pop(call.id, None)
        return True

    def _answer(self, call: AsyncCall) -> None:
        """Say what a call came to, unless somebody has."""
        if not self._leave(call):
            return
        try:
            value, error = call.task.result()
            if error is not None:
                raise error
            if call.id and not call.takes_port:
                self._rank.reply(call.id, value)
        except BaseException as error:
            was_interrupted = call.was_interrupted or self._executor.interrupted == call.id
            self._failed(call.id, error, was_interrupted, call.takes_port)
            if self._death is not None:
                for other in self._async_calls:
                    other.task.cancel()
                self._wake()

    async def _cancel_calls(self, why: Failure) -> None:
        """Cancel what still runs, and tell who has called it why."""
        tasks = []
        for call in list(self._async_calls):
            self._leave(call)
            self._rank.fail(self._executor, call.id, why)
            call.task.cancel()
            tasks.append(call.task)
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_S)

    async def _end_async(self) -> None:
        """As `_end`."""
        assert self._death is not None
        error, self._cause = self._cause, None
        await self._cancel_calls(self._death)
        if hasattr(self._actor, "__cleanup__"):
            await self._await_children()
        _, problem = await outcome(lambda: self._clean_up(error))
        if problem is not None:
            self._report_cleanup(problem)
        self._responses.end(self._death)

    async def _stop_async(self, loop: asyncio.AbstractEventLoop, message: StopActor) -> None:
        """As `_stop`."""
        executor = self._executor
        executor.over = True
        why = _stopped(message)
        await self._cancel_calls(why)
        if self._supervision is not None:
            self._supervision.cancel()
        self._children = self._rank.supervisor.ended(self._self.actor_id, request=message.id)
        await self._await_children()
        call = AsyncCall(message, loop.create_task(outcome(lambda: self._clean_up(None))))
        self._enter(call)
        await asyncio.wait([call.task])
        self._responses.end(why)
        self._answer(call)

    async def _broken(self, error: BaseException) -> None:
        """The loop was ended by what its life or a task of the user's raised."""
        failure = self._die(error)
        if self._actor is None:
            self._rank.fail(self._executor, self._executor.current, failure)
        await self._end_async()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)


def _stopped(message: StopActor) -> Failure:
    return Failure("stopped", "ActorStopped", message.reason, host=socket.gethostname(), pid=os.getpid())


async def _wait_for(work: Any) -> Any:
    return await work
