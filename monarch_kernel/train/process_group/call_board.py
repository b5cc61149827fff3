"""A place in the store of a group where ranks of different hosts publish the collective that each calls.

Theory of operation
===================

The first rank that comes to a collective publishes its call under the number of the collective, in one atomic operation. Each
later rank gets that call in the same operation, and compares it with its own, before it exchanges any data. No rank waits for
another one, only for the store. This takes a fraction of a millisecond, so it has a small budget (`call_check`).

The first of the two ranks of a message between hosts publishes its call in the same way, under the message.

A rank that finds a difference writes the text of the error into the store. The first rank, whose connections are then closed,
finds the text there.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from typing import Any

from monarch_kernel.train.process_group.call_page import Message, Published
from monarch_kernel.train.process_group.collective_calls import Call

__all__ = ["CallBoard"]

_log = logging.getLogger(__name__)

_KEPT = 64
"""Calls that a rank leaves in the store. A rank that is this far behind is not compared."""

_REFUSAL = "monarch/refusal"


class CallBoard:
    """The place of one group, as one rank uses it; after an error of the store it compares nothing.

    Args:
        store: the store of the group.
        rank: rank of this process in the group.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._mine: deque[str] = deque()
        self._is_broken = False

    def publish(self, number: int, uncompared: int, published: Published) -> tuple[int, Call, str] | None:
        """Publish the call of this rank if it is the first one; else return the first one: its rank, the call and the line.

        Args:
            number: of the collective in the group.
            uncompared: how many collectives before it were not published; a call with another number is not returned.
            published: the call of this rank.
        """
        return self._publish(f"monarch/call/{number}", uncompared, published)

    def publish_message(self, message: Message, published: Published) -> tuple[Call, str] | None:
        """Publish the call of this rank for a message if it is the first one; else return the other one's call and line."""
        first = self._publish(_key_of(message), 0, published)
        return None if first is None else first[1:]

    def retract(self, what: int | Message) -> None:
        """Withdraw the call of this rank for a collective or a message, which has failed before it took part."""
        key = f"monarch/call/{what}" if isinstance(what, int) else _key_of(what)
        if key in self._mine:
            self._mine.remove(key)
            self._ask("delete_key", key)

    def refuse(self, text: str) -> str:
        """Leave the text of the error for the other ranks; returns the text of the rank that was first."""
        return bytes(self._ask("compare_set", _REFUSAL, b"", text.encode()) or text.encode()).decode()

    @property
    def refusal(self) -> str:
        """Why a rank has refused a collective of the group; empty if none has."""
        return bytes(self._ask("get", _REFUSAL)).decode() if self._ask("check", [_REFUSAL]) else ""

    def _publish(self, key: str, uncompared: int, published: Published) -> tuple[int, Call, str] | None:
        mine = json.dumps([self._rank, uncompared, published.call.encode().decode(), published.line]).encode()
        found = self._ask("compare_set", key, b"", mine)
        if found is None:
            return None
        rank, theirs, call, line = json.loads(found)
        if rank == self._rank:
            self._mine.append(key)
            if len(self._mine) > _KEPT:
                self._ask("delete_key", self._mine.popleft())
            return None
        return (rank, Call.decode(call.encode()), line) if theirs == uncompared else None

    def _ask(self, operation: str, *args: Any) -> Any:
        if self._is_broken:
            return None
        try:
            return getattr(self._store, operation)(*args)
        except (RuntimeError, OSError, NotImplementedError) as error:  # its process has ended, or the store can't do it
            _log.warning("collectives can't be compared between hosts: %s", error)
            self._is_broken = True
            return None


def _key_of(message: Message) -> str:
    return f"monarch/message/{'/'.join(map(str, message))}"
