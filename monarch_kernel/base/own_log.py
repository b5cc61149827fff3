"""The package's own log: one handler takes its records, and none of them reaches the output of the user's code.

The loggers of the package have names that begin with ``monarch_kernel.``, and its threads have names that begin with
``monarch-``. Without a handler Python prints the records of a logger to `sys.stderr`, and so it does with the traceback of an
exception that ends a thread. In a notebook that is the output of a cell, which is saved with it. On a rank that is what the
rank writes, which a cell shows. The traceback of an exception that ends a thread of the user goes there, without the package's
frames, as a wrapped method of torch has one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, NamedTuple

from monarch_kernel.base.location import PACKAGE

__all__ = ["ForwardingHandler", "LogFileHandler", "LoggedErrors", "take_log"]

_LOGGER = "monarch_kernel"
_THREADS = "monarch-"


class LoggedErrors(NamedTuple):
    """The errors that this process has logged and shown nowhere else.

    Attributes:
        number: how many.
        last: the text of the last one.
        at: when that was, in seconds since 1970.
    """

    number: int = 0
    last: str = ""
    at: float = 0.0


class ForwardingHandler(logging.Handler):
    """Hands records to another logger, if that takes records of their level.

    Attributes:
        errors: those that handlers of this class have had in this process.
    """

    errors: ClassVar = LoggedErrors()

    def __init__(self, log: logging.Logger) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a record over, and count errors."""
        if record.levelno >= logging.ERROR:
            before = ForwardingHandler.errors.number
            ForwardingHandler.errors = LoggedErrors(before + 1, record.getMessage(), record.created)
        if self._log.isEnabledFor(record.levelno):
            self._log.handle(record)


class LogFileHandler(logging.Handler):
    """Writes records to a file descriptor, each at once, with the time and the pid."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self.setFormatter(logging.Formatter("%(asctime)s pid %(process)d: %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; a record that can't be written is lost, since `sys.stderr` belongs to the user's code."""
        try:
            os.write(self._fd, f"{self.format(record)}\n".encode("utf-8", "backslashreplace"))
        except OSError:  # the disk is full, or the user's code has closed the descriptor
            return


def take_log(handler: logging.Handler) -> Callable[[], None]:
    """Send the records of the package, and the exceptions that end its threads, to a handler and nowhere else.

    Returns:
        A function that undoes this.
    """
    log, before = logging.getLogger(_LOGGER), threading.excepthook

    def thread_ended(args: threading.ExceptHookArgs) -> None:
        if args.thread is None or not args.thread.name.startswith(_THREADS):
            if args.exc_value is not None:
                _leave_out_own_frames(args.exc_value)
            before(args)
        elif args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            log.error("an exception in the thread %s", args.thread.name, exc_info=args.exc_value)

    def give_back() -> None:
        log.removeHandler(handler)
        log.propagate = propagates
        if threading.excepthook is thread_ended:
            threading.excepthook = before

    propagates, log.propagate = log.propagate, False
    log.addHandler(handler)
    threading.excepthook = thread_ended
    return give_back


def _leave_out_own_frames(error: BaseException) -> None:
    """Cut the frames of the package out of the tracebacks of an error and its causes; one of such frames alone stays."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        step, steps = each.__traceback__, []
        while step is not None:
            if not step.tb_frame.f_code.co_filename.startswith(PACKAGE):
                steps.append(step)
            step = step.tb_next
        kept: TracebackType | None = None
        for step in reversed(steps):
            kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
        each.__traceback__ = kept or each.__traceback__
        each = each.__cause__ or each.__context__
