"""Verbs of meshes that move tensors: what the program does for them. Bytes go from rank to rank.

Theory of operation
===================

All verbs have the same steps. The ranks that have something *lend* it, and say which parts of which tensors they hold: one
request, in the order of cells. Then the ranks that want something are told all of that, and each plans for itself what to read
from whom (`features.resharding.plan`), and reads: one request, in the order of cells of theirs. Where what is there is
overwritten, they are asked before what they have, and nothing is touched unless all of it fits. At the end one message to each
rank ends what it has lent, whatever it is busy with.

The ranks that lend do not stand still meanwhile: that would be a deadlock where two copies cross, or where a rank reads from
itself. If somebody has them do something else at the same time, which writes to what is read, then torch's counters of writes
tell, and that is an error.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from monarch_kernel.actor.per_rank import apply_messages, by_rank
from monarch_kernel.base.mesh import Extent, Point, Region, ValueMesh
from monarch_kernel.base.mesh.extent import list_axes
from monarch_kernel.errors import (
    BufferGoneError,
    Failure,
    MoveError,
    RanksError,
    RemoteError,
    RemoteInterrupt,
    SupervisionError,
    format_ranks,
)
from monarch_kernel.features.resharding.fit import Fit, Side, dim_of, fit, joined
from monarch_kernel.features.resharding.plan import Box, Part, cut_evenly, whole
from monarch_kernel.features.resharding.reading import Held, Tally, kind_of
from monarch_kernel.features.resharding.worker import Leaves, describe, lend, read_state, take, take_box
from monarch_kernel.net.memory.layout import memory_of
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import EndLoans
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.client import Asker
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.gather import check_name, gather, read_value

__all__ = ["Moved", "Ranks", "all_to_all", "copy_state", "gather_parts", "scatter"]

T = TypeVar("T")

_SHOWN = 12
"""How many names or problems an error lists."""

_NEWS_S = 10.0
"""How long is waited for the word of how a rank has ended, which others have seen already."""


@dataclass(frozen=True)
class Moved:
    """What a verb has moved.

    Attributes:
        nbytes: of tensors, all ranks that have read taken together.
        seconds: from the call to the end.
        tensors: how many tensors were read or read in part, on all ranks together.
        roads: road -> bytes that went by it, as `Transfer` names it.
        missing: names that only the destination has, which were left as they are.
        unexpected: names that only the source has.
    """

    nbytes: int
    seconds: float
    tensors: int
    roads: dict[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rate = f", {_size(int(self.nbytes / self.seconds))}/s" if self.seconds and self.nbytes else ""
        roads = sorted(self.roads, key=lambda road: -self.roads[road])
        by = f" by {' and '.join(roads)}" if roads else ""
        parts = [f"{_size(self.nbytes)} of {self.tensors} tensors in {self.seconds:.3f} s{rate}{by}"]
        parts += [f"{len(self.missing)} not there"] * bool(self.missing)
        parts += [f"{len(self.unexpected)} not wanted"] * bool(self.unexpected)
        return f"<Moved {'; '.join(parts)}>"


class Ranks(NamedTuple):
    """The ranks of a mesh, as those that are asked.

    Attributes:
        asker: carries the requests.
        procs: the processes.
        ranks: flat, in the mesh as it was spawned.
        region: of the mesh.
        base: the mesh as it was spawned.
        name: of the mesh.
    """

    asker: Asker
    procs: Sequence[int]
    ranks: Sequence[int]
    region: Region
    base: Extent
    name: str

    def call(self, function: Callable[..., T], note: str, *values: Iterable[Any]) -> Future[ValueMesh[T]]:
        """Call a function of ours on each, with a value of its own of each sequence."""
        given = [by_rank(self.region, each, note) for each in values]
        finish = gather(self.region, f"{note} failed on {self.name}", RemoteError, read_value, self.base)
        return self.asker.request(
            self.procs,
            apply_messages(function, given, self.ranks),
            note,
            lambda answers: finish([_without_ours(answer) for answer in answers]),
        )


def _without_ours(answer: Answer) -> Answer:
    """A failure without the lines of this package that have found it, which say nothing to the user."""
    if isinstance(answer, Failure) and answer.user_frame is None:
        return replace(answer, frames=(), traceback="")
    return answer


class _Lent:
    """What ranks have lent for a while; it has an owner of its own, with which all of it ends.

    Args:
        source: the ranks.
        what: it is lent for, in words.
    """

    def __init__(self, source: Ranks, what: str) -> None:
        self._source = source
        self._what = what
        self._owner = source.asker.new_number()
        self.leaves: Sequence[Leaves] = ()

    def begin(self, names: Mapping[str, str]) -> Side:
        """Have the ranks lend; ``names`` as `describe` takes them."""
        self.leaves = self._source.call(partial(lend, names, self._owner), self._what).get().values()
        return Side(self._source.name, self._source.ranks, self.leaves)

    def abandon(self) -> list[Future[Answer]]:
        """Have all of it end; gives the answer of each rank."""
        asker = self._source.asker
        make = partial(EndLoans, owner=self._owner)
        return [
            asker.ask((proc,), lambda id: pack(make(id)), lambda answers: answers[0]) for proc in self._source.procs
        ]

    def end(self) -> None:
        """Have all of it end.

        Raises:
            MoveError: ranks have written to it meanwhile.
        """
        written: dict[str, list[int]] = {}
        for rank, leaves, future in zip(self._source.ranks, self.leaves, self.abandon()):
            answer = future.get()
            if isinstance(answer, Failure):  # it has ended since
                continue
            leases = {tuple(lease) for lease in read_value(answer)}
            for path, leaf in leaves.items():
                if isinstance(leaf, Held) and leaf.loan is not None and leaf.loan.lease in leases:
                    written.setdefault(path, []).append(rank)
        if written:
            ranks = {rank for each in written.values() for rank in each}
            raise MoveError(
                f"{self._what}: {self._source.name}{format_ranks(ranks)} wrote to {_some(written)} meanwhile, and what has "
                "arrived may be of before and after; let one cell end before the other begins, and move it again"
            )

    def deaths(self) -> dict[Point, Failure]:
        """End all of it, and tell which ranks have died, as soon as that is known."""
        found = {}
        for rank, future in zip(self._source.ranks, self.abandon()):
            answer = future.get() if future.wait(_NEWS_S) else None
            if isinstance(answer, Failure) and answer.kind == "lost":
                found[self._source.base.point(rank)] = answer
        return found


def copy_state(
    here: Ranks, there: Ranks, names: str | Iterable[str] | Mapping[str, str], *, strict: bool, cast: bool
) -> Moved:
    """What `ProcMesh.copy_state` does."""
    begun = time.perf_counter()
    pairs = _pairs(names)
    _check_session(there, here)
    what = f"copying {_some(pairs)} from {there.name} to {here.name}"
    ours = Side(
        here.name,
        here.ranks,
        here.call(partial(describe, {name: name for name in pairs.values()}), what).get().values(),
    )
    with _lending(there, what) as lent:
        theirs = lent.begin(pairs)
        fits = fit(theirs, ours, cast=cast)
        problems = list(fits.problems)
        if strict and fits.missing:
            problems.append(f"not on {there.name}: {_some(fits.missing)} (strict=False leaves them as they are)")
        if strict and fits.unexpected:
            problems.append(f"not on {here.name}: {_some(fits.unexpected)} (strict=False leaves them out)")
        if problems:
            raise MoveError(f"{what}: nothing was changed\n" + "\n".join(f"  {why}" for why in _first(problems)))
        read = partial(read_state, {name: name for name in pairs.values()}, lent.leaves)
        undefined = (
            f"what {here.name} has of {_some(pairs.values())} is undefined now: some of it was written, and some not"
        )
        tallies = _read(here, read, what, undefined, lent, range(len(here.ranks)))
    return _moved(tallies, begun, fits)


def scatter(here: Ranks, name: str, thing: Any, axis: str | None, dim: int) -> Moved:
    """What `ProcMesh.scatter` does."""
    begun = time.perf_counter()
    check_name(name)
    memory = memory_of(thing)
    layout, asker = memory.layout, here.asker
    boxes = _boxes(here, layout.shape, axis, dim, name)
    if isinstance(asker, Runtime):
        asker.host_actors()  # it is asked for memory by ranks that can't reach it
    owner = asker.new_number()
    try:
        loan = asker.lendings.lend(memory, owner)
        part = Part(whole(layout.shape), (0,) * len(layout.shape))
        held: Leaves = {"": Held(layout.dtype, layout.shape, (part,), loan, "", kind_of(thing))}
        what = f"scattering {name!r} to {here.name}"
        tallies = _read(here, partial(take, name, [held]), what, _unchanged(here, name), None, boxes, range(len(boxes)))
    finally:
        asker.lendings.end_all_of(owner)
    return _moved(tallies, begun)


def gather_parts(there: Ranks, name: str, axis: str | None, dim: int) -> Any:
    """What `ProcMesh.gather` does."""
    check_name(name)
    what = f"gathering {name!r} from {there.name}"
    with _lending(there, what) as lent:
        sources = joined(name, lent.begin({name: name}), _places(there, axis)[1], dim)
        try:
            return take_box(there.asker, sources, _whole(sources))[0]
        except BufferGoneError:
            deaths = lent.deaths()
            if not deaths:
                raise
            raise SupervisionError(f"{what} failed", deaths) from None


def all_to_all(
    here: Ranks, there: Ranks, name: str, axis: str | None, dim: int, from_axis: str | None, from_dim: int
) -> Moved:
    """What `ProcMesh.all_to_all` does."""
    begun = time.perf_counter()
    check_name(name)
    _check_session(there, here)
    what = f"moving {name!r} from {there.name} to {here.name}"
    _places(here, axis)  # before anything is asked
    with _lending(there, what) as lent:
        sources = joined(name, lent.begin({name: name}), _places(there, from_axis)[1], from_dim)
        boxes = _boxes(here, [stop for _, stop in _whole(sources)], axis, dim, name)
        tallies = _read(
            here, partial(take, name, sources), what, _unchanged(here, name), lent, boxes, range(len(boxes))
        )
    return _moved(tallies, begun)


def _places(at: Ranks, axis: str | None) -> tuple[int, list[int]]:
    """Into how many parts something is cut along an axis, and which of them each rank has; along none of all ranks."""
    extent = at.region.extent
    if axis is None:
        return len(at.ranks), list(range(len(at.ranks)))
    if axis not in extent:
        raise KeyError(f"unknown axis {axis!r}; {list_axes(extent)}")
    return extent[axis], [extent.point(rank)[axis] for rank in range(len(at.ranks))]


def _boxes(at: Ranks, shape: Sequence[int], axis: str | None, dim: int, name: str) -> list[Box]:
    """The part of each rank, cut evenly."""
    count, places = _places(at, axis)
    dim = dim_of(dim, shape, name)
    cuts = [cut_evenly(shape[dim], count, place) for place in places]
    return [tuple(cut if i == dim else (0, size) for i, size in enumerate(shape)) for cut in cuts]


def _whole(sources: Sequence[Leaves]) -> Box:
    return next(whole(leaf.shape) for leaf in (source[""] for source in sources) if isinstance(leaf, Held))


def _unchanged(at: Ranks, name: str) -> str:
    return f"ranks of {at.name} that have not got their part have what they had under {name!r}"


@contextlib.contextmanager
def _lending(source: Ranks, what: str) -> Iterator[_Lent]:
    """Have what ranks lend end in any case."""
    lent = _Lent(source, what)
    try:
        yield lent
    except BaseException:
        lent.abandon()
        raise
    lent.end()


def _read(
    here: Ranks, function: Callable[..., Tally], what: str, undefined: str, lent: _Lent | None, *values: Iterable[Any]
) -> Sequence[Tally]:
    """Have ranks read; an error says what becomes of what they have read so far."""
    try:
        return here.call(function, what, *values).get().values()
    except RemoteInterrupt as error:
        raise RemoteInterrupt(f"{error}; {undefined}") from None
    except RanksError as error:
        is_gone = any(report.etype == "BufferGoneError" for report in error.reports.values())
        deaths = lent.deaths() if is_gone and lent is not None else {}
        if deaths:
            raise SupervisionError(
                f"{what} failed, since ranks that were read from have ended; {undefined}", deaths
            ) from None
        raise type(error)(f"{error.what}; {undefined}", error.reports, error.results) from None


def _moved(tallies: Iterable[Tally], begun: float, fits: Fit | None = None) -> Moved:
    roads: Counter[str] = Counter()
    tensors = 0
    for tally in tallies:
        roads.update(tally.roads)
        tensors += tally.tensors
    missing, unexpected = (fits.missing, fits.unexpected) if fits else ((), ())
    return Moved(sum(roads.values()), time.perf_counter() - begun, tensors, dict(roads), missing, unexpected)


def _pairs(names: str | Iterable[str] | Mapping[str, str]) -> dict[str, str]:
    """Name on the source -> name on the target."""
    if isinstance(names, str):
        names = (names,)
    pairs = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
    for name in (*pairs, *pairs.values()):
        check_name(name)
    if len(set(pairs.values())) < len(pairs):
        raise ValueError(f"two variables are to be copied into one: {pairs}")
    return pairs


def _check_session(one: Ranks, other: Ranks) -> None:
    if one.asker is not other.asker:
        raise ValueError(
            f"meshes {one.name!r} and {other.name!r} belong to different sessions, whose ranks do not know each other (a mesh "
            "that outlives the notebook has one of its own): pull here and push there, or bring both up in one way"
        )


def _size(nbytes: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"


def _some(names: Iterable[str]) -> str:
    """Some of many names, in quotes."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(repr(name) for name in listed[:_SHOWN]) + more


def _first(problems: Sequence[str]) -> list[str]:
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return [*problems[:_SHOWN], *more]
