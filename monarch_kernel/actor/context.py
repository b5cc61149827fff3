"""The context of the running endpoint: its actor, and the mesh that the caller addressed.

The context is in a context variable, which asyncio copies into tasks and into `asyncio.to_thread`. Python 3.10 to 3.13 do not
copy context variables into a `threading.Thread` or into the work of a `concurrent.futures.ThreadPoolExecutor`, and 3.14 does so
only with ``-X thread_inherit_context``. `carry_into_threads` adds this for this one variable. It replaces two methods of the
standard library, as OpenTelemetry does for the same reason:
https://github.com/open-telemetry/opentelemetry-python-contrib/tree/main/instrumentation/opentelemetry-instrumentation-threading
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeAlias

from monarch_kernel.base.mesh import Extent, Point
from monarch_kernel.runtime.rpc.handles import PROCESS
from monarch_kernel.runtime.worker.executor import Executor, working

__all__ = [
    "ActorAborted",
    "ActorInstance",
    "Context",
    "Creator",
    "Host",
    "Lineage",
    "belongs_to",
    "carry_into_threads",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "running",
]


class Host(Protocol):
    """What makes and ends an actor here."""

    cls: type
    creator: Creator

    def stop_itself(self, reason: str) -> None:
        """Stop the actor after its current message."""
        ...


class Creator(int):
    """What has spawned an actor: another actor, or code outside of actors. It is the `actor_id` of that, with more about it.

    Attributes:
        name: the name given to ``spawn``; ``client`` for code outside of actors.
        class_name: the module and the name of the class; None for code outside of actors.
        rank: its point in its mesh as spawned.
        creator: what has spawned that, in turn; None for code outside of actors.
    """

    name: str
    class_name: str | None
    rank: Point
    creator: Creator | None

    @classmethod
    def from_lineage(cls, lineage: Lineage) -> Creator:
        """Make it from what `ActorInstance.lineage` gives in the process that spawns."""
        creator: Creator | None = None
        for number, name, class_name, axes, rank in reversed(lineage or (_CLIENT_ONLY,)):
            found = cls(number)
            found.name, found.class_name, found.rank = name, class_name, Point(rank, Extent(axes))
            found.creator, creator = creator, found
        assert creator is not None
        return creator

    def __bool__(self) -> bool:
        return True  # also for the program, whose number is 0: code for Monarch walks up while there is a creator

    def __repr__(self) -> str:
        return _qualified_name(self)


Lineage: TypeAlias = tuple[tuple[int, str, "str | None", tuple[tuple[str, int], ...], int], ...]
"""An actor and all that have led to it, from the last to the program: number, name, class, axes of the mesh, and rank."""


@dataclass(frozen=True, slots=True, repr=False)
class ActorInstance:
    """One actor on one rank.

    Attributes:
        name: the name given to ``spawn``; ``client`` outside of actors.
        actor_id: number of the spawn in its session; 0 outside of actors.
        rank: the actor's point in the mesh as spawned.
    """

    name: str
    actor_id: int
    rank: Point
    _procs: Any = None
    _flat: int = 0
    _host: Host | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        return _qualified_name(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorInstance, (self.name, self.actor_id, self.rank, self._procs, self._flat)

    @property
    def proc_mesh(self) -> Any:
        """The processes that the actor was spawned on; for the program, its own process. None for another program."""
        return PROCESS.program_mesh() if self is _ROOT.actor_instance else self._procs

    @property
    def proc(self) -> Any:
        """The process of the actor, as a mesh without axes; None for another program."""
        return self.proc_mesh if self._procs is None else self._procs.process(self._flat)

    @property
    def proc_id(self) -> str:
        """The name of its process, such as ``trainers[3]``; ``client`` for the program itself."""
        return _CLIENT if self._procs is None else f"{self._procs.name}[{self._flat}]"

    @property
    def class_name(self) -> str | None:
        """The module and the name of the actor's class; None outside of actors."""
        cls = None if self._host is None else self._host.cls
        return None if cls is None else f"{cls.__module__}.{cls.__qualname__}"

    @property
    def creator(self) -> Creator | None:
        """What has spawned this actor, which is also its `actor_id`: 0 for code outside of actors. None outside of actors."""
        return None if self._host is None else self._host.creator

    @property
    def lineage(self) -> Lineage:
        """This actor and all that have led to it, for an actor that it spawns."""
        found: ActorInstance | Creator | None = self
        each = []
        while found is not None:
            number = found.actor_id if isinstance(found, ActorInstance) else int(found)
            each.append((number, found.name, found.class_name, tuple(found.rank.extent.items()), found.rank.rank))
            found = found.creator
        return tuple(each)

    def stop(self, reason: str = "stopped by itself") -> None:
        """Stop this actor after its current message, and run its ``__cleanup__``.

        Raises:
            RuntimeError: the code runs outside of actors.
        """
        self._here("stop").stop_itself(reason)

    def abort(self, reason: str = "aborted by itself") -> NoReturn:
        """End this actor with a failure, which its owner gets. It raises, so the endpoint that calls it ends, too.

        Raises:
            RuntimeError: the code runs outside of actors.
            ActorAborted: otherwise.
        """
        self._here("abort")
        raise ActorAborted(reason)

    kill = abort

    def _here(self, what: str) -> Host:
        if self._host is None:
            raise RuntimeError(f"{what}() ends the actor whose code calls it, and no actor of this process does")
        return self._host


class ActorAborted(BaseException):
    """An actor ends itself by `ActorInstance.abort`."""


@dataclass(frozen=True, slots=True)
class Context:
    """What an endpoint can learn about itself.

    Attributes:
        actor_instance: the running actor.
        message_rank: its point in the mesh that the caller addressed.
    """

    actor_instance: ActorInstance
    message_rank: Point


def _qualified_name(found: ActorInstance | Creator | None) -> str:
    """Name an actor after all that have led to it: ``<client>.<trainers.Trainer trainers{'gpus': 1/2}>``."""
    names = []
    while found is not None:
        kind = f"{found.class_name} " if found.class_name else ""
        names.append(f"<{kind}{found.name}{found.rank if found.rank else ''}>")
        found = found.creator
    return ".".join(reversed(names))


_NOWHERE = Point(0, Extent())
_CLIENT = "client"
_CLIENT_ONLY = (0, _CLIENT, None, (), 0)
_ROOT = Context(ActorInstance(_CLIENT, 0, _NOWHERE), _NOWHERE)

running: ContextVar[Context | None] = ContextVar("monarch_kernel_context", default=None)
"""The context of the running endpoint. The host of an actor sets it before each endpoint."""

_STARTED_IN = "_monarch_kernel_context"
"""The attribute of a thread that holds the context in which it was started."""


def belongs_to(thread: threading.Thread, context: Context) -> None:
    """Make this the context of a thread's code outside of endpoints."""
    setattr(thread, _STARTED_IN, context)


@functools.cache
def carry_into_threads() -> None:
    """From now on, run new threads of this process, and work for its thread pools, in the context of the caller.

    The executor of the caller also knows the work for thread pools: an interrupt can't end what runs there.
    """
    start = threading.Thread.start
    submit: Callable[..., Future[Any]] = ThreadPoolExecutor.submit

    @functools.wraps(start)
    def start_with_context(self: threading.Thread) -> None:
        belongs_to(self, context())
        start(self)

    @functools.wraps(submit)
    def submit_with_context(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        executor = working.get()
        request = 0 if executor is None else executor.current
        return submit(
            self, _run_in, context(), executor, request, fn, *args, **kwargs
        )  # other actors may use the same pool

    threading.Thread.start = start_with_context  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submit_with_context  # type: ignore[method-assign, assignment]


def _run_in(
    context: Context,
    executor: Executor | None,
    request: int,
    function: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    before, thread = running.set(context), threading.get_ident()
    if executor is not None:
        executor.pool_work[thread] = request
    try:
        return function(*args, **kwargs)
    finally:
        if executor is not None:
            executor.pool_work.pop(thread, None)
        running.reset(before)


def _of_process() -> Context:
    """Return the context of code outside of actors; on a rank, it holds the rank's point in its mesh."""
    place = PROCESS.proc
    if place is None:
        return _ROOT
    whole, (rank,) = place.whole, place.ranks
    point = whole.extent.point(rank)
    return Context(ActorInstance(_CLIENT, 0, point, whole, rank), point)


def context() -> Context:
    """Return the context of the running endpoint, also in threads that the endpoint starts.

    Outside of actors, this is the context of the process. On a rank (in cells, and in threads that native code starts) that is
    the rank's point in its mesh; in the program, rank 0 of a mesh without axes.
    """
    return running.get() or getattr(threading.current_thread(), _STARTED_IN, None) or _of_process()


def current_rank() -> Point:
    """Return the point of this actor in the mesh that the caller addressed; outside of actors, of this process in its mesh."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """Return the axes and sizes of the mesh that the caller addressed; outside of actors, of the mesh of this process."""
    return dict(context().message_rank.extent)


def current_actor_name() -> str:
    """Return the name of the running actor; ``client`` outside of actors."""
    return context().actor_instance.name
