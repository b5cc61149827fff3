"""Notes of what happens on this rank, for the record that runs, if one does."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["note_event", "on_event"]

on_event: list[Callable[[str, str], None]] = []
"""Functions that get the kind and the text of each event of this process."""


def note_event(kind: str, text: str) -> None:
    """Something happened that a record holds. For any thread; has no effect while no record runs."""
    for note in tuple(on_event):
        note(kind, text)
