"""The controller's part of traffic: collects the counts of processes, and provides their throughput and the traffic table."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from monarch_kernel.base.events import MeshView, ThroughputEvent
from monarch_kernel.base.text import one_line
from monarch_kernel.errors import Failure
from monarch_kernel.features.traffic.meters import MeterBook
from monarch_kernel.features.traffic.table import CollectiveRow, End, Traffic, TrafficRow, largest_first
from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.net.transport.base import CONTROLLER, Peer, incarnation_of, proc_of
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Message, Metered, ReadMeters
from monarch_kernel.runtime.controller.effects import Effect, Tell
from monarch_kernel.runtime.controller.extensions import Core, Extension, register
from monarch_kernel.runtime.controller.process_records import RankRecord
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.host.link_speeds import link_text
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC

__all__ = ["TrafficControl", "TrafficExtension", "traffic_view"]

KEPT = 256
"""Processes that have ended whose traffic is kept; a session may have had very many."""

_MAX_LINKS = 32
_MAX_NAME = 60
_MAX_SHOWN = 4
"""Links in a view."""


@register
class TrafficExtension(Extension):
    """Collects the counts of all processes, and sends throughput to views.

    Attributes:
        book: the counts.
        links: process -> the links of its machine and of its GPU: name, and bytes per second in each direction.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.book = MeterBook()
        self.links: dict[int, tuple[tuple[str, float], ...]] = {}
        self.handlers = {Metered: self._metered}
        self._meters: Meters | None = None
        self._ended: deque[int] = deque()

    def process_lost(self, proc: int) -> list[Effect]:
        self._ended.append(proc)
        while len(self._ended) > KEPT:
            ended = self.core.ranks[self._ended.popleft()]
            if ended.stopping:  # else another process may have its number
                self.links.pop(ended.spec.proc, None)
                self.book.forget(ended.spec.proc)
                if self._meters is not None:
                    self._meters.forget(ended.spec.proc)
        return []

    def may_send(self, proc: int, message: Message) -> bool:
        assert isinstance(message, Metered)
        return all(proc in (row.source, row.target) for row in message.carried)

    def tick(self, now: float) -> list[Effect]:
        self.read(now)
        meshes: dict[str, dict[int, tuple[tuple[float, float], ...]]] = {}
        for proc, history in self.book.due(now).items():
            record = self.core.ranks.get(proc)
            if proc == CONTROLLER_PROC:
                meshes.setdefault("", {})[0] = history
            elif record is not None:
                meshes.setdefault(record.spec.mesh, {})[record.spec.rank] = history
        return [Tell(ThroughputEvent(mesh, ranks)) for mesh, ranks in meshes.items()]

    def shown(self, view: MeshView, procs: Sequence[int], now: float) -> MeshView:
        if links := list(dict.fromkeys(link for proc in procs for link in self.links.get(proc, ())))[:_MAX_SHOWN]:
            view = replace(view, links=", ".join(map(link_text, links)))
        rates = [self._rate(proc, now) for proc in procs]
        if not any(map(any, rates)):
            return view
        ranks = zip(view.ranks, rates)
        return replace(
            view,
            ranks=tuple(
                rank._replace(in_bytes_per_s=rate[0], out_bytes_per_s=rate[1]) if any(rate) else rank
                for rank, rate in ranks
            ),
        )

    def started(self, meters: Meters) -> None:
        self._meters = meters

    def read(self, now: float) -> None:
        """Collect the counts of the controller's own process."""
        changes = None if self._meters is None else self._meters.changes()
        if changes is not None and changes.carried:
            self.book.handle(CONTROLLER, Metered(changes.carried, changes.over_s), now)

    def _metered(self, record: RankRecord, message: Metered, now: float) -> list[Effect]:
        self.book.handle(record.peer, message, now)
        if message.links:
            self.links[record.spec.proc] = tuple(
                (one_line(name[:_MAX_NAME]), each) for name, each in message.links[:_MAX_LINKS]
            )
        return []

    def _rate(self, proc: int, now: float) -> tuple[float, float]:
        record = self.core.ranks.get(proc)
        return (0.0, 0.0) if record is None or record.death is not None else self.book.rate(proc, now)


class TrafficControl:
    """Reads the traffic of a session. Thread-safe.

    Args:
        runtime: the controller.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._traffic = runtime.extension(TrafficExtension)

    def throughput(self, procs: Sequence[int]) -> list[tuple[float, float]]:
        """Bytes per second received and sent by all these processes together, for each of the last seconds, oldest first."""
        now = time.monotonic()
        histories = [self._traffic.book.history(proc, now) for proc in procs]
        return [(sum(took for took, _ in at), sum(sent for _, sent in at)) for at in zip(*histories)]

    def table(self, procs: Collection[int], name: str, timeout_s: float) -> Traffic:
        """The traffic of these processes.

        Asks all ranks, because any process may have counted it. For a rank that does not answer in time, uses its last report.

        Raises:
            MeshDownError: the session was shut down.
        """
        records = self._traffic.core.ranks

        def living() -> list[int]:
            ranks = records.items()
            return [proc for proc, rank in ranks if proc != CONTROLLER_PROC and rank.up and rank.death is None]

        def read() -> Traffic:
            self._traffic.read(time.monotonic())
            found = traffic_view(name, frozenset(procs), self._traffic.book, records, silent)
            links = self._traffic.links
            return replace(found, links={records[proc].spec.rank: links[proc] for proc in procs if proc in links})

        silent: Sequence[int] = ()
        asked = self._runtime.run_on_io_thread(living)
        if asked:
            future: Future[Sequence[Answer]] = self._runtime.ask(
                asked, lambda id: pack(ReadMeters(id)), lambda answers: answers
            )
            if not future.wait(timeout_s):
                future.cancel()
            silent = [proc for proc, answer in zip(asked, future.get()) if isinstance(answer, Failure)]
        return self._runtime.run_on_io_thread(read)


def traffic_view(
    name: str,
    procs: Collection[int],
    book: MeterBook,
    ranks: Mapping[int, RankRecord],
    silent: Collection[int],
) -> Traffic:
    """The traffic of some processes, as far as it was reported.

    Args:
        name: name of the mesh, or of the part of a mesh, that these processes form.
        procs: numbers of the processes.
        book: the reported counts.
        ranks: all records, by number.
        silent: processes that have not answered when asked.
    """

    def end(proc: int, peer: Peer) -> End:
        """A process in what a peer has counted; the peer itself may be an earlier process of its rank."""
        record = ranks.get(proc)
        if proc == CONTROLLER_PROC or record is None:
            return End("" if proc == CONTROLLER_PROC else "unknown", 0, proc)
        mesh, rank, incarnation = record.spec.mesh, record.spec.rank, record.spec.incarnation
        if proc == proc_of(peer) and peer != record.peer:
            return End(mesh, rank, proc, True, incarnation_of(peer))
        return End(mesh, rank, proc, record.death is not None, incarnation)

    def is_known(peer: Peer) -> bool:
        """Whether a process has reported all its counts."""
        record = ranks.get(proc_of(peer))
        if peer == CONTROLLER:
            return True
        return record is not None and record.peer == peer and record.death is None and proc_of(peer) not in silent

    found: dict[tuple[End, End, str], TrafficRow] = {}
    for row, peer in book.carried(procs):
        key = end(row.source, peer), end(row.target, peer), row.path
        other = found.get(key, TrafficRow(*key, 0, 0, 0.0))
        found[key] = other._replace(
            nbytes=other.nbytes + row.nbytes,
            operations=other.operations + row.operations,
            seconds=other.seconds + row.seconds,
            is_last_known=other.is_last_known or not is_known(peer),
        )
    collected, unread = book.collected(procs)
    collectives = [
        CollectiveRow(
            end(proc_of(peer), peer),
            one.group,
            one.operation,
            one.nbytes,
            one.operations,
            one.seconds,
            not is_known(peer),
            one.path,
            one.ranks,
            one.nbytes_in,
            one.nbytes_out,
            one.timed_nbytes,
            one.timed_s,
        )
        for one, peer in collected
        if one.operations  # all have failed
    ]
    return Traffic(name, largest_first(found.values()), largest_first(collectives), unread)
