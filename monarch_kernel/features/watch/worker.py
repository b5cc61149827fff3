"""The rank's part of the watch: says how many collectives the rank has started."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_kernel.features.watch.messages import GetProgress
from monarch_kernel.net.wire.codec import Frame, dump, pack
from monarch_kernel.net.wire.messages import Result
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["install"]


@register
def install(rank: Rank) -> None:
    """Answer the question how far this rank is, on the I/O thread: its main thread is in the loop."""

    def answer(message: GetProgress, _: Sequence[Frame]) -> None:
        started = -1 if rank.group is None else rank.group.collectives()
        payload, frames = dump(started, "the number of collectives")
        rank.send_answer_now(message.id, pack(Result(message.id, payload), frames))

    rank.extend({GetProgress: answer})
