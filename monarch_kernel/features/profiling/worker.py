"""The rank's part of profiles: records what the rank does, on a separate thread, whatever its code is."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import logging
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from queue import Empty, SimpleQueue
from types import CodeType, ModuleType
from typing import Any

from monarch_kernel.base.after_import import after_import
from monarch_kernel.features.profiling.messages import GetTime, ReadProfile, StartProfile, StopProfile
from monarch_kernel.features.profiling.recording import LOOP, OPTIMIZER, Place, Recording, Sample, Started
from monarch_kernel.net.memory.counters import Transferred
from monarch_kernel.net.memory.leases import identity
from monarch_kernel.net.wire.codec import Frame, dump, pack
from monarch_kernel.net.wire.messages import Failed, Payload, Result
from monarch_kernel.runtime.diagnostics.failures import describe, is_machinery, is_user_file
from monarch_kernel.runtime.diagnostics.thread_frames import lines_of
from monarch_kernel.runtime.host.link_speeds import link_speeds
from monarch_kernel.runtime.host.processes import rss_nbytes
from monarch_kernel.runtime.rpc.handles import PROCESS
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["Profiler"]

_log = logging.getLogger(__name__)

_LOOK_S = 0.004
_IDLE_S = 0.5
"""A recording ends when the rank has run nothing for this long."""

_SETTLE_S = 0.05
"""The recording goes on for this long, and for one step, so that its end does not make this rank late where others record."""

_WANTED_S = 60.0
_OWN_PROFILER = "the code uses torch.profiler itself, beside which no other one can run"
_MAX_SETTLE_S = 1.0
_MAX_SAMPLES = 200_000
_MAX_TRANSFERS = 20_000
_FIRST_LINE = b"ERROR: External init callback must run in same thread as registerClient"
_SKIPPED = 1
"""Whole steps at the start that are left out, because other ranks may start in them."""


@register
class Profiler:
    """Records profiles.

    Args:
        rank: the rank.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._recorder: _Recorder | None = None
        rank.extend({StartProfile: self._start, ReadProfile: self._read})
        rank.extend({StopProfile: lambda message, frames: self._drop(), GetTime: self._tell_time})
        rank.at_new_controller.append(lambda open_requests: self._drop())

    def _tell_time(self, message: GetTime, _: Sequence[Frame]) -> None:
        payload, frames = dump(time.time(), "the time")
        self._rank.send_answer_now(message.id, pack(Result(message.id, payload), frames))

    def _drop(self) -> None:
        """End the recording, for which nothing waits any more: another one may follow at once."""
        if self._recorder is not None:
            self._recorder.is_dropped = True
            self._recorder.ends.set()
            self._recorder.wanted.put(None)

    def _start(self, message: StartProfile, _: Sequence[Frame]) -> None:
        before = self._recorder
        if before is not None and not before.is_dropped:
            self._refuse(message.id, "this rank records another profile: wait for its end")
            return
        recorder = self._recorder = _Recorder(self._rank)

        def record() -> None:
            if before is not None:
                before.is_over.wait()  # torch has one profiler
            try:
                self._record(recorder, message)
            finally:
                recorder.is_over.set()

        threading.Thread(target=record, name="monarch-profile", daemon=True).start()

    def _read(self, message: ReadProfile, _: Sequence[Frame]) -> None:
        if self._recorder is None:
            self._refuse(message.id, "the profile of this rank has been stopped")
        else:
            self._recorder.wanted.put(message)

    def _refuse(self, id: int, why: str) -> None:
        self._rank.send_answer_now(id, pack(Failed(id, describe(RuntimeError(why)))))

    def _record(self, recorder: _Recorder, message: StartProfile) -> None:
        """Run a profile; on its own thread."""
        tracer, id = _Tracer(message.memory), message.id
        try:
            tracer.start()
            self._rank.send_answer(id, pack(Result(id, Payload())))
            wanted = recorder.wanted.get(timeout=_WANTED_S)
            if wanted is None:
                raise _Dropped
            id = wanted.id
            payload, frames = dump(recorder.run(tracer, wanted), "the profile")
            packed = pack(Result(id, payload), frames)
        except (Empty, _Dropped):  # the controller has gone, or wants no profile any more
            tracer.drop()
            self._is_over(recorder)
            return
        except Exception as error:  # the code that is recorded goes on
            _log.exception("a profile could not be recorded")
            packed = pack(Failed(id, describe(error)))
        self._is_over(recorder)
        self._rank.send_answer(id, packed)

    def _is_over(self, recorder: _Recorder) -> None:
        """Another recording may start; one that has replaced this one goes on."""
        if self._recorder is recorder:
            self._recorder = None


class _Dropped(Exception):
    """Nothing waits for the recording any more."""


class _UsersProfilers:
    """The profilers of torch that the user's code starts. Ours may not run beside one: that would end the process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: set[int] = set()
        self._stop_ours: Callable[[], object] | None = None
        self._own = threading.local()
        self._is_enabled: Callable[[], bool] = lambda: True

    def install(self, module: ModuleType) -> None:
        """Learn of each profiler that is prepared or ends, and stop ours before one is prepared."""
        kind: Any = getattr(module, "profile", None)
        if not hasattr(kind, "_prepare_trace") or not hasattr(module, "_is_profiler_enabled"):
            return  # another version of torch: ours never runs
        prepare, leave = kind._prepare_trace, kind.__exit__

        @wraps(prepare)
        def _prepare_trace(profile: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._own, "starts", False):
                return prepare(profile, *args, **kwargs)
            with self._lock:
                self._open.add(id(profile))
                self.end(self._stop_ours)
            return prepare(profile, *args, **kwargs)

        @wraps(leave)
        def __exit__(profile: Any, *args: Any) -> Any:
            try:
                return leave(profile, *args)
            finally:
                self._open.discard(id(profile))

        kind._prepare_trace, kind.__exit__ = _prepare_trace, __exit__
        self._is_enabled = lambda: bool(getattr(module, "_is_profiler_enabled", True))

    @contextlib.contextmanager
    def alone(self, stop: Callable[[], object]) -> Iterator[bool]:
        """Context in which our profiler starts, if no other one runs; gives whether that is so.

        Args:
            stop: stops ours; it is called when the user's code starts one.
        """
        with self._lock:
            is_alone = not self._open and not self._is_enabled()
            self._own.starts = True
            try:
                yield is_alone
                self._stop_ours = stop if is_alone else None
            finally:
                self._own.starts = False

    def end(self, stop: Callable[[], object] | None) -> None:
        """Stop our profiler, if it runs."""
        with self._lock:
            if self._stop_ours is not None and stop is not None:
                self._stop_ours = None
                stop()


USERS = _UsersProfilers()


@register
def watch_profilers(rank: Rank) -> None:
    """Learn of the profilers of the user's code."""
    after_import("torch.autograd.profiler", USERS.install)


class _Recorder:
    """One recording.

    Args:
        rank: the rank.

    Attributes:
        wanted: gets what is wanted, or None if nothing is.
        ends: set when the recording is to end now.
        is_dropped: whether nothing waits for the recording any more, so that it is not written.
        is_over: set when the profiler has stopped.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._steps = 0
        self._seconds = 0.0
        self.wanted: SimpleQueue[ReadProfile | None] = SimpleQueue()
        self.ends = threading.Event()
        self.is_dropped = False
        self.is_over = threading.Event()
        self._samples: list[Sample] = []
        self._loop_marks: list[float] = []
        self._optimizer_marks: list[float] = []
        self._optimizer = 0
        self._transfers: list[Transferred] = []
        self._holds = False
        self._held: list[tuple[float, int]] = []
        self._step: tuple[int, int] | None = None
        self._is_user: dict[str, bool] = {}
        self._places: dict[tuple[CodeType, int], Place] = {}

    def run(self, tracer: _Tracer, wanted: ReadProfile) -> Recording:
        """Record until there are enough steps.

        Args:
            tracer: the profiler, which runs; it is stopped.
            wanted: what to record.

        Raises:
            _Dropped: nothing waits for the recording any more; the profiler runs.
        """
        self._steps, self._seconds = wanted.steps, wanted.seconds
        self._holds = tracer.with_memory
        hook = self._watch_optimizers()
        meters = self._rank.peers.meters
        meters.on_transfer = self._transferred
        began = time.time()
        try:
            self._watch(began)
        finally:
            ended = time.time()
            meters.on_transfer = None
            if hook is not None:
                hook.remove()
            if not self.is_dropped:
                tracer.stop()
        if self.is_dropped:
            raise _Dropped
        unit, marks = self._marks()
        return Recording(
            pid=os.getpid(),
            machine=identity(),
            began=began,
            ended=ended,
            unit=unit,
            marks=tuple(marks),
            samples=tuple(self._samples),
            collectives=tuple(_collectives(began, ended)),
            trace=tracer.trace,
            memory=tracer.memory,
            problem=tracer.problem,
            transfers=tuple(self._transfers),
            links=tuple((each.name, each.bytes_per_s) for each in link_speeds(os.environ)),
            held=tuple(self._held),
        )

    def _transferred(self, transfer: Transferred) -> None:
        if len(self._transfers) < _MAX_TRANSFERS:
            self._transfers.append(transfer)

    def _marks(self) -> tuple[str, list[float]]:
        """The starts of steps, without the first steps if there are enough."""
        for unit, marks in ((LOOP, self._loop_marks), (OPTIMIZER, self._optimizer_marks)):
            if len(marks) > 1:
                return unit, marks[min(_SKIPPED, len(marks) - 2) :]
        return "", []

    def _watch(self, began: float) -> None:
        """Look at the code again and again."""
        last = busy_at = began
        until = began + self._seconds
        while not self.ends.is_set() and last < until:
            self.ends.wait(_LOOK_S)
            now = time.time()
            if self._look(now, now - last):
                busy_at = now
            elif now > busy_at + _IDLE_S:
                return
            self._note_step()
            if self._holds and len(self._held) < _MAX_SAMPLES:
                self._held.append((now, rss_nbytes(os.getpid())))
            last = now
            _, marks = self._marks()
            if until == began + self._seconds and len(marks) > self._steps:
                step_s = (marks[-1] - marks[0]) / (len(marks) - 1)
                until = min(until, now + min(_MAX_SETTLE_S, step_s + _SETTLE_S))

    def _look(self, now: float, lasts_s: float) -> bool:
        """Note where the code of this rank is; returns whether some runs."""
        threads = [each.thread_id for each in self._rank.executors() if each.current or each.is_busy]
        if not threads or len(self._samples) >= _MAX_SAMPLES:
            return bool(threads)
        places = [self._place(thread) for thread in threads]
        place = next((each for each in places if each is not None), None)
        self._samples.append(Sample(now, lasts_s, place))
        return True

    def _place(self, thread: int) -> Place | None:
        """The innermost line of the user's code that a thread runs."""
        for code, line in lines_of(thread, self._is_user_code):
            key = code, line or 0
            if key not in self._places:
                self._places[key] = Place(code.co_filename, key[1], code.co_name)
            return self._places[key]
        return None

    def _is_user_code(self, code: CodeType) -> bool:
        file = code.co_filename
        known = self._is_user.get(file)
        if known is None:
            known = self._is_user[file] = is_user_file(file) and not is_machinery(file)
        return known

    def _note_step(self) -> None:
        """Note when a live loop has started a step: the loop knows it better than this thread, which looks now and then."""
        places = PROCESS.loops.places() if PROCESS.loops is not None else ()
        running = [each for each in places if not each.is_over]
        step = (running[-1].request, running[-1].steps) if running else None
        if step is not None and self._step is not None and step != self._step:
            self._loop_marks.append(running[-1].began)
        self._step = step

    def _watch_optimizers(self) -> Any:
        """Note the end of each step of the optimizer; of the first one, if there are several."""
        if "torch" not in sys.modules:
            return None
        optimizers = importlib.import_module("torch.optim.optimizer")
        register_hook = getattr(optimizers, "register_optimizer_step_post_hook", None)

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._optimizer = self._optimizer or id(optimizer)
            if id(optimizer) == self._optimizer:
                self._optimizer_marks.append(time.time())

        return None if register_hook is None else register_hook(stepped)


class _Tracer:
    """torch.profiler for all threads, and the memory of the GPU.

    Args:
        memory: whether to record allocations.

    Attributes:
        with_memory: whether to record allocations.
        trace: the trace, as JSON compressed by gzip; empty if there is none.
        memory: the snapshot, pickled; empty if there is none.
        problem: why there is no trace; empty if there is one.
    """

    def __init__(self, memory: bool) -> None:
        self.with_memory = memory
        self._profile: Any = None
        self._gpu_memory: Any = None
        self.trace = b""
        self.memory = b""
        self.problem = ""

    def start(self) -> None:
        """Start to record."""
        if "torch" not in sys.modules:
            self.problem = "the ranks have not imported torch"
            return
        import torch

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes lines into the output of the cell
        try:
            from torch._C._profiler import _ExperimentalConfig

            cuda: Any = torch.cuda
            has_gpu = cuda.is_available() and cuda.is_initialized()
            if has_gpu and _has_cuda_graphs():  # as torch.profiler does, because CUPTI's end breaks CUDA graphs
                os.environ["TEARDOWN_CUPTI"], os.environ["DISABLE_CUPTI_LAZY_REINIT"] = "0", "1"
            # Not torch.profiler.profile: it imports torch._inductor. If the user's code imports torch._dynamo meanwhile, as the
            # first step of an optimizer does, one of the two imports fails, because they import each other.
            profile: Any = torch.autograd.profiler.profile(
                use_device="cuda" if has_gpu else None,
                profile_memory=self.with_memory,
                use_kineto=True,
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )
            with USERS.alone(self._stop_early) as is_alone, _without_first_line():
                if not is_alone:
                    self.problem = _OWN_PROFILER
                    return
                profile.__enter__()
                self._profile = profile
            if self.with_memory and has_gpu:
                torch.cuda.memory._record_memory_history(max_entries=100_000)
                self._gpu_memory = torch.cuda.memory
        except (ImportError, TypeError) as error:  # an old torch can't record other threads
            self.problem = f"torch {torch.__version__} can't record all threads: {error}"
        except RuntimeError as error:  # the user's own profiler runs
            self.problem = f"torch.profiler could not start: {error}".partition("\n")[0]

    def _stop_now(self) -> None:
        if self._profile is not None:
            self._profile.__exit__(None, None, None)

    def _stop_early(self) -> None:
        """Stop on the thread of the user's code, which starts its own profiler, and keep nothing."""
        self._stop_now()
        self._profile = None
        self.problem = _OWN_PROFILER

    def drop(self) -> None:
        """Stop, and keep nothing: to write a trace takes seconds."""
        try:
            if self._gpu_memory is not None:
                self._gpu_memory._record_memory_history(enabled=None)
            USERS.end(self._stop_now)
        except RuntimeError:
            _log.warning("torch.profiler could not be stopped", exc_info=True)
        finally:
            self._profile = None

    def stop(self) -> None:
        """Stop, and read what there is."""
        try:
            if self._gpu_memory is not None:
                self.memory = pickle.dumps(self._gpu_memory._snapshot())
                self._gpu_memory._record_memory_history(enabled=None)
            USERS.end(self._stop_now)
            if self._profile is not None:
                with tempfile.TemporaryDirectory() as folder:
                    path = os.path.join(folder, "trace.json")
                    self._profile.export_chrome_trace(path)
                    with open(path, "rb") as file:
                        self.trace = gzip.compress(file.read(), 1)
        except (RuntimeError, OSError) as error:
            self.problem = f"torch.profiler has failed: {error}".partition("\n")[0]
        finally:
            self._profile = None


def _has_cuda_graphs() -> bool:
    """Whether code that torch has compiled uses CUDA graphs."""
    triton = getattr(sys.modules.get("torch._inductor.config"), "triton", None)
    return bool(getattr(triton, "cudagraphs", False))


_has_started = threading.Event()


@contextlib.contextmanager
def _without_first_line() -> Iterator[None]:
    """Drop what libkineto writes to stderr when it first starts on another thread than the one that has imported torch.

    What other threads write meanwhile is kept.
    """
    if _has_started.is_set():
        yield
        return
    _has_started.set()
    memory, stderr = os.memfd_create("stderr", os.MFD_CLOEXEC), os.dup(2)
    try:
        os.dup2(memory, 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
        written = os.pread(memory, os.fstat(memory).st_size, 0)
        kept = b"".join(line for line in written.splitlines(keepends=True) if not line.startswith(_FIRST_LINE))
        if kept:
            os.write(2, kept)
    finally:
        os.close(memory)
        os.close(stderr)


def _collectives(began: float, ended: float) -> list[Started]:
    """Return what the flight recorder of torch has of this time, in order."""
    if "torch.distributed" not in sys.modules:
        return []
    import torch.distributed as dist

    dump = getattr(dist.distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        from torch._C import _distributed_c10d

        dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    world: Any = dist.distributed_c10d._world
    names = dict(world.pg_names)
    members = {
        names[group]: tuple(sorted(ranks)) for group, ranks in dict(world.pg_group_ranks).items() if group in names
    }
    found = []
    for entry in json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", ()):
        at = entry["time_created_ns"] / 1e9
        name, about = entry["process_group"]
        if entry.get("is_p2p") or not began <= at <= ended or name not in members:
            continue
        label = (
            "" if about == "default_pg" else str(name if about in ("", "undefined") else about).removeprefix("mesh_")
        )
        number = int(entry["collective_seq_id"])
        found.append(Started(str(name), label, members[name], number, str(entry["profiling_name"]), at))
    return sorted(found, key=lambda each: each.at)
