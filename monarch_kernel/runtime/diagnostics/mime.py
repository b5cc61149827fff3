"""MIME representations of a value for sending: binary data as base64, and sizes bounded to what a notebook can hold."""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Mapping
from typing import Any

from monarch_kernel.base.text import plural

__all__ = ["bounded", "encoded"]

MAX_NBYTES = 8 << 20
MAX_TEXT = 256 << 10


def encoded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Encode binary representations as base64, as Jupyter does, and bound the sizes of all."""
    return bounded(
        {
            mime: b2a_base64(value, newline=False).decode("ascii") if isinstance(value, bytes) else value
            for mime, value in data.items()
        }
    )


def bounded(data: dict[str, Any]) -> dict[str, Any]:
    """Cut long plain text in the middle and remove other representations that are too large; the plain text notes both."""
    notes = []
    for mime, value in list(data.items()):
        if not isinstance(value, str):
            continue
        if mime == "text/plain":
            if len(value) > MAX_TEXT:
                half = MAX_TEXT // 2
                left_out = len(value) - 2 * half
                data[mime] = f"{value[:half]} … {plural(left_out, 'character')} left out here … {value[-half:]}"
        elif len(value) > MAX_NBYTES:
            del data[mime]
            notes.append(
                f"({mime} of {len(value) / 1e6:,.0f} MB left out, more than the {MAX_NBYTES / 1e6:,.0f} MB that are shown: "
                "make it smaller, or save it to a file)"
            )
    if notes:
        data["text/plain"] = "\n".join([str(data.get("text/plain", "")), *notes]).lstrip("\n")
    return data
