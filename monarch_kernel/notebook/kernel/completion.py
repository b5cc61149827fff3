"""Answers Tab and Shift-Tab in code for ranks while the main thread runs a cell.

Frontends send these requests to the main shell, where they would wait for the cell, and give up after a second. Any thread can
ask the ranks, so a thread of the executor answers these requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from monarch_kernel.notebook.kernel.status import SteadyStatus
from monarch_kernel.notebook.magics.remote_names import RemoteNames
from monarch_kernel.notebook.view.names import described

__all__ = ["RemoteTab"]


class RemoteTab(SteadyStatus):
    """A kernel that answers requests about code for ranks immediately."""

    names: RemoteNames

    async def shell_channel_thread_main(self, msg: Any) -> None:
        """Handle a message of the shell channel, on the thread that serves the channel."""
        if self._running is None or not await self._answered(msg):
            await super().shell_channel_thread_main(msg)  # type: ignore[no-untyped-call]

    async def do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Collection[str] = ()
    ) -> Any:
        """Describe the name at the cursor, as it is on the ranks if the code will run there."""
        reply: Any = self._inspected(code, cursor_pos, detail_level, omit_sections)
        if reply is None:
            reply = super().do_inspect(code, cursor_pos, detail_level, omit_sections)  # type: ignore[no-untyped-call]
        return await reply if asyncio.iscoroutine(reply) else reply

    def _inspected(self, code: str, cursor_pos: int, detail_level: int, omit_sections: Collection[str]) -> Any:
        description = self.names.inspect(code, cursor_pos, detail_level)
        if description is None:
            return None
        shown = {title: text for title, text in description.items() if title.lower() not in omit_sections}
        data = {"text/plain": described(shown, color=True)} if shown else {}
        return {"status": "ok", "found": bool(shown), "data": data, "metadata": {}}

    async def _answered(self, msg: Any) -> bool:
        """Answer a message if it is a request about code for ranks; False if it is not."""
        session: Any = self.session
        try:
            ident, parts = session.feed_identities(msg, copy=False)
            # Without its content, as otherwise the session would reject the message as a duplicate when it is read again.
            request = session.deserialize(parts, content=False, copy=False)
            kind, subshell = request["header"]["msg_type"], request["header"].get("subshell_id")
            if subshell or kind not in ("complete_request", "inspect_request"):
                return False
            content = session.unpack(request["content"])
            code, cursor = content["code"], content["cursor_pos"]
            if self.names.locate(code, cursor) is None:
                return False
        except Exception:  # ipykernel reports malformed messages
            return False
        if kind == "complete_request":
            answer: Callable[[], Any] = partial(self.do_complete, code, cursor)
        else:
            omitted = content.get("omit_sections", ())
            answer = partial(self._inspected, code, cursor, content.get("detail_level", 0), omitted)
        self._publish_status("busy", "shell", request)
        try:
            reply = await asyncio.get_running_loop().run_in_executor(None, answer)
            reply = await reply if asyncio.iscoroutine(reply) else reply
            session.send(self.shell_stream, kind.replace("request", "reply"), reply, request, ident)
        finally:
            self._publish_status("idle", "shell", request)
        return True
