"""Helpers for texts about progress and failures, which all launchers use."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable

__all__ = ["how_ended", "last_line", "most_common", "signal_name"]


def most_common(texts: Iterable[str]) -> str:
    """Summarize what several hosts wait for: ``3 × Pending; 1 × pulling the image``; empty texts do not count."""
    counts = Counter(text for text in texts if text)
    return "; ".join(text if len(counts) == 1 else f"{n} × {text}" for text, n in counts.most_common(2))


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_ended(code: int) -> str:
    """Say how a process ended, by its exit code; negative for a signal."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def last_line(text: str) -> str:
    """Return the last line of a command's output."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no reason was given"
