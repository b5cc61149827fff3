"""Extensions: the parts that features add to the controller.

Theory of operation
===================

The state of the controller (`state.State`) knows hosts, processes, requests and output, and no feature. A feature, such as
live loops, keeps its own part in an `Extension`. The state passes it the messages that it handles, and calls it when ranks
have answered a request, when a process is lost, and when time has passed. An extension returns effects, as the state does. It
has no I/O and no threads, and runs with the I/O lock held.

The module that defines an extension registers it (`register`), so a feature takes part in a session as soon as it is imported.
Each state makes one extension of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from monarch_kernel.base.events import MeshView
from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.net.wire.codec import Packed
from monarch_kernel.net.wire.messages import Message
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.process_records import HostRecord, RankRecord
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["Core", "Extension", "ExtensionT", "Handler", "make_extensions", "register"]

Handler = Callable[[RankRecord, Any, float], list[Effect]]
"""Handles a message of a rank at a time, in seconds of a monotonic clock."""


class Core(Protocol):
    """The state of the controller, as extensions use it.

    Attributes:
        ranks: By number of the process.
        hosts: By number.
        dropped_messages: The number of messages that were dropped.
    """

    ranks: dict[int, RankRecord]

    @property
    def hosts(self) -> Mapping[int, HostRecord]:
        """The host agents."""
        ...

    dropped_messages: int

    @property
    def n_sent(self) -> int:
        """The number of requests and messages to ranks that the program has made."""
        ...

    @property
    def n_open(self) -> int:
        """The number of requests that ranks have yet to answer."""
        ...

    def owing(self, id: int) -> list[int]:
        """The processes that have not answered a request yet."""
        ...

    def to_rank(self, proc: int, packed: Packed) -> list[Effect]:
        """Send a message to a rank when it is up, if it lives."""
        ...

    def to_host(self, host: int, packed: Packed) -> list[Effect]:
        """Send a message to a host agent, when it is up."""
        ...


class Extension:
    """One feature's part of the controller's state; a subclass overrides what it needs.

    Args:
        core: The state that it extends.

    Attributes:
        handlers: Handlers of the kinds of message that only this feature has. While the controller adopts the ranks of an
            earlier one, such messages wait.
        in_order: Handlers of messages that tell how much their rank wrote before them (``written``). Each message is handled
            when that output has arrived.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self.handlers: Mapping[type[Message], Handler] = {}
        self.in_order: Mapping[type[Message], Handler] = {}

    def may_send(self, proc: int, message: Message) -> bool:
        """Whether a rank may send a message of this feature; others are dropped and counted."""
        return True

    def request_ended(self, procs: Sequence[int], id: int) -> list[Effect]:
        """Called when ranks have answered a request, whatever the outcome."""
        return []

    def process_lost(self, proc: int) -> list[Effect]:
        """Called when a process has ended, or the controller has given it up."""
        return []

    def tick(self, now: float) -> list[Effect]:
        """Called a few times a second."""
        return []

    def shown(self, view: MeshView, procs: Sequence[int], now: float) -> MeshView:
        """Add what the feature shows to a view of the mesh of these processes."""
        return view

    def awaited(self, future: Future[Any]) -> None:
        """Called on the thread that waits for a future, after an effect has woken it (`effects.Halt`)."""

    def adopting(self) -> None:
        """Called when the session adopts the ranks of an earlier controller."""

    def started(self, meters: Meters) -> None:
        """Called when the session starts; ``meters`` count what the controller's own process sends and receives."""

    def closed(self) -> None:
        """Called when the session is over."""


ExtensionT = TypeVar("ExtensionT", bound=Extension)

_kinds: list[type[Extension]] = []


def register(kind: type[ExtensionT]) -> type[ExtensionT]:
    """Decorator: add a kind of extension to all sessions that start from now on."""
    _kinds.append(kind)
    return kind


def make_extensions(core: Core) -> dict[type[Extension], Extension]:
    """Make one extension of each registered kind."""
    return {kind: kind(core) for kind in _kinds}
