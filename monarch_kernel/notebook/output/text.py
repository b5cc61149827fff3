"""Single lines: how they grow from pieces, what is seen of them, and how they are shortened."""

from __future__ import annotations

import re

__all__ = ["Partial", "close_colors", "cut", "last_update"]

_ANSI_COLOR = re.compile(r"\x1b\[([0-9;:]*)m")


class Partial:
    """The beginning of a line whose end has not come: bounded, however long it grows.

    Attributes:
        text: what can still be seen of it; a carriage return at its end waits for what comes after it.
        n_cut: characters that were cut from its middle.
    """

    __slots__ = ("n_cut", "text")

    def __init__(self) -> None:
        self.text = ""
        self.n_cut = 0

    @property
    def visible(self) -> str:
        """What is seen."""
        return self.text.rstrip("\r")

    def append(self, text: str, max_length: int) -> None:
        """Add what was written next."""
        text = self.text + text
        if "\r" in text:
            visible, self.n_cut = last_update(text, self.n_cut)
            # The next character overwrites, unless it is the newline of a CR LF.
            text = f"{visible}\r" if text.endswith("\r") else visible
        half = max_length // 2
        if len(text) > 4 * half:
            self.n_cut += len(text) - 2 * half
            text = text[:half] + text[-half:]
        self.text = text

    def end(self, max_length: int) -> str:
        """The whole line."""
        text, n_cut = last_update(self.text, self.n_cut)
        return cut(text, n_cut, max_length)


def last_update(line: str, n_cut: int = 0) -> tuple[str, int]:
    """What is seen at the end of a line that overwrote itself with carriage returns, and what was cut from that."""
    _, cr, last = line.rstrip("\r").rpartition("\r")
    return (last, 0) if cr else (last, n_cut)


def cut(line: str, n_cut: int, max_length: int) -> str:
    """Shorten a line in the middle, from which ``n_cut`` characters were cut before."""
    if not n_cut and len(line) <= max_length:
        return line
    half = max_length // 2
    n_cut += max(0, len(line) - 2 * half)
    return f"{line[:half]} … {n_cut:,} characters left out here … {line[-half:]}"


def close_colors(text: str) -> str:
    """End the colours of a line, if they go beyond it."""
    if "\x1b" in text:
        colors = _ANSI_COLOR.findall(text)
        if colors and colors[-1].strip("0;"):
            return text + "\x1b[0m"
    return text
