"""More ways to call actors: `as_endpoint` for plain methods, `send` with answers to a port, and `Accumulator`."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from monarch_kernel.actor.actor import WITH_PORT, Endpoint, EndpointSpec
from monarch_kernel.actor.actor_mesh import BoundEndpoint, PlainMethod, tell_actors
from monarch_kernel.actor.channels import Port
from monarch_kernel.errors import ActorError, Failure, SupervisionError
from monarch_kernel.features.tensors.sending import keep_until_answered
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.gather import error_for
from monarch_kernel.runtime.rpc.waits import Wait

__all__ = ["Accumulator", "as_endpoint", "send"]

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")


@overload
def as_endpoint(
    not_an_endpoint: Callable[P, Coroutine[Any, Any, R]],
    *,
    propagate: Any = None,
    explicit_response_port: Literal[False] = False,
) -> Endpoint[P, R]: ...
@overload
def as_endpoint(
    not_an_endpoint: Callable[P, R], *, propagate: Any = None, explicit_response_port: Literal[False] = False
) -> Endpoint[P, R]: ...
@overload
def as_endpoint(
    not_an_endpoint: Callable[Concatenate[Port[R], P], Any],
    *,
    propagate: Any = None,
    explicit_response_port: Literal[True],
) -> Endpoint[P, R]: ...
def as_endpoint(not_an_endpoint: Any, *, propagate: Any = None, explicit_response_port: bool = False) -> Any:
    """Make an endpoint of a method that is not marked as one: ``as_endpoint(mesh.method).call()``.

    Args:
        not_an_endpoint: a method of a mesh of actors, in the process that spawned the mesh.
        propagate: as for `endpoint`.
        explicit_response_port: as for `endpoint`.

    Raises:
        TypeError: ``not_an_endpoint`` is not a method of a mesh of actors.
    """
    if isinstance(not_an_endpoint, BoundEndpoint):
        return not_an_endpoint
    if not isinstance(not_an_endpoint, PlainMethod):
        raise TypeError(f"as_endpoint() takes a method of a mesh of actors, not a {type(not_an_endpoint).__name__}")
    spec = EndpointSpec(not_an_endpoint._function, takes_port=explicit_response_port, propagate=propagate)
    if explicit_response_port:
        spec.name += WITH_PORT
    return _MethodEndpoint(not_an_endpoint._mesh, spec)


class _MethodEndpoint(BoundEndpoint):
    """A plain method that `as_endpoint` made callable."""

    def _spec_now(self) -> EndpointSpec:
        return self._spec


def send(
    endpoint: Endpoint[P, R],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    port: Port[R] | None = None,
    selection: Literal["all", "choose"] = "all",
) -> None:
    """Call an endpoint of every actor of a mesh, or of one chosen at random, without waiting.

    Args:
        endpoint: the endpoint of a mesh.
        args: its positional arguments.
        kwargs: its keyword arguments.
        port: gets the answers, values and errors, in the order of arrival.
        selection: whether to call all actors or one of them.

    Raises:
        TypeError: ``endpoint`` is not an endpoint of a mesh, or the arguments do not match its signature.
        ValueError: ``selection`` is unknown.
    """
    if not isinstance(endpoint, BoundEndpoint):
        raise TypeError(f"send() takes an endpoint of a mesh of actors, not a {type(endpoint).__name__}")
    if selection not in ("all", "choose"):
        raise ValueError(f"selection must be 'all' or 'choose', not {selection!r}")
    mesh = endpoint._mesh
    places = range(len(mesh._procs)) if selection == "all" else (random.randrange(len(mesh._procs)),)
    make = endpoint._make(args, kwargs)
    if port is None:
        tell_actors(mesh, [mesh._procs[place] for place in places], make)
        return
    for place in places:
        answer = mesh._client.request(
            (mesh._procs[place],), make, endpoint._description, keep_until_answered(make, _first)
        )
        answer.add_done_callback(functools.partial(_pass_on, answer, port, place))


def _first(answers: Sequence[Answer]) -> Answer:
    return answers[0]


def _pass_on(answer: Future[Answer], port: Port[Any], rank: int) -> None:
    if answer.exception(0) is not None:  # the session was shut down
        return
    port.pass_on(answer.get(0), rank)


class Accumulator(Generic[P, R, A]):
    """Calls an endpoint on every rank and folds the answers into one value, in the order of arrival.

    Args:
        endpoint: the endpoint of a mesh of actors.
        identity: the initial value. Every call starts from this object, so ``combine`` must return a new value and not change
            it.
        combine: computes the next value from the last one and an answer. It runs on the thread that reads the result first.
    """

    def __init__(self, endpoint: Endpoint[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        if not isinstance(endpoint, BoundEndpoint):
            raise TypeError(f"Accumulator() takes an endpoint of a mesh of actors, not a {type(endpoint).__name__}")
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> Future[A]:
        """Call the endpoint. The result of the future is the folded value; it raises if ranks failed.

        Raises:
            TypeError: the arguments do not match the signature, or can't be sent.
        """
        endpoint, mesh = self._endpoint, self._endpoint._mesh
        make = endpoint._make(args, kwargs)
        calls = [endpoint._call_at(place, make) for place in range(len(mesh._procs))]
        arrived: list[Future[R]] = []

        def fold(answers: Sequence[Answer]) -> A:
            reports: dict[Any, Failure] = {}
            results: dict[Any, R] = {}
            value = self._identity
            for call in arrived:
                error = call.exception(0)
                if isinstance(error, ActorError | SupervisionError):
                    reports |= error.reports
                elif error is not None:
                    raise error
                else:
                    results[mesh.extent.point(calls.index(call))] = result = call.get(0)
                    value = value if reports else self._combine(value, result)
            if reports:
                what = f"{endpoint._description}() failed on {mesh._name}"
                raise error_for(reports.values())(what, reports, results)
            return value

        folded = _Combined(_CombinedOwner(mesh._client, calls), mesh._client.new_number(), fold)

        def arrive(call: Future[R]) -> None:
            arrived.append(call)
            if len(arrived) == len(calls):
                folded.resolve((), True)

        for call in calls:
            call.add_done_callback(functools.partial(arrive, call))
        return folded


class _Combined(Future[A]):
    """A future that combines several futures."""

    __slots__ = ("_parts",)

    def __init__(self, owner: _CombinedOwner, id: int, finish: Callable[[Sequence[Answer]], A]) -> None:
        super().__init__(owner, id, finish)
        self._parts = owner.parts

    def _interrupt_work(self) -> str:
        effect: str = self._owner.client.interrupt_work(self._parts, self.interrupt)
        return effect


class _CombinedOwner:
    """Owner of a future that combines several futures."""

    def __init__(self, client: Client, parts: Sequence[Future[Any]]) -> None:
        self.client = client
        self.parts = parts

    def wait(self, waiter: Waiter, timeout_s: float | None) -> bool:
        return self.client.wait(waiter, timeout_s)

    def interrupt(self, id: int, *, abort: bool = False) -> None:
        for part in self.parts:
            part.interrupt(abort=abort)

    def cancel(self, id: int) -> None:
        for part in self.parts:
            part.cancel()

    def attend(self, future: Future[Any]) -> None:
        self.client.attend(future)

    def on_slow_wait(self, wait: Wait) -> float | None:
        wait.future = next((part for part in self.parts if not part.done()), wait.future)
        return self.client.on_slow_wait(wait)
