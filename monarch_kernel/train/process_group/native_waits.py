"""Waits in native code of torch, which KeyboardInterrupt does not reach: since when a thread is in one, and how it ends.

Theory of operation
===================

Python runs no signal handler while a thread is in native code. This module therefore wraps the parts of torch that wait there:

- A wait for keys of a store (``wait``, ``get``) asks the store in turns, and a ``TCPStore`` first connects in Python. So an
  interrupt is raised at once, and the store stays usable. gloo, which asks in native code, gets a store in Python that does so.
- A ``TCPStore`` whose server does not answer as one tries again and again, in native code with long pauses. It is made with a
  short limit in turns instead.
- A wait for keys of a store of this package, below a ``PrefixStore``, is interruptible anyway; it is only noted.
- ``Work.wait``, waits for functional collectives, ``monitored_barrier``, and what makes a process group of gloo or the server
  of a ``TCPStore``, are noted, with the sockets that were open before. `RankGroup.abort` shuts down those that they have opened
  since, and ends receives from any rank (`any_source`).
- When all groups have ended, sends and receives of gloo that still wait are aborted (`gloo_aborts`), and so are those for which
  code begins to wait until it makes another group: gloo forgets messages that it is writing or reading.

When gloo has connected a group, its port is closed (`strangers`), also if a program makes the group with its own store.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, wraps
from typing import Any

from monarch_kernel.base.failure_reports import GROUP_HAS_ENDED
from monarch_kernel.runtime.worker.store_client import is_session_store, note_values, values_set
from monarch_kernel.train.process_group import strangers
from monarch_kernel.train.process_group.any_source import AnySource
from monarch_kernel.train.process_group.cut_messages import Received
from monarch_kernel.train.process_group.gloo_aborts import abort
from monarch_kernel.train.process_group.sockets import Socket, open_sockets

__all__ = ["NativeWaits"]

_CONNECT_S = 1.0
"""How long one attempt to connect to a server may take."""

_PAUSE_S = 0.05
"""The longest pause between two questions to a store."""

_ATTEMPT_S = 0.1
"""How long torch may try to reach the server of a store in the first turn, in addition to the time that connecting takes.

Torch then pauses up to 0.6 s once, and a socket that an abort shuts down after an interrupt is not followed by another.
"""

_LONGEST_ATTEMPT_S = 1.0
"""The same for later turns, which get longer: a server on a busy machine may answer late."""

_LONGEST_PAUSE_S = 5.0
"""The longest pause between two turns: torch reports each on stderr."""

_MAX_NAMED = 4

_CLOSURE = "Application timeout caused pair closure"
"""What gloo says of a connection that it has closed itself, because a receive has timed out; an abort lets one do so."""


@dataclass(slots=True)
class _Wait:
    """A wait of a thread.

    Attributes:
        started: when it began, by `time.monotonic`.
        before: the sockets that were open before a call that opens some; None for other calls.
        members: of the process group that the call makes; empty for all ranks.
        size: the number of its members.
        what: for which keys of a store Python waits, or for which server; empty for other calls.
        is_in_session: whether the store is one of this package, whose waits `RankGroup.abort` ends.
        is_ended: whether it is to raise an error now.
        of: what it waits for, if that is an object of torch.
    """

    started: float = field(default_factory=time.monotonic)
    before: set[Socket] | None = None
    members: tuple[int, ...] = ()
    size: int = 0
    what: str = ""
    is_in_session: bool = False
    is_ended: bool = False
    of: Any = None


class NativeWaits:
    """The waits of this process, once it is installed; any thread may ask.

    Attributes:
        received: refuses what waits have received of messages that were cut.
        any_source: ends receives from any rank; installed apart, because it comes before what counts receives.
    """

    def __init__(self) -> None:
        self.received = Received()
        self.any_source = AnySource()
        self._waits: dict[int, _Wait] = {}  # by thread
        # When groups, and all groups, last started to end, and when a group was last made.
        self._closed_at = self._ended_at = self._made_at = -math.inf
        self._stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of gloo's groups

    def waits_s(self, thread: int) -> float:
        """For how long a thread has been in a wait, in seconds; 0 if it is in none."""
        wait = self._waits.get(thread)
        return 0.0 if wait is None else max(1e-9, time.monotonic() - wait.started)

    def oldest_s(self, others: Collection[int] = ()) -> float:
        """Return the age of the oldest wait that none of these threads is in; 0 if there is none.

        Waits for keys of a store do not count: a thread may wait for them in the background for as long as the process lives.
        """
        waits = [wait for thread, wait in list(self._waits.items()) if thread not in others and not wait.what]
        return max((max(1e-9, time.monotonic() - wait.started) for wait in waits), default=0.0)

    def end_key_wait(self, thread: int) -> bool:
        """Make a thread raise an error if it waits for keys of a store of the user's.

        Returns:
            Whether it does; not if it waits in native code, so that its sockets have to be shut down first.
        """
        wait = self._waits.get(thread)
        if wait is None or not wait.what or wait.is_in_session:
            return False
        wait.is_ended = True
        return wait.before is None

    def close(self, since: float) -> None:
        """Let waits raise an error that says that their group has ended, where gloo's names a timeout, which there was not.

        Args:
            since: when groups began to end, by `time.monotonic`.
        """
        self._closed_at = since

    def end_messages(self, since: float) -> None:
        """Make the waits for sends and receives of ended groups raise an error, those that begin later, too.

        Args:
            since: when all groups began to end, by `time.monotonic`; groups that were made later go on.
        """
        self._ended_at = since  # before the look at the waits: one that begins looks at it afterwards
        for wait in list(self._waits.values()):
            self._abort_message(wait)

    def _abort_message(self, wait: _Wait) -> None:
        if wait.of is not None and self._was_made_before(wait, self._ended_at):
            abort(wait.of)

    def _was_made_before(self, wait: _Wait, time: float) -> bool:
        """Whether the group that a thread waits for was made before a time."""
        return time > self._made_at or time > wait.started

    def for_keys(self) -> dict[int, tuple[float, str]]:
        """Return the waits for keys of stores, and for their servers.

        Returns:
            thread -> when it began to wait, by the clock `time.monotonic`, and for what.
        """
        return {thread: (wait.started, wait.what) for thread, wait in list(self._waits.items()) if wait.what}

    def opened(self, dead: int | None = None) -> tuple[set[Socket], int]:
        """Return the sockets that unfinished calls have opened, and the size of the largest group that they make.

        Args:
            dead: return only those for groups that this rank is in.
        """
        found: set[Socket] = set()
        size = 0
        for wait in list(self._waits.values()):
            if wait.before is None or not (dead is None or not wait.members or dead in wait.members):
                continue
            found |= open_sockets() - wait.before
            size = max(size, wait.size)
        return found, size

    @contextlib.contextmanager
    def opening(self, members: tuple[int, ...] = (), size: int = 0) -> Iterator[None]:
        """Context for a call that opens sockets, and waits for the members of a process group."""
        with self._noted(_Wait(before=open_sockets(), members=members, size=size)):
            yield

    def install(self, dist: Any) -> None:
        """Wrap the parts of torch that wait."""
        dist.Work.wait = self._noting(dist.Work.wait)
        dist.ProcessGroup.monitored_barrier = self._noting(dist.ProcessGroup.monitored_barrier)
        asked = (dist.TCPStore, dist.FileStore, dist.HashStore)
        dist.Store.wait = self._asking(dist.Store.wait, asked, dist.DistStoreError, dist.DistNetworkError)
        for name in ("get", "multi_get"):
            setattr(dist.Store, name, self._getting(getattr(dist.Store, name), asked))
        dist.TCPStore.__init__ = self._connecting(dist.TCPStore.__init__, dist.DistNetworkError, dist.DistError)
        if hasattr(dist, "ProcessGroupGloo"):
            dist.ProcessGroupGloo.__init__ = self._making(dist.ProcessGroupGloo.__init__, asked)
        self._note_functional()

    def _note_functional(self) -> None:
        """Wrap the function that waits for functional collectives; code that is compiled waits in C++."""
        from torch.compiler import is_compiling
        from torch.distributed import _functional_collectives as functional

        original: Any = functional.wait_tensor
        noted = self._noting(original)

        @wraps(original)
        def wait_tensor(tensor: Any) -> Any:
            return original(tensor) if is_compiling() else noted(tensor)

        functional.wait_tensor = wait_tensor

    @contextlib.contextmanager
    def _noted(self, wait: _Wait) -> Iterator[_Wait]:
        thread = threading.get_ident()
        outer = self._waits.get(thread)
        try:
            self._waits[thread] = wait
            yield wait
        finally:
            if outer is None:
                self._waits.pop(thread, None)
            else:
                self._waits[thread] = outer

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        waits, check = self._waits, self.received.check

        @wraps(original)
        def method(of: Any, *args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            try:
                waits[thread] = wait = _Wait(of=of)
                self._abort_message(wait)
                result = original(of, *args, **kwargs)
                check()
                return result
            except RuntimeError as error:
                if str(error).endswith(_CLOSURE) and self._was_made_before(wait, self._closed_at):
                    raise RuntimeError(f"the wait was ended: {GROUP_HAS_ENDED}") from None
                raise
            finally:
                waits.pop(thread, None)

        return method

    def _making(self, original: Callable[..., None], asked: tuple[type, ...]) -> Callable[..., None]:
        @wraps(original)
        def __init__(group: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
            outer = self._waits.get(threading.get_ident())
            is_admitted_later = outer is not None
            if isinstance(_without_prefix(store), asked):
                is_admitted_later = False
                store = self._stores[group] = _interruptible_store()(store)
            before = open_sockets()
            self._made_at = time.monotonic()
            with self.opening(() if outer is None else outer.members, size), values_set() as published:
                original(group, store, rank, size, *args, **kwargs)
            if not is_admitted_later:
                strangers.close_ports(open_sockets() - before, published)

        return __init__

    def _connecting(
        self, original: Callable[..., None], too_late: type[Exception], failed: type[Exception]
    ) -> Callable[..., None]:
        @wraps(original)
        def __init__(
            store: Any,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            timeout: timedelta = timedelta(seconds=300),
            *args: Any,
            **kwargs: Any,
        ) -> None:
            def make(limit: timedelta) -> None:
                original(store, host_name, port, world_size, is_master, limit, *args, **kwargs)

            if is_master:
                where = f" at port {port}" if port else ""
                what = f"TCPStore for {world_size} processes to connect{where}" if world_size else ""
                with self._noted(_Wait(before=open_sockets(), what=what)):
                    make(timeout)
                return
            with self._noted(_Wait(what=f"TCPStore for its server at {host_name} port {port}")) as wait:
                attempt_s, pause_s, end = _ATTEMPT_S, _CONNECT_S / 2, wait.started + timeout.total_seconds()
                while True:
                    connecting_s = _await_server(host_name, port, timeout, wait, too_late)
                    limit = timedelta(seconds=attempt_s + 2 * connecting_s)
                    try:
                        wait.before = open_sockets()
                        make(min(limit, timeout))
                        break
                    except failed as error:
                        problem = str(error).partition("\n")[0]
                    finally:
                        wait.before = None
                    _check_in_time(host_name, port, timeout, wait, too_late, problem)
                    time.sleep(max(0.0, min(pause_s, end - time.monotonic())))
                    attempt_s = min(_LONGEST_ATTEMPT_S, attempt_s * 2)
                    pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
            store.set_timeout(timeout)

        return __init__

    def _asking(
        self,
        original: Callable[..., None],
        asked: tuple[type, ...],
        too_late: type[Exception],
        ended: type[Exception],
    ) -> Callable[..., None]:
        @wraps(original)
        def wait(store: Any, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            limit = store.timeout if timeout is None else timeout
            if not isinstance(_without_prefix(store), asked):
                with self._asking_session(store, "wait", keys):
                    original(store, keys, limit)
                return
            kind = type(_without_prefix(store)).__name__
            with self._noted(_Wait(what=f"{kind}.wait for {_named(keys)}")) as noted:
                while not store.check(keys):
                    waited_s = time.monotonic() - noted.started
                    if noted.is_ended:
                        raise ended(f"the wait for {', '.join(keys)} was ended: another rank has failed")
                    if 0 < limit.total_seconds() <= waited_s:
                        raise too_late(
                            f"wait timeout after {limit.total_seconds() * 1000:g}ms, keys: {', '.join(keys)}"
                        )
                    time.sleep(min(_PAUSE_S, max(0.001, waited_s / 20)))

        return wait

    def _getting(self, original: Callable[..., Any], asked: tuple[type, ...]) -> Callable[..., Any]:
        """Wrap a method that returns the values of keys, so that it first waits until they exist."""
        name = original.__name__

        @wraps(original)
        def get(store: Any, keys: Any) -> Any:
            names = [keys] if isinstance(keys, str) else keys
            if isinstance(_without_prefix(store), asked):
                store.wait(names)
                return original(store, keys)
            with self._asking_session(store, name, names):
                return original(store, keys)

        return get

    def _asking_session(self, store: Any, name: str, keys: Sequence[str]) -> contextlib.AbstractContextManager[object]:
        """Context for a method of a store that waits for keys; it notes the wait if the store is one of this package.

        What makes a process group asks such a store, too. That is a part of a wait that is already noted.
        """
        if threading.get_ident() in self._waits or not is_session_store(store):
            return contextlib.nullcontext()
        return self._noted(_Wait(what=f"{type(store).__name__}.{name} for {_named(keys)}", is_in_session=True))


def _await_server(host: str, port: int, timeout: timedelta, wait: _Wait, error: type[Exception]) -> float:
    """Wait until a server listens.

    Returns:
        How long it took to connect to it, in seconds.

    Raises:
        DistNetworkError: It does not within the time, or the wait was ended; ``error`` is this type.
    """
    while True:
        now = time.monotonic()
        left_s = timeout.total_seconds() - (now - wait.started)
        try:
            socket.create_connection((host, port), max(0.01, min(_CONNECT_S, left_s))).close()
            return time.monotonic() - now
        except OSError as refused:
            problem = str(refused)
        _check_in_time(host, port, timeout, wait, error, problem)
        time.sleep(_PAUSE_S)


def _check_in_time(host: str, port: int, timeout: timedelta, wait: _Wait, error: type[Exception], problem: str) -> None:
    """Raise the error of a server that can't be reached if the wait for it is over; ``problem`` says why it can't."""
    if wait.is_ended:
        raise error(f"the wait for the store at {host} port {port} was ended: another rank has failed")
    if time.monotonic() - wait.started >= timeout.total_seconds():
        raise error(
            f"The client socket has timed out after {timeout.total_seconds() * 1000:g}ms while trying to connect to "
            f"({host}, {port}): {problem}"
        )


@cache
def _interruptible_store() -> Any:
    """Define the class; its base needs torch."""
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed  # few of its names are typed

    class InterruptibleStore(dist.Store):  # type: ignore[misc]
        """Passes operations of C++ code to another store, through the methods that Python code calls."""

        def __init__(self, store: Any) -> None:
            super().__init__()
            self._store = store
            self.set_timeout(store.timeout)

        def clone(self) -> Any:
            return self

    def passing(name: str) -> Callable[..., Any]:
        if name not in ("set", "append", "multi_set"):
            return lambda self, *args: getattr(self._store, name)(*args)

        def method(self: Any, keys: Any, values: Any) -> Any:
            note_values([bytes(each) for each in (values if name == "multi_set" else [values])])
            return getattr(self._store, name)(keys, values)

        return method

    for name in (
        "set",
        "get",
        "wait",
        "check",
        "add",
        "append",
        "compare_set",
        "delete_key",
        "num_keys",
        "multi_get",
        "multi_set",
        "has_extended_api",
    ):
        setattr(InterruptibleStore, name, passing(name))
    InterruptibleStore.deleteKey = InterruptibleStore.delete_key  # the names of these two in C++
    InterruptibleStore.getNumKeys = InterruptibleStore.num_keys
    return InterruptibleStore


def _named(keys: Sequence[str]) -> str:
    """Name keys without torch's prefixes, the first of many."""
    names = [key.rpartition("//")[2] for key in keys]
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"key{'s' * (len(names) != 1)} {', '.join(map(repr, names[:_MAX_NAMED]))}{more}"


def _without_prefix(store: Any) -> Any:
    """The store below all of torch's prefixes."""
    return getattr(store, "_underlying_non_prefix_store", store)
