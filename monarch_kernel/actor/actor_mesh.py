"""Meshes of actors, and the calls of their endpoints."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, GenericAlias
from typing import Any, ClassVar, NoReturn, ParamSpec, Protocol, TypeVar

from monarch_kernel.actor.actor import WITH_PORT, Actor, Endpoint, EndpointSpec, from_outline, sources_of
from monarch_kernel.actor.context import context
from monarch_kernel.actor.endpoint_table import interface_of
from monarch_kernel.actor.pickle_errors import error_of_user
from monarch_kernel.actor.reloading import Target, class_now, reload_classes
from monarch_kernel.base.mesh import Extent, Region, Shaped, ValueMesh
from monarch_kernel.errors import ActorError, Failure, PayloadError
from monarch_kernel.features.editing.classes import key_of, pickle_class
from monarch_kernel.features.editing.preview import Reloaded
from monarch_kernel.features.tensors.sending import SENDING, KeepingMessage, keep_until_answered
from monarch_kernel.net.wire.codec import Packed, dump_call, pack
from monarch_kernel.net.wire.messages import (
    Call,
    Spawn,
    StopActor,
)
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.future import Future, as_they_come
from monarch_kernel.runtime.rpc.gather import error_for, gather, read_value
from monarch_kernel.runtime.rpc.handles import Handle, client_for_unpickling

__all__ = ["RESERVED", "ActorMesh", "BoundEndpoint", "PlainMethod", "living_actors", "tell_actors"]

P = ParamSpec("P")
R = TypeVar("R")


class Procs(Protocol):
    """The part of a mesh of processes that a mesh of actors on it uses."""

    _client: Client
    _base: Sequence[int]


class ActorMesh(Handle, Shaped):
    """Actors of one class, one per rank. The endpoints are attributes."""

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # for annotations of Monarch: ActorMesh[Trainer]

    name: str
    """The name given to ``spawn``, unless the class has an endpoint with this name."""

    def __init__(
        self,
        procs: Procs,
        region: Region,
        name: str,
        actor: int,
        cls: type[Actor] | str,
        endpoints: dict[str, EndpointSpec],
        spawned_on: Region | None = None,
    ) -> None:
        self._proc_mesh = procs
        self._client = procs._client
        self._spawned_on = spawned_on or region
        self._region = region
        self._actor = actor
        self._interface = interface_of(self._client.shared, actor, cls, endpoints)
        self._interface.handles.add(self)
        self._initialized: Future[bool] | None = None
        self._name = name
        self._procs = tuple(procs._base[rank] for rank in region.ranks)
        self._packed = None if region is self._spawned_on else region.pack()
        for own in _OVERRIDABLE & endpoints.keys():
            self.__dict__[own] = BoundEndpoint(self, endpoints[own])

    def __repr__(self) -> str:
        return f"<ActorMesh {self._name} of {self._interface.kind} {self.extent}>"

    def _with_region(self, region: Region) -> ActorMesh:
        known = self._interface
        part = ActorMesh(self._proc_mesh, region, self._name, self._actor, known.cls, known.endpoints, self._spawned_on)
        part._initialized = self._initialized
        return part

    def __reduce__(self) -> tuple[Any, ...]:
        procs = tuple(self._proc_mesh._base)
        known = self._interface
        outlines = tuple(spec.outline() for spec in known.endpoints.values())
        return _open_actors, (procs, self._region, self._name, self._actor, known.kind, outlines, self._spawned_on)

    def __getattr__(self, name: str) -> Any:
        interface = self.__dict__.get("_interface")
        if interface is None:  # unpickling is not complete
            raise AttributeError(name)
        if name not in interface.endpoints:
            if name == "name":
                return self._name
            method = inspect.getattr_static(interface.cls, name, None)
            if isinstance(method, FunctionType) and not name.startswith("_"):
                return PlainMethod(self, method)
        bound = self.__dict__[name] = BoundEndpoint(self, interface.find(name))
        return bound

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._interface.endpoints})

    def announce(self, payload: Any, frames: Any, parts: list[Any]) -> None:
        """Send the spawn messages. Called by `ProcMesh.spawn`; ``parts`` are the distributed tensors in the arguments."""
        finish = gather(self._region, f"spawning {self._name} failed", ActorError, read_value)

        def up(answers: Sequence[Answer], parts: Any = parts) -> bool:
            finish(answers)
            return True

        known, first = self._interface, self._interface.cls
        assert isinstance(first, type)
        instance = context().actor_instance
        region, sources, owner, lineage = self._region.pack(), sources_of(first), instance.actor_id, instance.lineage

        def make(id: int, living: Sequence[int] | None = None) -> Packed:
            part = None if living is None else self._places_of(living)
            now, renewed = sources, b""
            if known.is_changed and isinstance(known.cls, type):
                now, renewed = sources_of(known.cls), pickle_class(known.cls)
            return pack(Spawn(id, self._actor, self._name, region, payload, now, owner, part, renewed, lineage), frames)

        self._client.spawned(self._actor, self._name, owner, self._procs, self)
        self._initialized = self._client.request(
            self._procs, make, f"{self._name}.__init__", up, spawned=(self._actor, make)
        )

    def _places_of(self, procs: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """List (rank, process) of the actors in these processes."""
        return tuple((rank, proc) for rank, proc in zip(self._region.ranks, self._procs) if proc in procs)

    @property
    def initialized(self) -> Future[bool]:
        """A future that resolves when the constructor of every actor has run; it raises what a constructor raised."""
        if self._initialized is None:  # the mesh came as an argument, so another process has the answer to the spawn
            self._initialized = self._ping()
        return self._initialized

    def _ping(self) -> Future[bool]:
        """Return a future that resolves when every actor has handled all earlier messages; it raises if one has ended."""
        finish = gather(self._region, f"spawning {self._name} failed", ActorError, read_value)
        payload, frames = dump_call((), {}, ())

        def up(answers: Sequence[Answer]) -> bool:
            finish(answers)
            return True

        return self._client.request(
            self._procs,
            lambda id: pack(Call(id, self._actor, "", self._packed, payload), frames),
            f"{self._name}.__init__",
            up,
        )

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Stop the actors. Later calls raise. An actor on a rank that is dead, or dies meanwhile, counts as stopped."""
        client, extent = self._client, self.extent
        dead = client.deaths(self._procs)
        living = {i: proc for i, proc in enumerate(self._procs) if proc not in dead}
        procs = tuple(living.values())

        def stopped(answers: Sequence[Answer]) -> None:
            failed = {
                extent.point(i): answer
                for i, answer in zip(living, answers)
                if isinstance(answer, Failure) and answer.kind not in ("lost", "stopped")
            }
            if failed:
                raise ActorError(f"stopping {self._name}", failed)

        client.stopped(self._actor, self._procs)
        client.forget_spawn(self._actor, self._procs)
        description = f"{self._name}.stop"
        future = client.request(procs, lambda id: pack(StopActor(id, self._actor, reason)), description, stopped)
        # If a rank dies just before the request, the request goes to no rank at all; this message still stops the others.
        future.add_done_callback(lambda: client.tell(procs, pack(StopActor(0, self._actor, reason))))
        return future

    def reload(self, cls: type | None = None) -> Reloaded:
        """Switch the actors to the current definition of their class in the notebook, and wait until they use it.

        The actors keep their state. Other actors of the class on the ranks of this mesh switch, too. If the class has a method
        ``__reload__(self)``, each actor runs it before its next message.

        Args:
            cls: the class that replaces that of the actors. By default the class that has the same name now.

        Raises:
            TypeError: ``cls`` is not a class, or is imported.
            EditError: the edit was refused, for the reasons in the text; nothing has changed.
            RanksError: ranks could not make the class, and nothing has changed; or a ``__reload__`` failed.
        """
        known = self._interface.cls
        new = class_now(known, self._name) if cls is None else cls
        key = key_of(known) if isinstance(known, type) else (new.__module__, known)
        base = Extent({"ranks": len(self._proc_mesh._base)})
        place = Target(self._client, self._procs, self._region, base, getattr(self._proc_mesh, "name", self._name))
        return reload_classes(place, [(new, key)], RESERVED)


class BoundEndpoint(Endpoint[Any, Any]):
    """An endpoint of a mesh, ready to be called."""

    def __init__(self, mesh: ActorMesh, spec: EndpointSpec) -> None:
        self._spec = spec
        self._mesh = mesh
        self._description = f"{mesh._name}.{spec.name}"
        self._finish = gather(mesh._region, f"{self._description}() failed on {mesh._name}", ActorError, read_value)
        self.__doc__ = spec.__doc__

    def __repr__(self) -> str:
        return f"<endpoint {self._description}{self._spec.signature} on {self._mesh.extent}>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{self._description} is an endpoint: call it with .call(), .call_one(), .choose(), .stream() or .broadcast()"
        )

    def _spec_now(self) -> EndpointSpec:
        """Return the current spec; it changes when the class is reloaded."""
        return self._mesh._interface.find(self._spec.name)

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[int], Any]:
        spec = self._spec_now()
        spec.check(args, kwargs)
        return self._message(spec.name, spec.names, args, kwargs)

    def _message(
        self, method: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[int], Packed]:
        mesh = self._mesh
        parts: list[Any] = []
        SENDING.parts = parts
        try:
            payload, frames = dump_call(args, kwargs, names)
        except PayloadError as error:
            raise error_of_user(error) from error.__cause__
        finally:
            SENDING.parts = None

        def make(id: int) -> Packed:
            return pack(Call(id, mesh._actor, method, mesh._packed, payload), frames)

        return KeepingMessage(make, parts) if parts else make

    def call(self, *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        """Call the endpoint on every rank. The result has the shape of the mesh."""
        mesh, make = self._mesh, self._make(args, kwargs)
        return mesh._client.request(mesh._procs, make, self._description, keep_until_answered(make, self._finish))

    def call_one(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the endpoint of the only actor of a mesh."""
        mesh = self._mesh
        if len(mesh._procs) != 1:
            raise ValueError(
                f"{self._description}.call_one() needs a mesh of one actor, but this one has {len(mesh._procs)}: "
                f"{mesh.extent}; slice it, or use .call()"
            )
        make = self._make(args, kwargs)
        return mesh._client.request(mesh._procs, make, self._description, keep_until_answered(make, self._finish_one))

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
            raise error_for([answer])(f"{self._description}() failed on {mesh._name}", {point: answer})

        rank = one.ranks[index]
        return mesh._client.request(
            (mesh._procs[index],), make, self._description, keep_until_answered(make, finish), rank
        )

    def choose(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the endpoint of one actor, chosen at random."""
        return self._call_at(random.randrange(len(self._mesh._procs)), self._make(args, kwargs))

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Future[Any]]:
        """Call the endpoint on every rank, and yield one future for each in the order of the answers; see its ``.rank``."""
        make = self._make(args, kwargs)
        futures = [self._call_at(i, make) for i in range(len(self._mesh._procs))]
        return as_they_come(futures)

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Call the endpoint on every rank without an answer."""
        tell_actors(self._mesh, self._mesh._procs, self._make(args, kwargs))

    def rref(self, *args: Any, **kwargs: Any) -> Any:
        """Call the endpoint on every rank without waiting; the tensors in its result become distributed tensors.

        The program knows their shapes by ``propagate`` of the endpoint (`tensor.remote`); by default the first call with
        tensors of these shapes waits.

        Raises:
            TensorError: the endpoint has failed, where the call waits; otherwise a read of its result raises it.
        """
        return importlib.import_module("monarch_kernel.tensor.actor_results").rref(self, args, kwargs)

    def begin_rref(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Call the endpoint on every rank, and leave the result there under a number."""
        mesh, spec = self._mesh, self._spec_now()
        if spec.takes_port:
            raise TypeError(f"{self._description}() answers through a port, so it has no rref")
        spec.check(args, kwargs)
        make = self._message("__rref__", (), (spec.name.removesuffix(WITH_PORT), number, args, kwargs), {})
        return mesh._client.request(mesh._procs, make, self._description, keep_until_answered(make, self._finish))

    @property
    def key(self) -> tuple[int, str, Any]:
        """The actors and the endpoint, and what says how the shape of its result follows from the arguments."""
        spec = self._spec_now()
        return self._mesh._actor, spec.name, spec.propagate

    @property
    def proc_mesh(self) -> Any:
        """The processes of the actors.

        Raises:
            TypeError: the mesh of actors came as an argument or a result.
        """
        procs: Any = self._mesh._proc_mesh
        if isinstance(procs, _ReceivedProcs):
            raise TypeError(
                f"{self._description}.rref() is only possible in the process that spawned {self._mesh._name!r}: call it there, "
                "or use .call() here"
            )
        return procs.with_region(self._mesh._region)


def tell_actors(mesh: ActorMesh, procs: Sequence[int], make: Callable[[int], Packed]) -> None:
    """Send actors of a mesh, in these processes, a message that has no answer."""
    mesh._client.tell(procs, make(0))
    if isinstance(make, KeepingMessage):  # the actors have taken the tensors in it when they answer the next message
        mesh._ping().add_done_callback(make.parts.clear)


class PlainMethod:
    """A method of an actor class that is not marked as an endpoint. Calling it raises; `as_endpoint` accepts it."""

    def __init__(self, mesh: ActorMesh, function: FunctionType) -> None:
        self._mesh = mesh
        self._function = function
        self.__doc__ = function.__doc__

    def __repr__(self) -> str:
        return f"<{self._mesh._name}.{self._function.__name__}, not an endpoint>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        said = f"{self._mesh._name}.{self._function.__name__}"
        raise TypeError(f"{said} is not an endpoint: mark it with @endpoint, or call as_endpoint({said}).call(...)")


class _ReceivedProcs:
    """The processes of a mesh of actors that this process received as an argument or a result."""

    def __init__(self, client: Client, procs: Sequence[int]) -> None:
        self._client = client
        self._base = procs


Places = Sequence[tuple[int, int]]
"""(rank, process) of each actor."""


def living_actors(
    client: Client, message: Spawn, living: Places, cls: type[Actor], endpoints: dict[str, EndpointSpec]
) -> ActorMesh | None:
    """Return the mesh of the surviving actors, for the ``__restore__`` of a replacement; None if there are none."""
    if not living:
        return None
    places = dict(living)
    procs = tuple(
        places.get(rank, -1) for rank in range(max(places) + 1)
    )  # -1 stands for ranks that are not in the region, which nothing reads
    region = Region(Extent({"ranks": len(places)}), tuple(places))
    spawned_on = Region.unpack(message.region)
    return ActorMesh(_ReceivedProcs(client, procs), region, message.name, message.actor, cls, endpoints, spawned_on)


def _open_actors(
    procs: Sequence[int],
    region: Region,
    name: str,
    actor: int,
    kind: str,
    outlines: Sequence[tuple[Any, ...]],
    spawned_on: Region,
) -> ActorMesh:
    """Make the mesh of actors that this process received as an argument or a result."""
    endpoints = {spec.name: spec for spec in map(from_outline, outlines)}
    spawned_on = region if region == spawned_on else spawned_on
    return ActorMesh(_ReceivedProcs(client_for_unpickling(), procs), region, name, actor, kind, endpoints, spawned_on)


_OVERRIDABLE = frozenset({"announce", "reload"})
"""Methods that meshes of PyTorch Monarch do not have: an endpoint with such a name is the attribute instead."""

RESERVED = frozenset(name for name in dir(ActorMesh) if not name.startswith("__")) - _OVERRIDABLE
"""Names that an actor's endpoints can't have."""
