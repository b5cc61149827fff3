"""Handles single lines: assembles them from pieces, finds their visible text, and shortens them."""

from __future__ import annotations

import re

from monarch_kernel.base.text import plural

__all__ = ["Partial", "close_colors", "cut", "last_update", "rewrites_line"]

_ANSI_COLOR = re.compile(r"\x1b\[([0-9;:]*)m")


class Partial:
    """An incomplete line, of bounded length.

    Attributes:
        text: the text that may still be visible; a carriage return at its end waits for the next piece.
        n_cut: number of characters cut from its middle.
    """

    __slots__ = ("n_cut", "text")

    def __init__(self) -> None:
        self.text = ""
        self.n_cut = 0

    @property
    def visible(self) -> str:
        """The visible text."""
        return self.text.rstrip("\r")

    def append(self, text: str, max_length: int) -> None:
        """Add the next piece of the line."""
        text = self.text + text
        if rewrites_line(text):
            visible, self.n_cut = last_update(text, self.n_cut)
            # The next character overwrites, unless it is the newline of a CR LF.
            text = f"{visible}\r" if text.endswith("\r") else visible
        half = max_length // 2
        if len(text) > 4 * half:
            self.n_cut += len(text) - 2 * half
            text = text[:half] + text[-half:]
        self.text = text

    def end(self, max_length: int) -> str:
        """Return the complete line, shortened."""
        text, n_cut = last_update(self.text, self.n_cut)
        return cut(text, n_cut, max_length)


def last_update(line: str, n_cut: int = 0) -> tuple[str, int]:
    """Return the visible text of a line, and the number of characters cut from it.

    It is the text after the last carriage return, without the characters that backspaces delete.
    """
    _, cr, last = line.rstrip("\r").rpartition("\r")
    return (_backspaced(last), 0) if cr else (_backspaced(last), n_cut)


def rewrites_line(text: str) -> bool:
    """Whether a text has characters that return over what is before them."""
    return "\r" in text or "\b" in text


def _backspaced(text: str) -> str:
    if "\b" not in text:
        return text
    visible: list[str] = []
    for char in text:
        if char != "\b":
            visible.append(char)
        elif visible:
            visible.pop()
    return "".join(visible)


def cut(line: str, n_cut: int, max_length: int) -> str:
    """Shorten a line in the middle, where ``n_cut`` characters were cut before."""
    if not n_cut and len(line) <= max_length:
        return line
    half = max_length // 2
    n_cut += max(0, len(line) - 2 * half)
    return f"{line[:half]} … {plural(n_cut, 'character')} left out here … {line[-half:]}"


def close_colors(text: str) -> str:
    """Reset the colours at the end of a line, if it leaves any set."""
    if "\x1b" in text:
        colors = _ANSI_COLOR.findall(text)
        if colors and colors[-1].strip("0;"):
            return text + "\x1b[0m"
    return text
