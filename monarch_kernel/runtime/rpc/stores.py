"""Stores of torch.distributed that a process keeps for others: keys and values, and requests that wait for keys. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.errors import Failure
from monarch_kernel.net.wire.codec import Packed, dump, pack
from monarch_kernel.net.wire.messages import Failed, Result, StoreCall

__all__ = ["StoreTable"]

Answers = list[tuple[int, Packed]]
"""Requests and their answers."""


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
    wanted: dict[str, list[int]] = field(default_factory=dict)

    def put(self, key: str, value: bytes) -> Answers:
        """Set a key; returns the answers to requests that now have all their keys."""
        self.values[key] = value
        answers: Answers = []
        for id in self.wanted.pop(key, ()):
            waiting = self.waiting.get(id)
            if waiting is None:
                continue
            waiting.missing.discard(key)
            if not waiting.missing:
                del self.waiting[id]
                answers.append(self.answer_waiting(waiting.call))
        return answers

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
    """

    def __init__(self) -> None:
        self._stores: dict[str, _Store] = {}
        self._operations: dict[str, Callable[[_Store, StoreCall], Answers]] = {
            "set": _set,
            "get": _wait,
            "wait": _wait,
            "check": lambda store, call: [_answer(call.id, all(key in store.values for key in call.keys))],
            "add": _add,
            "append": _append,
            "compare_set": _compare_set,
            "delete": lambda store, call: [_answer(call.id, store.values.pop(call.keys[0], None) is not None)],
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
        return self._operations[call.operation](store, call)

    def forget(self, id: int) -> None:
        """Drop a request that waits: its caller has given up."""
        for store in self._stores.values():
            store.waiting.pop(id, None)


def _set(store: _Store, call: StoreCall) -> Answers:
    answers = [_answer(call.id, None)]
    for key, value in zip(call.keys, call.values):
        answers += store.put(key, value)
    return answers


def _wait(store: _Store, call: StoreCall) -> Answers:
    missing = {key for key in call.keys if key not in store.values}
    if not missing:
        return [store.answer_waiting(call)]
    store.waiting[call.id] = _Waiting(call, missing)
    for key in missing:
        store.wanted.setdefault(key, []).append(call.id)
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


def _answer(id: int, value: Any) -> tuple[int, Packed]:
    payload, frames = dump(value, "what a store has")
    return id, pack(Result(id, payload), frames)


def _refuse(id: int, why: str) -> tuple[int, Packed]:
    return id, pack(Failed(id, Failure("exception", "LookupError", why)))


def _refuse_closed(id: int, name: str) -> tuple[int, Packed]:
    return _refuse(id, f"the store {name!r} is closed: the process group that used it is no more")
