"""What features add to the controller.

Theory of operation
===================

The state of the controller (`state.State`) knows hosts, processes, requests and output, and no feature. A feature, such as
steered loops, keeps its own part in an `Extension`. The state hands it the messages that it handles, and tells it when a rank
has answered a request, when a process is lost, and when time has passed. An extension returns effects, as the state does. It
has no I/O and no threads, and is used with the I/O lock held.

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
from monarch_kernel.runtime.controller.records import RankRecord
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["Core", "Extension", "ExtensionT", "Handler", "make_extensions", "register"]

Handler = Callable[[RankRecord, Any, float], list[Effect]]
"""Handles a message of a rank at a time, in seconds of a clock that only goes forward."""


class Core(Protocol):
    """The state of the controller, as extensions use it.

    Attributes:
        ranks: By number of the process.
        strays: Counts messages that were dropped.
    """

    ranks: dict[int, RankRecord]
    strays: int

    def owing(self, id: int) -> list[int]:
        """The processes that have yet to answer a request."""
        ...

    def to_rank(self, proc: int, packed: Packed) -> list[Effect]:
        """Send a message to a rank, if it lives."""
        ...

    def to_host(self, host: int, packed: Packed) -> list[Effect]:
        """Send a message to a host agent, when it is up."""
        ...


class Extension:
    """One feature's part of the controller's state; a subclass overrides what it needs.

    Args:
        core: the state that it extends.

    Attributes:
        handlers: Handle each kind of message that only this feature has. While the ranks of an earlier controller are adopted,
            such messages wait.
        in_order: The same for messages that say what their rank has written before (``written``). Each is handled when that
            output has arrived.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self.handlers: Mapping[type[Message], Handler] = {}
        self.in_order: Mapping[type[Message], Handler] = {}

    def may_send(self, proc: int, message: Message) -> bool:
        """Whether a rank may send a message of this feature; what it may not send is dropped and counted."""
        return True

    def request_ended(self, proc: int, id: int) -> list[Effect]:
        """A rank has answered a request, in whatever way."""
        return []

    def process_lost(self, proc: int) -> list[Effect]:
        """A process has ended, or is given up."""
        return []

    def tick(self, now: float) -> list[Effect]:
        """Time has passed; a few times a second."""
        return []

    def shown(self, view: MeshView, procs: Sequence[int], now: float) -> MeshView:
        """A view of the mesh of these processes, with what the feature shows in it."""
        return view

    def awaited(self, future: Future[Any]) -> None:
        """A thread waits for a future that an effect has halted (`effects.Halt`); called on that thread."""

    def adopting(self) -> None:
        """The session takes up the ranks of an earlier controller."""

    def started(self, meters: Meters) -> None:
        """The session begins; ``meters`` count what the controller's own process sends and receives."""

    def closed(self) -> None:
        """The session is over."""


ExtensionT = TypeVar("ExtensionT", bound=Extension)

_kinds: list[type[Extension]] = []


def register(kind: type[ExtensionT]) -> type[ExtensionT]:
    """Add a kind of extension to all sessions that begin from now on; a decorator of its class."""
    _kinds.append(kind)
    return kind


def make_extensions(core: Core) -> dict[type[Extension], Extension]:
    """One extension of each kind that is registered."""
    return {kind: kind(core) for kind in _kinds}
