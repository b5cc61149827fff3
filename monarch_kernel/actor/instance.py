"""The rank's side of actors: an executor each, sync ones on a thread of their own, async ones on an event loop of their own.

A sync actor's thread drives the socket while it waits, so a call needs no hand-over. An async actor's thread runs its loop;
messages are handed to it by whoever drives the socket. Either way one message is handled at a time, in order.

An exception in an endpoint that owes an answer is the answer. Without one (broadcast, ``__init__``), and for whatever is no
Exception, the actor dies: it answers everything that comes later with the failure that ended it. The process lives on.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from monarch_kernel.actor.actor import Actor, EndpointSpec, endpoints_of
from monarch_kernel.actor.context import ActorInstance, Context, running
from monarch_kernel.actor.endpoints import living_actors
from monarch_kernel.actor.procs import ProcMesh
from monarch_kernel.asking.home import opened_for
from monarch_kernel.describe.report import describe
from monarch_kernel.errors import Failure
from monarch_kernel.mesh import Point, Region
from monarch_kernel.rank.executor import Executor
from monarch_kernel.rank.workplace import Workplace
from monarch_kernel.transport.driver import Waiter
from monarch_kernel.wire.codec import Frame, load
from monarch_kernel.wire.messages import Call, PostMortem, Spawn, StopActor

__all__ = ["host_actors"]


def host_actors(workplace: Workplace, rank: int, proc_mesh: ProcMesh) -> None:
    """Let a process host actors.

    Args:
        workplace: of the process.
        rank: its flat rank in the mesh of processes as spawned.
        proc_mesh: that mesh.
    """

    def on_spawn(message: Spawn, executor: Executor) -> None:
        _Host(workplace, rank, proc_mesh, message, executor)

    workplace.on_spawn = on_spawn


class _LoopWaiter(Waiter):
    """Wakes an event loop instead of a thread."""

    __slots__ = ("_event", "_loop")
    leads = False

    def __init__(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        super().__init__()
        self._loop = loop
        self._event = event

    def set(self) -> None:
        self.ready = True
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            pass  # the loop has ended, and with it the actor


async def _outcome(work: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """Wait for an endpoint; for asyncio a SystemExit would be the end of its loop."""
    try:
        return await work, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


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
        self._self = ActorInstance(message.name, message.actor, point, proc_mesh, rank)
        self._whole = Context(self._self, point)
        self._parts: dict[str, Context] = {}
        self._actor: Any = None
        self._methods: dict[str, Any] = {}
        self._is_async = False
        self._death: Failure | None = None
        executor.handlers |= {Spawn: self._spawn, Call: self._call, StopActor: self._stop}
        threading.Thread(target=self._work, name=f"monarch-actor-{message.name}", daemon=True).start()

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

    def _die(self, error: BaseException | Failure) -> Failure:
        failure = error if isinstance(error, Failure) else describe(error)
        name = self._self.name
        self._death = replace(failure, kind="stopped", message=f"{failure.message} (this ended actor {name!r})")
        self._actor = None
        self._methods.clear()
        return failure

    # -- sync

    def _spawn(self, message: Spawn, frames: Sequence[Frame]) -> None:
        executor = self._executor
        for file, text in message.sources:
            lines = text.splitlines(keepends=True)
            linecache.cache[file] = (len(text), None, lines, file)  # no time of change: checkcache() leaves it alone
        try:
            with executor.user_code():
                cls, args, kwargs = load(message.payload, frames)
                specs = endpoints_of(cls, frozenset())
                self._is_async = any(spec.is_async for spec in specs.values())
                if self._is_async:
                    asyncio.run(self._live(message, cls, args, kwargs, specs))
                    return
                running.set(self._whole)
                self._make(cls, args, kwargs, specs)
                if inspect.isawaitable(self._restore(message, cls, specs)):
                    raise TypeError(f"{cls.__name__}.__restore__ is async, and its endpoints are not")
            self._rank.reply(message.id)
        except BaseException as error:  # whatever __init__ raises ends the actor, not the process
            failure = self._die(error)
            self._rank.fail(executor, executor.current, failure)  # of a loop that was ended: the call that ran

    def _make(self, cls: type, args: Any, kwargs: Any, specs: dict[str, EndpointSpec]) -> None:
        self._actor = cls(*args, **kwargs)
        self._methods = {name: getattr(self._actor, name) for name in specs}

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
        executor.kept = None
        try:
            running.set(self._context(message.region))
            args, kwargs = load(message.payload, frames)
            executor.in_user_code = True
            value = self._methods[message.method](*args, **kwargs)
            executor.leave_user_code()
            if id:
                self._rank.reply(id, value)
        except BaseException as error:
            executor.leave_user_code()
            self._failed(id, error)

    def _failed(self, id: int, error: BaseException) -> None:
        stopped = isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))
        interrupted = id != 0 and self._executor.interrupted == id and stopped
        cause = error
        if interrupted:
            error = KeyboardInterrupt()
        if not interrupted and (not id or not isinstance(error, Exception)):
            self._rank.fail(self._executor, id, self._die(error), cause)
        else:
            self._rank.fail(self._executor, id, error, cause)

    def _stop(self, message: StopActor, _: Sequence[Frame]) -> None:
        self._actor = None
        self._methods.clear()
        self._executor.over = True
        self._rank.reply(message.id)

    # -- async

    async def _live(self, message: Spawn, cls: type, args: Any, kwargs: Any, specs: dict[str, EndpointSpec]) -> None:
        """The life of an async actor, on its own loop."""
        executor = self._executor
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        of_thread, executor.waiter = executor.waiter, _LoopWaiter(loop, event)
        running.set(self._whole)
        try:
            self._make(cls, args, kwargs, specs)
            restored = self._restore(message, cls, specs)
            if inspect.isawaitable(restored):
                await restored
            executor.leave_user_code()  # from now on an interrupt cancels the task
            self._rank.reply(message.id)
            await self._serve(loop, event)
        finally:
            executor.waiter = of_thread

    async def _serve(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Until the actor is stopped or dies; what comes after its death is answered without the loop."""
        executor = self._executor
        while self._death is None:
            event.clear()
            while executor.mailbox and self._death is None:
                item, frames = executor.mailbox.popleft()
                if isinstance(item, StopActor):
                    self._stop(item, frames)
                    return
                executor.current = item.id
                if isinstance(item, PostMortem):
                    executor.handlers[PostMortem](item, frames)  # the loop stands still meanwhile
                    executor.current = 0
                    continue
                await self._call_async(loop, item, frames)
                executor.current = 0
            if not executor.mailbox and self._death is None:
                await event.wait()

    async def _call_async(self, loop: asyncio.AbstractEventLoop, message: Call, frames: Sequence[Frame]) -> None:
        executor, id = self._executor, message.id
        executor.kept = None
        try:
            running.set(self._context(message.region))
            args, kwargs = load(message.payload, frames)
            work: Coroutine[Any, Any, Any] = self._methods[message.method](*args, **kwargs)
            task = loop.create_task(_outcome(work))
            executor.strike = lambda: loop.call_soon_threadsafe(task.cancel)
            if id and executor.interrupted == id:
                task.cancel()
            value, error = await task
            if error is not None:
                raise error
            if id:
                self._rank.reply(id, value)
        except BaseException as error:
            self._failed(id, error)
        finally:
            executor.strike = None
            if executor.is_traced:
                executor.end_tracing()
