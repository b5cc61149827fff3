"""A cell that runs on ranks: it is queued and sent, shows its output, and ends.

Theory of operation
===================

The thread that waits for a `RemoteCell` advances it by ``wait`` and ``poll``: the main thread for a cell in the foreground
(`run_in_foreground`), the view thread for a cell in the background (`Background` in ``background.py``). Its stages:

- *waiting*: an earlier cell of the mesh has ranks in common with it (`CellQueue`);
- *forming*: the mesh forms its process group, before its first cell and after a cell that broke the group;
- *running*: the cell was sent; its output arrives as events;
- *recovering*: ranks have died, and the live loop recovers (`Recovery`); then the cell is sent again;
- *over*: `result` returns the ranks' values, or raises.

A cell that does not stop after an interrupt stays in its queue, and the view thread drives it from then on. Later cells on
the same ranks wait for it and can be interrupted while they wait, and its output is still shown below it.

The answer to a cell says how many collectives its rank has started. If these numbers differ, if a rank has aborted its
group, or if another process has come to a place, the group is formed again before the next cell, unless a rank of the mesh
is dead.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, MutableSequence
from typing import Any, Literal

from monarch_kernel.actor.host_mesh import HostMesh
from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.events import StopEvent
from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.errors import LaunchError, RanksError, RemoteInterrupt, format_ranks
from monarch_kernel.features.live.controller import LoopControl
from monarch_kernel.features.watch.findings import Trouble
from monarch_kernel.net.wire.messages import Payload, Rewind
from monarch_kernel.notebook.cells.early_failures import EarlyFailures
from monarch_kernel.notebook.cells.held_interrupts import HeldInterrupts
from monarch_kernel.notebook.cells.interrupt_progress import InterruptProgress, describe_interrupt, inspect_ranks
from monarch_kernel.notebook.cells.loop_watch import LoopWatch
from monarch_kernel.notebook.cells.output import CellOutput
from monarch_kernel.notebook.cells.recording import CellRecording
from monarch_kernel.notebook.cells.recovery import Recovery
from monarch_kernel.notebook.cells.wait_watch import WaitWatch
from monarch_kernel.notebook.output.logs import CellMark
from monarch_kernel.notebook.output.rich import RichSlots
from monarch_kernel.notebook.syntax.up_arguments import WARN_AFTER_S
from monarch_kernel.notebook.view.early_failures import brief_headline
from monarch_kernel.notebook.view.interrupts import restart_text
from monarch_kernel.notebook.view.stacks import doing_lines
from monarch_kernel.runtime.rpc.answers import Value
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.gather import CellResult

__all__ = ["CellQueue", "CellStage", "RemoteCell", "run_in_foreground"]

POLL_S = 0.05
_WAIT_NOTE_S = 2.0
_GROUP_TIMEOUT_S = 90.0
_MAX_CAUSES = 4
_FINISHED = Value(Payload(), (), {})
_MARKS = 1_000  # cells that a log can distinguish

CellStage = Literal["waiting", "forming", "running", "recovering", "over"]


class CellQueue:
    """The queue of a mesh's cells that have not ended; cells with ranks in common run one after another.

    Args:
        mesh: the whole mesh.
        form: makes a mesh form its process group; None where there is none.
    """

    def __init__(self, mesh: ProcMesh, form: Callable[[ProcMesh], Future[Any]] | None) -> None:
        self.mesh = mesh
        self.form = form
        self.needs_group = True
        self.healing: tuple[float, HostMesh | None] | None = None  # start time and hosts of a heal that was interrupted
        self.group_members: tuple[int, ...] = ()  # incarnations of the ranks when the group last formed
        self.slots = RichSlots(uuid.uuid4().hex)
        self.marks: deque[CellMark] = deque(maxlen=_MARKS)
        self.history: MutableSequence[tuple[int, str]] = deque(
            maxlen=_MARKS
        )  # number and code of the cells that finished on all ranks
        self.cells: list[RemoteCell] = []
        self._lock = threading.Lock()

    def enter(self, cell: RemoteCell) -> None:
        """Queue a cell."""
        with self._lock:
            self.cells.append(cell)

    def leave(self, cell: RemoteCell) -> None:
        """Remove a cell that has ended."""
        with self._lock:
            if cell in self.cells:
                self.cells.remove(cell)

    def before(self, cell: RemoteCell) -> RemoteCell | None:
        """Return the earliest cell that this one must wait for, or None."""
        with self._lock:
            for other in self.cells:
                if other is cell:
                    return None
                # Of an interrupted cell, only the ranks that have not stopped are in the way. When all have stopped, it is
                # still to be polled a last time, which finds out whether the process group is still usable.
                in_the_way = other.busy_ranks() if other.is_stopping else other.ranks
                if not in_the_way or not cell.ranks.isdisjoint(in_the_way):
                    return other
        return None

    def wants_group(self, mesh: ProcMesh) -> bool:
        """Whether to form the group now: not while a rank is dead, or while a rank outside ``mesh`` is too busy to join."""
        queries = mesh.runtime.queries
        if not self.group_members and queries.n_groups_formed and queries.has_group(self.mesh.procs):
            self.needs_group, self.group_members = False, self.mesh.incarnations()  # distributed tensors formed it
        in_place = not self.needs_group and self.group_members == self.mesh.incarnations()
        in_place = in_place and queries.share_group(mesh.procs)
        if in_place or self.form is None or self.mesh.deaths():
            return False
        return not any(rank.state == "running" and rank.rank not in mesh.ranks for rank in self.mesh.view().ranks)

    def begin_group(self) -> Future[Any]:
        """Start forming the process group of the current processes."""
        assert self.form is not None
        self.needs_group = True
        self.group_members = self.mesh.incarnations()
        return self.form(self.mesh)


class RemoteCell:
    """One cell on the ranks of a mesh, or of a slice of it.

    Args:
        cell_queue: the queue of the whole mesh.
        mesh: where the cell runs.
        code: IPython syntax; or a function that the ranks call.
        number: number of the notebook's cell, for tracebacks and views.
        want_value: whether the ranks send the values of the last expression.
        output: shows what the cell writes.
        timeout_s: seconds after which the cell is interrupted; None for no timeout.
        fail_fast: whether the cell ends when the first rank has failed, instead of when the last rank has ended.
        warn_after_s: age from which waits in collectives are reported, in seconds; 0 for never.

    Attributes:
        way_out: how the user ends the cell, as text.
        sent_at: when it was first sent to the ranks, by `time.monotonic`; None before.
    """

    def __init__(
        self,
        cell_queue: CellQueue,
        mesh: ProcMesh,
        code: str | Callable[[], Any],
        *,
        number: int,
        want_value: bool,
        output: CellOutput,
        timeout_s: float | None = None,
        fail_fast: bool = False,
        warn_after_s: float = WARN_AFTER_S,
        needs_all: bool = False,
    ) -> None:
        self.mesh = mesh
        self.ranks = frozenset(mesh.ranks)
        self.number = number
        self.output = output
        self.stage: CellStage = "waiting"
        self.is_over = threading.Event()
        self.sent_at: float | None = None
        self.way_out = "Kernel > Interrupt" if output.sink.can_update else "Ctrl-C"
        self._progress: InterruptProgress | None = None
        self._code = code
        self._recording = CellRecording(mesh, code, number, output)
        self._want_value = want_value
        self._timeout_s = timeout_s
        self._fail_fast = fail_fast
        self._ends_early = False
        self._deadline = float("inf")
        self._polled_at = 0.0
        self._has_stops = False
        self._lane = cell_queue
        self._warn_after_s = warn_after_s
        self._needs_all = needs_all
        self._restart_watches(time.monotonic())
        self._future: Future[Any] | None = None
        self._result: ValueMesh[CellResult] | None = None
        self._error: BaseException | None = None
        self._recovery = Recovery(
            mesh,
            number,
            code if isinstance(code, str) else "",
            cell_queue.history,
            cell_queue.begin_group,
            self._say,
            output.handle,
        )
        self._recovering: Generator[Future[Any], None, Rewind | None] | None = None
        self._rewind: Rewind | None = None
        cell_queue.enter(self)

    def __repr__(self) -> str:
        return f"<RemoteCell [{self.number}] on {self.mesh.name}{format_ranks(self.ranks)}: {self.stage}>"

    def wait(self, timeout_s: float) -> bool:
        """Wait until ``poll`` has something to do; False after the timeout."""
        if self.stage == "waiting":
            before = self._lane.before(self)
            return before is None or before.is_over.wait(timeout_s)
        return self._future is None or self._future.wait(timeout_s)

    def poll(self, now: float) -> None:
        """Advance as far as possible without waiting, and show the output that has arrived."""
        if self.stage == "waiting" and self._lane.before(self) is None:
            self._begin(now)
        if self.stage == "forming":
            self._check_group(now)
        if self.stage == "recovering":
            self.output.poll(now)
            self._recover(now)
        if self.stage == "running":
            assert self._future is not None
            self.output.poll(now)
            if self._has_stops:  # time in the debugger does not count towards --timeout
                self._deadline += now - self._polled_at
            self._polled_at, self._has_stops = now, bool(self.stops())
            if self._future.done():
                self._end(now)
            elif now >= self._deadline:
                self._deadline = float("inf")
                self.stop(f"stopped after {self._timeout_s:g} s (--timeout)", now)
            elif self._progress is not None:
                self._progress.poll(now)
            else:
                self._watch(self._future, now)

    def _watch(self, future: Future[Any], now: float) -> None:
        """Tell the user of ranks that have failed while others go on; with ``fail_fast`` interrupt the others."""
        answers = self.mesh.runtime.answers(future.id)
        self._early.note(answers, now)
        if not self._has_stops:
            self._waits.poll(answers, now)
            self._loops.poll(now)
        if not self._fail_fast:
            self._early.tell(self.way_out, now)
        elif self._early.is_due(now):
            self._ends_early = True
            self._begin_interrupt("stopped by --fail-fast", now)

    def _restart_watches(self, now: float) -> None:
        self._early = EarlyFailures(self.mesh, self.number, self._say)
        self._loops = LoopWatch(
            self._lane.mesh, self.mesh.ranks, self._trouble, self._say, now, asks=self._warn_after_s > 0
        )
        self._waits = WaitWatch(self._lane.mesh, self.mesh.ranks, self._say, self._warn_after_s, now)

    def _trouble(self) -> dict[int, Trouble]:
        """What is wrong with the live loops of this run of the cell."""
        return {} if self._future is None else LoopControl(self.mesh.runtime).trouble(self._future.id)

    def stop(self, reason: str, now: float | None = None) -> None:
        """Interrupt the cell. A cell that was not sent ends; else each call raises KeyboardInterrupt on the ranks.

        A second call also aborts the process groups of ranks that have not stopped.
        """
        now = time.monotonic() if now is None else now
        if self.stage == "waiting":
            before = self._lane.before(self)
            why = self._what_is_before(before) if before else "before it started; it was not sent"
            self._fail(RemoteInterrupt(f"{reason} {why}"))
        elif self.stage == "forming":
            assert self._future is not None
            self._future.interrupt()
            self._fail(RemoteInterrupt(f"{reason} while the process group was forming; the cell was not sent"))
        elif self.stage == "recovering":
            assert self._future is not None
            self._future.interrupt()
            self._fail(RemoteInterrupt(f"{reason} while ranks were being replaced; the loop did not continue"))
        elif self._progress is not None:
            self._progress.again(now)
        elif self._future is not None:
            self._begin_interrupt(reason, now)

    def note_stop(self, reason: str) -> None:
        """Note that its ranks are interrupted by other means, so that the cell ends as an interrupted cell."""
        if self.stage == "running" and self._progress is None:
            self._begin_interrupt(reason, time.monotonic(), is_sent=True)
        elif self.stage != "running":
            self.stop(reason)

    def _begin_interrupt(self, reason: str, now: float, *, is_sent: bool = False) -> None:
        ended = self.ranks.difference(self.busy_ranks())
        self._progress = InterruptProgress(self._lane.mesh, reason, self._interrupt, now, is_sent=is_sent, ended=ended)

    def _interrupt(self, abort: bool) -> None:
        if self._future is not None:
            self._future.interrupt(abort=abort)

    @property
    def is_stopping(self) -> bool:
        """Whether the cell was interrupted."""
        return self._progress is not None

    def is_given_up(self, now: float) -> bool:
        """Whether the user no longer waits for an interrupted cell that has not stopped."""
        return self.stage != "over" and self._progress is not None and self._progress.is_given_up(now)

    def stop_text(self) -> str:
        """Describe the effect of the interrupt so far."""
        assert self._progress is not None
        assert self._future is not None
        answers = self.mesh.runtime.answers(self._future.id)
        if not answers:  # the cell has just ended
            return f"{self._progress.why}; it has ended on all ranks"
        return describe_interrupt(self._progress, self.mesh.ranks, answers)

    def _what_is_before(self, before: RemoteCell) -> str:
        """Name the cell that this one waited for, and what its ranks do if it was interrupted and has not stopped."""
        text = f"while it waited for cell [{before.number}]; it was not sent"
        why = "\n".join(self._why_not_over(before))
        return f"{text}. {why}" if why else text

    def waiting_text(self) -> str:
        """Tell the user which cell this one waits for; empty if it does not wait."""
        before = self._lane.before(self) if self.stage == "waiting" else None
        if before is None:
            return ""
        ranks = format_ranks(self.ranks.intersection(before.busy_ranks()))
        text = (
            f"waits for cell [{before.number}] on {ranks} of {self._lane.mesh.name}; Kernel > Interrupt ends the wait"
        )
        return "\n".join([text, *self._why_not_over(before)])

    def _why_not_over(self, before: RemoteCell) -> list[str]:
        if not before.is_stopping:
            return []
        mesh = self._lane.mesh
        busy = before.busy_ranks()
        lines = doing_lines(mesh.view(), inspect_ranks(mesh), busy)
        head = f"Cell [{before.number}] was interrupted, but still runs:"
        return [
            head,
            *(f"  {line}" for line in lines),
            f"{restart_text(mesh.name, busy, len(mesh.extent), len(mesh))}.",
        ]

    def stops(self) -> list[StopEvent]:
        """Return where the cell is stopped in the debugger, by rank."""
        if self.stage != "running" or self._future is None:
            return []
        return [stop for stop in self.mesh.stops() if stop.request == self._future.id]

    def busy_ranks(self) -> list[int]:
        """Return the ranks that have not finished the cell."""
        if self.stage == "over":
            return []
        if self._future is None or self.stage != "running":
            return list(self.mesh.ranks)
        answers = self.mesh.runtime.answers(self._future.id)
        return [rank for rank, answer in zip(self.mesh.ranks, answers, strict=False) if answer is None]

    def result(self) -> ValueMesh[CellResult]:
        """Return the ranks' results of a cell that is over.

        Raises:
            RemoteError: the cell failed on some ranks.
            SupervisionError: a rank is dead.
            RemoteInterrupt: the cell was interrupted, or took longer than its timeout.
            LaunchError: the process group could not be formed.
        """
        assert self.stage == "over"
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def show_values(self) -> None:
        """Show the values of the last expression.

        Raises:
            MonarchError: as `result`.
        """
        bundles = (each.bundle for each in self.result().values())
        self.output.show_values(dict(zip(self.mesh.ranks, bundles, strict=True)))

    # -- stages

    def _begin(self, now: float) -> None:
        if self._lane.wants_group(self.mesh):
            self._deadline = now + _GROUP_TIMEOUT_S
            try:
                self._future = self._lane.begin_group()
            except Exception as error:  # the store could not be created
                self._fail(error)
                return
            self.stage = "forming"
        else:
            self._send(now)

    def _check_group(self, now: float) -> None:
        future = self._future
        assert future is not None
        if future.done():
            error = future.exception(0)
            if error is None:
                self._lane.needs_group = False
            elif isinstance(error, RanksError) and (not self.mesh.is_whole or len(self.mesh) == 1):
                self._say(_without_group(self.mesh.name, error))  # the cell may remove the cause, on ranks that have it
            else:
                self._fail(error)
                return
            self._send(now)
        elif now >= self._deadline:
            future.cancel()
            name, busy = self.mesh.name, self._lane.mesh.view().ranks
            late = format_ranks(rank.rank for rank in busy if rank.state == "running")
            self._fail(
                LaunchError(
                    f"{name}: the process group did not form within {_GROUP_TIMEOUT_S:g} s, still busy: {late}; "
                    f"%mesh interrupt {name} interrupts them, %mesh down {name} ends them"
                )
            )

    def _send(self, now: float) -> None:
        self._deadline = float("inf") if self._timeout_s is None else now + self._timeout_s
        self._restart_watches(now)
        self._lane.marks.append(CellMark(time.time(), self.number, self.ranks))
        try:
            self._recording.begin()
            if callable(self._code):
                self._future = self.mesh.call_cell(self._code, cell=self.number, listen=self.output.handle)
            else:
                self._future = self.mesh.run_cell(
                    self._code,
                    cell=self.number,
                    want_value=self._want_value,
                    listen=self.output.handle,
                    rewind=self._rewind,
                    needs_all=self._needs_all,
                )
        except Exception as error:  # the session was shut down
            self._fail(error)
            return
        self._recording.sent(self._future.id)
        self.sent_at = now if self.sent_at is None else self.sent_at
        self.stage = "running"

    def _end(self, now: float) -> None:
        future = self._future
        assert future is not None
        self._lane.needs_group |= not future.in_step
        self.output.finish(now)
        try:
            self._result = future.get()
        except RanksError as error:
            if self._progress is None and not self._fail_fast and self._recovery.wants(future.id, error):
                self._waits.end(now, succeeded=False)
                self._loops.end(now)
                self._recovering = self._recovery.steps(error)
                self.stage = "recovering"
                self._recover(now)
                return
            is_stopped = self._progress is not None and not self._ends_early
            self._error = RemoteInterrupt(self._outcome(error)) if is_stopped else error
        except Exception as error:
            self._error = error
        else:
            if self._progress is not None:
                self._error = RemoteInterrupt(f"{self._progress.why}, but all ranks ran to their end")
            if isinstance(self._code, str) and self._code and self.mesh.is_whole:
                self._lane.history.append((self.number, self._code))
        self._over()

    def _recover(self, now: float) -> None:
        """Advance the recovery as far as possible without waiting, and send the cell again when it is done."""
        assert self._recovering is not None
        try:
            while self._future is None or self._future.done():
                self._future = next(self._recovering)
        except StopIteration as done:
            self._rewind = done.value
            self._lane.needs_group = False
            self._send(now)
        except Exception as error:
            self.output.finish(now)
            self._fail(error)

    def _say(self, text: str) -> None:
        self.output.sink.write("stderr", f"{text}\n")

    def _outcome(self, error: RanksError) -> str:
        """Describe how the ranks of an interrupted cell ended."""
        assert self._progress is not None
        done = {point.rank: failure for point, failure in error.reports.items()}
        return describe_interrupt(
            self._progress, self.mesh.ranks, [done.get(rank, _FINISHED) for rank in self.mesh.ranks]
        )

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._over()

    def _over(self) -> None:
        self._waits.end(time.monotonic(), succeeded=self._error is None)
        self._loops.end(time.monotonic())
        self._recording.end(self._error)
        self.stage = "over"
        self._lane.leave(self)
        self.is_over.set()


def _without_group(mesh: str, error: RanksError) -> str:
    """Say why a cell on a part of a mesh runs without a process group."""
    causes = [
        f"{format_ranks([point.rank])} {brief_headline(failure)}"
        for point, failure in error.reports.items()
        if failure.kind != "released"
    ]
    why = "; ".join(causes[:_MAX_CAUSES]) or str(error).partition("\n")[0]
    return f"the process group of {mesh} could not be formed, and this cell runs without it: {why}"


def run_in_foreground(
    cell: RemoteCell,
    interrupts: HeldInterrupts,
    attend: Callable[[RemoteCell, HeldInterrupts], None] | None = None,
) -> ValueMesh[CellResult]:
    """Drive a cell until it is over, or until it has ignored an interrupt for too long.

    Args:
        cell: the cell to run.
        interrupts: counts interrupts since before the cell was queued: an earlier one stops it, too.
        attend: called after each turn while ranks are stopped in the debugger; may ask the user what they should do.

    Raises:
        RemoteInterrupt: the cell was interrupted; if ranks did not stop, the cell is still in its queue.
        MonarchError: as `RemoteCell.result`.
    """
    seen = 0
    note_at = time.monotonic() + _WAIT_NOTE_S
    while cell.stage != "over":
        now = time.monotonic()
        if now >= note_at:
            note_at = float("inf")
            if text := cell.waiting_text():
                cell.output.sink.write("stderr", f"{text}\n")
        if interrupts.count > seen:
            seen = interrupts.count
            cell.stop("interrupted", now)
        if cell.is_given_up(now):
            raise RemoteInterrupt(cell.stop_text())
        cell.wait(POLL_S)
        cell.poll(time.monotonic())
        if attend is not None and not cell.is_stopping and cell.stops():
            attend(cell, interrupts)
    if interrupts.count and not cell.is_stopping:
        cell.result()
        raise RemoteInterrupt("interrupted, but all ranks ran to their end")  # the user still wants to stop here
    return cell.result()
