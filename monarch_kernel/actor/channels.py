"""Channels: any process sends values into a port, and the process that opened the channel receives them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Generic, NoReturn, cast

from monarch_kernel.actor.context import context
from monarch_kernel.actor.pickle_errors import error_of_user
from monarch_kernel.errors import Failure, PayloadError, RemoteInterrupt, rebuild_exception
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.net.wire.codec import dump, pack
from monarch_kernel.net.wire.messages import Payload, PortSend
from monarch_kernel.runtime.controller.session import current_session
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.gather import read_value
from monarch_kernel.runtime.rpc.handles import PROCESS, Handle, opened_by
from monarch_kernel.runtime.rpc.ids import origin_of
from monarch_kernel.runtime.rpc.waits import WARN_AFTER_S, Wait

__all__ = ["Channel", "Port", "PortReceiver", "client_here", "open_port"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)  # of Channel.open(); Channel[int].open() says more
else:
    from typing import TypeVar

    T = TypeVar("T")

R = TypeVar("R")


def client_here() -> Client:
    """Return the client that sends the requests of this code: that of the rank, or of the session of the program."""
    client: Client | None = opened_by() or PROCESS.client
    if client is None:
        runtime = current_session().runtime
        runtime.host_actors()
        return runtime
    return client


class Port(Handle, Generic[T]):
    """The sending end of a channel. It can be passed to any process, as an argument or inside of one."""

    def __init__(self, client: Client, number: int) -> None:
        self._client = client
        self._number = number

    def __repr__(self) -> str:
        return f"<Port {self._number:#x}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Port) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_port, (self._number,)

    @property
    def return_undeliverable(self) -> bool:
        """Whether values come back that can't be delivered. They are dropped; the property is for code of PyTorch Monarch."""
        return False

    @return_undeliverable.setter
    def return_undeliverable(self, value: bool) -> None:
        if value:
            raise NotImplementedError(
                "values for a receiver that is gone are dropped: let an endpoint answer, whose caller gets the error"
            )

    def send(self, value: T) -> None:
        """Send a value. Values of one sender arrive in order. If the receiver is gone, the value is dropped silently.

        Raises:
            PayloadError: the value can't be pickled.
        """
        rank = context().message_rank.rank
        try:
            payload, frames = dump(
                value, f"what is sent into a port (a {type(value).__name__})", roots={"value": value}
            )
        except PayloadError as error:
            raise error_of_user(error) from error.__cause__
        self._client.tell((origin_of(self._number),), pack(PortSend(self._number, payload, rank), frames))

    def exception(self, error: BaseException) -> None:
        """Send an error, which the receiver's future raises."""
        rank = context().message_rank.rank
        self._client.tell((origin_of(self._number),), pack(PortSend(self._number, Payload(), rank, describe(error))))

    def pass_on(self, answer: Answer, rank: int) -> None:
        """Send the answer of a rank to a request without unpickling it."""
        if isinstance(answer, Failure):
            packed = pack(PortSend(self._number, Payload(), rank, answer))
        else:
            packed = pack(PortSend(self._number, answer.payload, rank), tuple(answer.frames))
        self._client.tell((origin_of(self._number),), packed)


class PortReceiver(Generic[T]):
    """The receiving end of a channel, which gives values in the order of arrival."""

    def __init__(self, client: Client, number: int) -> None:
        self._client = client
        self._number = number
        self._lock = threading.Lock()
        self._arrived: deque[Answer] = deque()
        self._waiting: deque[_NextValue[Any]] = deque()
        ours = weakref.ref(self)

        def take(answer: Answer) -> None:
            receiver = ours()
            if receiver is not None:
                receiver._take(answer)

        client.ports.open(number, take)
        weakref.finalize(self, client.ports.close, number)

    def __repr__(self) -> str:
        return f"<PortReceiver {self._number:#x}, {len(self._arrived)} arrived>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PortReceiver stays in the process that called Channel.open(); pass the Port instead")

    def recv(self) -> Future[T]:
        """Return a future of a value. The future takes the next value when it is first used, and raises an error that was sent.

        Used means waited for, awaited or asked whether it is done. A future that nothing uses takes no value; nor does one
        that is cancelled, or whose wait is interrupted: the value goes to the next future. A future whose ``get(timeout)``
        timed out takes no value until it is used again.
        """
        return self._receive(_read)

    def ranked(self) -> RankedPortReceiver[T]:
        """Return a receiver of the same values that gives pairs of rank and value, as `Channel.open_ranked` does."""
        return RankedPortReceiver(self)

    def _receive(self, finish: Callable[[Sequence[Answer]], R]) -> Future[R]:
        return _NextValue(_Receiving(self), self._client.new_number(), finish)

    def _take(self, answer: Answer) -> None:
        with self._lock:
            if not self._waiting:
                self._arrived.append(answer)
                return
            future = self._waiting.popleft()
        future.resolve([answer], True)

    def _withdraw(self, id: int) -> None:
        with self._lock:
            withdrawn = [future for future in self._waiting if future.id == id]
            for future in withdrawn:
                self._waiting.remove(future)
        for future in withdrawn:
            future.abandon(_cancelled())

    def _step_aside(self, future: _NextValue[Any]) -> bool:
        """Leave the values to other futures, unless another thread waits for this one.

        Returns:
            Whether the future has got a value.
        """
        with self._lock:
            if future not in self._waiting:
                return not future.is_aside
            if not future.is_waited_for:
                self._waiting.remove(future)
                future.is_aside = True
            return False

    def _queue_again(self, future: _NextValue[Any], *, to_wait: bool = True) -> bool:
        """Queue a future that stands aside, or give it up.

        Args:
            future: the future.
            to_wait: whether it is queued again.

        Returns:
            Whether it stood aside.
        """
        with self._lock:
            if not future.is_aside:
                return False
            future.is_aside = False
            if not to_wait:
                return True
            if not self._arrived:
                self._waiting.append(future)
                return True
            answer = self._arrived.popleft()
        future.resolve([answer], True)
        return True


class RankedPortReceiver(PortReceiver[tuple[int, T]]):
    """The receiving end of a channel, which gives pairs of rank and value."""

    def __init__(self, receiver: PortReceiver[T]) -> None:
        self._receiver = receiver

    def __repr__(self) -> str:
        return f"<ranked {self._receiver!r}>"

    def recv(self) -> Future[tuple[int, T]]:
        """Return a future of a rank and a value; it behaves as that of `PortReceiver.recv`."""
        return self._receiver._receive(_read_ranked)

    def ranked(self) -> RankedPortReceiver[Any]:
        """Return this receiver, whose values have their ranks already."""
        return self


def _read(answers: Sequence[Answer]) -> Any:
    (answer,) = answers
    if isinstance(answer, Failure):
        raise rebuild_exception(answer)
    return read_value(answer)


def _read_ranked(answers: Sequence[Answer]) -> Any:
    value = _read(answers)
    return cast(Value, answers[0]).rank, value


def _cancelled() -> CancelledError:
    return CancelledError("the wait was cancelled; the next value goes to the next recv()")


class _NextValue(Future[T]):
    """The next value of a receiver.

    A loop around ``recv().get(timeout)`` makes many futures that time out. A value must not go to one of them, where nothing
    reads it. So a future stands aside until it is used, and steps aside again when its wait times out.

    Attributes:
        is_aside: whether the future takes no value for now. Guarded by the receiver's lock.
    """

    __slots__ = ("_receiver", "is_aside")

    def __init__(self, owner: _Receiving, id: int, finish: Callable[[Sequence[Answer]], T]) -> None:
        super().__init__(owner, id, finish)
        self.is_aside = True
        self._receiver = owner.receiver

    @property
    def is_waited_for(self) -> bool:
        """Whether callbacks wait for the value."""
        return bool(self._callbacks)

    def done(self) -> bool:
        self._receiver._queue_again(self)
        return super().done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        super().add_done_callback(callback)
        self._receiver._queue_again(self)

    def cancel(self) -> None:
        if self._receiver._queue_again(self, to_wait=False):
            self.abandon(_cancelled())
        else:
            super().cancel()

    def _wait(self, timeout: float | None, warn_after_s: float | None = WARN_AFTER_S) -> None:
        try:
            super()._wait(timeout, warn_after_s)
        except RemoteInterrupt:
            raise RemoteInterrupt("the wait was interrupted; the next value goes to the next recv()") from None
        except TimeoutError:
            if not self._receiver._step_aside(self):
                raise TimeoutError(
                    f"no value arrived within {timeout} s; the port stays open: call recv() again"
                ) from None
            super().wait()  # a value arrived after the timeout


class _Receiving:
    """Owner of the futures of a receiver. An interrupt ends the wait; no other process is involved."""

    def __init__(self, receiver: PortReceiver[Any]) -> None:
        self.receiver = receiver
        self.client = receiver._client

    def wait(self, waiter: Waiter, timeout_s: float | None) -> bool:
        return self.client.wait(waiter, timeout_s)

    def interrupt(self, id: int, *, abort: bool = False) -> None:
        self.receiver._withdraw(id)

    def cancel(self, id: int) -> None:
        self.receiver._withdraw(id)

    def attend(self, future: Future[Any]) -> None:
        self.client.attend(future)

    def on_slow_wait(self, wait: Wait) -> float | None:
        return self.client.on_slow_wait(wait)


class Channel(Generic[T]):
    """A one-way channel for values between processes."""

    @classmethod
    def open(cls, once: bool = False) -> tuple[Port[T], PortReceiver[T]]:
        """Open a channel, and return its port, which can go to other processes, and its receiver, which stays here.

        Args:
            once: whether one value is enough. Accepted for code of PyTorch Monarch; the channel takes further values, too.
        """
        client = client_here()
        number = client.new_number()
        return Port(client, number), PortReceiver(client, number)

    @classmethod
    def open_ranked(cls, once: bool = False) -> tuple[Port[T], RankedPortReceiver[T]]:
        """Open a channel whose receiver gives pairs of rank and value.

        The rank is that of the actor that answers, in the mesh that `send` addresses, or of the actor that sends.
        """
        port, receiver = cls.open(once)
        return port, receiver.ranked()


def open_port(number: int) -> Port[Any]:
    """Make the port that came from another process."""
    return Port(client_here(), number)
