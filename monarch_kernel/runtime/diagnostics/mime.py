"""MIME representations of a value for sending: binary data as base64, and sizes bounded to what a notebook can hold."""

from __future__ import annotations

import itertools
from binascii import b2a_base64
from collections.abc import Iterator, Mapping
from typing import Any

from monarch_kernel.base.text import plural

__all__ = ["bounded", "encoded", "encoded_metadata", "structure_problem", "with_text_keys"]

MAX_NBYTES = 8 << 20
MAX_TEXT = 256 << 10
MAX_STRUCTURE_NBYTES = 64 << 20
"""Size of a structure, such as a chart: its texts, and 8 bytes for each other part."""

MAX_METADATA_NBYTES = 1 << 20
MAX_PARTS = 100
"""MIME types of one display."""

MAX_DEPTH = 100
"""Levels of a structure. A receiver whose stack is deeper than that of the sender can read fewer levels than it could."""


def encoded(data: Mapping[Any, Any]) -> dict[str, Any]:
    """Encode binary representations as base64, as Jupyter does, and bound the sizes of all."""
    kept = dict(itertools.islice(data.items(), MAX_PARTS))
    bundle = bounded(
        {
            str(mime): b2a_base64(value, newline=False).decode("ascii") if isinstance(value, bytes) else value
            for mime, value in kept.items()
        }
    )
    if len(data) > MAX_PARTS:
        _note(
            bundle,
            [f"({plural(len(data) - MAX_PARTS, 'MIME type')} left out, more than the {MAX_PARTS} that are shown)"],
        )
    return bundle


def bounded(data: dict[str, Any]) -> dict[str, Any]:
    """Cut long plain text in the middle and remove other representations that are too large; the plain text notes both."""
    notes = []
    for mime, value in list(data.items()):
        if not isinstance(value, str):
            if problem := structure_problem(value):
                del data[mime]
                notes.append(f"({mime[:80]} left out: {problem})")
            else:
                data[mime] = with_text_keys(value)
        elif mime == "text/plain":
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
    _note(data, notes)
    return data


def encoded_metadata(metadata: Mapping[Any, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a display as it can be sent; the plain text of its ``data`` notes if it is left out."""
    if problem := structure_problem(metadata, MAX_METADATA_NBYTES):
        _note(data, [f"(metadata left out: {problem})"])
        return {}
    return dict(with_text_keys(metadata))


def _note(data: dict[str, Any], notes: list[str]) -> None:
    if notes:
        data["text/plain"] = "\n".join([str(data.get("text/plain", "")), *notes]).lstrip("\n")


def structure_problem(value: object, most_nbytes: int = MAX_STRUCTURE_NBYTES) -> str:
    """Say why a structure of lists and dictionaries can't be sent; empty if it can."""
    level, nbytes = [value], 0
    for _ in range(MAX_DEPTH):
        parts: list[object] = []
        for each in level:
            if isinstance(each, str | bytes | bytearray | memoryview):
                nbytes += len(each)
            else:
                nbytes += 8
                parts.extend(_parts_of(each))
            if nbytes + 8 * len(parts) > most_nbytes:
                return f"more than {most_nbytes / 1e6:,.0f} MB: make it smaller, or save it to a file"
        if not parts:
            return ""
        level = parts
    return f"more than {MAX_DEPTH} levels, or it contains itself"


def _parts_of(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from value
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value


def with_text_keys(value: Any) -> Any:
    """Return a structure whose keys are texts, as in JSON; the value itself if they are. It has at most `MAX_DEPTH` levels."""
    if isinstance(value, Mapping):
        kept = {key if isinstance(key, str) else _key(key): with_text_keys(part) for key, part in value.items()}
        is_same = type(value) is dict and all(kept.get(key, kept) is part for key, part in value.items())
        return value if is_same else kept
    if isinstance(value, list | tuple):
        parts = [with_text_keys(part) for part in value]
        return value if all(new is old for new, old in zip(parts, value, strict=True)) else parts
    return value


def _key(key: object) -> str:
    """Return a key as JSON has it, or else its text."""
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return str(key)
