"""Errors that the user's own code raises while a value is pickled."""

from __future__ import annotations

from monarch_kernel.errors import PayloadError
from monarch_kernel.runtime.diagnostics.failures import is_machinery, is_user

__all__ = ["error_of_user"]


def error_of_user(error: PayloadError) -> BaseException:
    """Return what a ``__getstate__`` or ``__reduce__`` of the user has raised, with a note; for other errors, this one."""
    cause = error.__cause__
    trace = None if cause is None else cause.__traceback__
    if cause is None or trace is None:
        return error
    while trace.tb_next is not None:
        trace = trace.tb_next
    frame = trace.tb_frame
    if is_machinery(frame.f_code.co_filename) or not is_user(frame):
        return error
    note = str(error)
    notes = [*getattr(cause, "__notes__", ()), note]
    cause.__notes__ = notes  # like add_note(), which Python 3.10 does not have
    return cause.with_traceback(cause.__traceback__)
