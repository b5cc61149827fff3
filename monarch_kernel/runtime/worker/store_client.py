"""A store of torch.distributed that listens at no port: another process of the session keeps its keys.

A ``TCPStore`` has no authentication: every user of the machine can connect to its port, overwrite keys so that ranks connect
to another address, and send data that the ranks unpickle. Here operations are requests (`StoreCall`) over the connections of
the session, which are authenticated, and `runtime.rpc.store_server` performs them.

gloo and NCCL call the store from their own threads, without the GIL; torch acquires it around each call of a method here. A
store in Python can do everything except list its keys and keep queues.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from importlib import import_module
from typing import Any
from urllib.parse import parse_qs, urlsplit

from monarch_kernel.base.text import format_nbytes
from monarch_kernel.errors import Failure
from monarch_kernel.net.wire.codec import load, pack
from monarch_kernel.net.wire.messages import StoreCall, StoreOperation
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.store_server import MAX_NBYTES

__all__ = [
    "StoreClient",
    "is_session_store",
    "meeting_in",
    "note_values",
    "serve_rendezvous",
    "torch_store",
    "values_set",
]

_NOTE = "meeting in a store"
_READY = " ready"
"""End of the key by which a rank says that it has the values of all ranks."""

_END_WITHIN_S = 3.0
"""How long a request waits for `StoreClient.end`, in seconds, after the process that keeps the keys has ended."""


class _Collected(threading.local):
    """The lists of `values_set` and the meeting of `meeting_in`, of this thread."""

    def __init__(self) -> None:
        self.lists: list[list[bytes]] = []
        self.meeting: _Meeting | None = None


class _Meeting:
    """Ranks that make a group: each writes a value, and waits for the values of all."""

    def __init__(self, while_waiting: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self.while_waiting = while_waiting
        self.key = ""  # that this rank wrote last


_collected = _Collected()


@contextlib.contextmanager
def values_set() -> Iterator[list[bytes]]:
    """Context that collects the values that this thread writes to stores; they say at which port gloo listens."""
    values: list[bytes] = []
    _collected.lists.append(values)
    try:
        yield values
    finally:
        _collected.lists.pop()


@contextlib.contextmanager
def meeting_in(while_waiting: Callable[[], contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    """Context in which this thread makes a group.

    Args:
        while_waiting: makes the context in which the rank waits for the values of all ranks. It goes on when all have left it.
    """
    before, _collected.meeting = _collected.meeting, _Meeting(while_waiting)
    try:
        yield
    finally:
        _collected.meeting = before


def note_values(values: Sequence[bytes]) -> None:
    """Add values that this thread writes to a store to those that `values_set` collects."""
    for each in _collected.lists:
        each += values


class StoreClient:
    """Sends operations to the process that keeps a store.

    Args:
        client: The `Client` of this process.
        proc: The process that keeps the keys.
        name: The name of the store there.
    """

    def __init__(self, client: Client, proc: int, name: str) -> None:
        self._client = client
        self._proc = proc
        self._name = name
        self._pending: dict[Future[Any], tuple[int, ...]] = {}  # with the members of the groups that they are for
        self._members: tuple[int, ...] = ()  # of the group that is being made, as far as they are known
        self._limit_s: float | None = None
        self._is_ended = False
        self._dead: set[int] = set()
        self._end_received = threading.Event()

    def begin(self, proc: int, name: str) -> None:
        """Use another store from now on."""
        self._proc, self._name = proc, name
        self._dead.clear()
        self.resume()

    def resume(self) -> None:
        """Let requests wait again."""
        self._is_ended = False
        self._end_received.clear()

    @contextlib.contextmanager
    def making(self, members: tuple[int, ...], timeout: timedelta | None) -> Iterator[None]:
        """Context for operations that make a group of these ranks, and that wait for this long; no members means all ranks."""
        before = self._members, self._limit_s
        self._members, self._limit_s = members, None if timeout is None else timeout.total_seconds()
        try:
            yield
        finally:
            self._members, self._limit_s = before

    def end(self, dead: int | None = None) -> None:
        """End all waits for keys, now and later; if a rank is dead, only those for groups that it is in."""
        if dead is None:
            self._is_ended = True
        else:
            self._dead.add(dead)
        self._end_received.set()
        for future, members in list(self._pending.items()):
            if self._has_ended(members):
                future.cancel()

    def ask(
        self,
        operation: StoreOperation,
        keys: Sequence[str] = (),
        values: Sequence[bytes] = (),
        amount: int = 0,
        *,
        timeout_s: float,
    ) -> Any:
        """Request an operation, and wait for its result.

        Args:
            operation: The operation.
            keys: Keys of the store.
            values: Values for the keys, if the operation takes any.
            amount: For ``add``.
            timeout_s: How long to wait for keys, in seconds, unless the group that is being made has its own limit; 0 for ever.

        Raises:
            DistStoreError: The keys were not there in time, or the store can't do it.
            DistNetworkError: The wait was ended, or the process that keeps the keys has ended.
        """
        import torch.distributed as dist

        if (
            nbytes := sum(map(len, values))
        ) > MAX_NBYTES:  # refused there, too, but the transfer would stop other messages
            raise dist.DistStoreError(
                f"{operation} of {_named(keys)} failed: the values take {format_nbytes(nbytes)}, and the store of the process "
                f"group may keep {format_nbytes(MAX_NBYTES)}: send large values by collectives"
            )
        note_values(values)
        waits = operation in ("get", "wait")
        members = self._members
        if self._limit_s is not None:
            timeout_s = self._limit_s
        call = StoreCall(0, self._name, operation, tuple(keys), tuple(values), amount)
        future: Future[Any] = self._client.request(
            (self._proc,),
            lambda id: pack(StoreCall(id, call.store, call.operation, call.keys, call.values, call.amount)),
            _NOTE,
            lambda answers: answers[0],
            quiet=True,
        )
        try:
            if waits:
                self._pending[future] = members
                if self._has_ended(members):
                    future.cancel()
            is_answered = future.wait(timeout_s or None)
        except BaseException:
            future.cancel()
            raise
        finally:
            self._pending.pop(future, None)
        if not is_answered:
            future.cancel()
            raise dist.DistStoreError(f"{operation} timed out after {timeout_s:g} s, waiting for {_named(keys)}")
        answer = future.get(0)
        if not isinstance(answer, Failure):
            return load(answer.payload, answer.frames)
        if answer.kind in ("lost", "stopped"):
            self._end_received.wait(_END_WITHIN_S)  # so that errors that follow are known as consequences of the death
            raise dist.DistNetworkError(f"the process that keeps the keys of the group has ended: {answer.message}")
        if waits and self._has_ended(members):
            raise dist.DistNetworkError(f"the wait for {_named(keys)} was ended: a peer is gone, or it was interrupted")
        raise dist.DistStoreError(f"{operation} of {_named(keys)} failed: {answer.message}")

    def _has_ended(self, members: tuple[int, ...]) -> bool:
        if self._is_ended:
            return True
        return not self._dead.isdisjoint(members) if members else bool(self._dead)


def torch_store(client: StoreClient) -> Any:
    """A ``torch.distributed.Store`` over a client; it waits as long as torch's groups do, unless the caller sets a timeout.

    The caller must keep it as long as a group may use it: torch holds only the part of it that is in C++.
    """
    return _store_class()(client)


def is_session_store(store: Any) -> bool:
    """Whether a store, also below torch's prefixes, is one of `torch_store`."""
    return isinstance(getattr(store, "_underlying_non_prefix_store", store), _store_class())


@cache
def _store_class() -> Any:
    """Define the class; its base needs torch."""
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed  # few of its names are typed

    class SessionStore(dist.Store):  # type: ignore[misc]
        """A store whose keys another process keeps; its methods are those that torch calls from C++."""

        def __init__(self, client: StoreClient) -> None:
            super().__init__()
            self._client = client
            self.set_timeout(dist.default_pg_timeout)

        def _ask(self, operation: StoreOperation, *args: Any, timeout: timedelta | None = None) -> Any:
            return self._client.ask(
                operation, *args, timeout_s=(self.timeout if timeout is None else timeout).total_seconds()
            )

        def clone(self) -> Any:
            return self

        def set(self, key: str, value: str | bytes) -> None:
            self._ask("set", [key], [_bytes(value)])
            if _collected.meeting is not None:
                _collected.meeting.key = key

        def get(self, key: str) -> bytes:
            return bytes(self._ask("get", [key])[0])

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            self._ask("wait", keys, timeout=timeout)

        def check(self, keys: Sequence[str]) -> bool:
            return bool(self._ask("check", keys))

        def add(self, key: str, amount: int) -> int:
            return int(self._ask("add", [key], (), amount))

        def append(self, key: str, value: str | bytes) -> None:
            self._ask("append", [key], [_bytes(value)])

        def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
            return bytes(self._ask("compare_set", [key], [_bytes(expected), _bytes(desired)]))

        def delete_key(self, key: str) -> bool:
            return bool(self._ask("delete", [key]))

        def num_keys(self) -> int:
            return int(self._ask("count"))

        def multi_get(self, keys: Sequence[str]) -> list[bytes]:
            meeting = _collected.meeting
            if meeting is None or meeting.key not in keys or len(keys) == 1:
                return list(self._ask("get", keys))
            with meeting.while_waiting():
                values = list(self._ask("get", keys))
            self._ask("set", [f"{meeting.key}{_READY}"], [b""])
            self._ask("wait", [f"{key}{_READY}" for key in keys])
            return values

        def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
            self._ask("set", keys, [_bytes(value) for value in values])

        def has_extended_api(self) -> bool:
            return True

        deleteKey = delete_key  # the names of these two in C++
        getNumKeys = num_keys

    return SessionStore


def serve_rendezvous(store: Any, address: str, port: int) -> None:
    """Use a store for ``env://`` in this process, as long as MASTER_ADDR and MASTER_PORT have these values.

    With other values, which a user has set, torch's own handler runs.
    """
    module: Any = import_module("torch.distributed.rendezvous")  # a function of torch.distributed has the same name
    handlers: dict[str, Any] = module._rendezvous_handlers
    torchs = getattr(handlers["env"], "torchs", handlers["env"])

    def env(url: str, timeout: timedelta | None = None, **options: Any) -> Iterator[tuple[Any, int, int]]:
        if (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) != (address, str(port)):
            yield from torchs(url, **options) if timeout is None else torchs(url, timeout=timeout, **options)
            return
        query = {name: values[-1] for name, values in parse_qs(urlsplit(url).query).items()}
        rank, size = (int(query.get(name.lower(), os.environ.get(name, "-1"))) for name in ("RANK", "WORLD_SIZE"))
        if rank < 0 or size < 0:
            raise ValueError("env:// needs RANK and WORLD_SIZE in the environment")
        yield store, rank, size
        raise RuntimeError("Unable to perform rerendezvous using env:// method")

    env.torchs = torchs  # type: ignore[attr-defined]
    handlers["env"] = env


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _named(keys: Sequence[str]) -> str:
    """The last parts of the keys, without torch's prefixes, which do not help the user."""
    named = ", ".join(dict.fromkeys(key.rpartition("//")[2] for key in keys[:4]))
    return f"{named or 'keys'} and {len(keys) - 4} more" if len(keys) > 4 else named or "keys"
