"""Outcomes of cells, for all shells that run cells."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.errors import Failure

__all__ = ["CellOutcome", "followed_by_semicolon", "forget_last_error", "set_last_error"]


@dataclass(frozen=True)
class CellOutcome:
    """The outcome of a cell.

    Attributes:
        value: The value of the last expression, even if a ``;`` keeps it from being shown; None if there is none.
        bundle: The representations of that value by MIME type, as Jupyter sends them; empty if it is not shown.
        failure: Why the cell ended early, or None.
        metadata: The metadata of ``bundle``, by MIME type.
    """

    value: Any = None
    bundle: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def set_last_error(error: BaseException) -> None:
    """Keep an error where Python's debugger looks for the last one."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error


def forget_last_error() -> None:
    """Drop the error that `set_last_error` has kept."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)


def followed_by_semicolon(source: str, statement: ast.stmt) -> bool:
    """Whether a statement ends in a semicolon."""
    if ";" not in source or statement.end_lineno is None:
        return False
    line = source.split("\n")[statement.end_lineno - 1].encode()  # columns are counted in bytes of UTF-8
    return line[statement.end_col_offset :].lstrip().startswith(b";")
