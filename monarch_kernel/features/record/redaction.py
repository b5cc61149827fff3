"""Removes secrets from a record."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from typing import Any

from monarch_kernel.errors import RecordError

__all__ = ["REDACTED", "Redaction"]

REDACTED = "[redacted]"


class Redaction:
    """The patterns that a record must not hold."""

    def __init__(self) -> None:
        self._patterns: list[re.Pattern[str]] = []

    @staticmethod
    def check(pattern: str) -> None:
        """Check a regular expression.

        Raises:
            RecordError: it is not valid, or matches the empty text.
        """
        try:
            is_wide = bool(re.compile(pattern).fullmatch(""))
        except re.error as error:
            raise RecordError(f"redact({pattern!r}): this is not a regular expression: {error}") from None
        if is_wide:
            raise RecordError(
                f"redact({pattern!r}): the pattern matches the empty text; write what the secret looks like"
            )

    def add(self, pattern: str) -> None:
        """Add a pattern."""
        self._patterns.append(re.compile(pattern))

    def clean(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the values of a row without what matches."""
        return (
            [self._text(value) if isinstance(value, str) else value for value in values] if self._patterns else values
        )

    def apply(self, connection: sqlite3.Connection) -> int:
        """Remove what matches from all rows of a record, in a transaction; returns how many values have changed."""
        changed = 0
        connection.execute("BEGIN IMMEDIATE")
        try:
            tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for table in tables:
                columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")') if row[2] == "TEXT"]
                for column in columns:
                    found = connection.execute(f'SELECT DISTINCT "{column}" FROM "{table}"').fetchall()
                    for (value,) in found:
                        if isinstance(value, str) and (clean := self._text(value)) != value:
                            connection.execute(
                                f'UPDATE OR REPLACE "{table}" SET "{column}" = ? WHERE "{column}" = ?', (clean, value)
                            )
                            changed += 1
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return changed

    def _text(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(REDACTED, text)
        return text
