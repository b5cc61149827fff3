"""Every error that monarch_kernel raises, and the report that a rank makes of a failure.

The tree::

    KeyboardInterrupt
    └── RemoteInterrupt            work on ranks was interrupted

    MonarchError
    ├── RanksError                 something failed on some ranks of a mesh
    │   ├── ActorError             an endpoint raised, or its result could not travel
    │   ├── RemoteError            a cell (``%%remote``), a push or a pull failed
    │   └── SupervisionError       a rank or an actor that is needed is dead or stopped
    ├── DeadlockError              actors wait for each other in a circle
    ├── EditError                  an edit can't be taken over by what lives; nothing has changed
    ├── AttachError                a mesh that outlived its kernel can't be taken up, or a new one can't be kept
    ├── LaunchError                a host or its ranks did not come up
    ├── PayloadError               also a TypeError: a value cannot be sent
    └── MeshDownError              the mesh (or the whole session) has been shut down

Errors say who erred, on which ranks and host, and what to do next; each can be pickled. Misuse that is found before
anything is sent raises the built-in exception that a local call would raise (``TypeError``, ``ValueError``,
``IndexError``, ``KeyError``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

__all__ = [
    "ActorError",
    "AttachError",
    "DeadlockError",
    "EditError",
    "Failure",
    "Frame",
    "LaunchError",
    "MeshDownError",
    "MonarchError",
    "PayloadError",
    "RanksError",
    "RemoteError",
    "RemoteInterrupt",
    "SupervisionError",
    "format_ranks",
    "rebuild_exception",
]


FailureKind = Literal["exception", "interrupted", "lost", "released", "stopped"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a remote traceback.

    Attributes:
        file: file name, or ``<remote cell [n]>`` for code of a cell.
        line: the line that was running, counted from 1.
        function: name of the function, ``<module>`` for a cell's top level.
        source: a few lines of source around ``line``; empty where there is no source.
        first_line: the line number of ``source[0]``.
        user: whether this is the user's code (a cell, ``__main__`` or a file outside site-packages).
        variables: name and short description (shape, dtype, device or value) of what the line mentions.
    """

    file: str
    line: int
    function: str
    source: tuple[str, ...] = ()
    first_line: int = 0
    user: bool = False
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """What one rank reports of one failure; travels as a message, so it holds plain data only.

    Attributes:
        kind: ``exception`` (user code raised), ``interrupted`` (stopped on request, state kept), ``lost`` (the process
            died), ``released`` (freed from a collective because another rank had failed: a consequence, not a
            cause), ``stopped`` (the actor or mesh had been stopped).
        etype: name of the exception's class, such as ``ZeroDivisionError``.
        message: ``str(exception)``, or for a lost rank the exit code or signal with its meaning.
        frames: the traceback, outermost call first.
        traceback: the whole traceback as text, chained exceptions included.
        host: name of the machine.
        pid: process id there.
        exception: the pickled exception; empty where it can't be pickled.
        last_lines: for a lost rank, the last lines it wrote.
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

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame that is the user's own code."""
        return next((frame for frame in reversed(self.frames) if frame.user), None)

    @property
    def fingerprint(self) -> tuple[object, ...]:
        """Equal for failures that should be shown as one: same error, same text, same place in the user's code."""
        where = self.user_frame
        place = (where.file, where.line) if where else None
        return (self.kind, self.etype, self.message, place)

    def headline(self) -> str:
        """The error in one line: ``ZeroDivisionError: division by zero``."""
        return f"{self.etype}: {self.message}" if self.message else self.etype


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as compressed ranges in brackets: ``[0-3,6]``."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return "[" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) + "]"


_ORDER = {"lost": 0, "exception": 1, "stopped": 2, "interrupted": 3, "released": 4}
"""Causes before consequences."""

_BROKEN_CONNECTION = re.compile(r"connection (closed|reset) by peer|broken pipe|pair closure", re.IGNORECASE)


def _with_consequences(reports: dict[Any, Failure]) -> dict[Any, Failure]:
    """A rank that ends, or aborts its group, breaks the connections of the others, whose errors are then consequences.

    The others may see that before they are told: a rank that came late to a collective is released after those that wait.
    """
    if not {"lost", "interrupted", "released"}.intersection(failure.kind for failure in reports.values()):
        return reports
    return {
        point: replace(failure, kind="released")
        if failure.kind == "exception" and _BROKEN_CONNECTION.search(failure.message)
        else failure
        for point, failure in reports.items()
    }


class MonarchError(Exception):
    """Base of all errors of monarch_kernel."""

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in vars(self).items() if name != "_render_traceback_"}
        return type(self), self.args, state  # without the way in which a notebook has shown it


class RanksError(MonarchError):
    """Something failed on some ranks; the others' results are kept.

    Attributes:
        reports: ``Point -> Failure``, the reports as the ranks made them.
        results: ``Point -> value`` of the ranks that succeeded.
    """

    def __init__(self, what: str, reports: Mapping[Any, Failure], results: Mapping[Any, Any] | None = None) -> None:
        super().__init__(what, dict(reports), dict(results or {}))
        self.what = what
        self.reports: dict[Any, Failure] = _with_consequences(self.args[1])
        self.results: dict[Any, Any] = self.args[2]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Flat ranks that failed, sorted."""
        return tuple(sorted(point.rank for point in self.reports))

    @property
    def rank(self) -> int:
        """The lowest rank whose failure is a cause rather than a consequence of another's."""
        return int(min(point.rank for point, failure in self.reports.items() if failure is self.primary))

    @property
    def primary(self) -> Failure:
        """The failure to look at first: a cause before a consequence, then by rank."""
        return min(self.reports.items(), key=lambda item: (_ORDER[item[1].kind], item[0].rank))[1]

    @property
    def exception(self) -> BaseException:
        """The primary failure as an exception object."""
        return rebuild_exception(self.primary)

    @property
    def failures(self) -> dict[Any, BaseException]:
        """``Point -> exception`` for every rank that failed."""
        return {point: rebuild_exception(failure) for point, failure in self.reports.items()}

    def groups(self) -> list[tuple[Failure, tuple[int, ...]]]:
        """Distinct failures with the ranks that had them, causes first, then by lowest rank."""
        groups: dict[tuple[object, ...], tuple[Failure, list[int]]] = {}
        for point, failure in sorted(self.reports.items(), key=lambda item: item[0].rank):
            groups.setdefault(failure.fingerprint, (failure, []))[1].append(point.rank)
        return sorted(
            ((failure, tuple(ranks)) for failure, ranks in groups.values()),
            key=lambda group: (_ORDER[group[0].kind], group[1]),
        )

    def __repr__(self) -> str:
        said = "; ".join(f"{format_ranks(ranks)} {failure.headline()}" for failure, ranks in self.groups())
        return f"<{type(self).__name__}: {self.what}: {said}>"

    def __str__(self) -> str:
        lines = [self.what]
        for failure, ranks in self.groups():
            where = failure.user_frame
            place = f" ({where.file}, line {where.line})" if where else ""
            lines.append(f"{format_ranks(ranks)} {failure.headline()}{place}")
            lines.append(f"    on host {failure.host}, pid {failure.pid}")
            if where and where.source:
                lines.append(f"    > {where.source[where.line - where.first_line].strip()}")
            lines.extend(f"    | {line}" for line in failure.last_lines[-5:])
        return "\n".join(lines)


class ActorError(RanksError):
    """An endpoint raised on at least one rank, or its result could not be sent; the actors live on."""


class RemoteError(RanksError):
    """A cell, a push or a pull failed on at least one rank; the ranks live on."""


class SupervisionError(RanksError):
    """A rank or actor that the call needs is dead or stopped."""


class RemoteInterrupt(KeyboardInterrupt):
    """Work on ranks was interrupted; the text says which ranks stopped, with their state kept, and which did not."""

    def _render_traceback_(self) -> list[str]:
        """For IPython: the text alone, for there is nothing to find in the frames."""
        return [f"{type(self).__name__}: {self}"]


class LaunchError(MonarchError):
    """A host, or ranks on it, did not come up; the text names the stage and shows the log's last lines."""


class EditError(MonarchError):
    """Edited code can't be taken over by what lives (actors, modules); the text says why, and nothing has changed."""


class AttachError(MonarchError):
    """A mesh that outlived its kernel can't be taken up (or one can't be brought up as such); the text says what to do."""


class DeadlockError(MonarchError):
    """Actors wait for each other in a circle, which the text names; raised where one of them waits.

    An actor handles one message at a time, so one that waits for an answer does not answer meanwhile.
    """

    def __init__(self, circle: str) -> None:
        super().__init__(circle)
        self.circle = circle

    def __str__(self) -> str:
        return (
            f"these wait for each other, and none of them can go on: {self.circle}; an actor handles one message at a time: "
            "call back with broadcast(), or let the endpoint that waits be a @concurrent_endpoint"
        )


class PayloadError(MonarchError, TypeError):
    """A value cannot be sent to or from a rank; the text names the value and why."""


class MeshDownError(MonarchError):
    """The mesh, or the session it belongs to, has been shut down."""


def rebuild_exception(failure: Failure) -> BaseException:
    """Make an exception object of a report: the original where it can be unpickled, else a RuntimeError that names it."""
    import pickle

    error: BaseException
    try:
        error = pickle.loads(failure.exception) if failure.exception else RuntimeError(failure.headline())
    except Exception:  # an exception class that does not survive pickling is the user's, and must not hide the failure
        error = RuntimeError(failure.headline())
    if not isinstance(error, BaseException):
        error = RuntimeError(failure.headline())
    if failure.traceback and not getattr(error, "__notes__", None):
        note = f"Traceback on the rank:\n{failure.traceback.rstrip()}"
        error.__notes__ = [note]  # what add_note does; Python 3.10 has no add_note
    return error
