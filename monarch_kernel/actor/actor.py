"""What users write: classes derived from `Actor` with methods marked `endpoint`."""

from __future__ import annotations

import inspect
import linecache
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

if TYPE_CHECKING:
    from monarch_kernel.asking.future import Future
    from monarch_kernel.mesh import ValueMesh

__all__ = ["Actor", "Endpoint", "EndpointSpec", "endpoint", "endpoints_of", "sources_of"]

P = ParamSpec("P")
R = TypeVar("R")


class EndpointSpec:
    """A method that was marked as an endpoint.

    Attributes:
        function: the method as written.
        signature: of its parameters after ``self``.
        is_async: whether it is a coroutine function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        self.is_async = inspect.iscoroutinefunction(function)
        self.__doc__ = function.__doc__
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise TypeError(f"endpoint {self.name!r} must take self as its first parameter")
        self.signature = inspect.Signature(parameters[1:])
        self.names = tuple(
            parameter.name
            for parameter in parameters[1:]
            if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        )
        self._plain = len(self.names) == len(parameters) - 1 and all(
            parameter.default is inspect.Parameter.empty for parameter in parameters[1:]
        )

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


class Endpoint(Generic[P, R]):
    """An endpoint of an actor mesh, as its holders see it; choose how to call it by an adverb."""

    if TYPE_CHECKING:

        def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]: ...
        def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
        def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
        def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]: ...
        def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None: ...


@overload
def endpoint(function: Callable[Concatenate[Any, P], Awaitable[R]]) -> Endpoint[P, R]: ...
@overload
def endpoint(function: Callable[Concatenate[Any, P], R]) -> Endpoint[P, R]: ...
@overload
def endpoint() -> Callable[[Callable[Concatenate[Any, P], R]], Endpoint[P, R]]: ...
def endpoint(function: Callable[..., Any] | None = None) -> Any:
    """Mark a method (sync or async) as callable from elsewhere.

    Raises:
        TypeError: what is marked is no function.
    """
    if function is None:
        return endpoint
    if not callable(function) or not hasattr(function, "__code__"):
        raise TypeError(f"@endpoint marks methods, not {type(function).__name__} {function!r}")
    return EndpointSpec(function)


class Actor:
    """Base of actors: one instance per rank of the mesh it is spawned on, one message at a time."""


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


def endpoints_of(cls: type, reserved: frozenset[str]) -> dict[str, EndpointSpec]:
    """The endpoints of an actor class.

    Raises:
        ValueError: it is no `Actor`, mixes sync and async endpoints, or names one like an attribute of meshes.
    """
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise ValueError(f"{getattr(cls, '__name__', cls)!r} is no Actor: derive it from monarch_kernel.actor.Actor")
    found: dict[str, EndpointSpec] = {}
    for base in reversed(cls.__mro__):
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
