"""Merges changes of a widget's state that follow each other quickly. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterator

from monarch_kernel.features.widgets.messages import CommSent
from monarch_kernel.net.wire.codec import replace

__all__ = ["Outbox"]


class Outbox:
    """Comm messages on their way to the page, in order.

    The first change of a model goes at once. Later ones within an interval are merged, and go at its end, or before the next
    message of another kind: that may refer to them.

    Args:
        every_s: the interval, in seconds.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._sent_at: dict[str, float] = {}
        self._waiting: dict[str, CommSent] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no change waits."""
        return not self._waiting

    def put(self, message: CommSent, now: float) -> Iterator[CommSent]:
        """Take a message; yields what must be sent now."""
        if not _is_mergeable(message):
            yield from self.flush(now)
            if message.kind == "comm_close":
                self._sent_at.pop(message.comm, None)
            yield message
            return
        earlier = self._waiting.get(message.comm)
        if earlier is not None:
            state = {**earlier.data["state"], **message.data["state"]}
            self._waiting[message.comm] = replace(earlier, data={**message.data, "state": state})
        elif now >= self._sent_at.get(message.comm, float("-inf")) + self._every_s:
            self._sent_at[message.comm] = now
            yield message
        else:
            self._waiting[message.comm] = message

    def flush(self, now: float) -> Iterator[CommSent]:
        """Yield all changes that wait."""
        waiting, self._waiting = self._waiting, {}
        for comm, message in waiting.items():
            self._sent_at[comm] = now
            yield message


def _is_mergeable(message: CommSent) -> bool:
    """Whether a message only says what parts of a model's state are now; one with binary parts refers to them by place."""
    data = message.data
    return (
        message.kind == "comm_msg"
        and data.get("method") == "update"
        and isinstance(data.get("state"), dict)
        and not message.buffers
        and not message.metadata
    )
