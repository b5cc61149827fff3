"""Meshes of actors, and how their endpoints are called."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from monarch_kernel.actor.actor import Actor, Endpoint, EndpointSpec, from_outline, sources_of
from monarch_kernel.actor.answers import gather, read_value
from monarch_kernel.actor.context import running
from monarch_kernel.asking.answer import Answer
from monarch_kernel.asking.asker import Asker
from monarch_kernel.asking.future import Future
from monarch_kernel.asking.home import opener
from monarch_kernel.errors import ActorError, Failure, SupervisionError
from monarch_kernel.mesh import Extent, Region, Shaped, ValueMesh
from monarch_kernel.transport.driver import Waiter
from monarch_kernel.wire.codec import Packed, dump_call, pack
from monarch_kernel.wire.messages import (
    Call,
    Spawn,
    StopActor,
)

__all__ = ["RESERVED", "ActorMesh", "living_actors"]


class Procs(Protocol):
    """What a mesh of actors needs of the mesh of processes that it is on."""

    _asker: Asker
    _base: Sequence[int]


class ActorMesh(Shaped):
    """Actors of one class, one a rank; its endpoints are attributes."""

    def __init__(
        self,
        procs: Procs,
        region: Region,
        name: str,
        actor: int,
        cls: type[Actor] | str,
        endpoints: dict[str, EndpointSpec],
        born_on: Region | None = None,
    ) -> None:
        self._proc_mesh = procs
        self._asker = procs._asker
        self._born_on = born_on or region
        self._region = region
        self._actor = actor
        self._cls = cls
        self._kind = cls if isinstance(cls, str) else cls.__name__
        self._endpoints = endpoints
        self._initialized: Future[bool] | None = None
        self.name = name
        self._procs = tuple(procs._base[rank] for rank in region.ranks)
        self._packed = None if region is self._born_on else region.pack()

    def __repr__(self) -> str:
        return f"<ActorMesh {self.name} of {self._kind} {self.extent}>"

    def _with_region(self, region: Region) -> ActorMesh:
        part = ActorMesh(self._proc_mesh, region, self.name, self._actor, self._cls, self._endpoints, self._born_on)
        part._initialized = self._initialized
        return part

    def __reduce__(self) -> tuple[Any, ...]:
        procs = tuple(self._proc_mesh._base)
        outlines = tuple(spec.outline() for spec in self._endpoints.values())
        return _open_actors, (procs, self._region, self.name, self._actor, self._kind, outlines, self._born_on)

    def __getattr__(self, name: str) -> Any:
        spec = self.__dict__.get("_endpoints", {}).get(name)
        if spec is None:
            have = ", ".join(sorted(self.__dict__.get("_endpoints", {}))) or "none"
            raise AttributeError(f"{self._kind} has no endpoint {name!r}; it has: {have}")
        bound = _BoundEndpoint(self, spec)
        self.__dict__[name] = bound
        return bound

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._endpoints})

    def announce(self, payload: Any, frames: Any) -> None:
        """Send the spawn; for `ProcMesh.spawn`."""
        finish = gather(self._region, f"spawning {self.name} failed", ActorError, read_value)

        def up(answers: Sequence[Answer]) -> bool:
            finish(answers)
            return True

        assert isinstance(self._cls, type)
        region, sources, owner = self._region.pack(), sources_of(self._cls), running.get().actor_instance.actor_id

        def make(id: int, living: Sequence[int] | None = None) -> Packed:
            part = None if living is None else self._places_of(living)
            return pack(Spawn(id, self._actor, self.name, region, payload, sources, owner, part), frames)

        self._initialized = self._asker.request(
            self._procs, make, f"{self.name}.__init__", up, spawned=(self._actor, make)
        )

    def _places_of(self, procs: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Rank and process of the actors that are in these processes."""
        return tuple((rank, proc) for rank, proc in zip(self._region.ranks, self._procs) if proc in procs)

    @property
    def initialized(self) -> Future[bool]:
        """Resolves when every actor's constructor has run, or raises what it raised."""
        if self._initialized is None:  # it came as an argument: who has spawned it knows more
            finish = gather(self._region, f"spawning {self.name} failed", ActorError, read_value)
            payload, frames = dump_call((), {}, ())
            self._initialized = self._asker.request(
                self._procs,
                lambda id: pack(Call(id, self._actor, "", self._packed, payload), frames),
                f"{self.name}.__init__",
                lambda answers: bool(finish(answers)) or True,
            )
        return self._initialized

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Stop the actors; calls from now on raise."""
        finish = gather(self._region, f"stopping {self.name}", ActorError, read_value)

        def stopped(answers: Sequence[Answer]) -> None:
            finish(answers)

        self._asker.forget_spawn(self._actor, self._procs)
        return self._asker.request(
            self._procs, lambda id: pack(StopActor(id, self._actor, reason)), f"{self.name}.stop", stopped
        )


class _BoundEndpoint(Endpoint[Any, Any]):
    """An endpoint of a mesh."""

    def __init__(self, mesh: ActorMesh, spec: EndpointSpec) -> None:
        self._spec = spec
        self._mesh = mesh
        self._note = f"{mesh.name}.{spec.name}"
        self._finish = gather(mesh._region, f"{self._note}() failed on {mesh.name}", ActorError, read_value)
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
        return mesh._asker.request(mesh._procs, self._make(args, kwargs), self._note, self._finish)

    def call_one(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it on a mesh of exactly one actor."""
        mesh = self._mesh
        if len(mesh._procs) != 1:
            raise ValueError(
                f"{self._note}.call_one() needs a mesh of one actor, this one has {len(mesh._procs)}: {mesh.extent}; "
                "slice it, or use .call()"
            )
        return mesh._asker.request(mesh._procs, self._make(args, kwargs), self._note, self._finish_one)

    def _finish_one(self, answers: Sequence[Answer]) -> Any:
        answer = answers[0]
        return self._finish(answers).values()[0] if isinstance(answer, Failure) else read_value(answer)

    def _call_at(self, index: int, make: Callable[[int], Any]) -> Future[Any]:
        mesh = self._mesh
        point = mesh.extent.point(index)
        one = Region(mesh.extent, mesh._region.ranks)

        def finish(answers: Sequence[Answer]) -> Any:
            answer = answers[0]
            if not isinstance(answer, Failure):
                return read_value(answer)
            gone = answer.kind in ("lost", "stopped")
            raise (SupervisionError if gone else ActorError)(f"{self._note}() failed on {mesh.name}", {point: answer})

        rank = one.ranks[index]
        return mesh._asker.request((mesh._procs[index],), make, self._note, finish, rank)

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
        mesh._asker.tell(mesh._procs, self._make(args, kwargs)(0))


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
                mesh._asker.wait(waiter, None)
        yield arrived.popleft()


class _Places:
    """The processes of a mesh of actors that came as an argument or as a result."""

    def __init__(self, asker: Asker, procs: Sequence[int]) -> None:
        self._asker = asker
        self._base = procs


def living_actors(
    asker: Asker, message: Spawn, cls: type[Actor], endpoints: dict[str, EndpointSpec]
) -> ActorMesh | None:
    """The mesh of the actors that live on, for one that comes in the place of another; None if none does."""
    if not message.living:
        return None
    places = dict(message.living)
    procs = tuple(
        places.get(rank, -1) for rank in range(max(places) + 1)
    )  # what is not in the region is never looked at
    region = Region(Extent({"ranks": len(places)}), tuple(places))
    born_on = Region.unpack(message.region)
    return ActorMesh(_Places(asker, procs), region, message.name, message.actor, cls, endpoints, born_on)


def _open_actors(
    procs: Sequence[int],
    region: Region,
    name: str,
    actor: int,
    kind: str,
    outlines: Sequence[tuple[Any, ...]],
    born_on: Region,
) -> ActorMesh:
    """A mesh of actors that came as an argument or as a result."""
    endpoints = {spec.name: spec for spec in map(from_outline, outlines)}
    born_on = region if region == born_on else born_on
    return ActorMesh(_Places(opener(), procs), region, name, actor, kind, endpoints, born_on)


RESERVED = frozenset(name for name in {*dir(ActorMesh), "name", "initialized"} if not name.startswith("__"))
"""Names that an actor's endpoints can't have."""
