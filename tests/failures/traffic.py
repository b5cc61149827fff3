"""Streams of calls, of calls between actors, and of cells, each with an answer that can be checked."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from monarch_kernel.actor import Actor, Future, ProcMesh, SupervisionError, current_rank, endpoint

__all__ = ["CALL_S", "Traffic", "Worker", "answer", "end_streams"]

CALL_S = 60.0
"""Deadline for a future, in seconds."""

WINDOW = 4
LINES = 3
OUTPUT_S = 10.0
PAUSE_S = 0.005

Excuse = Callable[[int, float], bool]
"""Whether a rank may have failed to answer a request that was made at this time."""


def answer(rank: int, number: int) -> int:
    """The expected answer of a rank."""
    return rank * 1_000_003 + number


class Worker(Actor):
    """Answers calls and records its answers; has a child process, as a user's program may."""

    def __init__(self) -> None:
        self.rank = current_rank().rank
        self.taken: dict[str, list[int]] = {}
        self.child = subprocess.Popen(["sleep", "3600"])

    @endpoint
    def take(self, stream: str, number: int) -> tuple[int, int]:
        self.taken.setdefault(stream, []).append(number)
        return os.getpid(), self.rank * 1_000_003 + number

    @endpoint
    def all(self) -> tuple[int, dict[str, list[int]]]:
        return os.getpid(), self.taken


class Caller(Actor):
    """Calls workers on other hosts."""

    @endpoint
    def ask(self, worker: Any, stream: str, number: int) -> tuple[int, int] | None:
        try:
            return worker.take.call_one(stream, number).get(CALL_S)  # type: ignore[no-any-return]
        except SupervisionError:
            return None


class Outcomes:
    """Records the outcome of all requests.

    Attributes:
        values: number of futures that ended with a value.
        errors: number of futures that ended with an error.
        wrong: descriptions of failed checks.
        taken: numbers that each process has answered in each stream, in the order of the requests.
    """

    def __init__(self) -> None:
        self.values = 0
        self.errors = 0
        self.wrong: list[str] = []
        self.taken: defaultdict[int, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.lock = threading.Lock()

    def took(self, stream: str, rank: int, number: int, answered: tuple[int, int]) -> None:
        """Record the answer of a rank, and check it."""
        pid, value = answered
        self.taken[pid][stream].append(number)
        if value != answer(rank, number):
            self.blame(stream, number, f"rank {rank} answered {value} instead of {answer(rank, number)}")

    def blame(self, stream: str, number: int, what: str) -> None:
        self.wrong.append(f"{stream} {number}: {what}")


Judge = Callable[[Any, "SupervisionError | None"], None]


class Stream(threading.Thread):
    """Makes requests until `end`, with a few futures pending at a time.

    Args:
        name: name of the stream.
        begin: makes the request of a number; gives its future, and the function that checks the outcome.
        outcomes: records the outcomes.
        window: how many futures are pending at the same time.
    """

    def __init__(
        self, name: str, begin: Callable[[int], tuple[Future[Any], Judge]], outcomes: Outcomes, window: int
    ) -> None:
        super().__init__(name=f"traffic-{name}", daemon=True)
        self._begin = begin
        self._outcomes = outcomes
        self._window = window
        self._is_over = threading.Event()
        self._pending: deque[tuple[int, Future[Any], Judge]] = deque()

    def run(self) -> None:
        number = 0
        try:
            while not self._is_over.wait(PAUSE_S):
                self._pending.append((number, *self._begin(number)))
                number += 1
                while len(self._pending) >= self._window:
                    self._end_oldest()
            while self._pending:
                self._end_oldest()
        except BaseException as error:
            self._outcomes.blame(self.name, number, f"the stream has ended: {error!r}")

    def end(self) -> None:
        """Stop making requests."""
        self._is_over.set()

    def _end_oldest(self) -> None:
        number, future, judge = self._pending.popleft()
        error: SupervisionError | None = None
        value = None
        try:
            value = future.get(CALL_S)
        except SupervisionError as failure:
            error = failure
        except Exception as failure:  # including a timeout
            self._outcomes.blame(self.name, number, repr(failure))
            return
        with self._outcomes.lock:
            if error is None:
                self._outcomes.values += 1
            else:
                self._outcomes.errors += 1
            judge(value, error)


class Output(NamedTuple):
    """Output of a cell on one rank.

    It may arrive after the cell has ended, since the rank's agent may have been stopped at that moment.
    """

    number: int
    rank: int
    started_at: float
    written: Mapping[int, str]

    @property
    def is_whole(self) -> bool:
        return self.written[self.rank] == f"cell {self.number} on {self.rank}\n" * LINES


class Traffic:
    """All streams to one mesh.

    Args:
        mesh: mesh with the axes ``hosts`` and ``gpus``.
        excuse: whether a rank may have failed.
        seed: seed of the requests.
    """

    def __init__(self, mesh: ProcMesh, excuse: Excuse, seed: int) -> None:
        self.mesh = mesh
        self.outcomes = Outcomes()
        self.workers: Any = mesh.spawn("workers", Worker)
        self.callers: Any = mesh.spawn("callers", Caller)
        self._excuse = excuse
        self._outputs: list[Output] = []
        self._hosts, self._gpus = mesh.extent["hosts"], mesh.extent["gpus"]
        self._dice = {name: random.Random(f"{seed} {name}") for name in ("calls", "relays", "cells")}
        self._streams = [
            Stream("calls", self._call, self.outcomes, WINDOW),
            Stream("broadcasts", self._broadcast, self.outcomes, WINDOW),
            Stream("relays", self._relay, self.outcomes, WINDOW),
            Stream("cells", self._cell, self.outcomes, 1),  # as in a notebook
        ]
        self.workers.all.call().get(CALL_S)

    def begin(self) -> None:
        for stream in self._streams:
            stream.start()

    def end(self) -> None:
        """Stop making requests, and wait for the open ones."""
        end_streams(self._streams, self.outcomes)

    def check_outputs(self) -> None:
        """Check that finished cells have all their output; call this before marking injuries as healed."""
        with self.outcomes.lock:
            outputs, self._outputs = self._outputs, []
        deadline = time.monotonic() + OUTPUT_S
        for output in outputs:
            while not output.is_whole and not self._excuse(output.rank, output.started_at):
                if time.monotonic() > deadline:
                    text = output.written[output.rank]
                    self.outcomes.blame("cells", output.number, f"rank {output.rank} wrote {text!r}")
                    break
                time.sleep(0.01)

    def check(self) -> None:
        """Check that each living rank has done each request once and in order, and that no answer was lost."""
        self.check_outputs()
        for rank, (pid, did) in enumerate(self.workers.all.call().get(CALL_S).values()):
            for stream in sorted(did.keys() | self.outcomes.taken[pid].keys()):
                done, answered = did.get(stream, []), self.outcomes.taken[pid][stream]
                if stream == "relays":  # the caller may have died before it reported; two may overtake each other
                    if over := Counter(answered) - Counter(done):
                        self.outcomes.wrong.append(f"rank {rank} did not record some relays that it answered: {over}")
                elif done != answered:
                    self.outcomes.wrong.append(
                        f"rank {rank} (pid {pid}) has done {len(done)} {stream}, and {len(answered)} were answered: "
                        f"{_difference(done, answered)}"
                    )

    # -- requests

    def _place(self, rank: int) -> dict[str, int]:
        host, gpu = divmod(rank, self._gpus)
        return {"hosts": host, "gpus": gpu}

    def _random_rank(self, stream: str) -> int:
        return self._dice[stream].randrange(self._hosts * self._gpus)

    def _blame_unexcused(
        self, stream: str, number: int, started_at: float, error: SupervisionError, ranks: set[int]
    ) -> None:
        """Check that a fault excuses each failed rank, and that all failed ranks got the request."""
        said = set(error.ranks)
        innocent = sorted(rank for rank in said if not self._excuse(rank, started_at))
        if innocent or not said <= ranks:
            self.outcomes.blame(stream, number, f"{innocent or sorted(said)} failed, but no fault hit them: {error}")

    def _call(self, number: int) -> tuple[Future[Any], Judge]:
        rank, started_at = self._random_rank("calls"), time.monotonic()

        def judge(value: Any, error: SupervisionError | None) -> None:
            if error is None:
                self.outcomes.took("calls", rank, number, value)
            elif not self._excuse(rank, started_at):
                self.outcomes.blame("calls", number, f"rank {rank} failed, but no fault hit it: {error}")

        return self.workers.slice(**self._place(rank)).take.call_one("calls", number), judge

    def _broadcast(self, number: int) -> tuple[Future[Any], Judge]:
        started_at = time.monotonic()

        def judge(value: Any, error: SupervisionError | None) -> None:
            if error is None:
                found = dict(enumerate(value.values()))
            else:
                found = {point.rank: each for point, each in error.results.items()}
                self._blame_unexcused("broadcasts", number, started_at, error, set(self.mesh.ranks))
            for rank, each in found.items():
                self.outcomes.took("broadcasts", rank, number, each)

        return self.workers.take.call("broadcasts", number), judge

    def _relay(self, number: int) -> tuple[Future[Any], Judge]:
        asking, started_at = self._random_rank("relays"), time.monotonic()
        asked = (asking + self._gpus * (1 + number % (self._hosts - 1))) % (self._hosts * self._gpus)  # on another host

        def judge(value: Any, error: SupervisionError | None) -> None:
            if error is not None:
                if not self._excuse(asking, started_at):
                    self.outcomes.blame("relays", number, f"rank {asking} failed, but no fault hit it: {error}")
                return
            if value is not None:
                self.outcomes.took("relays", asked, number, value)
            elif not self._excuse(asked, started_at):
                self.outcomes.blame("relays", number, f"rank {asked} was lost to rank {asking}, but no fault hit it")

        worker = self.workers.slice(**self._place(asked))
        return self.callers.slice(**self._place(asking)).ask.call_one(worker, "relays", number), judge

    def _cell(self, number: int) -> tuple[Future[Any], Judge]:
        host, started_at = self._dice["cells"].randrange(self._hosts), time.monotonic()
        ranks = [host * self._gpus + gpu for gpu in range(self._gpus)]
        written: defaultdict[int, str] = defaultdict(str)

        def listen(event: Any) -> None:
            written[event.rank] += event.text

        def judge(value: Any, error: SupervisionError | None) -> None:
            if error is None:
                found = dict(zip(ranks, value.values()))
            else:
                found = {point.rank: each for point, each in error.results.items()}
                self._blame_unexcused("cells", number, started_at, error, set(ranks))
            for rank, each in found.items():
                if each.value != answer(rank, number):
                    self.outcomes.blame("cells", number, f"rank {rank} gave {each.value}")
                self._outputs.append(Output(number, rank, started_at, written))

        code = f"for _ in range({LINES}): print('cell', {number}, 'on', rank)\nrank * 1_000_003 + {number}"
        return self.mesh.slice(hosts=host).run_cell(code, cell=number + 1, want_value=True, listen=listen), judge


def end_streams(streams: Sequence[Stream], outcomes: Outcomes) -> None:
    """Stop making requests, and wait for the open ones."""
    for stream in streams:
        stream.end()
    for stream in streams:
        stream.join(CALL_S + 30.0)
        if stream.is_alive():
            outcomes.wrong.append(f"{stream.name} did not end")


def _difference(done: list[int], answered: list[int]) -> str:
    only_done, only_answered = Counter(done) - Counter(answered), Counter(answered) - Counter(done)
    if only_done or only_answered:
        return f"{list(only_done)[:5]} only done, {list(only_answered)[:5]} only answered"
    return "in another order"
