"""Loops of a rank that are steered from elsewhere while they run: what `monarch_kernel.live` does here.

Theory of operation. A loop begins the steps that it was granted (`features.live.pace`), which for the most part is a
comparison. Half way to the end of what it was granted it reports, so that more is there before it is needed: how far it is,
how long a step takes, what was logged. Only when nothing more is granted, since the loop is paused, it waits, as whoever waits
for an answer does: an interrupt strikes there, too. What is logged is kept as it is, tensors also, until it is reported: to
read a tensor of a GPU is to wait for all that the GPU has yet to do.

When there is no controller any more, for the mesh outlives it, a loop that comes to the end of what it was granted goes free,
unless it was paused. A new controller is told how far it is, and steers it from there.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from monarch_kernel.features.live.device_flops import device_peak
from monarch_kernel.features.live.pace import Grant, Lease
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.net.wire.codec import Frame, Packed, pack, replace
from monarch_kernel.net.wire.messages import Knob, Logged, LoopBegun, LoopGrant, LoopLeft, LoopReport, Rewind
from monarch_kernel.runtime.rpc.handles import HOME
from monarch_kernel.runtime.worker.executor import working
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["Loops", "RankLoop"]

_MAX_VALUES = 64
"""Of a metric in one report; of more, 2, 4, 8 ... steps are told as one, the same ones by all ranks."""

_REPORT_S = 1.0
"""At the latest after this, and the step that runs: of a rank that is far slower than others one wants to hear, too."""

_MAX_KEPT = 10_000
"""Values of a metric that nobody was told of, while there is no controller; of more the last ones are kept."""

_LOOK_EVERY_S = 0.5
"""How often one that waits sees whether there is a controller."""

_SETTLE_S = 5.0
"""So long after a controller has come the sign that there is none may still be there."""

_COUNTED = 64
"""Requests of which it is known how many loops they have begun; far more than run at once."""


def working_request() -> int:
    """The request that this thread works on; 0 if it is on none."""
    executor = working.get()
    return 0 if executor is None else executor.current


def release_working() -> None:
    """What this thread raises from now on comes of the death of another rank."""
    executor = working.get()
    if executor is not None:
        executor.released = executor.current


class Port(NamedTuple):
    """What loops need of their process.

    Attributes:
        submit: sends the controller a message; for any thread.
        wait: waits, in code that this thread runs.
        is_detached: whether there is no controller now, and may be another one later.
        request: gives the request that this thread works on; 0 if it is on none.
        is_cell: whether that is a cell of a notebook.
        peak: gives how many floating-point operations a second the device can do; 0 if nobody knows.
        release: notes that what this thread raises from now on comes of a death.
    """

    submit: Callable[[Packed], object]
    wait: Callable[[Waiter, float | None], bool]
    is_detached: Callable[[], bool] = lambda: False
    request: Callable[[], int] = working_request
    is_cell: Callable[[], bool] = lambda: False
    peak: Callable[[], float] = lambda: 0.0
    release: Callable[[], None] = release_working


class Series(Protocol):
    """Snapshots that are taken between the steps of a loop."""

    first: int
    """The step with which the loop begins."""

    rewound: Rewind | None
    """What was put back before it, if something was."""

    @property
    def apart(self) -> int:
        """How many steps ranks may be apart, for there to be one of which each has a snapshot."""
        ...

    def begin(self) -> None:
        """The loop begins."""
        ...

    def before(self, step: int) -> None:
        """A step is about to begin."""
        ...


class SnapshotHome(Protocol):
    """Where snapshots are."""

    def begin(self, things: dict[str, Any], every: int, most: int) -> int | None:
        """Say what belongs to the next loop; gives the step with which that begins if it was put back."""
        ...

    def take_series(self) -> Series | None:
        """The snapshots of a loop that begins now."""
        ...


class RankLoop:
    """One loop, from its beginning until it is left.

    Args:
        request: in which it runs.
        number: counts the loops of that.
        steps: how many it has at most; None: as many as one wants.
        port: the way to the controller.
        series: its snapshots, if it has some.
        recovers: whether it is to go on by itself if a rank dies.

    Attributes:
        step: that is done now; -1 before the first.
        recovers: whether it is to go on by itself if a rank dies.
    """

    def __init__(
        self,
        request: int,
        number: int,
        steps: int | None,
        port: Port,
        series: Series | None = None,
        *,
        recovers: bool = False,
    ) -> None:
        self.step = -1
        self.steps = steps
        self._key = request, number
        self._port = port
        self._lease = Lease()
        self._waiter: Waiter | None = None
        self._knobs: dict[str, Knob] = {}
        self._new_knobs: list[Knob] = []
        self._met_at = -math.inf  # when a new controller has come
        self._tells_all = False  # a new controller has to be told of all knobs
        self._logged: dict[str, list[tuple[int, Any]]] = {}
        self._series = series
        self.recovers = recovers
        self._lost = ""
        self._reported = 0 if series is None else series.first, time.perf_counter()
        self._due = self._reported[1] + _REPORT_S

    def run(self) -> Iterator[int]:
        """The steps, each when it may begin."""
        lease, steps, step, series = self._lease, self.steps, 0, self._series
        begun = LoopBegun(*self._key, -1 if steps is None else steps, recovers=self.recovers)
        if series is not None:
            series.begin()
            begun = replace(begun, apart=series.apart)
            if series.rewound is not None:
                step = series.first
                rewound = series.rewound
                begun = replace(
                    begun, step=step, horizon=step + 1, follows=rewound.key[0], is_recovery=rewound.is_recovery
                )
        self._port.submit(pack(begun))
        try:
            while steps is None or step < steps:
                if step >= lease.horizon:
                    self._wait(step)
                if self._lost:
                    self._port.release()
                    raise RuntimeError(f"live.loop: {self._lost}")
                lease.begin(step)
                if lease.is_stopped:
                    break
                if lease.should_report(step) or time.perf_counter() > self._due:
                    self._report(step)
                self.step = step
                if series is not None:
                    series.before(step)
                yield step
                step += 1
        finally:
            self._report(step)
            self._port.submit(pack(LoopLeft(*self._key, step)))

    def lose(self, who: str) -> None:
        """Somebody has died who was in it: one that is to go back ends; on the thread that drives the socket."""
        if self.recovers:
            self._lost = f"{who} has died"
            waiter = self._waiter
            if waiter is not None:
                waiter.set()

    def granted(self, grant: LoopGrant) -> None:
        """More steps may begin, or something changes; on the thread that drives the socket."""
        self._lease.granted(Grant(grant.horizon, grant.ahead, grant.changes, grant.is_paused))
        waiter = self._waiter
        if waiter is not None:
            waiter.set()

    def come_back(self) -> None:
        """A new controller is there; on the thread that drives the socket."""
        lease = self._lease
        self._met_at = time.monotonic()
        step, horizon = lease.come_back()
        steps = -1 if self.steps is None else self.steps
        self._port.submit(pack(LoopBegun(*self._key, steps, step, horizon, lease.is_paused)))
        self._tells_all = True
        waiter = self._waiter
        if waiter is not None:
            waiter.set()

    def knob(self, knob: Knob) -> Any:
        """What a knob is in this step; it is told of when it is new, or is another than before."""
        if self._knobs.get(knob.name) != knob:
            self._knobs[knob.name] = knob
            self._new_knobs.append(knob)
        return self._lease.values.get(knob.name, knob.value)

    def log(self, values: dict[str, Any]) -> None:
        """Note what is to be reported."""
        for name, value in values.items():
            if type(value) is not float:
                value = _kept(name, value)
            logged = self._logged.setdefault(name, [])
            logged.append((self.step, value))
            if len(logged) > _MAX_KEPT:
                del logged[: _MAX_KEPT // 2]

    def _wait(self, step: int) -> None:
        """Wait until a step may begin.

        Raises:
            RuntimeError: by now this is in another cell or call.
        """
        if self._key[0] != self._port.request():
            raise RuntimeError(
                "this loop was begun in another cell or call, which is over; begin another: live.loop(...)"
            )
        waiter = self._waiter = Waiter()
        try:
            while not self._lease.may_begin(step) and not self._lost:
                if self._lease.should_report(step, waits=True) or self._tells_all:
                    self._report(step)
                if self._port.wait(waiter, _LOOK_EVERY_S):
                    waiter.ready = False
                elif not self._lease.is_paused and self._is_left():
                    self._lease.go_free()
                    self._due = math.inf  # nobody is there to be told
        finally:
            self._waiter = None

    def _is_left(self) -> bool:
        """Whether there is no controller."""
        return time.monotonic() > self._met_at + _SETTLE_S and self._port.is_detached()

    def _report(self, step: int) -> None:
        (before, then), now = self._reported, time.perf_counter()
        self._reported = step, now
        self._due = now + _REPORT_S
        step_s = (now - then) / (step - before) if step > before else 0.0
        logged, self._logged = self._logged, {}
        knobs, self._new_knobs = self._new_knobs, []
        if self._tells_all:
            self._tells_all = False
            values = self._lease.turned()
            knobs = [
                Knob(name, values.get(name, knob.value), knob.low, knob.high) for name, knob in self._knobs.items()
            ]
        told = {name: tuple(_summed(_numbers(values))) for name, values in logged.items()}
        peak = self._port.peak() if "flops" in told else 0.0
        self._port.submit(pack(LoopReport(*self._key, step, step_s, told, tuple(knobs), peak)))


class Loops:
    """All loops of a process.

    Args:
        port: the way to the controller.

    Attributes:
        snapshots: that loops have taken, where that is possible.
        peak: floating-point operations a second of the device, if the program has said it.
    """

    def __init__(self, port: Port) -> None:
        self.snapshots: SnapshotHome | None = None
        self.peak = 0.0
        self._port = port._replace(peak=lambda: self.peak or port.peak())
        self._lock = threading.Lock()
        self._by_key: dict[tuple[int, int], RankLoop] = {}
        self._counts: dict[int, int] = {}  # how many loops a request has begun, of the last ones
        self._deaths: dict[int, str] = {}  # who has died who worked on a request, of the last ones
        self._here = threading.local()

    def begin(self, steps: int | None, *, recovers: bool = False) -> Iterator[int]:
        """A loop of the code that this thread runs.

        Raises:
            RuntimeError: it is to recover, and is in no cell, or has no snapshots.
        """
        series = None if self.snapshots is None else self.snapshots.take_series()
        if recovers and not self._port.is_cell():
            raise RuntimeError("live.loop(on_failure='recover') is for cells of a notebook: they can be run again")
        if recovers and series is None:
            raise RuntimeError("live.loop(on_failure='recover') needs live.snapshot(model=model, ...) before it")
        return self._run(steps, series, recovers)

    def _run(self, steps: int | None, series: Series | None, recovers: bool) -> Iterator[int]:
        request = self._port.request()
        with self._lock:
            number = self._counts[request] = self._counts.pop(request, 0) + 1  # the last one is the last in order
            while len(self._counts) > _COUNTED:
                del self._counts[min(self._counts.keys() - {0})]
            loop = self._by_key[request, number] = RankLoop(
                request, number, steps, self._port, series, recovers=recovers
            )
            died = self._deaths.get(request)
        if died is not None:
            loop.lose(died)
        stack: list[RankLoop] = self._here.__dict__.setdefault("stack", [])
        stack.append(loop)
        try:
            yield from loop.run()
        finally:
            stack.remove(loop)
            with self._lock:
                self._by_key.pop((request, number), None)

    @property
    def current(self) -> RankLoop | None:
        """The innermost loop of the code that this thread runs."""
        stack: Sequence[RankLoop] = self._here.__dict__.get("stack", ())
        return stack[-1] if stack else None

    def controller_is_new(self) -> None:
        """Another one is there, which knows of no loop yet; on the thread that drives the socket."""
        for loop in list(self._by_key.values()):
            loop.come_back()

    def ends_with_a_death(self, request: int) -> bool:
        """Whether a loop of a request ends when somebody dies who works on that, to begin anew."""
        return any(loop.recovers for loop in self._of(request))

    def lose(self, request: int, who: str) -> None:
        """Somebody has died who worked on a request: its loops that are to go back end, and those that it is yet to begin.

        On the thread that drives the socket.
        """
        with self._lock:
            self._deaths[request] = who
            while len(self._deaths) > _COUNTED:
                del self._deaths[min(self._deaths)]
        for loop in self._of(request):
            loop.lose(who)

    def _of(self, request: int) -> Iterator[RankLoop]:
        return (loop for (of, _), loop in list(self._by_key.items()) if of == request)

    def granted(self, grant: LoopGrant, _: Sequence[Frame] = ()) -> None:
        """Take what the controller says; on the thread that drives the socket."""
        loop = self._by_key.get((grant.request, grant.number))
        if loop is not None:
            loop.granted(grant)


def _kept(name: str, value: Any) -> Any:
    """A value that can be logged: a number, or a tensor that is one.

    Raises:
        TypeError: it is something else.
        ValueError: it is too great.
    """
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"live.log({name}=...): a whole number that is more than a float can be") from None
    if callable(getattr(value, "full_tensor", None)):  # a DTensor; all ranks log it, or their steps are different
        value = value.full_tensor()
    detach: Callable[[], Any] | None = getattr(value, "detach", None)
    if detach is not None and (value.is_meta or value.is_complex()):
        kind = "on the meta device, without a value" if value.is_meta else "of complex numbers"
        raise TypeError(f"live.log({name}=...) takes a number or a tensor with one element, not a tensor {kind}")
    if detach is not None and value.numel() == 1:
        return detach()
    if detach is None and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return float(value.item())
    what = f"a tensor of shape {list(value.shape)}" if hasattr(value, "shape") else f"a {type(value).__name__}"
    raise TypeError(f"live.log({name}=...) takes a number or a tensor with one element, not {what}")


def _numbers(values: list[tuple[int, Any]]) -> list[tuple[int, float]]:
    """The same with tensors read, all at once where that is possible."""
    at = [i for i, (_, value) in enumerate(values) if type(value) is not float]
    if not at:
        return values
    import torch

    tensors = [values[i][1].reshape(()).to(torch.float64) for i in at]
    by_device: dict[Any, list[int]] = {}
    for i, tensor in zip(at, tensors):
        by_device.setdefault(tensor.device, []).append(i)
    read = list(values)
    by_place = dict(zip(at, tensors))
    for places in by_device.values():
        for i, number in zip(places, torch.stack([by_place[i] for i in places]).tolist()):
            read[i] = read[i][0], number
    return read


def _summed(values: list[tuple[int, float]]) -> Iterator[Logged]:
    """At most `_MAX_VALUES`, in order."""
    size = 1
    while len(values) > _MAX_VALUES and values[-1][0] // size - values[0][0] // size >= _MAX_VALUES:
        size *= 2
    for _, some in groupby(values, lambda each: each[0] // size):
        told = list(some)
        finite = [value for _, value in told if math.isfinite(value)]
        yield Logged(told[-1][0], math.fsum(finite), len(finite), told[-1][1], size)


@register
def install(rank: Rank) -> None:
    """Let the code of a rank have steered loops."""
    port = Port(
        rank.driver.submit, rank.peers.wait, rank.is_detached, is_cell=lambda: rank.is_in_cell, peak=device_peak
    )
    loops = HOME.loops = Loops(port)
    rank.at_new_controller.append(lambda owed: loops.controller_is_new())
    rank.extend({LoopGrant: loops.granted})
