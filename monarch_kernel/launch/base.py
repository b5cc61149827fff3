"""The seam between the controller and whatever obtains hosts."""

from __future__ import annotations

from typing import Protocol

__all__ = ["HostHandle", "Launcher"]


class HostHandle(Protocol):
    """A host agent that was launched."""

    def poll(self) -> str | None:
        """None while it runs, or is about to; else how it ended, in words."""
        ...

    def log_tail(self) -> tuple[str, ...]:
        """The last lines that the agent itself wrote."""
        ...

    def close(self, timeout_s: float) -> None:
        """Wait for its end, force it when the time is up, and release what it held."""
        ...


class Launcher(Protocol):
    """Obtains hosts."""

    def launch(self, host: int, token: str) -> HostHandle:
        """Start an agent which will present ``token``; returns at once."""
        ...
