"""Keeps the kernel's status busy while a cell runs, even if the kernel answers other requests meanwhile."""

from __future__ import annotations

import threading
from typing import Any

from ipykernel.ipkernel import IPythonKernel

__all__ = ["SteadyStatus"]


class SteadyStatus(IPythonKernel):
    """A kernel that reports busy again when a request on another channel or subshell has made it look idle.

    Frontends and the server use the last status that they receive, regardless of the request to which it belongs.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._status_lock = threading.RLock()
        self._running: Any = None
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]

    async def execute_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Run a cell."""
        is_main = parent["header"].get("subshell_id") is None
        if is_main:
            with self._status_lock:
                self._running = parent
        try:
            await super().execute_request(stream, ident, parent)  # type: ignore[no-untyped-call]
        finally:
            if is_main:
                with self._status_lock:
                    self._running = None

    def _publish_status(self, status: str, channel: str, parent: Any = None) -> None:
        with self._status_lock:
            super()._publish_status(status, channel, parent)  # type: ignore[no-untyped-call]
            if status == "idle" and self._running is not None:
                super()._publish_status("busy", "shell", self._running)  # type: ignore[no-untyped-call]
