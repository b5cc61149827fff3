"""Streams of transfers with known contents, while tests drop memory and kill the owners."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

from monarch_kernel.actor import Future, ProcMesh, SupervisionError
from monarch_kernel.rdma import Buffer
from tests.failures.harm import Injuries
from tests.failures.parties import Outcome, Party
from tests.failures.things import Content, Sketch, some_near, some_sketch
from tests.failures.traffic import CALL_S, Judge, Outcomes, Stream, end_streams

__all__ = ["Doom", "Exchange", "Place"]

STREAMS = 5
WINDOW = 3
ENTRIES = 8  # live entries of each stream
GHOSTS = 6  # handles of each stream on memory that is gone
PER_PLACE = 2  # number of actors
KILL_SHARE = 0.06  # share of the transfers that a kill follows; spared places are not killed


@dataclass
class Place:
    """A process with actors that exchange memory.

    Attributes:
        number: index of the place.
        mesh: the mesh of the process.
        rank: the rank of the process in the mesh.
        parties: handles of its actors.
        is_spared: whether the campaign never harms the process.
        kills: how often the campaign killed it.
        deaths: how often the controller reported its death.
    """

    number: int
    mesh: ProcMesh
    rank: int
    parties: Sequence[Any]
    is_spared: bool
    kills: int = 0
    deaths: int = 0


class Doom(NamedTuple):
    """The place to kill, and how long after the start of a transfer."""

    place: Place
    delay_s: float


@dataclass(eq=False)
class Entry:
    """Exported memory and its expected content.

    Attributes:
        name: name of the memory at its owner.
        sketch: kind and layout of the tensor, array or bytes.
        owner: the process that has the memory.
        party: index of the actor there that exported it.
        life: number of kills of the owner before the export.
        buffer: the handle; None until it arrives.
        content: by rows along the first axis: (first row, row after the last, version).
        claims: rows that a transfer reads or writes at this moment: (first, after the last, whether it writes).
        is_unsure: whether a write has failed, so that the content is unknown.
        is_dropped: whether a drop was requested.
        was_dropped: whether the drop is done.
    """

    name: str
    sketch: Sketch
    owner: Place
    party: int
    life: int
    content: list[tuple[int, int, int]]
    buffer: Buffer | None = None
    claims: list[tuple[int, int, bool]] = field(default_factory=list)
    is_unsure: bool = False
    is_dropped: bool = False
    was_dropped: bool = False

    @property
    def rows(self) -> int:
        return self.sketch.shape[0] if self.sketch.shape else 1

    @property
    def is_doomed(self) -> bool:
        """Whether the owner was killed after the export."""
        return self.owner.kills > self.life

    @property
    def is_gone(self) -> bool:
        """Whether a transfer that starts now must fail."""
        return self.was_dropped or self.owner.deaths > self.life

    def is_free(self, start: int, stop: int, is_write: bool) -> bool:
        """Whether a transfer of these rows does not conflict with the rows that are claimed."""
        return not any(
            (is_write or theirs) and max(start, first) < min(stop, last) for first, last, theirs in self.claims
        )

    def holds(self, start: int, stop: int) -> Content:
        """The expected content of some rows."""
        row_nbytes = self.sketch.nbytes // max(1, self.rows)
        cuts = [(max(start, first), min(stop, last), version) for first, last, version in self.content]
        return [(version, first * row_nbytes, last * row_nbytes) for first, last, version in cuts if first < last]

    def takes(self, start: int, stop: int, version: int) -> None:
        """Note that a write has replaced the content of some rows."""
        around = [(first, min(last, start), each) for first, last, each in self.content if first < start]
        around += [(max(first, stop), last, each) for first, last, each in self.content if last > stop]
        self.content = sorted([*around, (start, stop, version)])


class Part(NamedTuple):
    """One step of a transfer: the rows of one entry."""

    entry: Entry
    start: int
    stop: int
    is_write: bool
    version: int
    was_gone: bool


class Trader:
    """Makes the requests of one stream.

    The seed determines the requests, but not their timing: a second run with a seed differs only in that.

    Args:
        number: index of the stream.
        places: the processes that exchange memory.
        exchange: the exchange that the stream belongs to.
        dice: source of the random choices.
    """

    def __init__(self, number: int, places: Sequence[Place], exchange: Exchange, dice: random.Random) -> None:
        self._number = number
        self._places = places
        self._exchange = exchange
        self._dice = dice
        self._versions = itertools.count(number << 32)
        self._entries: list[Entry] = []
        self._ghosts: deque[Entry] = deque(maxlen=GHOSTS)

    def begin(self, number: int) -> tuple[Future[Any], Judge]:
        """Make the next request."""
        self._collect_gone()
        usable = [entry for entry in self._entries if not entry.is_dropped and not entry.is_unsure]
        stale = [entry for entry in self._entries if not entry.is_dropped and entry.is_unsure]
        if stale:
            return self._drop(number, stale[0])
        if len(usable) < ENTRIES // 2 or (len(usable) < ENTRIES and self._dice.random() < 0.2):
            return self._lend(number)
        what = self._dice.random()
        entry = self._dice.choice(usable)
        if what < 0.07:
            return self._drop(number, entry)
        if what < 0.13 and entry.is_free(0, entry.rows, False):
            return self._look(number, entry)
        return self._carry(number, usable)

    def finish(self) -> None:
        """Drop and forget all exported memory."""
        for entry in self._entries:
            if not entry.is_gone:
                self._exchange.conclude(*self._drop(-1, entry))
        self._entries.clear()
        self._ghosts.clear()

    # -- requests

    def _lend(self, number: int) -> tuple[Future[Any], Judge]:
        place, started_at = self._some_place(), time.monotonic()
        sketch, version = some_sketch(self._dice), next(self._versions)
        rows = sketch.shape[0] if sketch.shape else 1
        party = self._dice.randrange(PER_PLACE)
        entry = Entry(f"{self._number}.{version}", sketch, place, party, place.kills, [(0, rows, version)])

        def judge(buffer: Any, error: SupervisionError | None) -> None:
            if error is None:
                entry.buffer = buffer
                self._entries.append(entry)
            else:
                self._excuse(number, place, started_at, error)

        content = [(version, 0, sketch.nbytes)]
        return place.parties[party].lend.call_one(entry.name, tuple(sketch), content), judge

    def _look(self, number: int, entry: Entry) -> tuple[Future[Any], Judge]:
        started_at, claim = time.monotonic(), (0, entry.rows, False)
        entry.claims.append(claim)

        def judge(wrong: Any, error: SupervisionError | None) -> None:
            entry.claims.remove(claim)
            if error is not None:
                self._excuse(number, entry.owner, started_at, error)
            elif wrong and not entry.is_dropped:
                self._blame(number, f"{entry.name} at its owner: {wrong}")

        party = entry.owner.parties[entry.party]
        return party.look.call_one(entry.name, tuple(entry.sketch), entry.holds(0, entry.rows)), judge

    def _drop(self, number: int, entry: Entry) -> tuple[Future[Any], Judge]:
        place, started_at = self._some_place(), time.monotonic()
        entry.is_dropped = True

        def judge(was_lent: Any, error: SupervisionError | None) -> None:
            if error is not None:
                entry.is_dropped = False  # perhaps it was dropped; the next request drops it again
                entry.is_unsure = True
                self._excuse(number, place, started_at, error)
                return
            entry.was_dropped = True
            if not was_lent and not entry.is_doomed and not entry.is_unsure:
                self._blame(number, f"{entry.name} was not lent when it was dropped")

        return place.parties[0].drop.call_one(entry.buffer), judge

    def _carry(self, number: int, usable: Sequence[Entry]) -> tuple[Future[Any], Judge]:
        dice, started_at, place = self._dice, time.monotonic(), self._some_place()
        how = dice.choice(("in turn", "together", "batch"))
        parts: list[Part] = []
        steps: list[tuple[Any, ...]] = []
        for _ in range(dice.choice((1, 1, 1, 2, 4))):
            entry, is_write = dice.choice(usable), dice.random() < 0.4
            if self._ghosts and dice.random() < 0.04:
                entry = dice.choice(self._ghosts)
            start, stop = sorted(dice.randrange(entry.rows + 1) for _ in range(2))
            if not entry.sketch.shape or dice.random() < 0.5:
                start, stop = 0, entry.rows
            shape = (stop - start, *entry.sketch.shape[1:]) if entry.sketch.shape else ()
            near = some_near(dice, shape, entry.sketch.dtype)
            if not entry.is_free(start, stop, is_write):
                continue
            entry.claims.append((start, stop, is_write))
            part = Part(entry, start, stop, is_write, next(self._versions), entry.is_gone)
            row_nbytes = entry.sketch.nbytes // max(1, entry.rows)
            written = [(part.version, start * row_nbytes, stop * row_nbytes)]
            assert entry.buffer is not None
            buffer = entry.buffer if shape == entry.sketch.shape else entry.buffer[start:stop]
            steps.append((buffer, tuple(near), written if is_write else entry.holds(start, stop), is_write))
            parts.append(part)
        if not parts:
            return self._lend(number)

        def judge(found: Any, error: SupervisionError | None) -> None:
            for part in parts:
                part.entry.claims.remove((part.start, part.stop, part.is_write))
            if error is not None:
                self._excuse(number, place, started_at, error)
                found = [("", 0, "", "") for _ in parts]
                self._exchange.counts["ended with their carrier"] += len(parts)
            for part, each in zip(parts, found):
                outcome = Outcome(*each)
                self._judge(number, part, outcome, place, parts if how == "batch" else [part])

        party = place.parties[dice.randrange(PER_PLACE)]
        future = party.carry.call_one(steps, how)
        self._exchange.began(dice, [place, *(part.entry.owner for part in parts)])
        return future, judge

    def _judge(self, number: int, part: Part, outcome: Outcome, place: Place, together: Sequence[Part]) -> None:
        """Check the result of one part; ``together`` are the parts that fail as one, which is all parts of a batch."""
        entry, counts = part.entry, self._exchange.counts
        if outcome.data_path:
            counts[f"by {outcome.data_path}"] += 1
            self._exchange.nbytes += outcome.nbytes
            if part.was_gone:
                self._blame(number, f"{entry.name} was gone, but {outcome.nbytes} bytes of it were transferred")
            if outcome.wrong and not entry.is_unsure:
                self._blame(number, f"{entry.name}, by {outcome.data_path}: {outcome.wrong}")
            if (outcome.data_path == "process") != (entry.owner is place):
                self._blame(number, f"{entry.name} went by {outcome.data_path}")
            if part.is_write:
                entry.takes(part.start, part.stop, part.version)
            return
        if part.is_write:
            entry.is_unsure = True
        if not outcome.gone:  # the process that carried it has ended
            return
        was_dropped = "dropped" in outcome.gone
        why = "it was dropped" if was_dropped else "its owner has ended"
        counts[f"refused: {why}" if len(together) == 1 else f"refused with another part of its batch: {why}"] += 1
        if not any(each.entry.is_dropped if was_dropped else each.entry.is_doomed for each in together):
            self._blame(number, f"{entry.name}: the error is {outcome.gone}, which is not so")

    # -- helpers

    def _some_place(self) -> Place:
        """Choose a place that is not known to be harmed at this moment; otherwise the program."""
        place = self._dice.choice(self._places)
        return self._places[-1] if self._exchange.injuries.excuse(place.number, time.monotonic()) else place

    def _collect_gone(self) -> None:
        gone = [entry for entry in self._entries if entry.is_gone]
        self._ghosts += gone
        self._entries = [entry for entry in self._entries if entry not in gone]

    def _excuse(self, number: int, place: Place, started_at: float, error: SupervisionError) -> None:
        if not self._exchange.injuries.excuse(place.number, started_at):
            self._blame(number, f"place {place.number} failed, but no fault hit it: {error}")

    def _blame(self, number: int, what: str) -> None:
        self._exchange.outcomes.blame(f"stream {self._number}", number, what)


class Exchange:
    """All streams of transfers between the processes of some meshes.

    Args:
        meshes: meshes with the axis ``gpus``; all ranks but the first may be killed. The last one is the program's own.
        injuries: harmed places.
        seed: seed of the requests.

    Attributes:
        places: all processes.
        dooms: places to kill, in order.
        outcomes: the failed checks.
        counts: number of transfers by outcome.
        nbytes: transferred bytes.
    """

    def __init__(self, meshes: Sequence[ProcMesh], injuries: Injuries, seed: int) -> None:
        self.injuries = injuries
        self.outcomes = Outcomes()
        self.counts: Counter[str] = Counter()
        self.nbytes = 0
        self.dooms: SimpleQueue[Doom] = SimpleQueue()
        self.places: list[Place] = []
        for mesh in meshes:
            parties = [mesh.spawn(f"parties{number}", Party) for number in range(PER_PLACE)]
            for rank in mesh.ranks:
                own = [each.slice(gpus=rank) if mesh.extent else each for each in parties]
                self.places.append(Place(len(self.places), mesh, rank, own, rank == 0))
        dice = [random.Random(f"{seed} transfers {number}") for number in range(STREAMS)]
        self._traders = [Trader(number, self.places, self, each) for number, each in enumerate(dice)]
        self._streams = [
            Stream(f"transfers-{number}", trader.begin, self.outcomes, WINDOW)
            for number, trader in enumerate(self._traders)
        ]

    @property
    def transfers(self) -> int:
        """Number of finished transfers."""
        with self.outcomes.lock:
            return sum(self.counts.values())

    def begin(self) -> None:
        for stream in self._streams:
            stream.start()

    def end(self) -> None:
        """Stop the streams, wait for open requests, and drop all memory; no process may be harmed at this moment."""
        end_streams(self._streams, self.outcomes)
        for trader in self._traders:
            trader.finish()

    def conclude(self, future: Future[Any], judge: Judge) -> None:
        """Wait for a request that must succeed, and check its value."""
        value = future.get(CALL_S)
        with self.outcomes.lock:
            judge(value, None)

    def began(self, dice: random.Random, places: Sequence[Place]) -> None:
        """Decide whether the start of a transfer between these places dooms one of them."""
        is_doomed, victim = (
            dice.random() < KILL_SHARE,
            dice.choice([each for each in places if not each.is_spared] or places),
        )
        delay_s = dice.choice((0.0, dice.uniform(0, 0.003), dice.uniform(0, 0.05)))
        if is_doomed and not victim.is_spared:
            self.dooms.put(Doom(victim, delay_s))
