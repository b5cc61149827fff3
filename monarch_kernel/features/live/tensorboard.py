"""Writes what loops log to TensorBoard event files.

The controller queues the reports of ranks without waiting; a separate thread writes them. It writes the mean of a step over
ranks once every rank in the loop has reported the step, and late enough for ranks that are about to join the loop. It samples
the speed of the loop and its knobs once a second.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from monarch_kernel.base.events import LoopView
from monarch_kernel.features.live.loops import LoopRecord
from monarch_kernel.features.live.rates import PER_SECOND
from monarch_kernel.net.wire.messages import Logged

__all__ = ["TensorBoardJournal"]

_log = logging.getLogger(__name__)

_VIEW_EVERY_S = 1.0
_TICK_S = 0.5
_MORE_COME_S = 1.0
"""Delay between the first report of a step and its writing, because ranks need not start a loop at the same time."""
_CLOSE_S = 5.0

Key = tuple[int, int]


class _News(NamedTuple):
    """A report of a rank about a loop.

    Attributes:
        key: key of the loop.
        logged: what the rank logged since its last report.
        reached: the first step that some rank has not reported yet; None once the loop is over.
        view: the state of the loop, with some reports only.
        follows: the loop that this one continues after a rank died.
        first: the step with which it continues.
    """

    key: Key
    logged: Mapping[str, tuple[Logged, ...]]
    reached: int | None
    view: LoopView | None
    follows: Key | None
    first: int


@dataclass
class _Sum:
    total: float = 0.0
    count: int = 0

    def add(self, total: float, count: int) -> None:
        self.total += total
        self.count += count

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass
class _Run:
    """One loop and its event file.

    Attributes:
        writer: writes the event file.
        waits: step -> reported values that are not written yet.
        reported_at: step -> when its first report came.
        reached: the first step that some rank has not reported yet.
        written: the last step in the file; later reports of it or of earlier steps are dropped.
        size: number of steps that are written as one: the most that any rank has combined into one value.
        ends_at: when to close the file, once all ranks have left the loop.
    """

    writer: Any
    waits: dict[int, dict[str, _Sum]] = field(default_factory=dict)
    reported_at: dict[int, float] = field(default_factory=dict)
    reached: int = 0
    written: int = -1
    size: int = 1
    ends_at: float = math.inf


class TensorBoardJournal:
    """Writes each loop of a mesh into its own folder: ``loop_0``, ``loop_1`` ...

    Args:
        folder: parent of these folders; created if it does not exist.
        mesh: name of the mesh.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed.
        OSError: the folder can't be written to.
    """

    def __init__(self, folder: str | os.PathLike[str], mesh: str) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "TensorBoard's package writes the files, where the notebook runs: "
                f"pip install 'monarch_kernel[tensorboard]' ({error})"
            ) from None
        try:
            self.folder = Path(folder).expanduser().absolute()
        except RuntimeError as error:  # ~ of an unknown user
            raise FileNotFoundError(f"{folder}: {error}") from None
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write into {self.folder}")
        self._open = EventFileWriter
        self._mesh = mesh
        self._news: SimpleQueue[_News | None] = SimpleQueue()
        self._looked_at: dict[Key, float] = {}
        self._runs: dict[Key, _Run] = {}
        self._folders: dict[Key, Path] = {}
        self._written: dict[Key, int] = {}  # the last step of ended loops, for ranks that join later
        self._replaced: set[Key] = set()  # loops that another one continues
        self._thread = threading.Thread(target=self._work, name="monarch-tensorboard", daemon=True)
        self._thread.start()

    def record(self, loop: LoopRecord, logged: Mapping[str, tuple[Logged, ...]]) -> None:
        """Queue what a rank logged, or that a rank left the loop; does not wait."""
        now, is_over = time.monotonic(), loop.pace.is_over
        view = None
        if is_over or now >= self._looked_at.get(loop.key, -math.inf) + _VIEW_EVERY_S:
            self._looked_at[loop.key] = now
            view = loop.view(now, points=False)
        if is_over:
            self._looked_at.pop(loop.key, None)
        reached = None if is_over else loop.pace.reached
        self._news.put(_News(loop.key, logged, reached, view, loop.follows, loop.first))

    def close(self) -> None:
        """Write all queued reports, and stop; later reports are dropped."""
        self._news.put(None)
        self._thread.join(_CLOSE_S)

    # -- on the writer thread

    def _work(self) -> None:
        try:
            self._write()
        except Exception as error:  # from the file system: training goes on without the files
            _log.debug("TensorBoard", exc_info=True)
            said = f"{self._mesh}: loops are no longer written to TensorBoard in {self.folder}: {error}; start it again"
            print(said, file=sys.stderr, flush=True)
            for run in self._runs.values():
                with contextlib.suppress(Exception):  # it may fail to write its buffer
                    run.writer.close()
            while self._news.get() is not None:
                pass

    def _write(self) -> None:
        ticked_at = time.monotonic()
        while True:
            try:
                news = self._news.get(timeout=_TICK_S if self._runs else None)
            except Empty:
                pass
            else:
                if news is None:
                    for key in list(self._runs):
                        self._end(key)
                    return
                self._take(news)
            now = time.monotonic()
            if now >= ticked_at + _TICK_S:
                ticked_at = now
                self._tick(now)

    def _tick(self, now: float) -> None:
        for key, run in list(self._runs.items()):
            if run.ends_at <= now:
                self._end(key)
            else:
                before = now - _MORE_COME_S
                whole = run.reached // run.size * run.size
                reported = {step: at for step, at in run.reported_at.items() if step < whole}
                late = min((step // run.size for step, at in reported.items() if at > before), default=math.inf)
                self._settle(run, [step for step in reported if step // run.size < late])
                run.writer.flush()

    def _take(self, news: _News) -> None:
        if news.key in self._replaced:
            return
        run = self._runs.get(news.key)
        if run is None:
            run = self._runs[news.key] = self._begin(news)
        now = time.monotonic()
        run.ends_at = now + _MORE_COME_S if news.reached is None else math.inf
        run.reached = max(run.waits, default=-1) + 1 if news.reached is None else news.reached
        for name, values in news.logged.items():
            if name not in PER_SECOND:
                for value in (value for value in values if value.step > run.written):
                    run.size = max(run.size, value.size)
                    run.reported_at.setdefault(value.step, now)
                    total = run.waits.setdefault(value.step, {}).setdefault(name, _Sum())
                    total.add(value.total, value.count)
        if news.view is not None:
            self._add(run, news.view.step, dict(_state(news.view)))

    def _end(self, key: Key) -> None:
        run = self._runs.pop(key)
        self._settle(run, list(run.waits))
        self._written[key] = run.written
        run.writer.close()

    def _begin(self, news: _News) -> _Run:
        """Open the file of a loop. A loop that continues after a rank died is the same run; any other loop is a new run."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        folder, writer, goes_on = self._folders.get(news.key), None, False
        if folder is None and news.follows is not None and news.follows in self._folders:
            folder, goes_on = self._folders[news.follows], True
            self._replaced.add(news.follows)
            if (before := self._runs.pop(news.follows, None)) is not None:
                self._settle(before, list(before.waits))
                writer = before.writer  # TensorBoard reads files of the same second in any order
        if folder is None:
            folder = self._new_folder()
        self._folders[news.key] = folder
        run = _Run(writer or self._open(str(folder)), written=self._written.get(news.key, -1))
        if goes_on:  # TensorBoard then hides what was written for this step and later ones
            start = SessionLog(status=SessionLog.START)
            run.writer.add_event(Event(wall_time=time.time(), step=news.first, session_log=start))
        return run

    def _new_folder(self) -> Path:
        taken = [int(found[1]) for name in os.listdir(self.folder) if (found := re.fullmatch(r"loop_(\d+)", name))]
        number = max(taken, default=-1) + 1
        while True:
            folder = self.folder / f"loop_{number}"
            try:
                folder.mkdir()
            except FileExistsError:
                number += 1
            else:
                return folder

    def _settle(self, run: _Run, steps: list[int]) -> None:
        """Write the reported values of steps."""
        for place, some in groupby(sorted(steps), lambda step: step // run.size):
            sums: dict[str, _Sum] = {}
            for step in some:
                del run.reported_at[step]
                for name, total in run.waits.pop(step).items():
                    sums.setdefault(name, _Sum()).add(total.total, total.count)
            run.written = (place + 1) * run.size - 1
            self._add(run, step, {name: total.mean for name, total in sums.items()})

    def _add(self, run: _Run, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if values:
            entries = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            run.writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=entries)))


def _state(view: LoopView) -> Iterator[tuple[str, float]]:
    """The speed of a loop, and the values of its knobs."""
    if view.step_s:
        yield "speed/step_s", view.step_s
    for name, rate in view.per_s:
        yield f"speed/{name}_per_s", rate
    if view.mfu is not None:
        yield "speed/mfu", view.mfu
    for knob in view.knobs:
        if isinstance(knob.value, (int, float)):
            yield f"knobs/{knob.name}", float(knob.value)
