"""Outcomes of cells, for all shells that run cells."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from monarch_kernel.errors import Failure
from monarch_kernel.runtime.diagnostics.failures import describe

__all__ = ["CellOutcome", "cell_failure", "followed_by_semicolon", "forget_last_error"]

_PARSERS = ("absl", "argparse", "click", "docopt", "fire", "optparse", "simple_parsing", "typer", "tyro")
"""Modules that parse the arguments of a program, and end it if these are wrong."""


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


def cell_failure(error: BaseException, name: str, flush: Callable[[], object]) -> Failure:
    """Describe the error that ended a cell, and keep it for a post-mortem.

    Args:
        error: its traceback is cut so that it starts in the cell: a post-mortem starts at the user's code, and the error does
            not keep our frames alive.
        name: the file name of the cell's code.
        flush: sends the output that came before the error.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace
    _set_last_error(error)
    try:
        failure = describe(error, kind="interrupted" if isinstance(error, KeyboardInterrupt) else "exception")
        if isinstance(error, SystemExit):
            why = _advice(error)
            failure = replace(failure, message=why if error.code is None else f"{failure.message} ({why})")
        flush()
    except KeyboardInterrupt:  # a second interrupt, while the report of the first was made
        return Failure("interrupted", "KeyboardInterrupt", "")
    return failure


def _advice(error: SystemExit) -> str:
    """Say what to do after a cell has tried to end its process; a parser of a program's arguments does so if it finds none."""
    trace = error.__traceback__
    while trace is not None:
        parser = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if parser in _PARSERS:
            return _advice_about(parser, trace.tb_frame, error.code)
        trace = trace.tb_next
    return "a cell cannot end its rank; use %mesh down"


def _advice_about(parser: str, called: FrameType, code: object) -> str:
    """Say why a parser of arguments ends its program, and what to pass to the function of it that the cell has called."""
    is_list = parser in ("argparse", "optparse")
    if code in (None, 0):
        return f"{parser} ends a program after it has printed its help or version; leave that option out"
    if is_list and called.f_locals.get("args") is not None and called.f_code.co_name == "parse_args":
        return f"{parser} refuses the arguments that the cell passes to parse_args; its text above says why"
    given = "parse_args([...])" if is_list else "its arguments as a list"
    return f"{parser} parses the command line of a program, and a cell has none: pass {given}"


def _set_last_error(error: BaseException) -> None:
    """Keep an error where Python's debugger looks for the last one."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error


def forget_last_error() -> None:
    """Drop the error that `cell_failure` has kept."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)


def followed_by_semicolon(source: str, statement: ast.stmt) -> bool:
    """Whether a statement ends in a semicolon."""
    if ";" not in source or statement.end_lineno is None:
        return False
    line = source.split("\n")[statement.end_lineno - 1].encode()  # columns are counted in bytes of UTF-8
    return line[statement.end_col_offset :].lstrip().startswith(b";")
