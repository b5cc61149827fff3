"""Handles messages of our views immediately, even while the main thread runs a cell.

Depending on the frontend and the version of ipykernel, comm messages go to the main shell, where they wait for the running
cell, or to a subshell. Messages of our views are quick to handle, so the thread that receives all messages of the shell channel
handles them. The control channel accepts them, too, for frontends that consider the shell channel busy.
"""

from __future__ import annotations

import logging
from typing import Any, cast

from monarch_kernel.notebook.kernel.completion import RemoteTab
from monarch_kernel.notebook.magics.viewers import TARGET, Viewers

__all__ = ["LiveComms"]

_log = logging.getLogger(__name__)


class LiveComms(RemoteTab):
    """A kernel that handles messages of views immediately."""

    viewers: Viewers

    def listen(self, viewers: Viewers) -> None:
        """Accept comms of panels from now on."""
        self.viewers = viewers
        manager: Any = self.comm_manager
        manager.register_target(TARGET, viewers.panel)
        for kind in ("comm_open", "comm_msg", "comm_close"):
            self.control_handlers[kind] = getattr(manager, kind)

    async def shell_channel_thread_main(self, msg: Any) -> None:
        """Handle a message of the shell channel, on the thread that serves the channel."""
        if not self._handle_view_message(msg):
            await super().shell_channel_thread_main(msg)

    def cell_arrived(self, id: str, subshell: str | None, content: dict[str, Any]) -> None:
        """Called with each cell for a subshell, or for the main shell (None), before the thread of the shell gets it.

        The caller is the thread that serves the channel.
        """

    def message_arrived(self, id: str, subshell: str | None) -> None:
        """Called with each message of a comm, as `cell_arrived`."""

    def _handle_view_message(self, msg: Any) -> bool:
        """Handle a message if it comes from a view; False if it does not."""
        session, manager = cast(Any, self.session), cast(Any, self.comm_manager)
        try:
            ident, parts = session.feed_identities(msg, copy=False)
            message = session.deserialize(parts, content=False, copy=False)  # see RemoteTab
            kind = message["header"]["msg_type"]
            id, subshell = message["header"]["msg_id"], message["header"].get("subshell_id")
            if kind == "execute_request":
                self.cell_arrived(id, subshell, session.unpack(message["content"]))
            if kind not in ("comm_open", "comm_msg", "comm_close"):
                return False
            message["content"] = content = session.unpack(message["content"])
            viewer = self.viewers.by_comm.get(content["comm_id"])
            data = content["data"] if kind == "comm_msg" else {}
            is_of_view = content.get("target_name") == TARGET if kind == "comm_open" else viewer is not None
            if not is_of_view or ("method" in data and data["method"] != "custom"):  # for ipywidgets
                self.message_arrived(id, subshell)
                return False
        except Exception:  # ipykernel reports malformed messages
            return False
        try:
            if "method" in data and viewer is not None:
                viewer.handle(data.get("content"))
            else:
                getattr(manager, kind)(None, ident, message)
        except Exception:  # no message of a page may end the callback of the thread
            _log.warning("a message of a page can't be handled: %s", kind, exc_info=True)
        return True
