"""Widgets of ranks in the page: each comm of a rank has a comm with the same id between this kernel and the page."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import comm
from comm.base_comm import BaseComm

from monarch_kernel.features.widgets.controller import CommExtension, send_to_rank
from monarch_kernel.features.widgets.messages import CommSent
from monarch_kernel.notebook.magics.viewers import TARGET
from monarch_kernel.runtime.controller.runtime import Runtime

if TYPE_CHECKING:
    from monarch_kernel.notebook.view.rank_model import RankModel

__all__ = ["MAX_COMMS", "RankWidgets"]

_log = logging.getLogger(__name__)

MAX_COMMS = 10_000
"""Number of comms of one rank that the page may have; a rank refuses to open so many itself."""


class _Open(NamedTuple):
    """A comm with the page, and the model of the widget behind it; None if it is no widget."""

    comm: BaseComm
    model: RankModel | None


class RankWidgets:
    """The comms of the ranks of a session in the page of this notebook.

    Args:
        runtime: the controller.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._open: dict[int, dict[str, _Open]] = {}  # by process and id
        self._dead: deque[BaseComm] = deque()

    @staticmethod
    def follow(runtime: Runtime) -> None:
        """Show the widgets of the ranks of a session from now on."""
        extension = runtime.extension(CommExtension)
        if extension.listener is None:
            extension.listener = RankWidgets(runtime)

    def comm_sent(self, proc: int, message: CommSent) -> None:
        """Handle a message of a rank; no such message may end the I/O thread."""
        try:
            self._handle(proc, message)
        except Exception:
            _log.warning("a widget's message of a rank can't be shown: %s", message.kind, exc_info=True)

    def rank_lost(self, proc: int) -> None:
        """Disable the controls of a rank that has ended; what they show stays in the page."""
        for there, model in self._open.pop(proc, {}).values():
            if model is not None and model.can_be_disabled:
                there.send({"method": "update", "state": {"disabled": True}, "buffer_paths": []})
            there._closed = True  # to close it would remove the widget from the page
            there.on_msg(None)
            there.on_close(None)
            self._dead.append(there)  # it stays known: the page may still send something
            while len(self._dead) > MAX_COMMS:
                comm.get_comm_manager().unregister_comm(self._dead.popleft())
            if model is not None:
                model.forget()

    def _handle(self, proc: int, message: CommSent) -> None:
        known = self._open.setdefault(proc, {})
        if message.kind == "comm_open":
            is_free = message.target != TARGET and message.comm not in comm.get_comm_manager().comms
            if is_free and len(known) < MAX_COMMS:
                known[message.comm] = self._open_in_page(proc, message)
            return
        there, model = known.get(message.comm, (None, None))
        if there is None:
            return
        buffers: Any = list(message.buffers) or None
        if message.kind == "comm_close":
            del known[message.comm]
            there.close(message.data, message.metadata, buffers)
            if model is not None:
                model.forget()
            return
        if message.kind != "comm_msg":
            return
        there.send(message.data, message.metadata, buffers)
        if model is not None and message.data.get("method") in ("update", "echo_update"):
            _note(model, message)

    def _open_in_page(self, proc: int, message: CommSent) -> _Open:
        there: Any = comm.create_comm(
            target_name=message.target,
            data=message.data,
            metadata=message.metadata,
            buffers=list(message.buffers) or None,
            comm_id=message.comm,
        )
        # ipykernel 7.4 would answer where the comm was opened: on the main thread, behind the running cell.
        there._reply_subshell_for = lambda data, default: default
        model, state = None, message.data.get("state")
        if "ipywidgets" in sys.modules and isinstance(state, dict) and "_model_name" in state:
            from monarch_kernel.notebook.view.rank_model import RankModel

            model = RankModel(there, state, lambda: self._closed_here(proc, message.comm))
            _note(model, message)
        there.on_msg(lambda received: self._pass_on(proc, "comm_msg", received))
        there.on_close(lambda received: self._closed_by_page(proc, received))
        return _Open(there, model)

    def _closed_here(self, proc: int, id: str) -> None:
        if self._open.get(proc, {}).pop(id, None) is not None:
            send_to_rank(self._runtime, proc, "comm_close", id, {}, {})

    def _closed_by_page(self, proc: int, received: Mapping[str, Any]) -> None:
        _, model = self._open.get(proc, {}).pop(received["content"]["comm_id"], (None, None))
        if model is not None:
            model.forget()
        self._pass_on(proc, "comm_close", received)

    def _pass_on(self, proc: int, kind: str, received: Mapping[str, Any]) -> None:
        content = received["content"]
        data, metadata = content.get("data", {}), received.get("metadata", {})
        send_to_rank(self._runtime, proc, kind, content["comm_id"], data, metadata, received.get("buffers", ()))


def _note(model: RankModel, message: CommSent) -> None:
    """Keep a state that was sent to the page: its binary parts go into their places."""
    model.note(message.data.get("state", {}), message.data.get("buffer_paths", ()), message.buffers)
