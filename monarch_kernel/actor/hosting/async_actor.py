"""The coroutines of an async actor on its event loop: endpoints run one after another, concurrent endpoints overlap."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from monarch_kernel.actor.context import running
from monarch_kernel.actor.hosting.actor_host import ActorHost, was_stopped
from monarch_kernel.actor.hosting.event_loop import AsyncCall, LoopWaiter, Stepped, outcome
from monarch_kernel.errors import Failure
from monarch_kernel.net.wire.codec import Frame, load
from monarch_kernel.net.wire.messages import Call, PostMortem, Spawn, StopActor
from monarch_kernel.runtime.worker.executor import CALLED

__all__ = ["AsyncRunner"]

CANCEL_S = 2.0


class AsyncRunner:
    """Runs an async actor on the thread of its event loop."""

    def __init__(self, host: ActorHost) -> None:
        self._host = host
        self._calls: dict[AsyncCall, None] = {}  # in the order in which they started
        self._wake: Callable[[], object] = host.executor.waiter.set
        self._supervision: asyncio.Task[None] | None = None
        host.executor.calls = self._calls

    async def run(self, message: Spawn, cls: type, args: Any, kwargs: Any) -> None:
        """Make the actor, and pass messages to it until it ends."""
        executor = self._host.executor
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        of_thread, executor.waiter = executor.waiter, LoopWaiter(loop, event)
        self._wake = event.set
        running.set(self._host.whole)
        try:
            with executor.user_code():  # from here on, an interrupt cancels the task
                executor.raise_if_interrupted()
                self._host.make(cls, args, kwargs)
                restored = self._host.restore(message, cls, self._host.specs)
                if inspect.isawaitable(restored):
                    await restored
            executor.attend = lambda: _call_soon(loop, lambda: self.start_supervision(loop))
            self._host.actor_server.reply(message.id)
            executor.current, executor.taken = 0, (None, ())
            executor.is_made = True
            await self._serve(loop, event)
        finally:
            executor.waiter = of_thread

    def start_supervision(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a task that supervises failures. Must be called on the loop."""
        if self._supervision is None:
            self._supervision = loop.create_task(self._supervise_all())

    async def _supervise_all(self) -> None:
        try:
            while (failure := self._host.next_failure()) is not None:
                running.set(self._host.whole)
                supervise = getattr(self._host.instance, "__supervise__", None)
                is_handled, error = None, None
                if supervise is not None:
                    try:
                        is_handled, error = await outcome(partial(supervise, failure))
                    except asyncio.CancelledError as raised:
                        if self._host.executor.over or self._host.death is not None:
                            raise  # this task was cancelled, as the actor ends
                        error = raised  # __supervise__ has awaited something that was cancelled
                if self._host.death is None and not self._host.end_unless_handled(failure, is_handled, error):
                    for call in self._calls:
                        call.task.cancel()
                    self._wake()
        finally:
            self._supervision = None

    async def _serve(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Handle messages until the actor is stopped or dies. Later messages are answered without the loop."""
        executor = self._host.executor
        while self._host.death is None and not executor.over:
            event.clear()
            while executor.mailbox and self._host.death is None:
                if not executor.begin_next():
                    continue
                item, frames = executor.taken
                if isinstance(item, StopActor):
                    await self._stop(loop, item)
                    return
                if item is CALLED:
                    self.start_supervision(loop)
                elif isinstance(item, PostMortem):
                    executor.handlers[PostMortem](item, frames)  # this blocks the loop
                else:
                    await self._call(loop, item, frames)
                executor.current = 0
                executor.taken = item, frames = None, ()
            if not executor.mailbox and self._host.death is None and not executor.over:
                await event.wait()
        if self._host.death is not None:
            await self._end()

    async def _call(self, loop: asyncio.AbstractEventLoop, message: Call, frames: Sequence[Frame]) -> None:
        executor, id = self._host.executor, message.id
        if not message.method:
            self._host.actor_server.reply(id)
            return
        if self._host.answer_if_removed(message):
            return
        executor.kept = None
        try:
            running.set(self._host.context_of(message.region))
            args, kwargs = load(message.payload, frames)
            method = self._host.method(message.method)
            spec = self._host.specs.get(message.method)
            takes_port = self._host.takes_port(message.method)
            if takes_port:
                args = (self._host.responses.port(id), *args)
        except BaseException as error:
            self._host.failed(id, error, False, False)
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
            await asyncio.sleep(0)  # the call runs to its first await before the next message is handled
            return
        call = AsyncCall(message, loop.create_task(outcome(lambda: method(*args, **kwargs))), takes_port)
        self._enter(call)
        try:
            await call.task  # faster than asyncio.wait()
        except asyncio.CancelledError:
            if not call.task.done():
                raise
        self._answer(call)
        if executor.is_traced:
            executor.end_tracing()

    def _overlap(self, call: AsyncCall, work: Coroutine[Any, Any, Any]) -> Stepped:
        """Wrap the coroutine of a call, so that the call is the current one of this thread while its steps run."""
        executor, before = self._host.executor, 0
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
        """Register a call for interrupts; this also applies an interrupt that came just before."""
        self._calls[call] = None
        if call.id:
            self._host.executor.interrupters[call.id] = call.interrupt
            if self._host.executor.interrupted == call.id:
                call.interrupt()

    def _leave(self, call: AsyncCall) -> bool:
        """Mark a call as answered, and return whether it was open."""
        if call not in self._calls:
            return False
        del self._calls[call]
        self._host.executor.interrupters.pop(call.id, None)
        return True

    def _answer(self, call: AsyncCall) -> None:
        """Answer a call with its result or error, unless it is already answered."""
        if not self._leave(call):
            return
        try:
            value, error = call.task.result()
            if error is not None:
                raise error
            if call.id and not call.takes_port:
                self._host.actor_server.reply(call.id, value)
        except BaseException as error:
            was_interrupted = call.was_interrupted or self._host.executor.interrupted == call.id
            self._host.failed(call.id, error, was_interrupted, call.takes_port)
            if self._host.death is not None:
                for other in self._calls:
                    other.task.cancel()
                self._wake()

    async def _cancel_calls(self, why: Failure) -> None:
        """Cancel the running calls, and answer them with the reason."""
        tasks = []
        for call in list(self._calls):
            self._leave(call)
            self._host.actor_server.fail(self._host.executor, call.id, why)
            call.task.cancel()
            tasks.append(call.task)
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_S)

    async def _end(self) -> None:
        """Clean up after a failure, as `ActorHost` does for a sync actor."""
        assert self._host.death is not None
        error, self._host.cause = self._host.cause, None
        await self._cancel_calls(self._host.death)
        if hasattr(self._host.instance, "__cleanup__"):
            await self._host.await_children()
        _, problem = await outcome(lambda: self._host.clean_up(error))
        if problem is not None:
            self._host.report_cleanup(problem)
        self._host.release(self._host.death)

    async def _stop(self, loop: asyncio.AbstractEventLoop, message: StopActor) -> None:
        """Stop and clean up, as `ActorHost` does for a sync actor."""
        executor = self._host.executor
        executor.over = True
        why = was_stopped(message)
        await self._cancel_calls(why)
        if self._supervision is not None:
            self._supervision.cancel()
        self._host.children = self._host.actor_server.supervisor.ended(self._host.actor, request=message.id)
        await self._host.await_children()
        call = AsyncCall(message, loop.create_task(outcome(lambda: self._host.clean_up(None))))
        self._enter(call)
        await asyncio.wait([call.task])
        self._host.release(why)
        self._answer(call)

    async def handle_loop_error(self, error: BaseException) -> None:
        """Handle an error in `run` or in a user's task that has ended the loop."""
        failure = self._host.die(error)
        if self._host.instance is None:
            self._host.actor_server.fail(self._host.executor, self._host.executor.current, failure)
        await self._end()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)
