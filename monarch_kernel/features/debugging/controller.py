"""The controller's part of debugging: the requests that wait at a prompt of pdb, and the lines that they get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from monarch_kernel.base.events import MeshView, StopEvent
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Continued, DebugInput, SkipBreakpoint, Stopped
from monarch_kernel.runtime.controller.effects import Effect, Halt, Tell
from monarch_kernel.runtime.controller.extensions import Core, Extension, register
from monarch_kernel.runtime.controller.process_records import RankRecord
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["DebugPrompts", "DebuggingExtension"]


@register
class DebuggingExtension(Extension):
    """Tracks where ranks wait for a line of input for their debugger.

    Attributes:
        attendant: Asks the user what the ranks of a future should do, and returns when none of them waits. None if there is
            no user to ask; then breakpoints are skipped.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.in_order = {Stopped: self._stopped, Continued: self._continued}
        self.attendant: Callable[[Future[Any]], None] | None = None
        self._stops: dict[int, dict[int, StopEvent]] = {}

    def stops(self, procs: Sequence[int] | None = None, request: int = 0) -> list[StopEvent]:
        """List the stops, by rank.

        Args:
            procs: The processes; None for all.
            request: The request; 0 for any.
        """
        at = list(self._stops.values()) if procs is None else [self._stops.get(proc, {}) for proc in procs]
        found = [stop for stops in at for stop in list(stops.values()) if request in (0, stop.request)]
        return sorted(found, key=lambda stop: (stop.rank, stop.turn))

    def answer(self, stop: StopEvent, line: str) -> list[Effect]:
        """Send a debugger the line that it waits for; do nothing if it no longer waits."""
        return self._end(stop, DebugInput(stop.request, stop.turn, line))

    def skip(self, stop: StopEvent, why: str) -> list[Effect]:
        """Let code continue where it has stopped, because there is no user to ask."""
        return self._end(stop, SkipBreakpoint(stop.request, stop.turn, why))

    def adopting(self) -> None:
        self.attendant = lambda future: None  # code that has stopped waits for the program that attaches

    def awaited(self, future: Future[Any]) -> None:
        if self.attendant is not None:
            self.attendant(future)

    def request_ended(self, procs: Sequence[int], id: int) -> list[Effect]:
        for proc in procs if self._stops else ():
            stops = self._stops.get(proc)
            # The caller may have cancelled it, and the rank has not ended it yet.
            if stops and id not in self.core.ranks[proc].open_requests:
                stops.pop(id, None)
        return []

    def shown(self, view: MeshView, procs: Sequence[int], now: float) -> MeshView:
        if not any(map(self._stops.get, procs)):
            return view
        rows = list(view.ranks)
        for i, proc in enumerate(procs):
            stop = next(iter(list(self._stops.get(proc, {}).values())), None)
            if stop is not None and rows[i].activity:
                rows[i] = rows[i]._replace(activity=f"debugger at {stop.where}", running_s=now - stop.since)
        return replace(view, ranks=tuple(rows))

    def _stopped(self, record: RankRecord, message: Stopped, now: float) -> list[Effect]:
        spec, id = record.spec, message.id
        description = record.open_requests.get(id)
        stops = self._stops.setdefault(spec.proc, {})
        known = stops.get(id)
        if description is None or (known is not None and message.turn <= known.turn):
            self.core.dropped_messages += (
                1  # the request has ended, or the rank repeats what a new controller may not know
            )
            return []
        where, text, prompt, begins = message.where, message.text, message.prompt, message.begins
        stop = StopEvent(
            spec.proc, spec.rank, spec.mesh, id, description, message.turn, where, text, prompt, begins, now
        )
        stops[id] = stop
        if self.attendant is None:
            return self.skip(stop, "code can stop only in a notebook, where a user can answer the prompt")
        return [Halt(id), Tell(stop)]

    def _continued(self, record: RankRecord, message: Continued, now: float) -> list[Effect]:
        if message.id in record.open_requests:
            self._stops.get(record.spec.proc, {}).pop(message.id, None)
        else:
            self.core.dropped_messages += 1
        return []

    def _end(self, stop: StopEvent, message: DebugInput | SkipBreakpoint) -> list[Effect]:
        stops = self._stops.get(stop.proc, {})
        if stops.get(stop.request) is not stop:
            return []
        stops[stop.request] = replace(stop, is_waiting=False)
        return self.core.to_rank(stop.proc, pack(message))


class DebugPrompts:
    """The prompts of the debuggers in a session; for any thread.

    Args:
        runtime: The controller.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._extension = runtime.extension(DebuggingExtension)

    def attend(self, attendant: Callable[[Future[Any]], None] | None) -> None:
        """Call this function when a thread waits for a future whose ranks have stopped, to ask the user; None for no user."""
        self._extension.attendant = attendant

    def stops(self, procs: Sequence[int] | None = None, request: int = 0) -> list[StopEvent]:
        """List the stops, by rank: on these processes or on all, for one request or for any."""
        return self._extension.stops(procs, request)

    def answer(self, stop: StopEvent, line: str) -> None:
        """Send a debugger the line that it waits for. When this returns, `stops` no longer says that it waits."""
        done = Waiter()

        def item(now: float) -> list[Effect]:
            effects = self._extension.answer(stop, line)
            done.set()
            return effects

        self._runtime.enter(item)
        self._runtime.wait(done, None)

    def skip(self, stop: StopEvent, why: str) -> None:
        """Let code continue where it has stopped, because there is no user to ask."""
        self._runtime.enter(lambda now: self._extension.skip(stop, why))
