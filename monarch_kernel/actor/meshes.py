"""What the controller holds: meshes of hosts, of processes and of actors."""

from __future__ import annotations

import inspect
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NoReturn, TypeVar, cast

from monarch_kernel.actor.actor import Actor, Endpoint, EndpointSpec, endpoints_of, sources_of
from monarch_kernel.actor.rankwise import apply_messages, by_rank, push_messages
from monarch_kernel.agent.logs import LogRecord
from monarch_kernel.agent.processes import gpu_ids
from monarch_kernel.controller.effects import Answer, Value
from monarch_kernel.controller.future import Future
from monarch_kernel.controller.runtime import Listener
from monarch_kernel.controller.session import Session, close_session, current_session
from monarch_kernel.describe.stacks import Doing
from monarch_kernel.errors import ActorError, Failure, RanksError, RemoteError, SupervisionError, format_ranks
from monarch_kernel.events import MeshView, StopEvent
from monarch_kernel.mesh import Extent, Point, Region, Shaped, ValueMesh
from monarch_kernel.transport.driver import Waiter
from monarch_kernel.wire.codec import Packed, dump, dump_call, load, pack
from monarch_kernel.wire.messages import (
    Call,
    Complete,
    Inspect,
    ListErrors,
    Look,
    Ping,
    PostMortem,
    Pull,
    Push,
    RankSpec,
    Run,
    Spawn,
    StopActor,
)

__all__ = ["ActorMesh", "CellResult", "HostMesh", "ProcMesh", "gather", "shutdown_context", "this_host"]

A = TypeVar("A", bound=Actor)
T = TypeVar("T")

Device = Literal["auto", "cpu", "cuda"]


def gather(
    region: Region, what: str, error: type[RanksError], read: Callable[[Value], T], base: Extent | None = None
) -> Callable[[Sequence[Answer]], ValueMesh[T]]:
    """Make a function that turns the answers of a region's ranks into a mesh of values, or raises.

    Args:
        region: where the answers come from, in order.
        what: what was asked, in the user's words.
        error: raised if ranks failed; a `SupervisionError` if one was lost or had been stopped.
        read: gives the value of an answer.
        base: the mesh as spawned, if errors are to name the ranks there, and not within the region.
    """

    def point_of(index: int) -> Point:
        return region.extent.point(index) if base is None else base.point(region.ranks[index])

    def finish(answers: Sequence[Answer]) -> ValueMesh[T]:
        values = [read(answer) for answer in answers if not isinstance(answer, Failure)]
        if len(values) == len(answers):
            return ValueMesh(region, values)
        reports: dict[Point, Failure] = {}
        succeeded: list[Point] = []
        for i, answer in enumerate(answers):
            if not isinstance(answer, Failure):
                succeeded.append(point_of(i))
            elif answer.etype != "NotSent":
                reports[point_of(i)] = answer
        gone = any(report.kind in ("lost", "stopped") for report in reports.values())
        said = what
        if len(reports) < len(answers) - len(values):
            dead = format_ranks(point.rank for point in reports)
            said = f"{what}: it was not sent, because {dead} are gone; slice them out, or bring the mesh up again"
        raise (SupervisionError if gone else error)(said, reports, dict(zip(succeeded, values)))

    return finish


def _read(answer: Value) -> Any:
    return load(answer.payload, answer.frames)


class CellResult:
    """What a cell gave on one rank.

    Attributes:
        value: of its last expression; None unless it was asked for.
        bundle: how the value looks: MIME type -> data; empty if there is nothing to show.
    """

    __slots__ = ("bundle", "value")

    def __init__(self, value: Any, bundle: dict[str, object]) -> None:
        self.value = value
        self.bundle = bundle


class HostMesh(Shaped):
    """Machines of a session."""

    def __init__(self, session: Session, region: Region, hosts: Sequence[int]) -> None:
        self._session = session
        self._region = region
        self._hosts = hosts

    def __repr__(self) -> str:
        return f"<HostMesh {self.extent}>"

    def _with_region(self, region: Region) -> HostMesh:
        return HostMesh(self._session, region, self._hosts)

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        *,
        name: str = "",
        env: Mapping[str, str] | None = None,
        device: Device = "auto",
    ) -> ProcMesh:
        """Start processes on every host; returns at once, the first answer waits for them.

        Args:
            per_host: axis -> number of processes along it on each host, such as ``{"gpus": 8}``.
            name: what the mesh is called in messages.
            env: added to the environment of the processes.
            device: ``cuda`` gives each process a GPU of its own, ``cpu`` none; ``auto`` is ``cuda`` where there are GPUs.

        Raises:
            TypeError: a name or a value of ``env`` is no str.
            ValueError: an axis is named twice, or there are fewer GPUs than processes.
        """
        for key, value in (env or {}).items():
            _check_type(f"env[{key!r}]", value, str)
        _check_type("name", name, str)
        local = Extent(per_host or {})
        extent = Extent([*self.extent.items(), *local.items()])
        per = local.nelements
        gpus = gpu_ids()
        if device == "auto":
            device = "cuda" if gpus else "cpu"
        if device == "cuda" and per > len(gpus):
            raise ValueError(
                f"{per} processes with a GPU each were asked for, and this machine has {len(gpus)} GPUs; "
                "ask for fewer, or for device='cpu'"
            )
        runtime = self._session.runtime
        world = extent.nelements
        procs = tuple(runtime.new_proc() for _ in range(world))
        name = name or f"procs{procs[0]}"
        for i, base in enumerate(self._region.ranks):
            specs = [
                RankSpec(
                    proc=procs[i * per + local_rank],
                    rank=i * per + local_rank,
                    world_size=world,
                    local_rank=local_rank,
                    local_world_size=per,
                    axes=tuple(extent.items()),
                    mesh=name,
                    device=device,
                    threads=max(1, len(os.sched_getaffinity(0)) // per),
                    env={
                        "GLOO_SOCKET_IFNAME": "lo",  # else gloo takes the interface that the host's name resolves to
                        **(env or {}),
                        "CUDA_VISIBLE_DEVICES": gpus[local_rank] if device == "cuda" else "",
                    },
                    cwd=os.getcwd(),
                    sys_path=tuple(sys.path),
                    record=self._session.record_of(procs[i * per + local_rank]),
                )
                for local_rank in range(per)
            ]
            runtime.start_ranks(self._hosts[base], specs)
        return ProcMesh(self._session, Region.whole(extent), procs, name, time.monotonic(), extent)

    def shutdown(self) -> Future[None]:
        """End the session: all processes and agents."""
        return shutdown_context()


class ProcMesh(Shaped):
    """Processes, one a rank; cells run on them, and actors are spawned on them."""

    def __init__(
        self, session: Session, region: Region, procs: Sequence[int], name: str, born: float, extent: Extent
    ) -> None:
        self._session = session
        self._runtime = session.runtime
        self._region = region
        self._base = procs
        self._born = born
        self._as_spawned = extent
        self.name = name

    def __repr__(self) -> str:
        return f"<ProcMesh {self.name} {self.extent}>"

    def _with_region(self, region: Region) -> ProcMesh:
        return ProcMesh(self._session, region, self._base, self.name, self._born, self._as_spawned)

    @cached_property
    def procs(self) -> tuple[int, ...]:
        """Numbers of the processes, unique in the session."""
        return tuple(self._base[rank] for rank in self._region.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Flat ranks in the mesh as it was spawned."""
        return tuple(self._region.ranks)

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the mesh as it was spawned."""
        return len(self._region) == len(self._base)

    @property
    def whole(self) -> ProcMesh:
        """All of the mesh as it was spawned."""
        return self._with_region(Region.whole(self._as_spawned))

    @property
    def initialized(self) -> Future[bool]:
        """Resolves when every process is up and has done what it was sent before."""
        finish = gather(self._region, f"starting {self.name}", SupervisionError, _read, self._as_spawned)

        def up(answers: Sequence[Answer]) -> bool:
            finish(answers)
            return True

        return self._runtime.request(self.procs, lambda id: pack(Ping(id)), "ping", up, quiet=True)

    def run_cell(
        self, code: str, *, cell: int = 0, want_value: bool = False, listen: Listener | None = None
    ) -> Future[ValueMesh[CellResult]]:
        """Run code in the namespace of every rank, as a cell.

        Args:
            code: IPython syntax.
            cell: number to show in tracebacks and in the view.
            want_value: whether the value of the last expression is to be sent here.
            listen: gets what the cell writes and displays, on the leading thread; without it that is printed.
        """
        _check_type("code", code, str)
        note = f"cell [{cell}]" if cell else "a cell"

        def read(answer: Value) -> CellResult:
            return CellResult(_read(answer), answer.bundle)

        finish = gather(self._region, f"{note} failed on {self.name}", RemoteError, read, self._as_spawned)
        return self._runtime.request(
            self.procs,
            lambda id: pack(Run(id, code, cell, want_value)),
            note,
            finish,
            listen=listen,
            is_cell=cell > 0,
        )

    def run(self, code: str) -> Future[ValueMesh[Any]]:
        """Run code in the namespace of every rank; gives the value of its last expression."""
        _check_type("code", code, str)
        finish = gather(self._region, f"code failed on {self.name}", RemoteError, _read, self._as_spawned)
        return self._runtime.request(self.procs, lambda id: pack(Run(id, code, 0, True)), "code", finish)

    def __getitem__(self, key: Any) -> Any:
        """``mesh["x"]`` pulls a variable as a `ValueMesh`; ``mesh[0]``, ``mesh[0:4]``, ``mesh[0, 1:3]`` give slices.

        A list gives the ranks with these places, along one axis: ``mesh[[0, 1, 3]]``; a `Point` gives the rank there.
        """
        if isinstance(key, list):
            ranks = [self._region.ranks[index] for index in key]
            return self._with_region(Region(Extent({"ranks": len(ranks)}), tuple(ranks)))
        if isinstance(key, Point):
            return self._with_region(self._region.slice(**key))
        if not isinstance(key, str):
            if isinstance(key, tuple) and any(isinstance(each, str) for each in key):
                raise TypeError(f"{self.name}[...] takes a slice or a name, not both; such as {self.name}[0:2]['x']")
            return self._with_region(self._region.index(key))
        _check_name(key)
        finish = gather(self._region, f"pulling {key!r} from {self.name} failed", RemoteError, _read, self._as_spawned)
        return self._runtime.request(
            self.procs, lambda id: pack(Pull(id, key)), f"pull {key!r}", finish, quiet=True
        ).get()

    def __setitem__(self, key: str, value: Any) -> None:
        """Push a value to every rank's namespace, and wait until it is there.

        Of a `ValueMesh` every rank gets its own value; `per_rank` makes one of a list.

        Raises:
            ValueError: a `ValueMesh` has another extent.
            PayloadError: the value can't be sent.
        """
        _check_name(key)
        make: Callable[[int], Packed | Sequence[Packed]]
        if isinstance(value, ValueMesh):
            make = push_messages(key, by_rank(self._region, value, f"{self.name}[{key!r}]"), self.ranks)
        else:
            payload, frames = dump(value, f"the value for {key!r} (a {type(value).__name__})")
            make = lambda id: pack(Push(id, key, payload), frames)  # noqa: E731
        finish = gather(self._region, f"pushing {key!r} to {self.name} failed", RemoteError, _read, self._as_spawned)
        self._runtime.request(self.procs, make, f"push {key!r}", finish, quiet=True).get()

    def per_rank(self, values: Iterable[T]) -> ValueMesh[T]:
        """One value for each rank, in their order, for pushing: ``mesh["lr"] = mesh.per_rank([1e-3, 3e-4])``.

        Raises:
            ValueError: they are too few or too many.
        """
        return by_rank(self._region, values, f"{self.name}.per_rank()")

    def map(self, function: Callable[..., T], *values: Iterable[Any]) -> Future[ValueMesh[T]]:
        """Call a function on every rank, with the rank's own value of each list or `ValueMesh`, where cells run.

        The function travels with what it refers to here; a name that is not defined here means the rank's variable.

        Raises:
            TypeError: it is no plain function, or can't be sent.
            ValueError: there is not one value for each rank.
        """
        given = [by_rank(self._region, each, f"{self.name}.map(): values {i}") for i, each in enumerate(values, 1)]
        make = apply_messages(function, given, self.ranks)
        note = f"{getattr(function, '__name__', 'a function')}()"
        finish = gather(self._region, f"{note} failed on {self.name}", RemoteError, _read, self._as_spawned)
        return self._runtime.request(self.procs, make, note, finish)

    def spawn(self, name: str, cls: type[A], *args: Any, **kwargs: Any) -> A:
        """Make an actor of a class on every rank; returns at once, a handle with the class's endpoints.

        Raises:
            TypeError: the arguments do not fit the constructor, or can't be sent.
            ValueError: the class is no `Actor`, or its endpoints can't be.
            SupervisionError: ranks were stopped.
        """
        _check_type("name", name, str)
        endpoints = endpoints_of(cls, _RESERVED)
        if cls.__init__ is object.__init__:
            if args or kwargs:
                raise TypeError(f"{cls.__name__}() takes no arguments")
        else:
            try:
                inspect.signature(cls).bind(*args, **kwargs)
            except TypeError as error:
                signature = inspect.signature(cls).replace(return_annotation=inspect.Signature.empty)
                raise TypeError(f"{cls.__name__}{signature}: {error}") from None
        stopped = {rank: death for rank, death in self.deaths().items() if death.kind == "stopped"}
        if stopped:
            reports = {self._as_spawned.point(rank): death for rank, death in stopped.items()}
            raise SupervisionError(f"spawning {name} on {self.name} failed: it was not sent", reports, {})
        payload, frames = dump((cls, args, kwargs), f"class {cls.__name__} or its arguments")
        mesh = ActorMesh(self, self._region, name, self._session.new_actor(), cls, endpoints)
        # Ranks know their place in the process mesh as spawned; a mesh of actors on a slice counts from there.
        mesh.announce(payload, frames)
        return cast(A, mesh)

    def post_mortem(self, request: int) -> Future[ValueMesh[None]]:
        """Open the debugger where a request failed; resolves when it is left. Its prompts are told to who watches."""
        finish = gather(self._region, f"debugging {self.name}", RemoteError, _read, self._as_spawned)
        return self._runtime.request(
            self.procs, lambda id: pack(PostMortem(id, request)), "a post-mortem", finish, quiet=True
        )

    def stops(self) -> list[StopEvent]:
        """What stands still in the debugger on these ranks, by rank."""
        return self._runtime.stops(self.procs)

    def interrupt(self, *, abort: bool = False) -> None:
        """Interrupt whatever the ranks run; idle ones are not touched.

        Args:
            abort: whether to abort the process groups of ranks that do not stop otherwise.
        """
        self._runtime.interrupt_ranks(self.procs, abort=abort)

    def doing(self) -> Future[dict[int, Doing | Failure]]:
        """What every rank does now, by flat rank; a rank that is not up answers with a `Failure`.

        It takes milliseconds, whatever the ranks run; one whose native code holds the GIL answers when that ends. The
        future then ends by ``cancel()``, with a `Failure` for each such rank.
        """

        def finish(answers: Sequence[Answer]) -> dict[int, Doing | Failure]:
            read = [answer if isinstance(answer, Failure) else _read(answer) for answer in answers]
            return dict(zip(self.ranks, read, strict=True))

        return self._runtime.ask(self.procs, lambda id: pack(Look(id)), finish)

    def stop(self, reason: str = "stopped by client", *, grace_s: float = 2.0) -> Future[None]:
        """End the processes: those that take longer than ``grace_s`` seconds are killed."""
        self._runtime.stop_ranks(self.procs, reason, grace_s)
        return self._runtime.request((), lambda id: pack(Ping(id)), "", lambda answers: None)

    def deaths(self) -> dict[int, Failure]:
        """Flat rank -> how it ended, of the ranks that are dead or stopped."""
        found = self._runtime.deaths(self.procs)
        return {rank: found[proc] for rank, proc in zip(self.ranks, self.procs) if proc in found}

    def names(self) -> dict[int, dict[str, str]]:
        """Flat rank -> the names that cells have defined there -> what kind of thing each is; the ranks are not asked."""
        return dict(zip(self.ranks, self._runtime.names(self.procs)))

    def look(self, rank: int, make: Callable[[int], Complete | Inspect | ListErrors]) -> Future[Any]:
        """Ask one rank about its namespace, or the errors it keeps; it answers at once, whatever it runs.

        Args:
            rank: flat rank in the mesh as it was spawned.
            make: gives the message for a request id.
        """

        def read(answers: Sequence[Answer]) -> Any:
            return None if isinstance(answers[0], Failure) else _read(answers[0])

        return self._runtime.ask((self._base[rank],), lambda id: pack(make(id)), read)

    def logs(self) -> dict[int, list[LogRecord]]:
        """Flat rank -> the youngest part of all that it wrote, some megabytes; of dead ranks, too, until they are stopped."""
        return {rank: self._session.log(proc) for rank, proc in zip(self.ranks, self.procs)}

    def view(self) -> MeshView:
        """The mesh as it is now, for showing."""
        return self._runtime.view(self._base, self.name, dict(self._as_spawned), time.monotonic() - self._born)


class ActorMesh(Shaped):
    """Actors of one class, one a rank; its endpoints are attributes."""

    def __init__(
        self,
        procs: ProcMesh,
        region: Region,
        name: str,
        actor: int,
        cls: type[Actor],
        endpoints: dict[str, EndpointSpec],
        born_on: Region | None = None,
    ) -> None:
        self._proc_mesh = procs
        self._runtime = procs._runtime
        self._born_on = born_on or region
        self._region = region
        self._actor = actor
        self._cls = cls
        self._endpoints = endpoints
        self._initialized: Future[bool] | None = None
        self.name = name
        self._procs = tuple(procs._base[rank] for rank in region.ranks)
        self._packed = None if region is self._born_on else region.pack()

    def __repr__(self) -> str:
        return f"<ActorMesh {self.name} of {self._cls.__name__} {self.extent}>"

    def _with_region(self, region: Region) -> ActorMesh:
        part = ActorMesh(self._proc_mesh, region, self.name, self._actor, self._cls, self._endpoints, self._born_on)
        part._initialized = self._initialized
        return part

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"actor mesh {self.name!r} can't travel to a rank: calls between ranks are not supported yet")

    def __getattr__(self, name: str) -> Any:
        spec = self.__dict__.get("_endpoints", {}).get(name)
        if spec is None:
            have = ", ".join(sorted(self.__dict__.get("_endpoints", {}))) or "none"
            raise AttributeError(f"{self._cls.__name__} has no endpoint {name!r}; it has: {have}")
        bound = _BoundEndpoint(self, spec)
        self.__dict__[name] = bound
        return bound

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._endpoints})

    def announce(self, payload: Any, frames: Any) -> None:
        """Send the spawn; for `ProcMesh.spawn`."""
        finish = gather(self._region, f"spawning {self.name} failed", ActorError, _read)

        def up(answers: Sequence[Answer]) -> bool:
            finish(answers)
            return True

        region, sources = self._region.pack(), sources_of(self._cls)
        self._initialized = self._runtime.request(
            self._procs,
            lambda id: pack(Spawn(id, self._actor, self.name, region, payload, sources), frames),
            f"{self.name}.__init__",
            up,
        )

    @property
    def initialized(self) -> Future[bool]:
        """Resolves when every actor's constructor has run, or raises what it raised."""
        assert self._initialized is not None
        return self._initialized

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Stop the actors; calls from now on raise."""
        finish = gather(self._region, f"stopping {self.name}", ActorError, _read)

        def stopped(answers: Sequence[Answer]) -> None:
            finish(answers)

        return self._runtime.request(
            self._procs, lambda id: pack(StopActor(id, self._actor, reason)), f"{self.name}.stop", stopped
        )


class _BoundEndpoint(Endpoint[Any, Any]):
    """An endpoint of a mesh."""

    def __init__(self, mesh: ActorMesh, spec: EndpointSpec) -> None:
        self._spec = spec
        self._mesh = mesh
        self._note = f"{mesh.name}.{spec.name}"
        self._finish = gather(mesh._region, f"{self._note}() failed on {mesh.name}", ActorError, _read)
        self.__doc__ = spec.__doc__

    def __repr__(self) -> str:
        return f"<endpoint {self._note}{self._spec.signature} on {self._mesh.extent}>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{self._note} is an endpoint: say how to call it with .call(), .call_one(), .choose(), .stream() "
            "or .broadcast()"
        )

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[int], Any]:
        spec, mesh = self._spec, self._mesh
        spec.check(args, kwargs)
        payload, frames = dump_call(args, kwargs, spec.names)
        return lambda id: pack(Call(id, mesh._actor, spec.name, mesh._packed, payload), frames)

    def call(self, *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        """Call it on every rank; the result has the shape of the mesh."""
        mesh = self._mesh
        return mesh._runtime.request(mesh._procs, self._make(args, kwargs), self._note, self._finish)

    def call_one(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it on a mesh of exactly one actor."""
        mesh = self._mesh
        if len(mesh._procs) != 1:
            raise ValueError(
                f"{self._note}.call_one() needs a mesh of one actor, this one has {len(mesh._procs)}: {mesh.extent}; "
                "slice it, or use .call()"
            )
        return mesh._runtime.request(mesh._procs, self._make(args, kwargs), self._note, self._finish_one)

    def _finish_one(self, answers: Sequence[Answer]) -> Any:
        answer = answers[0]
        return self._finish(answers).values()[0] if isinstance(answer, Failure) else _read(answer)

    def _call_at(self, index: int, make: Callable[[int], Any]) -> Future[Any]:
        mesh = self._mesh
        point = mesh.extent.point(index)
        one = Region(mesh.extent, mesh._region.ranks)

        def finish(answers: Sequence[Answer]) -> Any:
            answer = answers[0]
            if not isinstance(answer, Failure):
                return _read(answer)
            gone = answer.kind in ("lost", "stopped")
            raise (SupervisionError if gone else ActorError)(f"{self._note}() failed on {mesh.name}", {point: answer})

        rank = one.ranks[index]
        return mesh._runtime.request((mesh._procs[index],), make, self._note, finish, rank)

    def choose(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it on one actor, chosen at random."""
        return self._call_at(random.randrange(len(self._mesh._procs)), self._make(args, kwargs))

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Future[Any]]:
        """Call it on every rank; gives one future each, with its ``.rank``, in the order in which answers come."""
        make = self._make(args, kwargs)
        futures = [self._call_at(i, make) for i in range(len(self._mesh._procs))]
        return _as_they_come(self._mesh, futures)

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Call it on every rank, and do not wait for answers; there are none."""
        mesh = self._mesh
        mesh._runtime.tell(mesh._procs, self._make(args, kwargs)(0))


def _as_they_come(mesh: ActorMesh, futures: Sequence[Future[Any]]) -> Iterator[Future[Any]]:
    arrived: deque[Future[Any]] = deque()
    waiter = Waiter()

    def note(future: Future[Any]) -> Callable[[], None]:
        def arrive() -> None:
            arrived.append(future)
            waiter.set()

        return arrive

    for future in futures:
        future.add_done_callback(note(future))
    for _ in futures:
        while not arrived:
            waiter.ready = False
            if not arrived:
                mesh._runtime.wait(waiter, None)
        yield arrived.popleft()


_RESERVED = frozenset(name for name in {*dir(ActorMesh), "name", "initialized"} if not name.startswith("__"))


def _check_type(what: str, value: object, expected: type) -> None:
    if not isinstance(value, expected):
        raise TypeError(f"{what} must be a {expected.__name__}, not {value!r} (of type {type(value).__name__})")


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{name!r} is no variable name; a mesh takes mesh['x'] for a variable, mesh[0:2] for a slice")


def this_host() -> HostMesh:
    """The machine of the caller, as a mesh of one host with no axes."""
    session = current_session()
    return HostMesh(session, Region.whole(Extent()), (session.local_host(),))


def shutdown_context() -> Future[None]:
    """End the session of this process: every mesh, process and agent. A later `this_host` starts a new one."""
    return close_session()
