"""Every error that monarch_kernel raises; what a rank reports about a failure is in `base.failure_reports`.

The tree::

    KeyboardInterrupt
    └── RemoteInterrupt            work on ranks was interrupted

    MonarchError
    ├── RanksError                 something failed on some ranks of a mesh
    │   ├── ActorError             an endpoint raised, or its result could not travel
    │   ├── RemoteError            a cell (``%%remote``), a push or a pull failed
    │   └── SupervisionError       also a RuntimeError: a rank or an actor that is needed is dead or stopped
    │       ├── ActorDiedError     also an ActorError: an endpoint raised an error that ended its actor
    │       └── BootstrapError     also an ActorError: the bootstrap of a process raised
    ├── DeadlockError              actors wait for each other in a circle
    ├── DriftError                 ranks that should hold equal tensors hold different ones
    ├── EditError                  edited code can't be applied to live actors and modules; nothing has changed
    ├── AttachError                the kernel can't attach to a detached mesh, or can't detach a new one
    ├── LaunchError                a host or its ranks did not come up
    ├── MoveError                  tensors can't be moved between meshes as they are
    ├── PayloadError               also a TypeError: a value cannot be sent
    ├── PlanError                  a model can't be spread over ranks as it is, or as requested
    ├── CheckpointError            a checkpoint could not be saved, does not exist, or does not fit
    ├── ClientError                a command for the meshes of a running kernel, or a tool of its agent server, failed
    │   ├── NotPrivate             other users have access to the connection file of a kernel
    │   └── OtherKernel            a kernel is not one of monarch_kernel
    ├── RecordError                a run record can't be written, read or replayed
    ├── SnapshotError              there is no snapshot to go back to
    ├── TensorError                also a RuntimeError: an operation on distributed tensors is wrong, or has failed on a rank
    ├── CollectiveError            also a RuntimeError: ranks call a collective with different arguments
    ├── BufferGoneError            memory of another process can't be read or written any more
    ├── ForkedError                a process that was forked from a rank, or from the program, has used a handle
    └── MeshDownError              the mesh (or the whole session) has been shut down

Errors say what failed, on which ranks and host, and what to do next; each can be pickled. Misuse that is found before
anything is sent raises the built-in exception that a local call would raise (``TypeError``, ``ValueError``,
``IndexError``, ``KeyError``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from monarch_kernel.base.failure_reports import ORDER, Cause, Failure, Frame, with_consequences
from monarch_kernel.base.failures_by_rank import (
    causes_by_rank,
    continued,
    details,
    grouped,
    last_lines,
    python_note,
)
from monarch_kernel.base.text import format_ranks, plain, readable

__all__ = [
    "ActorDiedError",
    "ActorError",
    "AttachError",
    "BootstrapError",
    "BufferGoneError",
    "Cause",
    "CheckpointError",
    "CollectiveError",
    "DeadlockError",
    "DriftError",
    "EditError",
    "Failure",
    "ForkedError",
    "Frame",
    "LaunchError",
    "MeshDownError",
    "MeshFailure",
    "MonarchError",
    "MoveError",
    "PayloadError",
    "PlanError",
    "RanksError",
    "RecordError",
    "RemoteError",
    "RemoteInterrupt",
    "SnapshotError",
    "SupervisionError",
    "TensorError",
    "causes_by_rank",
    "format_ranks",
    "rebuild_exception",
]

_ON_THE_RANK = "Traceback on the rank:\n"


@dataclass(frozen=True, slots=True)
class MeshFailure:
    """The failure of a mesh of actors, as passed to ``__supervise__`` of its owner; plain data.

    Ranks count within the mesh as it was spawned. ``host``, ``exit_code``, ``signal`` and ``last_lines`` come from
    the primary report.

    Attributes:
        mesh_name: as given to ``spawn``.
        reports: rank -> how its actor ended.
        causes: rank -> the failure below it that was not handled there; without the ranks that failed by themselves.
        actor: number of the actor mesh in its session.
        mesh: the mesh, in the failure that the owner receives; None in reports of other processes.
    """

    mesh_name: str
    reports: dict[int, Failure]
    causes: dict[int, MeshFailure] = field(default_factory=dict)
    actor: int = 0
    mesh: Any = field(default=None, compare=False, repr=False)

    @property
    def crashed_ranks(self) -> tuple[int, ...]:
        """The ranks that failed, sorted."""
        return tuple(sorted(self.reports))

    @property
    def primary(self) -> Failure:
        """The report to look at first: the death of a process before an exception, then by rank."""
        return min(self.reports.items(), key=lambda item: (ORDER[item[1].kind], item[0]))[1]

    @property
    def cause(self) -> MeshFailure | None:
        """The failure below the lowest rank that failed because of another failure."""
        return self.causes[min(self.causes)] if self.causes else None

    @property
    def root_cause(self) -> MeshFailure:
        """The first failure, as far down as it is known; this one, if it has no cause."""
        found = self
        while (below := found.cause) is not None:
            found = below
        return found

    @property
    def exception(self) -> BaseException:
        """The primary report as an exception object."""
        return rebuild_exception(self.primary)

    @property
    def host(self) -> str:
        """Name of the machine."""
        return self.primary.host

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process; None if it did not end by itself, or was killed by a signal."""
        return self.primary.exit_code

    @property
    def signal(self) -> str:
        """The signal that killed the process, such as ``SIGKILL``; empty if there was none."""
        return self.primary.signal

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines that the process wrote, if it died."""
        return self.primary.last_lines

    def by_rank(self) -> list[MeshFailure]:
        """The failures of the single ranks."""
        return [
            replace(
                self, reports={rank: self.reports[rank]}, causes={r: c for r, c in self.causes.items() if r == rank}
            )
            for rank in self.crashed_ranks
        ]

    def without_mesh(self) -> MeshFailure:
        """Return a copy for another process, where the mesh has no meaning."""
        return replace(self, mesh=None)

    def headline(self) -> str:
        """The failure in one line: ``workers[1] failed: RankDied: killed by SIGKILL``."""
        return f"{self.mesh_name}{format_ranks(self.reports)} failed: {self.primary.headline()}"

    def __str__(self) -> str:
        return self.report()

    def report(self) -> str:
        """The failure in full: what failed where, and below it the causes."""
        lines: list[str] = []
        for failure, ranks in grouped(self.reports):
            lines += continued([f"{self.mesh_name}{format_ranks(ranks)} failed: {failure.headline()}"])
            lines += details({rank: self.reports[rank] for rank in ranks})
        reported: list[MeshFailure] = []
        for rank in sorted(self.causes):
            if self.causes[rank] not in reported:
                reported.append(self.causes[rank])
                lines.append(f"caused by {self.causes[rank].report()}")
        return readable("\n".join(lines))


class MonarchError(Exception):
    """Base of all errors of monarch_kernel.

    The text may contain what a host, a file or a rank has said, so terminal controls other than colours are removed.
    """

    def __str__(self) -> str:
        return readable(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in vars(self).items() if name != "_render_traceback_"}
        return type(self), self.args, state  # without the notebook's renderer


class RanksError(MonarchError):
    """Something failed on some ranks; the results of the others are kept.

    Attributes:
        reports: ``Point -> Failure``, the reports as the ranks made them.
        results: ``Point -> value`` of the ranks that succeeded.
    """

    def __init__(self, what: str, reports: Mapping[Any, Failure], results: Mapping[Any, Any] | None = None) -> None:
        super().__init__(what, dict(reports), dict(results or {}))
        self.what = what
        self.reports: dict[Any, Failure] = with_consequences(self.args[1])
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
        return min(self.reports.items(), key=lambda item: (ORDER[item[1].kind], item[0].rank))[1]

    @property
    def exception(self) -> BaseException:
        """The primary failure as an exception object; the error itself, if a program made it without reports."""
        return rebuild_exception(self.primary) if self.reports else self

    @property
    def failures(self) -> dict[Any, BaseException]:
        """``Point -> exception`` for every rank that failed."""
        return {point: rebuild_exception(failure) for point, failure in self.reports.items()}

    def groups(self, *, exact: bool = False) -> list[tuple[Failure, tuple[int, ...]]]:
        """Distinct failures with the ranks that had them, causes first, then by lowest rank.

        Args:
            exact: whether texts that differ only in times, addresses, process ids, memory and the rank's own number are
                distinct.
        """
        return grouped({point.rank: failure for point, failure in self.reports.items()}, exact=exact)

    def __repr__(self) -> str:
        said = "; ".join(f"{format_ranks(ranks)} {failure.headline()}" for failure, ranks in self.groups())
        return f"<{type(self).__name__}: {self.what}{': ' if said else ''}{said}>"

    def __str__(self) -> str:
        lines = [self.what]
        by_rank = {point.rank: report for point, report in self.reports.items()}
        for failure, ranks in self.groups():
            where = failure.user_frame
            place = f" ({where.file}, line {where.line})" if where else ""
            head, *rest = failure.headline().split("\n")
            said = [f"{format_ranks(ranks)} {head}{place}", *(f"    {line}" for line in (*rest, *failure.added_notes))]
            if failure.host:  # otherwise no report has come
                pid = f", pid {failure.pid}" if failure.pid else ""
                said.append(f"    on host {failure.host}{pid}{python_note(failure)}")
            if where and where.source:
                said.append(f"    > {where.source[where.line - where.first_line].strip()}")
            same = {rank: by_rank[rank] for rank in ranks}
            said.extend(f"    {line}" for line in causes_by_rank(same))
            said.extend(f"    {note}" for note in failure.notes)
            lines += [*continued(said), *last_lines(same)]
        return readable("\n".join(lines))


class _NoMesh:
    """The place of a failure that a program has made itself."""

    rank = 0


class ActorError(RanksError):
    """An endpoint raised on at least one rank, or its result could not be sent; the actors are still alive.

    A program can make one of an exception: ``ActorError(error, "it failed")``, or with the names ``exception`` and ``message``.
    """

    def __init__(
        self,
        what: str | BaseException = "",
        reports: Mapping[Any, Failure] | str = "",
        results: Mapping[Any, Any] | None = None,
        *,
        exception: BaseException | None = None,
        message: str = "",
    ) -> None:
        what = what if exception is None else exception
        if isinstance(what, BaseException):
            text = message or (reports if isinstance(reports, str) and reports else "an actor failed")
            failure = Failure("exception", type(what).__name__, str(what), exception=_pickled(what))
            super().__init__(text, {_NoMesh(): failure})
        else:
            super().__init__(what, {} if isinstance(reports, str) else reports, results)

    @property
    def message(self) -> str:
        """What failed, without the reports of the ranks."""
        return self.what

    @property
    def exception_formatted(self) -> str:
        """The exception with its causes and its traceback, as text."""
        import traceback

        return "".join(traceback.format_exception(self.exception))


def _pickled(error: BaseException) -> bytes:
    import pickle

    try:
        return pickle.dumps(error)
    except Exception:  # of the user's class; the text names the error
        return b""


class RemoteError(RanksError):
    """A cell, a push or a pull failed on at least one rank; the ranks are still alive."""


class SupervisionError(RanksError, RuntimeError):
    """A rank or actor that the call needs is dead or stopped.

    A program can make one of a text: ``SupervisionError("the trainers are gone")``.
    """

    def __init__(
        self,
        what: str = "",
        reports: Mapping[Any, Failure] | None = None,
        results: Mapping[Any, Any] | None = None,
    ) -> None:
        super().__init__(what, reports or {}, results)


class ActorDiedError(SupervisionError, ActorError):
    """An endpoint raised an error that ended its actor: one that is no `Exception`, such as SystemExit."""


class BootstrapError(SupervisionError, ActorError):
    """The bootstrap of a process raised, so no actor can be made there."""


# The name in notebooks, and for code that compares names; the alias of PyTorch Monarch gives the first one another name.
ActorDiedError.__name__ = BootstrapError.__name__ = ActorError.__name__


class RemoteInterrupt(KeyboardInterrupt):
    """Work on ranks was interrupted; the text says which ranks stopped, with their state kept, and which did not."""

    def _render_traceback_(self) -> list[str]:
        """Show only the text in IPython, as the frames say nothing about the cause."""
        return [f"{type(self).__name__}: {self}"]


class LaunchError(MonarchError, RuntimeError):
    """A host, or ranks on it, did not come up; the text names the stage and shows the log's last lines."""


class EditError(MonarchError):
    """Edited code can't be applied to live actors and modules; the text says why, and nothing has changed."""


class AttachError(MonarchError):
    """The kernel can't attach to a detached mesh, or can't detach a new one; the text says what to do."""


class DeadlockError(MonarchError):
    """Actors wait for each other in a circle, which the text names; raised where one of them waits.

    An actor handles one message at a time, so an actor that waits for an answer does not answer other calls.
    """

    def __init__(self, circle: str) -> None:
        super().__init__(circle)
        self.circle = circle

    def __str__(self) -> str:
        return (
            f"calls wait for each other in a circle: {plain(self.circle)}; an actor handles one message at a time: "
            "call back with broadcast(), or make the waiting endpoint a @concurrent_endpoint"
        )


class PayloadError(MonarchError, TypeError):
    """A value cannot be sent to or from a rank; the text names the value and why."""


class BufferGoneError(MonarchError):
    """Memory of another process can't be read or written any more: it was dropped, or its owner has ended."""


class MoveError(MonarchError):
    """Tensors can't be moved between meshes as they are; the text says which and why, and whether anything has changed."""


class CheckpointError(MonarchError):
    """A checkpoint could not be saved, does not exist, or does not fit; the text says which, why, and what is left.

    The text may have names from the files, so it has no colours, either.
    """

    def __str__(self) -> str:
        return plain(super().__str__())


class RecordError(MonarchError):
    """A run record can't be written, read or replayed; the text says why, and what is left of it."""

    def __str__(self) -> str:
        return plain(super().__str__())


class SnapshotError(MonarchError):
    """There is no snapshot to go back to."""


class DriftError(MonarchError):
    """Ranks that should hold equal tensors hold different ones; the text names the first one, its ranks and by how much."""


class PlanError(MonarchError):
    """A model can't be spread over ranks as it is, or as requested; the text says why, and what to write instead."""


class CollectiveError(MonarchError, RuntimeError):
    """Ranks of a process group call different collectives, or one with different tensors; it was refused.

    The text has the call of each rank. Collectives of this group raise it until the group is formed again.
    """


class TensorError(MonarchError, RuntimeError):
    """An operation on distributed tensors is wrong for its arguments, not possible, or has failed on a rank.

    Attributes:
        reports: flat rank -> the report of the rank, if it has failed there.
    """

    def __init__(self, text: str, reports: Mapping[int, Failure] | None = None) -> None:
        super().__init__(text, dict(reports or {}))
        self.text = text
        self.reports: dict[int, Failure] = self.args[1]

    def __str__(self) -> str:
        return readable(self.text)


class ForkedError(MonarchError):
    """A process that was forked from a rank, or from the program, has used a handle: it is not part of the mesh."""

    def __init__(self, parent: int) -> None:
        super().__init__(parent)
        self.parent = parent

    def __str__(self) -> str:
        return (
            f"this process was forked from process {self.parent} of the mesh, and can't talk to the mesh itself: pass "
            "the request to that process (by a pipe, or a multiprocessing.Queue), or make it before the fork"
        )


class MeshDownError(MonarchError):
    """The mesh, or the session it belongs to, has been shut down."""


def rebuild_exception(failure: Failure) -> BaseException:
    """Make an exception object of a report: the original if it can be unpickled, else a RuntimeError that names it."""
    import pickle

    error: BaseException
    try:
        error = pickle.loads(failure.exception) if failure.exception else RuntimeError(failure.headline())
    except Exception:  # a user's exception class that can't be unpickled must not hide the failure
        error = RuntimeError(failure.headline())
    if not isinstance(error, BaseException):
        error = RuntimeError(failure.headline())
    stored = getattr(error, "__notes__", None)
    notes = list(stored) if isinstance(stored, list) and stored else list(failure.added_notes)
    if failure.traceback and not any(str(note).startswith(_ON_THE_RANK) for note in notes):
        notes.append(f"{_ON_THE_RANK}{failure.traceback.rstrip()}")
    if notes:
        error.__notes__ = notes  # like add_note(), which Python 3.10 does not have
    return error
