"""Monarch's debugger, in the words of this product's."""

from __future__ import annotations

__all__ = ["DebugController", "debug_controller"]

_HOW = (
    "the debugger needs no server here: `breakpoint()` in an endpoint stops the rank, and the prompt opens where the program "
    "waits for the call; in a notebook, %debug opens it after an error (docs/debugging.md)"
)


class DebugController:
    """Stands for the actor of Monarch that serves debuggers. Its methods say what to use."""

    def __repr__(self) -> str:
        return f"<DebugController: {_HOW}>"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"DebugController.{name}: {_HOW}")


def debug_controller() -> DebugController:
    """Return an object that stands for Monarch's server of debuggers."""
    return DebugController()
