"""What pages say that show meshes, heard at once, also while the main thread runs a cell.

Messages of comms come to the main shell, behind the cell that it runs, or to a subshell, as frontends and versions of
ipykernel have it. What our views say is done quickly, so the thread does it to which all messages of the channel come first.
They are taken on the control channel, too, for frontends to which the shell channel seems to be busy.
"""

from __future__ import annotations

import logging
from typing import Any, cast

from monarch_kernel.notebook.kernel.completion import RemoteTab
from monarch_kernel.notebook.magics.viewers import TARGET, Viewers

__all__ = ["LiveComms"]

_log = logging.getLogger(__name__)


class LiveComms(RemoteTab):
    """Hears views at once."""

    viewers: Viewers

    def listen(self, viewers: Viewers) -> None:
        """From now on panels may open comms."""
        self.viewers = viewers
        manager: Any = self.comm_manager
        manager.register_target(TARGET, viewers.panel)
        for kind in ("comm_open", "comm_msg", "comm_close"):
            self.control_handlers[kind] = getattr(manager, kind)

    async def shell_channel_thread_main(self, msg: Any) -> None:
        """Take a message from the shell channel, on the thread that serves it."""
        if not self._heard(msg):
            await super().shell_channel_thread_main(msg)

    def _heard(self, msg: Any) -> bool:
        """Take a message if a view says it; False if it is for others."""
        session, manager = cast(Any, self.session), cast(Any, self.comm_manager)
        try:
            ident, parts = session.feed_identities(msg, copy=False)
            message = session.deserialize(parts, content=False, copy=False)  # see RemoteTab
            kind = message["header"]["msg_type"]
            if kind not in ("comm_open", "comm_msg", "comm_close"):
                return False
            message["content"] = content = session.unpack(message["content"])
            viewer = self.viewers.by_comm.get(content["comm_id"])
            if kind == "comm_open" and content.get("target_name") != TARGET:
                return False
            if kind != "comm_open" and viewer is None:
                return False
            data = content["data"] if kind == "comm_msg" else {}
            if "method" in data and data["method"] != "custom":  # of a widget, for ipywidgets
                return False
        except Exception:  # a message that is not well formed is refused where all are
            return False
        try:
            if "method" in data and viewer is not None:
                viewer.hear(data.get("content"))
            else:
                getattr(manager, kind)(None, ident, message)
        except Exception:  # nothing that a page says may end the thread's callback
            _log.warning("a message of a page is not understood: %s", kind, exc_info=True)
        return True
