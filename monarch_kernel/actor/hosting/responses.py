"""Answers through ports: an endpoint with a response port can answer later, or let another actor answer."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from monarch_kernel.actor.channels import Port, open_port
from monarch_kernel.errors import Failure
from monarch_kernel.net.wire.codec import dump, pack
from monarch_kernel.net.wire.messages import Failed, Result
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.worker.actor_server import ActorServer
from monarch_kernel.runtime.worker.executor import Executor

__all__ = ["ResponsePort", "Responses"]

T = TypeVar("T")


class Responses:
    """The open requests of one actor that are answered through ports.

    A port that is pickled becomes an ordinary port of this process. The first value that this port gets answers the request.

    Attributes:
        is_lenient: whether a second answer is dropped, not an error. An integration sets it.
        is_ending: whether the actor is ending, and drops its ports with its other objects.
    """

    is_lenient = False

    def __init__(self, actor_server: ActorServer, executor: Executor) -> None:
        self.is_ending = False
        self._workplace = actor_server
        self._executor = executor
        self._open: dict[int, list[int]] = {}  # request -> numbers of its pickled ports

    def port(self, id: int) -> ResponsePort[Any]:
        """Make the port of a request. Id 0 stands for a broadcast, which has no answer."""
        port: ResponsePort[Any] = ResponsePort(self, id)
        if id:
            self._open[id] = []
            weakref.finalize(port, self._drop, id).atexit = False
        return port

    def take(self, id: int) -> bool:
        """Mark a request as answered, and return whether it was open. Of several threads, only one gets True."""
        passed_on = self._open.pop(id, None)
        for number in passed_on or ():
            self._workplace.client.ports.close(number)
        return passed_on is not None

    def send(self, id: int, value: Any) -> None:
        """Answer with a value."""
        payload, frames = dump(value, "the response", roots={"response": value})
        if id and self._take_once(id):
            self._workplace.send_answer(id, pack(Result(id, payload), frames))

    def fail(self, id: int, error: BaseException | Failure) -> None:
        """Answer with an error."""
        if not id or self._take_once(id):
            self._workplace.fail(self._executor, id, error)

    def _take_once(self, id: int) -> bool:
        is_open = self.take(id)
        if not is_open and not self.is_lenient:
            raise ValueError("this call is already answered: a response port takes one answer")
        return is_open

    def hand_on(self, id: int) -> int:
        """Return the number of a port that can go to other processes."""
        client = self._workplace.client
        number = client.new_number()
        passed_on = self._open.get(id)
        if passed_on is not None:
            passed_on.append(number)
            client.ports.open(number, lambda answer: self.pass_on(id, answer))
        return number

    def pass_on(self, id: int, answer: Answer) -> None:
        """Answer with the value that another process has sent; later values are dropped. Runs on the I/O thread."""
        if not self.take(id):
            return
        if isinstance(answer, Failure):
            packed = pack(Failed(id, answer))
        else:
            packed = pack(Result(id, answer.payload), tuple(answer.frames))
        self._workplace.send_answer_now(id, packed)

    def end(self, why: Failure) -> None:
        """Answer all open requests with the failure that ended the actor."""
        for id in list(self._open):
            if self.take(id):
                self._workplace.fail(self._executor, id, why)

    def _drop(self, id: int) -> None:
        if not self.is_ending and not self._open.get(id, True) and self.take(id):  # no port is left that could answer
            error = RuntimeError("the endpoint dropped its response port without an answer")
            self._workplace.fail(self._executor, id, error)


class ResponsePort(Port[T]):
    """The port for the only answer of an endpoint that is marked with ``explicit_response_port=True``."""

    def __init__(self, responses: Responses, id: int) -> None:
        self._responses = responses
        self._id = id

    def __repr__(self) -> str:
        return f"<response port of request {self._id}>"

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_port, (self._responses.hand_on(self._id),)

    def send(self, value: T) -> None:
        """Answer the call. The answer to a broadcast is dropped.

        Raises:
            PayloadError: the value can't be pickled; the call is still open.
            ValueError: the call is already answered.
        """
        self._responses.send(self._id, value)

    def exception(self, error: BaseException) -> None:
        """Answer the call with an error.

        Raises:
            ValueError: the call is already answered.
        """
        self._responses.fail(self._id, error)

    def pass_on(self, answer: Answer, rank: int) -> None:
        """Answer the call with the answer to another request."""
        self._responses.pass_on(self._id, answer)
