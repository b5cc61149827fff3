"""Describes what a rank is doing at the moment, as plain data, to show why a cell does not end.

This runs on a different thread than the user's code, which may be anywhere, even in native code that never returns. So nothing
here waits for that thread, reads its local variables or raises an exception. (Native code that holds the GIL blocks every
Python thread, this one too.)
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import linecache
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

from monarch_kernel.errors import Frame
from monarch_kernel.runtime.diagnostics.failures import describe_frames, is_machinery, is_of_debugger, is_user
from monarch_kernel.runtime.diagnostics.loop_positions import loop_turn
from monarch_kernel.runtime.diagnostics.thread_frames import frames_of

__all__ = [
    "IN_POOL",
    "Activity",
    "AwaitedCall",
    "Collective",
    "Doing",
    "LoopPlace",
    "awaited_by",
    "describe_thread",
    "with_callers",
]

_log = logging.getLogger(__name__)

awaited_by: list[Callable[[int], str]] = []
"""Functions that say what a thread waits for in other processes; an empty text means nothing, or unknown."""

_MAX_CALL = 120
_MAX_DEPTH = 500
_MAX_COROUTINES = 20
_CALLERS = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/device_mesh.py")
"""Files of torch with functions that users call, and that do collectives of other names."""

_DDP = "/torch/nn/parallel/distributed.py"
_RUN_FOREVER = asyncio.base_events.BaseEventLoop.run_forever.__code__


IN_POOL = ", in a thread of a pool"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that has not completed on a rank.

    Attributes:
        operation: such as ``all_reduce``.
        number: index within the group, counting from 1; the same on all ranks if they run the same collectives. 0 for calls
            that are not counted: sends, receives, ``monitored_barrier`` and ``new_group``.
        group: name of the process group; empty for the default one.
        members: flat ranks that take part.
        shapes: shapes of its inputs, such as ``4x8``; empty if it has none.
        age_s: how long it has been waiting, in seconds.
        thread: the thread that started it.
        peer: the flat rank that a send or receive is for; None for collectives, and for a receive from any rank.
        tag: the tag of a send or receive.
        caller: the function of torch that the user has called, where the operation has another name, such as
            ``all_gather_object``; else empty.
        purpose: what it is for, such as ``DDP's gradients of 0.weight``; empty if that is not known.
    """

    operation: str
    number: int
    group: str = ""
    members: tuple[int, ...] = ()
    shapes: str = ""
    age_s: float = 0.0
    thread: int = 0
    peer: int | None = None
    tag: int = 0
    caller: str = ""
    purpose: str = ""


@dataclass(frozen=True, slots=True)
class AwaitedCall:
    """A call of another process, such as of an actor's endpoint, that code of a rank waits for.

    Attributes:
        description: such as ``trainer.step``.
        procs: numbers of the processes that have not answered.
        age_s: how long it has been waited for, in seconds.
        thread: the thread that waits.
    """

    description: str
    procs: tuple[int, ...]
    age_s: float
    thread: int = 0


@dataclass(frozen=True, slots=True)
class LoopPlace:
    """How far a rank is in a live loop.

    Attributes:
        request: the id of the request that runs it.
        steps: how many steps it has started.
        is_over: whether the loop has ended.
        began: when the current step began, by the clock of `time.time` of the rank; 0 if the loop has ended.
    """

    request: int
    steps: int
    is_over: bool = False
    began: float = 0.0


@dataclass(frozen=True, slots=True)
class Activity:
    """A running request.

    Attributes:
        request: its id.
        executor: ``main`` for cells, ``actor NAME`` for calls; with `IN_POOL` for what a request has left in a thread pool.
        frames: its stack from the user's code inward, outermost first; empty if there is no Python frame.
        call: the innermost call, as written in the innermost frame; empty if unknown.
        thread: the thread that runs it.
        unknown: why the frames could not be read; empty if they could.
        turn: how far the innermost ``for`` loop of a cell is, such as ``step = 4``; empty if it runs none.
        awaits: what it waits for in another process, such as a worker of a DataLoader; empty if that is not known.
        is_coroutine: whether it is in a coroutine of the user's, which an interrupt can only end where it awaits something.
    """

    request: int
    executor: str
    frames: tuple[Frame, ...] = ()
    call: str = ""
    thread: int = 0
    unknown: str = ""
    turn: str = ""
    awaits: str = ""
    is_coroutine: bool = False

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame that is the user's own code."""
        return next((frame for frame in reversed(self.frames) if frame.user), None)


@dataclass(frozen=True, slots=True)
class Doing:
    """The current activities of a rank.

    Attributes:
        activities: its running requests; none if it is idle.
        collectives: those that have not completed, oldest first.
        reached: process group -> number of the last collective that this rank has started in it.
        unknown: why the collectives could not be read; empty if they could.
        aborted: whether the rank has aborted its process groups, which it has not formed again yet.
        rank: its flat rank; -1 if unknown.
        loops: its live loops, the last ones that have ended included.
        calls: the calls of other processes that its code waits for, the oldest first.
        groups: how many process groups it has made or makes, apart from the default one; -1 if it has none.
        loop_ends: the integer variables of the ``for`` loops of its last cell, as far as the cell has set them.
        is_silent: whether it could not say this itself, because native code holds the GIL, or its process is stopped.
        halted: why its process runs nothing, such as ``stopped by a signal``; empty if it runs, or if that is not known.
    """

    activities: tuple[Activity, ...] = ()
    collectives: tuple[Collective, ...] = ()
    reached: dict[str, int] = field(default_factory=dict)
    unknown: str = ""
    aborted: bool = False
    rank: int = -1
    loops: tuple[LoopPlace, ...] = ()
    calls: tuple[AwaitedCall, ...] = ()
    groups: int = -1
    loop_ends: dict[str, int] = field(default_factory=dict)
    is_silent: bool = False
    halted: str = ""


def with_callers(collectives: Sequence[Collective], activities: Sequence[Activity]) -> tuple[Collective, ...]:
    """Add to the last collective of each thread the function of torch that started it, where its name is another one."""
    last = {each.thread: each for each in sorted(collectives, key=lambda each: -each.age_s)}
    callers = {activity.thread: _caller(activity.frames) for activity in activities}
    return tuple(
        replace(each, caller=caller)
        if each is last[each.thread] and (caller := callers.get(each.thread, "")) and not _is_named(each, caller)
        else each
        for each in collectives
    )


def _caller(frames: Sequence[Frame]) -> str:
    """Name the function of torch.distributed that the user's code has called; empty if it has called none."""
    inner = itertools.takewhile(lambda frame: not frame.user, reversed(frames))
    for frame in reversed(list(inner)):
        if frame.file.endswith(_DDP):
            return "DistributedDataParallel"
        if frame.file.endswith(_CALLERS) and not frame.function.startswith(("_", "<")):
            return frame.function
    return ""


def _is_named(call: Collective, caller: str) -> bool:
    """Whether an operation has the name of its function, as ``all_gather`` for ``all_gather_into_tensor``."""
    operation = call.operation.partition(" ")[0]
    rest = caller.removeprefix("i") if call.peer is not None else caller.removeprefix(operation)
    return rest in ("", operation, "_into_tensor", "_tensor", "_single", "_coalesced") or not operation


def describe_thread(thread: int, request: int, executor: str, coroutines: Collection[Any] = ()) -> list[Activity]:
    """Describe what a thread of this process is doing for a request; if its frames can't be read, the activity says why.

    Args:
        thread: identifier of the thread.
        request: id of the request.
        executor: name of the executor that the thread belongs to.
        coroutines: the coroutines of the requests on its event loop, of which several may wait at once.
    """
    try:
        return [_describe(steps, thread, request, executor) for steps in _stacks_of(thread, coroutines)]
    except Exception as error:  # the thread keeps running and its frames change, which must not fail the request
        _log.exception("can't read the frames of thread %d", thread)
        return [Activity(request, executor, thread=thread, unknown=f"{type(error).__name__}: {error}")]


def _describe(frames: Sequence[FrameType], thread: int, request: int, executor: str) -> Activity:
    steps = [(each, each.f_lineno or 1, each.f_lasti) for each in frames]
    described = tuple(describe_frames(((f, line, line) for f, line, _ in steps), with_variables=False))
    shown = [step for step in steps if not is_machinery(step[0].f_code.co_filename)]
    turn = next((text for each, line, _ in reversed(steps) if is_user(each) and (text := loop_turn(each, line))), "")
    awaits = next(filter(None, (each(thread) for each in awaited_by)), "")
    call = _call(*shown[-1]) if shown else ""
    is_coroutine = any(each.f_code.co_flags & inspect.CO_COROUTINE and is_user(each) for each in frames)
    return Activity(request, executor, described, call, thread, turn=turn, awaits=awaits, is_coroutine=is_coroutine)


def _stacks_of(thread: int, coroutines: Collection[Any]) -> list[list[FrameType]]:
    """Return the frames of a thread, outermost first, and those of each coroutine that waits on its event loop."""
    frames: list[FrameType] = []
    loop: Any = None
    for frame in frames_of(thread, _MAX_DEPTH):
        frames.append(frame)
        if frame.f_code is _RUN_FOREVER:
            loop = frame.f_locals.get("self")
            break
    frames.reverse()
    frames = list(itertools.takewhile(lambda each: not is_of_debugger(each), frames))
    if loop is None:
        return [frames]
    idle = all(is_machinery(each.f_code.co_filename) or _is_of_asyncio(each) for each in frames)
    if not coroutines:
        return [_awaiting(loop) or frames] if idle else [frames]
    some = itertools.islice(coroutines, _MAX_COROUTINES)
    waiting = [found for each in some if _is_of_user(found := list(_frames_of_coroutine(each)))]
    return waiting if idle and waiting else [frames, *waiting]


def _is_of_asyncio(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in ("asyncio", "selectors")


def _awaiting(loop: Any) -> list[FrameType]:
    """Return the frames of the coroutine that a request runs in; for a loop that is idle."""
    for task in asyncio.all_tasks(loop):
        frames = list(_frames_of_coroutine(task.get_coro()))
        if _is_of_user(frames) and is_machinery(frames[0].f_code.co_filename):  # it wraps the user's coroutine
            return frames
    return []


def _is_of_user(frames: Sequence[FrameType]) -> bool:
    return any(not (is_machinery(frame.f_code.co_filename) or _is_of_asyncio(frame)) for frame in frames)


def _frames_of_coroutine(coroutine: Any) -> Iterator[FrameType]:
    for _ in range(_MAX_DEPTH):
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def _call(frame: FrameType, line: int, instruction: int) -> str:
    """Return the source of the expression that a frame is evaluating: ``work.wait()``."""
    if sys.version_info < (3, 11) or instruction < 0:
        return ""
    first, last, begin, end = _position(frame.f_code, instruction)
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)[first - 1 : last]
    if not lines:
        return ""
    encoded = [text.encode() for text in lines]  # columns count bytes of UTF-8
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][begin:]
    text = " ".join(b"".join(encoded).decode(errors="replace").split())
    return text if len(text) <= _MAX_CALL else text[: _MAX_CALL - 1] + "…"


def _position(code: CodeType, instruction: int) -> Sequence[int | None]:
    return next(itertools.islice(code.co_positions(), instruction // 2, None), (None,) * 4)
