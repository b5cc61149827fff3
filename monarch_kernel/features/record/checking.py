"""Checks what a record holds before it is used: a record may come from another person, and any program can write its file.

SQLite takes a text or bytes where a table says that a number belongs, runs the code of views and triggers, and holds states of
random generators in compressed form, of which a few bytes can become gigabytes.
"""

from __future__ import annotations

import json
import sqlite3
import types
import typing
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from monarch_kernel.features.record.tables import SCHEMA

__all__ = ["MAX_RANKS", "Unfit", "fitting", "foreign_part", "state_of", "value_of"]

MAX_RANKS = 1 << 20
MAX_STATE_NBYTES = 16 << 20
"""A state of a random generator has some kilobytes."""

_MAX_VALUE = 1 << 20


class Unfit(ValueError):
    """A part of a record that no record has; the text says what is wrong."""


def foreign_part(connection: sqlite3.Connection) -> str:
    """Return the first part of a file that is no table of a record, such as ``view 'metric'``; empty if there is none.

    Raises:
        sqlite3.Error: the file can't be read.
    """
    ours = {_normal(statement) for statement in SCHEMA.split(";")}
    rows: Iterable[tuple[Any, Any, Any]] = connection.execute("SELECT type, name, sql FROM sqlite_master")
    for kind, name, sql in rows:
        is_of_key = kind == "index" and sql is None
        if not is_of_key and not (kind == "table" and isinstance(sql, str) and _normal(sql) in ours):
            return f"{kind} {str(name)[:60]!r}"
    return ""


def _normal(sql: str) -> str:
    """Return a statement without blanks; SQLite keeps each as it was written."""
    return "".join(sql.split())


@cache
def _kinds(row: type) -> tuple[tuple[type, ...], ...]:
    """Return the types that each field of a row may have."""
    found = []
    for hint in typing.get_type_hints(row).values():
        hints = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds = [object if each is Any else typing.get_origin(each) or each for each in hints]
        found.append((*kinds, int) if float in kinds else tuple(kinds))
    return tuple(found)


def fitting(row: type, values: Sequence[Any]) -> bool:
    """Whether the values of a row have the types of its class."""
    kinds = _kinds(row)
    return len(values) == len(kinds) and all(map(isinstance, values, kinds))


def value_of(text: Any) -> Any:
    """Return the value of a knob.

    Raises:
        Unfit: it is no number, text or truth value.
    """
    try:
        value = json.loads(text) if isinstance(text, str) and len(text) <= _MAX_VALUE else ...
    except (ValueError, RecursionError):
        value = ...
    if not isinstance(value, str | int | float | bool | None):
        raise Unfit("the value of a knob is neither a number nor a text")
    return value


def state_of(data: Any) -> bytes:
    """Return the state of a random generator.

    Raises:
        Unfit: it can't be unpacked, or is far too large.
    """
    unpacker = zlib.decompressobj()
    try:
        state = unpacker.decompress(data, MAX_STATE_NBYTES)
    except (TypeError, zlib.error):
        state = b""
    if not unpacker.eof:
        raise Unfit("the state of a random generator is damaged, or far too large")
    return state
