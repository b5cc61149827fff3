"""What a rank reports about a failure: plain data, with the traceback and the exceptions behind it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from monarch_kernel.base.steady_text import steady_message

__all__ = ["GROUP_HAS_ENDED", "ORDER", "Cause", "Failure", "FailureKind", "Frame", "with_consequences"]

FailureKind = Literal["exception", "interrupted", "lost", "released", "stopped"]

ORDER = {"lost": 0, "exception": 1, "stopped": 2, "interrupted": 3, "released": 4}
"""Causes before consequences."""

_TRACEBACK = "Traceback (most recent call last):"
_MAX_MORE_LINES = 4

GROUP_HAS_ENDED = "its process group has ended"
"""Ends the text of an error that this package raises in place of torch's, in a group whose connections are closed."""

_BROKEN_CONNECTION = re.compile(r"connection (closed|reset) by peer|broken pipe|pair closure", re.IGNORECASE)
_TORCH_ERRORS = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
_PEER_ERROR = re.compile(
    r"connection closed by (remote )?peer|pair closure"
    r"|ncclRemoteError|remote process exited or there was a network error|NCCL communicator was aborted"
    r"|received errors while waiting for send/recv from rank|did the remote server shutdown or crash"
    rf"|{GROUP_HAS_ENDED}$",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a remote traceback.

    Attributes:
        file: file name, or ``<remote cell [n]>`` for code of a cell.
        line: the line that was running, counted from 1.
        function: name of the function, ``<module>`` for a cell's top level.
        source: a few lines of source around ``line``; empty where there is no source.
        first_line: the line number of ``source[0]``.
        user: whether this is the user's code (a cell, ``__main__`` or a file outside site-packages).
        variables: name and short description (shape, dtype, device or value) of the variables in the line.
        left_out: number of frames between this one and the one before it that are not in the report.
    """

    file: str
    line: int
    function: str
    source: tuple[str, ...] = ()
    first_line: int = 0
    user: bool = False
    variables: tuple[tuple[str, str], ...] = ()
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Cause:
    """An exception to which another one is chained.

    Attributes:
        link: ``caused by`` or ``raised while handling``.
        etype: name of the exception's class.
        message: ``str(exception)``.
        notes: the lines that ``add_note()`` added.
        frame: the line of the user's code that raised it, or else the innermost line; None if it was never raised.
    """

    link: str
    etype: str
    message: str = ""
    notes: tuple[str, ...] = ()
    frame: Frame | None = None

    @property
    def headline(self) -> str:
        """Class and first line of the text, ``KeyError: 'w'``; for a text with a traceback in it also its last line."""
        lines = [line.strip() for line in self.message.splitlines() if line.strip() not in ("", '"""')]
        starts = [i for i, line in enumerate(lines) if line.endswith(_TRACEBACK)]
        text = lines[0] if lines else ""
        if starts:
            text = f"{text} … {lines[-1]}" if starts[0] else lines[-1]
        return f"{self.etype}: {text}" if text else self.etype

    @property
    def is_broken_connection(self) -> bool:
        """Whether a collective of torch failed because another rank closed its connection."""
        return self.etype in _TORCH_ERRORS and _PEER_ERROR.search(self.message) is not None

    @property
    def more_lines(self) -> tuple[str, ...]:
        """The lines of the text after the first, if there is no traceback in it; of many the first and the last."""
        lines = self.message.strip().splitlines()
        if any(line.endswith(_TRACEBACK) for line in lines):
            return ()
        rest = [line.rstrip() for line in lines[1:] if line.strip()]
        return tuple(rest if len(rest) <= _MAX_MORE_LINES else [*rest[: _MAX_MORE_LINES - 2], "…", rest[-1]])

    @property
    def fingerprint(self) -> tuple[object, ...]:
        """Key that is equal for causes that differ only in their texts."""
        return (self.link, self.etype, self.frame and (self.frame.file, self.frame.line))


@dataclass(frozen=True, slots=True)
class Failure:
    """What one rank reports about one failure; sent as a message, so it contains only plain data.

    Attributes:
        kind: ``exception`` (user code raised), ``interrupted`` (stopped on request, state kept), ``lost`` (the process
            died), ``released`` (removed from a collective because another rank had failed: a consequence, not a
            cause), ``stopped`` (the actor or mesh had been stopped).
        etype: name of the exception's class, such as ``ZeroDivisionError``.
        message: ``str(exception)``, or for a lost rank the exit code or signal with its meaning.
        frames: the traceback, outermost call first.
        traceback: the whole traceback as text, chained exceptions included.
        host: name of the machine.
        pid: process id there.
        exception: the pickled exception; empty where it can't be pickled.
        last_lines: for a lost rank, the last lines it wrote.
        exit_code: the exit code of a lost rank that ended by itself; else None.
        signal: for a lost rank that was killed by a signal, its name, such as ``SIGKILL``.
        python: for a failed import, the interpreter of the rank; hosts may have different ones.
        notes: further lines about the place: for a model the module, its inputs and its parameters.
        added_notes: the lines that ``add_note()`` added to the exception.
        chain: the exceptions to which this one is chained, the nearest first.
        is_fatal: whether the error has ended the actor whose endpoint raised it.
    """

    kind: FailureKind
    etype: str
    message: str
    frames: tuple[Frame, ...] = ()
    traceback: str = ""
    host: str = ""
    pid: int = 0
    exception: bytes = b""
    last_lines: tuple[str, ...] = ()
    exit_code: int | None = None
    signal: str = ""
    python: str = ""
    notes: tuple[str, ...] = ()
    added_notes: tuple[str, ...] = ()
    chain: tuple[Cause, ...] = ()
    is_fatal: bool = False

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame of the user's own code."""
        return next((frame for frame in reversed(self.frames) if frame.user), None)

    @property
    def fingerprint(self) -> tuple[object, ...]:
        """Key that is equal for failures to show as one: same error, same text, same lines of the user's code, same chain.

        It does not contain the texts of causes: ranks that read different files have one error, with causes that differ by
        rank.
        """
        path = [frame for frame in self.frames if frame.user]
        if self.kind != "exception":  # the outer frames of an ended rank say little
            path = path[-1:]
        elif not path:
            path = list(self.frames[-1:])
        lines = tuple((frame.file, frame.line) for frame in path)
        chain = tuple(cause.fingerprint for cause in self.chain)
        return (self.kind, self.etype, self.message, self.added_notes, lines, chain)

    def steady_fingerprint(self, rank: int | None = None) -> tuple[object, ...]:
        """Key like ``fingerprint``, but equal also for texts that differ only in times, addresses and process ids.

        Args:
            rank: the rank that reported this, if its own number in the text does not count either.
        """
        own = replace(
            self,
            message=steady_message(self.message, rank, self.pid),
            added_notes=tuple(steady_message(note, rank, self.pid) for note in self.added_notes),
        )
        return own.fingerprint

    @property
    def is_broken_connection(self) -> bool:
        """Whether a collective of torch failed because another rank closed its connection."""
        if self.etype not in _TORCH_ERRORS:
            return False
        of_gloo = self.message.partition("gloo/")[2]
        return bool(_PEER_ERROR.search(self.message) or _BROKEN_CONNECTION.search(of_gloo))

    def headline(self) -> str:
        """The error in one line: ``ZeroDivisionError: division by zero``."""
        return f"{self.etype}: {self.message}" if self.message else self.etype


def with_consequences(reports: dict[Any, Failure]) -> dict[Any, Failure]:
    """Mark errors of broken connections as consequences if another rank ended, aborted its group, or failed by itself.

    The other ranks may see that before they are released: a rank that came late to a collective is released after those that
    wait. If all ranks have such errors, none of them is known to be a consequence.
    """
    is_ended = bool({"lost", "interrupted", "released"}.intersection(failure.kind for failure in reports.values()))
    is_failed = any(failure.kind == "exception" and not failure.is_broken_connection for failure in reports.values())
    return {
        point: replace(failure, kind="released")
        if failure.kind == "exception"
        and (
            (is_ended and _BROKEN_CONNECTION.search(failure.message))
            or ((is_ended or is_failed) and failure.is_broken_connection)
        )
        else failure
        for point, failure in reports.items()
    }
