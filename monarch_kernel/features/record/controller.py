"""The controller's part of run records: tells ranks to note what a record needs, and passes their notes to the recorder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from monarch_kernel.base.events import MeshView
from monarch_kernel.features.live.controller import LoopControl
from monarch_kernel.features.record.messages import EventNoted, Noted, NoteState, SetRecording, StateNoted
from monarch_kernel.features.record.notes import on_event
from monarch_kernel.features.record.recorder import Recorder
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.extensions import Core, Extension, register
from monarch_kernel.runtime.controller.process_records import RankRecord
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC

__all__ = ["RecordControl", "RecordExtension"]


@register
class RecordExtension(Extension):
    """Passes what ranks note to the recorder.

    Attributes:
        recorder: the record that runs; None if there is none.
        told: process -> the incarnation that knows that a record runs.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.recorder: Recorder | None = None
        self.told: dict[int, int] = {}
        self.handlers = {Noted: self._noted, StateNoted: self._state_noted, EventNoted: self._event_noted}

    def tell(self) -> list[Effect]:
        """Tell the ranks that do not know it yet that a record runs."""
        recorder = self.recorder
        if recorder is None:
            return []
        effects: list[Effect] = []
        message = pack(SetRecording(True, recorder.every))
        for proc, record in list(self.core.ranks.items()):
            incarnation = record.spec.incarnation
            if proc == CONTROLLER_PROC or record.death is not None or self.told.get(proc) == incarnation:
                continue
            if proc in self.told:
                recorder.event("heal", "another process took its place", mesh=record.spec.mesh, rank=record.spec.rank)
            self.told[proc] = incarnation
            effects += self.core.to_rank(proc, message)
        return effects

    def tick(self, now: float) -> list[Effect]:
        return self.tell()

    def process_lost(self, proc: int) -> list[Effect]:
        record = self.core.ranks.get(proc)
        if self.recorder is not None and record is not None and not record.stopping:
            how = "" if record.death is None else record.death.message
            self.recorder.event("death", how, mesh=record.spec.mesh, rank=record.spec.rank)
        return []

    def shown(self, view: MeshView, procs: Sequence[int], now: float) -> MeshView:
        return view if self.recorder is None else replace(view, record=self.recorder.line())

    def closed(self) -> None:
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            _forget(recorder)
            recorder.close()

    def _noted(self, record: RankRecord, message: Noted, now: float) -> list[Effect]:
        if self.recorder is not None:
            self.recorder.noted(record.spec.rank, message)
        return []

    def _state_noted(self, record: RankRecord, message: StateNoted, now: float) -> list[Effect]:
        if self.recorder is not None:
            self.recorder.state_noted(record.spec.rank, message)
        return []

    def _event_noted(self, record: RankRecord, message: EventNoted, now: float) -> list[Effect]:
        if self.recorder is not None:
            self.recorder.event_noted(record.spec.mesh, record.spec.rank, message)
        return []


def _forget(recorder: Recorder) -> None:
    """Pass no more events of this process to a recorder."""
    if recorder.event in on_event:
        on_event.remove(recorder.event)


class RecordControl:
    """Starts and ends the record of a session. Thread-safe.

    Args:
        runtime: the controller.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._extension = runtime.extension(RecordExtension)

    @property
    def recorder(self) -> Recorder | None:
        """The record that runs."""
        return self._extension.recorder

    def start(self, recorder: Recorder) -> None:
        """Record what runs from now on."""

        def start() -> None:
            self._extension.recorder = recorder
            self._extension.told.clear()
            self._runtime.perform(self._extension.tell())

        LoopControl(self._runtime).listen(recorder)
        on_event.append(recorder.event)
        self._runtime.run_on_io_thread(start)

    def stop(self) -> Recorder | None:
        """End the record that runs; returns it, closed."""

        def stop() -> Recorder | None:
            recorder, self._extension.recorder = self._extension.recorder, None
            return recorder

        recorder = self._runtime.run_on_io_thread(stop)
        if recorder is not None:
            LoopControl(self._runtime).listen(recorder, is_on=False)
            _forget(recorder)
            self._runtime.tell_all(pack(SetRecording(False)))
            recorder.close()
        return recorder

    def before_cell(self, procs: Sequence[int], cell: int) -> None:
        """Note the state of the random generators of ranks before a cell that is sent to them next."""

        def note() -> None:
            self._runtime.perform(self._extension.tell())
            message = pack(NoteState(cell))
            for proc in procs:
                self._runtime.perform(self._extension.core.to_rank(proc, message))

        self._runtime.run_on_io_thread(note)
