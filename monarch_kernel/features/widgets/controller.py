"""The controller's part of widgets: passes messages between comms of ranks and the notebook."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from monarch_kernel.errors import MeshDownError
from monarch_kernel.features.widgets.messages import CommReceived, CommSent
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.extensions import Core, Extension, register
from monarch_kernel.runtime.controller.process_records import RankRecord
from monarch_kernel.runtime.controller.runtime import Runtime

__all__ = ["CommExtension", "CommListener", "send_to_rank"]


class CommListener(Protocol):
    """Gets what ranks send to the page. It runs on the I/O thread, so it must be quick."""

    def comm_sent(self, proc: int, message: CommSent) -> None:
        """Handle a message of a rank."""

    def rank_lost(self, proc: int) -> None:
        """Handle the end of a rank: no comm of it will answer."""


@register
class CommExtension(Extension):
    """Passes messages of comms to a listener; without one, as in a script, they are dropped.

    Attributes:
        listener: set by the notebook.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.listener: CommListener | None = None
        self.handlers = {CommSent: self._sent}

    def process_lost(self, proc: int) -> list[Effect]:
        if self.listener is not None:
            self.listener.rank_lost(proc)
        return []

    def _sent(self, record: RankRecord, message: CommSent, now: float) -> list[Effect]:
        if self.listener is not None:
            self.listener.comm_sent(record.spec.proc, message)
        return []


def send_to_rank(
    runtime: Runtime,
    proc: int,
    kind: str,
    comm: str,
    data: Mapping[str, Any],
    metadata: Mapping[str, Any],
    buffers: Sequence[Any] = (),
) -> None:
    """Send a message of the page to a comm of a rank, which handles it between two cells; for any thread.

    It is a request, so that views show that the rank runs a callback, and an interrupt of the mesh ends it.
    """
    parts = tuple(bytes(buffer) for buffer in buffers)
    with contextlib.suppress(MeshDownError):  # the widget stays in the page
        runtime.request(
            [proc],
            lambda id: pack(CommReceived(id, kind, comm, dict(data), dict(metadata), parts)),
            "a widget's callback",
            lambda answers: None,
            quiet=True,
        )
