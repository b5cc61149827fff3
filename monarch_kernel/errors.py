"""Every error that monarch_kernel raises, and the report that a rank makes of a failure.

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

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from monarch_kernel.base.text import format_ranks, plain, printable
from monarch_kernel.base.volatile import steady_message, without_gloo_place

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


FailureKind = Literal["exception", "interrupted", "lost", "released", "stopped"]


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


_TRACEBACK = "Traceback (most recent call last):"
_ON_THE_RANK = "Traceback on the rank:\n"
_MAX_MORE_LINES = 4


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
        return min(self.reports.items(), key=lambda item: (_ORDER[item[1].kind], item[0]))[1]

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
        for failure, ranks in _grouped(self.reports):
            lines.append(f"{self.mesh_name}{format_ranks(ranks)} failed: {failure.headline()}")
            lines += _details({rank: self.reports[rank] for rank in ranks})
        reported: list[MeshFailure] = []
        for rank in sorted(self.causes):
            if self.causes[rank] not in reported:
                reported.append(self.causes[rank])
                lines.append(f"caused by {self.causes[rank].report()}")
        return printable("\n".join(lines))


def _grouped(reports: Mapping[int, Failure], *, exact: bool = False) -> list[tuple[Failure, tuple[int, ...]]]:
    """Distinct failures with their ranks, causes first, then by lowest rank."""
    groups: dict[tuple[object, ...], tuple[Failure, list[int]]] = {}
    for rank, failure in sorted(reports.items()):
        groups.setdefault(failure.fingerprint, (failure, []))[1].append(rank)
    if not exact and len(groups) > 1:
        equal, groups = groups, {}
        for failure, ranks in equal.values():
            # A number of a rank that several ranks name is not each one's own.
            key = failure.steady_fingerprint(ranks[0] if len(ranks) == 1 else None)
            groups.setdefault(key, (failure, []))[1].extend(ranks)
    found = [(failure, tuple(sorted(ranks))) for failure, ranks in groups.values()]
    return sorted(found, key=lambda group: (_ORDER[group[0].kind], group[1]))


def _details(reports: Mapping[int, Failure]) -> list[str]:
    """Where something failed, why, and the last lines written there, for ranks that have the same error."""
    failure = next(iter(reports.values()))
    lines = []
    where = failure.user_frame
    if where is not None:
        lines.append(f"    {where.file}, line {where.line}, in {where.function}")
        if where.source:
            lines.append(f"    > {where.source[where.line - where.first_line].strip()}")
    lines += [f"    {note}" for note in failure.added_notes]
    lines += [f"    {line}" for line in causes_by_rank(reports)]
    lines += [f"    {note}" for note in failure.notes]
    if failure.host:
        lines.append(f"    on host {failure.host}, pid {failure.pid}{_python(failure)}")
    return lines + _last_lines(reports)


def _last_lines(reports: Mapping[int, Failure]) -> list[str]:
    """The last lines of the lowest rank; with its number, if other ranks wrote something else."""
    rank, failure = next(iter(reports.items()))
    whose = f"{format_ranks([rank])} " if len({each.last_lines for each in reports.values()}) > 1 else ""
    return [f"    {whose}| {line}" for line in failure.last_lines[-5:]]


def causes_by_rank(reports: Mapping[int, Failure], *, whole: bool = False) -> list[str]:
    """A line for each exception to which an error is chained, the nearest first, with ranks where the texts differ.

    Args:
        reports: rank -> report, of ranks whose fingerprints are equal.
        whole: whether to give each error of a broken connection its lines; otherwise they are one line together, as they only
            follow from what happened to another rank, or to the process group.
    """
    lines: list[str] = []
    broken: list[Cause] = []
    at = 0
    for causes in _causes_of(reports):
        cause = next(iter(causes.values()))
        if not whole and all(each.is_broken_connection for each in causes.values()):
            at = at if broken else len(lines)
            broken.append(cause)
            continue
        is_same = (
            len({(_steady_headline(rank, each), each.more_lines, each.notes) for rank, each in causes.items()}) == 1
        )
        lines.append(f"{cause.link}{_texts_by_rank(causes)}")
        if is_same:
            lines += [f"    {line}" for line in (*cause.more_lines, *cause.notes)]
        if cause.frame is not None:
            function = "" if cause.frame.function in ("", "<module>") else f", in {cause.frame.function}"
            lines.append(f"    {cause.frame.file}, line {cause.frame.line}{function}{_code(cause.frame)}")
    if broken:
        first, times = broken[0], f", {len(broken)} times" if len(broken) > 1 else ""
        lines.insert(at, f"{first.link} {first.etype}: {without_gloo_place(first.headline.partition(': ')[2])}{times}")
    return lines


def _steady_headline(rank: int, cause: Cause) -> str:
    return steady_message(cause.headline, rank)


def _code(frame: Frame) -> str:
    index = frame.line - frame.first_line
    return f": {frame.source[index].strip()}" if 0 <= index < len(frame.source) else ""


def _causes_of(reports: Mapping[int, Failure]) -> list[dict[int, Cause]]:
    """The causes of ranks whose fingerprints are equal, as rank -> cause, the nearest first."""
    chains = {rank: report.chain for rank, report in reports.items()}
    return [dict(zip(chains, causes, strict=True)) for causes in zip(*chains.values(), strict=True)]


def _texts_by_rank(causes: Mapping[int, Cause]) -> str:
    """`` OSError: no shard``, or ``, on [0] OSError: no shard-0; on [1] OSError: no shard-1``."""
    ranks: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for rank, cause in causes.items():
        ranks.setdefault((_steady_headline(rank, cause), cause.notes), []).append(rank)
    if len(ranks) == 1:
        return f" {next(iter(causes.values())).headline}"
    shown = []
    for (_, notes), theirs in list(ranks.items())[:_MAX_TEXTS]:
        shown.append(
            f"on {format_ranks(theirs)} {causes[theirs[0]].headline}" + (f" ({'; '.join(notes)})" if notes else "")
        )
    if hidden := [rank for theirs in list(ranks.values())[_MAX_TEXTS:] for rank in theirs]:
        shown.append(f"{len(ranks) - _MAX_TEXTS:,} more on {format_ranks(hidden)}")
    return f", {'; '.join(shown)}"


def _python(failure: Failure) -> str:
    return f", python {failure.python}" if failure.python else ""


_MAX_TEXTS = 4
"""Number of causes that differ by rank to show; for further ones only the ranks are shown."""

_ORDER = {"lost": 0, "exception": 1, "stopped": 2, "interrupted": 3, "released": 4}
"""Causes before consequences."""

_BROKEN_CONNECTION = re.compile(r"connection (closed|reset) by peer|broken pipe|pair closure", re.IGNORECASE)
_TORCH_ERRORS = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
_PEER_ERROR = re.compile(
    r"connection closed by (remote )?peer|pair closure"
    r"|ncclRemoteError|remote process exited or there was a network error|NCCL communicator was aborted"
    r"|received errors while waiting for send/recv from rank|did the remote server shutdown or crash",
    re.IGNORECASE | re.DOTALL,
)


def _with_consequences(reports: dict[Any, Failure]) -> dict[Any, Failure]:
    """Mark errors of broken connections as consequences if another rank ended, aborted its group, or failed by itself.

    The other ranks may see that before they are released: a rank that came late to a collective is released after those that
    wait. If all ranks have such errors, none of them is known to be a consequence.
    """
    is_ended = bool({"lost", "interrupted", "released"}.intersection(failure.kind for failure in reports.values()))
    is_failed = any(failure.kind == "exception" and not failure.is_broken_connection for failure in reports.values())
    return {
        point: replace(failure, kind="released")
        if failure.kind == "exception"
        and ((is_ended and _BROKEN_CONNECTION.search(failure.message)) or (is_failed and failure.is_broken_connection))
        else failure
        for point, failure in reports.items()
    }


class MonarchError(Exception):
    """Base of all errors of monarch_kernel.

    The text may contain what a host, a file or a rank has said, so terminal controls other than colours are removed.
    """

    def __str__(self) -> str:
        return printable(super().__str__())

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

    def groups(self, *, exact: bool = False) -> list[tuple[Failure, tuple[int, ...]]]:
        """Distinct failures with the ranks that had them, causes first, then by lowest rank.

        Args:
            exact: whether texts that differ only in times, addresses, process ids, memory and the rank's own number are
                distinct.
        """
        return _grouped({point.rank: failure for point, failure in self.reports.items()}, exact=exact)

    def __repr__(self) -> str:
        said = "; ".join(f"{format_ranks(ranks)} {failure.headline()}" for failure, ranks in self.groups())
        return f"<{type(self).__name__}: {self.what}: {said}>"

    def __str__(self) -> str:
        lines = [self.what]
        by_rank = {point.rank: report for point, report in self.reports.items()}
        for failure, ranks in self.groups():
            where = failure.user_frame
            place = f" ({where.file}, line {where.line})" if where else ""
            head, *rest = failure.headline().split("\n")
            lines.append(f"{format_ranks(ranks)} {head}{place}")
            lines.extend(f"    {line}" for line in (*rest, *failure.added_notes))
            if failure.host:  # otherwise no report has come
                pid = f", pid {failure.pid}" if failure.pid else ""
                lines.append(f"    on host {failure.host}{pid}{_python(failure)}")
            if where and where.source:
                lines.append(f"    > {where.source[where.line - where.first_line].strip()}")
            same = {rank: by_rank[rank] for rank in ranks}
            lines.extend(f"    {line}" for line in causes_by_rank(same))
            lines.extend(f"    {note}" for note in failure.notes)
            lines.extend(_last_lines(same))
        return printable("\n".join(lines))


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
    """A rank or actor that the call needs is dead or stopped."""


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


class LaunchError(MonarchError):
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
        return printable(self.text)


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
