"""The classes that users write: subclasses of `Actor` with methods marked as `endpoint`."""

from __future__ import annotations

import copy
import functools
import inspect
import linecache
import logging
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
"""Suffix of a method's name in a call where `as_endpoint` makes the method an endpoint that takes a port."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class EndpointSpec:
    """A method that is marked as an endpoint.

    Attributes:
        function: the method as written.
        name: the name under which callers find it.
        signature: the parameters that callers pass: those after ``self``, and after the port if there is one.
        is_async: whether the method is a coroutine function.
        is_generator: whether it is a generator or an async generator, which can't be called from elsewhere.
        is_concurrent: whether calls of the method overlap.
        takes_port: whether the method answers through a port, which is its first argument.
        propagate: how the shape of the result follows from the arguments.
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
        self.is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
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
        """Set the parameters that callers pass."""
        self.signature = inspect.Signature(given)
        self.names = tuple(parameter.name for parameter in given if parameter.kind in _POSITIONAL)
        self._plain = len(self.names) == len(given) and all(
            parameter.default is inspect.Parameter.empty for parameter in given
        )

    def named(self, name: str) -> EndpointSpec:
        """Return the spec under the name that the class has for it: a decorated function may have that of its wrapper."""
        if name == self.name:
            return self
        spec = copy.copy(self)
        spec.name = name
        return spec

    def outline(self) -> tuple[Any, ...]:
        """Describe the endpoint without its code, for handles elsewhere; `from_outline` reads it."""
        given = tuple((one.name, one.kind, one.default is not one.empty) for one in self.signature.parameters.values())
        return (self.name, given, self.is_async, self.is_concurrent, self.takes_port, self.__doc__)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check arguments against the signature.

        Raises:
            TypeError: the arguments do not match the signature.
        """
        if self._plain and not kwargs and len(args) == len(self.names):
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}{self.signature}: {error}") from None

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Return the plain method on an instance, so that actors can call it, and the spec on the class."""
        return self if instance is None else self.function.__get__(instance, owner)


def from_outline(outline: tuple[Any, ...]) -> EndpointSpec:
    """Make the spec of an endpoint whose code is in another process."""
    name, given, is_async, is_concurrent, takes_port, doc = outline
    spec = EndpointSpec.__new__(EndpointSpec)
    spec.name, spec.__doc__, spec.is_generator = name, doc, False
    spec.is_async, spec.is_concurrent, spec.takes_port, spec.propagate = is_async, is_concurrent, takes_port, None
    empty = inspect.Parameter.empty
    spec.take([inspect.Parameter(each, kind, default=... if optional else empty) for each, kind, optional in given])
    return spec


class Endpoint(Generic[P, R]):
    """An endpoint of an actor mesh. Its methods (``call``, ``call_one``, ...) are the ways to call it."""

    if TYPE_CHECKING:

        def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]: ...
        def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
        def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
        def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]: ...
        def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None: ...
        def rref(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


class _Marks(Protocol):
    """Type of ``@endpoint(...)``, which marks a method."""

    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> Endpoint[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> Endpoint[P, R]: ...


class _MarksPorted(Protocol):
    """Type of ``@endpoint(explicit_response_port=True)``: the method gets a port before the arguments of the caller."""

    def __call__(self, function: Callable[Concatenate[Any, Port[R], P], Any], /) -> Endpoint[P, R]: ...


class _MarksConcurrent(Protocol):
    """Type of ``@concurrent_endpoint(...)``, which marks a coroutine function."""

    def __call__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /) -> Endpoint[P, R]: ...


@overload
def endpoint(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Endpoint[P, R]: ...
@overload
def endpoint(method: Callable[Concatenate[Any, P], R]) -> Endpoint[P, R]: ...
@overload
def endpoint(
    *, propagate: Any = None, explicit_response_port: Literal[False] = False, instrument: bool = True
) -> _Marks: ...
@overload
def endpoint(
    *, propagate: Any = None, explicit_response_port: Literal[True], instrument: bool = True
) -> _MarksPorted: ...
def endpoint(
    method: Callable[..., Any] | None = None,
    *,
    propagate: Any = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Mark a method (sync or async) as callable from other processes.

    Args:
        method: the method. Without it, the result is a decorator with the other options.
        propagate: how the shape of the result follows from the arguments, for ``rref``.
        explicit_response_port: whether the method gets a `Port` as its first argument, and answers by sending to it
            instead of returning.
        instrument: accepted for code of PyTorch Monarch. Calls have no spans, so it has no effect.

    Raises:
        TypeError: the marked object is not a function, or does not take self (or the port).
    """
    return _mark("endpoint", method, takes_port=explicit_response_port, propagate=propagate)


@overload
def concurrent_endpoint(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Endpoint[P, R]: ...
@overload
def concurrent_endpoint(
    *, propagate: Any = None, explicit_response_port: Literal[False] = False, instrument: bool = True
) -> _MarksConcurrent: ...
@overload
def concurrent_endpoint(
    *, propagate: Any = None, explicit_response_port: Literal[True], instrument: bool = True
) -> _MarksPorted: ...
def concurrent_endpoint(
    method: Callable[..., Any] | None = None,
    *,
    propagate: Any = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Mark an async method whose calls start in the order of arrival and then overlap.

    When the actor ends, the calls that still run are cancelled before its ``__cleanup__``. The arguments are those of
    `endpoint`.

    Raises:
        TypeError: as for `endpoint`.
        ValueError: the method is not async.
    """
    return _mark(
        "concurrent_endpoint", method, is_concurrent=True, takes_port=explicit_response_port, propagate=propagate
    )


def _mark(name: str, function: Callable[..., Any] | None, **options: Any) -> Any:
    if function is None:
        return lambda method: _mark(name, method, **options)
    if isinstance(function, EndpointSpec):
        raise TypeError(f"{function.name!r} is marked twice; put all options of an endpoint into one @{name}(...)")
    if not callable(function) or not hasattr(function, "__code__"):
        raise TypeError(f"@{name} marks methods, not {type(function).__name__} {function!r}")
    spec = EndpointSpec(function, **options)
    if spec.is_concurrent and not spec.is_async:
        raise ValueError(f"@{name} marks async methods: calls of {spec.name!r}, which is sync, can't overlap")
    return spec


class Actor:
    """Base class of actors. A spawn makes one instance on each rank of a mesh; each instance handles one message at a time.

    A subclass can define ``__cleanup__(self, exc)``, sync or async. It runs once, when the actor ends: with None if the actor
    is stopped, with the exception if it fails. ``__reload__(self)`` runs after the class has been reloaded, before the next
    message.
    """

    @functools.cached_property
    def logger(self) -> logging.Logger:
        """The logger of the class, which passes all records on to its handlers; a subclass can assign another one."""
        logger = logging.getLogger(f"{type(self).__module__}.{type(self).__qualname__}")
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.DEBUG)
        return logger

    def __rref__(self, endpoint: str, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an endpoint for ``rref``: its result stays on the rank (`features.tensors.results`)."""
        from monarch_kernel.features.tensors.results import hand_over

        return hand_over(number, lambda: getattr(self, endpoint)(*args, **kwargs))

    if TYPE_CHECKING:
        # `ProcMesh.spawn` gives an `ActorMesh`, typed as the class, so that calls of endpoints are checked.

        @property
        def extent(self) -> Extent: ...
        @property
        def sizes(self) -> dict[str, int]: ...
        @property
        def initialized(self) -> Future[bool]: ...
        def size(self, axis: str | Sequence[str] | None = None, *, dim: str | Sequence[str] | None = None) -> int: ...
        def slice(self: ActorT, /, **axes: AxisIndex) -> ActorT: ...
        def split(self: ActorT, /, **axes: Sequence[str] | int) -> ActorT: ...
        def flatten(self: ActorT, name: str) -> ActorT: ...
        def rename(self: ActorT, /, **names: str) -> ActorT: ...
        def stop(self, reason: str = "stopped by client") -> Future[None]: ...
        def reload(self, cls: type | None = None) -> Reloaded: ...
        def __len__(self) -> int: ...


def sources_of(cls: type) -> tuple[tuple[str, str], ...]:
    """List (name, text) of the source of a class that is not in a file, for tracebacks and debuggers in other processes."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        for value in vars(base).values():
            code = getattr(getattr(value, "function", value), "__code__", None)
            file = getattr(code, "co_filename", "")
            if file in linecache.cache and file not in found and not os.path.exists(file):
                found[file] = "".join(linecache.getlines(file))
    return tuple(found.items())


def endpoints_of(cls: Callable[..., Any], reserved: frozenset[str]) -> dict[str, EndpointSpec]:
    """Find the endpoints of an actor class.

    Raises:
        ValueError: the class is not an `Actor`, mixes sync and async endpoints, has an endpoint that is a generator, or one
            with the name of an attribute of meshes.
    """
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise ValueError(
            f"{getattr(cls, '__name__', cls)!r} is not an Actor: derive it from monarch_kernel.actor.Actor"
        )
    return endpoints_among(cls, cls.__mro__, reserved)


def endpoints_among(cls: type, classes: Sequence[type], reserved: frozenset[str]) -> dict[str, EndpointSpec]:
    """Find the endpoints that an actor class would have with these bases, which are in method resolution order.

    Raises:
        ValueError: as for `endpoints_of`.
    """
    found: dict[str, EndpointSpec] = {}
    for base in reversed(classes):
        for name, value in vars(base).items():
            if isinstance(value, EndpointSpec):
                found[name] = value.named(name)
            else:
                found.pop(name, None)
    clash = sorted(set(found) & reserved)
    if clash:
        raise ValueError(
            f"{cls.__name__}: an endpoint can't be called {', '.join(clash)}: meshes already use that name"
        )
    if generators := [name for name, spec in found.items() if spec.is_generator]:
        raise ValueError(
            f"{cls.__name__}: an endpoint can't be a generator ({', '.join(generators)}), because a call has one answer; "
            "return a list, or take the port of a Channel as an argument and send each item through it"
        )
    kinds = {spec.is_async for spec in found.values()}
    if len(kinds) > 1:
        sync = ", ".join(sorted(name for name, spec in found.items() if not spec.is_async))
        raise ValueError(
            f"{cls.__name__} mixes sync endpoints ({sync}) with async ones; make all of them async, or none"
        )
    return found
