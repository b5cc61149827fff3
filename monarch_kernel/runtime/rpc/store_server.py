"""Stores of torch.distributed that a process keeps for others: keys and values, and requests that wait for keys. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.base.text import format_nbytes
from monarch_kernel.errors import Failure
from monarch_kernel.net.wire.codec import Packed, dump, pack
from monarch_kernel.net.wire.messages import Failed, Result, StoreCall

__all__ = ["MAX_NBYTES", "StoreTable"]

Answers = list[tuple[int, Packed]]
"""Requests and their answers."""

MAX_NBYTES = 256 << 20
"""What a store may keep: keys, values, and the keys that requests wait for."""

_ENTRY_NBYTES = 200
"""What an entry takes beside the bytes of its key and value."""


@dataclass(slots=True)
class _Waiting:
    """A request that waits for keys."""

    call: StoreCall
    missing: set[str]


@dataclass(slots=True)
class _Store:
    """Keys and values. ``waiting`` maps ids to requests that wait, ``wanted`` maps keys to the ids that wait for them."""

    values: dict[str, bytes] = field(default_factory=dict)
    waiting: dict[int, _Waiting] = field(default_factory=dict)
    wanted: dict[str, set[int]] = field(default_factory=dict)
    nbytes: int = 0

    def put(self, key: str, value: bytes) -> Answers:
        """Set a key; returns the answers to requests that now have all their keys."""
        self.nbytes += _nbytes(key, value) - self._nbytes_of(key)
        self.values[key] = value
        answers: Answers = []
        for id in self.wanted.pop(key, ()):
            waiting = self.waiting.get(id)
            if waiting is None:
                continue
            waiting.missing.discard(key)
            if not waiting.missing:
                self.drop_wait(id)
                answers.append(self.answer_waiting(waiting.call))
        return answers

    def delete(self, key: str) -> bool:
        """Delete a key; returns whether it was there."""
        self.nbytes -= self._nbytes_of(key)
        return self.values.pop(key, None) is not None

    def wait(self, call: StoreCall, missing: set[str]) -> None:
        """Let a request wait for keys."""
        self.drop_wait(call.id)
        self.nbytes += sum(map(_nbytes, call.keys))
        self.waiting[call.id] = _Waiting(call, missing)
        for key in missing:
            self.wanted.setdefault(key, set()).add(call.id)

    def drop_wait(self, id: int) -> None:
        """Drop a request that waits, if it is known."""
        waiting = self.waiting.pop(id, None)
        if waiting is None:
            return
        self.nbytes -= sum(map(_nbytes, waiting.call.keys))
        for key in waiting.missing:
            if ids := self.wanted.get(key):
                ids.discard(id)
                if not ids:
                    del self.wanted[key]

    def growth(self, call: StoreCall) -> int:
        """By how many bytes the store grows at most if it performs a request."""
        match call.operation:
            case "set":
                pairs = zip(call.keys, call.values)
                return sum(_nbytes(key, value) - self._nbytes_of(key) for key, value in pairs)
            case "compare_set":
                return _nbytes(call.keys[0], call.values[1]) - self._nbytes_of(call.keys[0])
            case "append" | "add":
                new = 0 if call.keys[0] in self.values else _nbytes(call.keys[0])
                return new + sum(map(len, call.values))
            case "get" | "wait":
                return 0 if self.values.keys() >= set(call.keys) else sum(map(_nbytes, call.keys))
        return 0

    def _nbytes_of(self, key: str) -> int:
        value = self.values.get(key)
        return 0 if value is None else _nbytes(key, value)

    def answer_waiting(self, call: StoreCall) -> tuple[int, Packed]:
        """Make the answer to a request whose keys are all set."""
        if call.operation == "wait":
            return _answer(call.id, None)
        missing = next((key for key in call.keys if key not in self.values), None)
        if missing is not None:
            return _refuse(call.id, f"the key {missing!r} was deleted")
        return _answer(call.id, [self.values[key] for key in call.keys])


class StoreTable:
    """The stores that a process keeps.

    Any thread may open a store; only the I/O thread does the rest.

    Args:
        max_nbytes: What each store may keep.
    """

    def __init__(self, max_nbytes: int = MAX_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._stores: dict[str, _Store] = {}
        self._operations: dict[str, Callable[[_Store, StoreCall], Answers]] = {
            "set": _set,
            "get": _wait,
            "wait": _wait,
            "check": lambda store, call: [_answer(call.id, all(key in store.values for key in call.keys))],
            "add": _add,
            "append": _append,
            "compare_set": _compare_set,
            "delete": lambda store, call: [_answer(call.id, store.delete(call.keys[0]))],
            "count": lambda store, call: [_answer(call.id, len(store.values))],
        }

    def __len__(self) -> int:
        return len(self._stores)

    @property
    def n_waiting(self) -> int:
        """Number of requests that wait for keys."""
        return sum(len(store.waiting) for store in list(self._stores.values()))

    def open(self, name: str) -> None:
        """Keep a new store."""
        self._stores[name] = _Store()

    def close(self, name: str) -> Answers:
        """Drop a store; returns the answers to requests that wait in it."""
        store = self._stores.pop(name, None)
        return [] if store is None else [_refuse_closed(id, name) for id in store.waiting]

    def handle(self, call: StoreCall) -> Answers:
        """Perform a request; returns the answer, unless it has to wait, and answers to requests that waited for its key."""
        store = self._stores.get(call.store)
        if store is None:
            return [_refuse_closed(call.id, call.store)]
        growth = store.growth(call)
        if growth > 0 and store.nbytes + growth > self._max_nbytes:
            return [_refuse(call.id, self._full_text(store))]
        return self._operations[call.operation](store, call)

    def forget(self, id: int) -> None:
        """Drop a request that waits: its caller has given up."""
        for store in self._stores.values():
            store.drop_wait(id)

    def _full_text(self, store: _Store) -> str:
        return (
            f"the store of the process group may keep {format_nbytes(self._max_nbytes)}, and has {len(store.values)} keys that "
            f"take, with those that ranks wait for, {format_nbytes(store.nbytes)}: delete keys that are no longer needed "
            "(store.delete_key), and send large values by collectives"
        )


def _set(store: _Store, call: StoreCall) -> Answers:
    answers = [_answer(call.id, None)]
    for key, value in zip(call.keys, call.values):
        answers += store.put(key, value)
    return answers


def _wait(store: _Store, call: StoreCall) -> Answers:
    missing = {key for key in call.keys if key not in store.values}
    if not missing:
        return [store.answer_waiting(call)]
    store.wait(call, missing)
    return []


def _add(store: _Store, call: StoreCall) -> Answers:
    (key,) = call.keys
    try:
        total = int(store.values.get(key, b"0")) + call.amount
    except ValueError:
        return [_refuse(call.id, f"the value of {key!r} is not a number, and nothing can be added to it")]
    return [_answer(call.id, total), *store.put(key, b"%d" % total)]


def _append(store: _Store, call: StoreCall) -> Answers:
    (key,), (value,) = call.keys, call.values
    return [_answer(call.id, None), *store.put(key, store.values.get(key, b"") + value)]


def _compare_set(store: _Store, call: StoreCall) -> Answers:
    """Do as torch's ``TCPStore``: set a missing key if an empty value is expected."""
    (key,), (expected, desired) = call.keys, call.values
    known = store.values.get(key)
    if known == expected or (known is None and not expected):
        return [_answer(call.id, desired), *store.put(key, desired)]
    return [_answer(call.id, expected if known is None else known)]


def _nbytes(key: str, value: bytes = b"") -> int:
    return _ENTRY_NBYTES + len(key) + len(value)


def _answer(id: int, value: Any) -> tuple[int, Packed]:
    payload, frames = dump(value, "what a store has")
    return id, pack(Result(id, payload), frames)


def _refuse(id: int, why: str) -> tuple[int, Packed]:
    return id, pack(Failed(id, Failure("exception", "LookupError", why)))


def _refuse_closed(id: int, name: str) -> tuple[int, Packed]:
    return _refuse(id, f"the store {name!r} is closed: the process group that used it no longer exists")
