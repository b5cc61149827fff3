"""What users write: classes derived from `Actor` with methods marked `endpoint`."""

from __future__ import annotations

import inspect
import linecache
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from monarch_kernel.actor.channels import Port
    from monarch_kernel.base.mesh import Extent, ValueMesh
    from monarch_kernel.base.mesh.shape import AxisIndex
    from monarch_kernel.features.editing.preview import Reloaded
    from monarch_kernel.runtime.rpc.future import Future

__all__ = [
    "WITH_PORT",
    "Actor",
    "Endpoint",
    "EndpointSpec",
    "concurrent_endpoint",
    "endpoint",
    "endpoints_among",
    "endpoints_of",
    "from_outline",
    "sources_of",
]

P = ParamSpec("P")
R = TypeVar("R")
ActorT = TypeVar("ActorT", bound="Actor")

WITH_PORT = ":port"
"""After the name of a method that is no endpoint, and is called as one that takes a port."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class EndpointSpec:
    """A method that was marked as an endpoint.

    Attributes:
        function: the method as written.
        signature: of what callers give: the parameters after ``self``, and after the port if it takes one.
        is_async: whether it is a coroutine function.
        is_concurrent: whether calls of it overlap.
        takes_port: whether it answers through a port, which it gets as its first argument.
        propagate: how the shape of its result follows from its arguments.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        is_concurrent: bool = False,
        takes_port: bool = False,
        propagate: Any = None,
    ) -> None:
        self.function = function
        self.name = function.__name__
        self.is_async = inspect.iscoroutinefunction(function)
        self.is_concurrent = is_concurrent
        self.takes_port = takes_port
        self.propagate = propagate
        self.__doc__ = function.__doc__
        first = ("self", "the port that it answers through")[: 1 + takes_port]
        parameters = list(inspect.signature(function).parameters.values())
        for place, what in enumerate(first):
            if len(parameters) <= place or parameters[place].kind not in _POSITIONAL:
                raise TypeError(
                    f"endpoint {self.name!r} must take {what} as its {('first', 'second')[place]} parameter"
                )
        self.take(parameters[len(first) :])

    def take(self, given: Sequence[inspect.Parameter]) -> None:
        """Say what callers give."""
        self.signature = inspect.Signature(given)
        self.names = tuple(parameter.name for parameter in given if parameter.kind in _POSITIONAL)
        self._plain = len(self.names) == len(given) and all(
            parameter.default is inspect.Parameter.empty for parameter in given
        )

    def outline(self) -> tuple[Any, ...]:
        """What holders of a handle need, for `from_outline`: no code, and of the signature only what fits."""
        given = tuple((one.name, one.kind, one.default is not one.empty) for one in self.signature.parameters.values())
        return (self.name, given, self.is_async, self.is_concurrent, self.takes_port, self.__doc__)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Bind arguments to the signature.

        Raises:
            TypeError: they do not fit.
        """
        if self._plain and not kwargs and len(args) == len(self.names):
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}{self.signature}: {error}") from None

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """On an instance the plain method, so that actors can call their own; on the class the mark."""
        return self if instance is None else self.function.__get__(instance, owner)


def from_outline(outline: tuple[Any, ...]) -> EndpointSpec:
    """The mark of an endpoint whose code is elsewhere."""
    name, given, is_async, is_concurrent, takes_port, doc = outline
    spec = EndpointSpec.__new__(EndpointSpec)
    spec.name, spec.__doc__ = name, doc
    spec.is_async, spec.is_concurrent, spec.takes_port, spec.propagate = is_async, is_concurrent, takes_port, None
    empty = inspect.Parameter.empty
    spec.take([inspect.Parameter(each, kind, default=... if optional else empty) for each, kind, optional in given])
    return spec


class Endpoint(Generic[P, R]):
    """An endpoint of an actor mesh, as its holders see it; choose how to call it by an adverb."""

    if TYPE_CHECKING:

        def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]: ...
        def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
        def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
        def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]: ...
        def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None: ...


class _Marks(Protocol):
    """What ``@endpoint(...)`` gives: it marks a method."""

    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> Endpoint[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> Endpoint[P, R]: ...


class _MarksPorted(Protocol):
    """What ``@endpoint(explicit_response_port=True)`` gives: the method gets a port before what callers give."""

    def __call__(self, function: Callable[Concatenate[Any, Port[R], P], Any], /) -> Endpoint[P, R]: ...


class _MarksConcurrent(Protocol):
    """What ``@concurrent_endpoint(...)`` gives: it marks a coroutine function."""

    def __call__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> Endpoint[P, R]: ...


@overload
def endpoint(function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> Endpoint[P, R]: ...
@overload
def endpoint(function: Callable[Concatenate[Any, P], R], /) -> Endpoint[P, R]: ...
@overload
def endpoint(*, propagate: Any = None, explicit_response_port: Literal[False] = False) -> _Marks: ...
@overload
def endpoint(*, propagate: Any = None, explicit_response_port: Literal[True]) -> _MarksPorted: ...
def endpoint(
    function: Callable[..., Any] | None = None, /, *, propagate: Any = None, explicit_response_port: bool = False
) -> Any:
    """Mark a method (sync or async) as callable from elsewhere.

    Args:
        function: the method; without it the options are kept for the method that follows.
        propagate: how the shape of its result follows from its arguments, for ``rref``.
        explicit_response_port: whether it gets a `Port` as its first argument and answers through that, not by returning.

    Raises:
        TypeError: what is marked is no function, or takes no self (or no port).
    """
    return _mark("endpoint", function, takes_port=explicit_response_port, propagate=propagate)


@overload
def concurrent_endpoint(function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> Endpoint[P, R]: ...
@overload
def concurrent_endpoint(
    *, propagate: Any = None, explicit_response_port: Literal[False] = False
) -> _MarksConcurrent: ...
@overload
def concurrent_endpoint(*, propagate: Any = None, explicit_response_port: Literal[True]) -> _MarksPorted: ...
def concurrent_endpoint(
    function: Callable[..., Any] | None = None, /, *, propagate: Any = None, explicit_response_port: bool = False
) -> Any:
    """Mark an async method whose calls begin in the order in which they came, and then overlap.

    What still runs when the actor ends is cancelled, before its ``__cleanup__``. Arguments are those of `endpoint`.

    Raises:
        TypeError: as for `endpoint`.
        ValueError: the method is not async.
    """
    return _mark(
        "concurrent_endpoint", function, is_concurrent=True, takes_port=explicit_response_port, propagate=propagate
    )


def _mark(name: str, function: Callable[..., Any] | None, **options: Any) -> Any:
    if function is None:
        return lambda method: _mark(name, method, **options)
    if isinstance(function, EndpointSpec):
        raise TypeError(f"{function.name!r} is marked twice; options of an endpoint go into one @{name}(...)")
    if not callable(function) or not hasattr(function, "__code__"):
        raise TypeError(f"@{name} marks methods, not {type(function).__name__} {function!r}")
    spec = EndpointSpec(function, **options)
    if spec.is_concurrent and not spec.is_async:
        raise ValueError(f"@{name} marks async methods: calls of {spec.name!r}, which is sync, can't overlap")
    return spec


class Actor:
    """Base of actors: one instance per rank of the mesh it is spawned on, one message at a time.

    A subclass may have a method ``__cleanup__(self, exc)``, sync or async. It runs once, when the actor ends: with None when
    it is stopped, with the exception when it fails. ``__reload__(self)`` runs after its class has been reloaded, before the
    next message.
    """

    if TYPE_CHECKING:
        # `ProcMesh.spawn` gives an `ActorMesh`, typed as the class, so that calls of endpoints are checked.

        @property
        def extent(self) -> Extent: ...
        @property
        def sizes(self) -> dict[str, int]: ...
        @property
        def initialized(self) -> Future[bool]: ...
        def size(self, axis: str | None = None) -> int: ...
        def slice(self: ActorT, /, **axes: AxisIndex) -> ActorT: ...
        def split(self: ActorT, /, **axes: Sequence[str] | int) -> ActorT: ...
        def flatten(self: ActorT, name: str) -> ActorT: ...
        def rename(self: ActorT, /, **names: str) -> ActorT: ...
        def stop(self, reason: str = "stopped by client") -> Future[None]: ...
        def reload(self, cls: type | None = None) -> Reloaded: ...
        def __len__(self) -> int: ...


def sources_of(cls: type) -> tuple[tuple[str, str], ...]:
    """Name and text of the code of a class that is in no file: tracebacks and debuggers elsewhere can't read it there."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        for value in vars(base).values():
            code = getattr(getattr(value, "function", value), "__code__", None)
            file = getattr(code, "co_filename", "")
            if file in linecache.cache and file not in found and not os.path.exists(file):
                found[file] = "".join(linecache.getlines(file))
    return tuple(found.items())


def endpoints_of(cls: Callable[..., Any], reserved: frozenset[str]) -> dict[str, EndpointSpec]:
    """The endpoints of an actor class.

    Raises:
        ValueError: it is no `Actor`, mixes sync and async endpoints, or names one like an attribute of meshes.
    """
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise ValueError(f"{getattr(cls, '__name__', cls)!r} is no Actor: derive it from monarch_kernel.actor.Actor")
    return endpoints_among(cls, cls.__mro__, reserved)


def endpoints_among(cls: type, classes: Sequence[type], reserved: frozenset[str]) -> dict[str, EndpointSpec]:
    """The endpoints of an actor class as they would be if these were its bases, in the order in which Python asks them.

    Raises:
        ValueError: as for `endpoints_of`.
    """
    found: dict[str, EndpointSpec] = {}
    for base in reversed(classes):
        for name, value in vars(base).items():
            if isinstance(value, EndpointSpec):
                found[name] = value
            else:
                found.pop(name, None)
    clash = sorted(set(found) & reserved)
    if clash:
        raise ValueError(
            f"{cls.__name__}: an endpoint can't be called {', '.join(clash)}: meshes have that name already"
        )
    kinds = {spec.is_async for spec in found.values()}
    if len(kinds) > 1:
        sync = ", ".join(sorted(name for name, spec in found.items() if not spec.is_async))
        raise ValueError(
            f"{cls.__name__} mixes sync endpoints ({sync}) with async ones; make all of them async, or none"
        )
    return found
