"""Movement of tensors between meshes: the controller's side of `copy_state`, `scatter`, `gather_parts` and `all_to_all`.

Theory of operation
===================

All operations have the same steps, and the bytes go from rank to rank:

1. The source ranks *lend* their tensors and list the parts that they hold. This is one request, in order with their cells.
2. The destination ranks receive these lists. Each plans what to read from which rank (`features.resharding.plan`), and reads.
   This is one request, in order with their cells. If it overwrites variables, an earlier request asks the destination ranks
   what they have, and nothing is written unless everything matches.
3. One message to each source rank ends its leases, whatever the rank is busy with.

The source ranks are not blocked meanwhile: that would be a deadlock where two copies cross, or where a rank reads from itself.
If other code on a source rank writes to a tensor during the transfer, torch's version counters show it, and the operation
raises.
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
from monarch_kernel.base.text import plural
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
from monarch_kernel.features.resharding.fit import Fit, Side, agreed, dim_of, fit, joined
from monarch_kernel.features.resharding.plan import Box, Part, cut_evenly, whole
from monarch_kernel.features.resharding.reading import Held, Plain, Tally, TensorReading, kind_of, new_thing
from monarch_kernel.features.resharding.worker import Leaves, describe, lend, read_state, take, take_box
from monarch_kernel.net.memory.layout import memory_of
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import EndExports
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.gather import check_name, check_new_name, gather, read_value

__all__ = ["Moved", "Ranks", "all_to_all", "copy_state", "fetch_state", "gather_parts", "move_parts", "scatter"]

T = TypeVar("T")

_SHOWN = 12
"""How many names or problems an error lists."""

_DEATH_REPORT_S = 10.0
"""How long to wait for the report of a rank's death that other ranks have noticed already, in seconds."""


@dataclass(frozen=True)
class Moved:
    """Statistics of a movement of tensors.

    Attributes:
        nbytes: bytes of tensors that all ranks have read together.
        seconds: time from the call to the end.
        tensors: number of tensors that were read, entirely or in part, on all ranks together.
        data_paths: data path -> bytes that it carried; `Transfer` has the names.
        missing: names that only the destination has; these tensors were left alone.
        unexpected: names that only the source has.
    """

    nbytes: int
    seconds: float
    tensors: int
    data_paths: dict[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rate = f", {_size(int(self.nbytes / self.seconds))}/s" if self.seconds and self.nbytes else ""
        paths = sorted(self.data_paths, key=lambda path: -self.data_paths[path])
        by = f" by {' and '.join(paths)}" if paths else ""
        parts = [f"{_size(self.nbytes)} of {plural(self.tensors, 'tensor')} in {self.seconds:.3f} s{rate}{by}"]
        parts += [f"{len(self.missing)} missing"] * bool(self.missing)
        parts += [f"{len(self.unexpected)} unexpected"] * bool(self.unexpected)
        return f"<Moved {'; '.join(parts)}>"


class Ranks(NamedTuple):
    """The ranks of a mesh as targets of requests.

    Attributes:
        client: sends the requests.
        procs: the processes.
        ranks: the flat ranks in the mesh as it was spawned.
        region: the region of the mesh.
        base: the extent of the mesh as it was spawned.
        name: the name of the mesh.
    """

    client: Client
    procs: Sequence[int]
    ranks: Sequence[int]
    region: Region
    base: Extent
    name: str

    def call(self, function: Callable[..., T], description: str, *values: Iterable[Any]) -> Future[ValueMesh[T]]:
        """Call a function of this package on each rank, with the rank's value of each sequence."""
        given = [by_rank(self.region, each, description) for each in values]
        finish = gather(self.region, f"{description} failed on {self.name}", RemoteError, read_value, self.base)
        return self.client.request(
            self.procs,
            apply_messages(function, given, self.ranks),
            description,
            lambda answers: finish([_without_ours(answer) for answer in answers]),
        )


def _without_ours(answer: Answer) -> Answer:
    """Remove the traceback from a failure that only has frames of this package, which do not help the user."""
    if isinstance(answer, Failure) and answer.user_frame is None:
        return replace(answer, frames=(), traceback="")
    return answer


class _Leases:
    """The memory that ranks lend for one operation. All leases have the same owner number, and end together.

    Args:
        source: the ranks.
        what: the operation, for messages.
    """

    def __init__(self, source: Ranks, what: str) -> None:
        self._source = source
        self._what = what
        self._owner = source.client.new_number()
        self.leaves: Sequence[Leaves] = ()

    def begin(self, names: Mapping[str, str]) -> Side:
        """Make the ranks lend variables; ``names`` is that of `describe`."""
        self.lend(lambda owner: partial(lend, names, owner))
        return Side(self._source.name, self._source.ranks, self.leaves)

    def lend(self, make: Callable[[int], Callable[[], Leaves]]) -> Sequence[Leaves]:
        """Make the ranks call a function that lends memory; it is made for the number of the owner."""
        self.leaves = self._source.call(make(self._owner), self._what).get().values()
        return self.leaves

    def abandon(self) -> list[Future[Answer]]:
        """End the leases, and return the answer of each rank."""
        client = self._source.client
        make = partial(EndExports, owner=self._owner)
        return [
            client.ask((proc,), lambda id: pack(make(id)), lambda answers: answers[0]) for proc in self._source.procs
        ]

    def end(self) -> None:
        """End the leases.

        Raises:
            MoveError: ranks have written to the memory meanwhile.
        """
        written: dict[str, list[int]] = {}
        for rank, leaves, future in zip(self._source.ranks, self.leaves, self.abandon()):
            answer = future.get()
            if isinstance(answer, Failure):  # the rank has ended since
                continue
            leases = {tuple(lease) for lease in read_value(answer)}
            for path, leaf in leaves.items():
                if isinstance(leaf, Held) and leaf.handle is not None and leaf.handle.lease in leases:
                    written.setdefault(path, []).append(rank)
        if written:
            ranks = {rank for each in written.values() for rank in each}
            raise MoveError(
                f"{self._what}: {self._source.name}{format_ranks(ranks)} wrote to {_some(written)} meanwhile, so the copy may "
                "mix old and new values; let one cell end before the other starts, and copy again"
            )

    def deaths(self) -> dict[Point, Failure]:
        """End the leases, and return the ranks that have died; waits for reports of deaths."""
        found = {}
        for rank, future in zip(self._source.ranks, self.abandon()):
            answer = future.get() if future.wait(_DEATH_REPORT_S) else None
            if isinstance(answer, Failure) and answer.kind == "lost":
                found[self._source.base.point(rank)] = answer
        return found


def copy_state(
    here: Ranks, there: Ranks, names: str | Iterable[str] | Mapping[str, str], *, strict: bool, cast: bool
) -> Moved:
    """Implement `ProcMesh.copy_state`."""
    started = time.perf_counter()
    pairs = _pairs(names)
    _check_session(there, here)
    what = f"copying {_some(pairs)} from {there.name} to {here.name}"
    ours = Side(
        here.name,
        here.ranks,
        here.call(partial(describe, {name: name for name in pairs.values()}), what).get().values(),
    )
    with _lending(there, what) as lending:
        theirs = lending.begin(pairs)
        fits = fit(theirs, ours, cast=cast)
        problems = list(fits.problems)
        if strict and fits.missing:
            problems.append(f"not on {there.name}: {_some(fits.missing)} (strict=False leaves them alone)")
        if strict and fits.unexpected:
            problems.append(f"not on {here.name}: {_some(fits.unexpected)} (strict=False leaves them out)")
        if problems:
            raise MoveError(f"{what}: nothing was changed\n" + "\n".join(f"  {why}" for why in _first(problems)))
        read = partial(read_state, {name: name for name in pairs.values()}, lending.leaves)
        undefined = (
            f"{_some(pairs.values())} on {here.name} is undefined now: some of the data was written, some was not"
        )
        tallies = _read(here, read, what, undefined, lending, range(len(here.ranks)))
    return _moved(tallies, started, fits)


def scatter(here: Ranks, name: str, thing: Any, axis: str | None, dim: int) -> Moved:
    """Implement `ProcMesh.scatter`."""
    started = time.perf_counter()
    check_new_name(name)
    memory = memory_of(thing)
    layout, client = memory.layout, here.client
    boxes = _boxes(here, layout.shape, axis, dim, name)
    if isinstance(client, Runtime):
        client.host_actors()  # ranks that have no path to its memory request the data from it
    owner = client.new_number()
    try:
        handle = client.exports.lend(memory, owner)
        part = Part(whole(layout.shape), (0,) * len(layout.shape))
        held: Leaves = {"": Held(layout.dtype, layout.shape, (part,), handle, "", kind_of(thing))}
        what = f"scattering {name!r} to {here.name}"
        tallies = _read(here, partial(take, name, [held]), what, _unchanged(here, name), None, boxes, range(len(boxes)))
    finally:
        client.exports.end_all_of(owner)
    return _moved(tallies, started)


def gather_parts(there: Ranks, name: str, axis: str | None, dim: int) -> Any:
    """Implement `ProcMesh.gather`."""
    check_name(name)
    what = f"gathering {name!r} from {there.name}"
    with _lending(there, what) as lending:
        sources = joined(name, lending.begin({name: name}), _places(there, axis)[1], dim)
        try:
            return take_box(there.client, sources, _whole(sources))[0]
        except BufferGoneError:
            deaths = lending.deaths()
            if not deaths:
                raise
            raise SupervisionError(f"{what} failed", deaths) from None


def fetch_state(
    there: Ranks,
    names: str | Iterable[str],
    check: Callable[[Mapping[str, tuple[str, tuple[int, ...]]]], None] | None,
    turn: int,
) -> dict[str, Any]:
    """Implement `ProcMesh.fetch_state`."""
    pairs = _pairs(names)
    what = f"fetching {_some(pairs)} from {there.name}"
    with _lending(there, what) as lending:
        side = lending.begin(pairs)
        leaves = {path: next(iter(side.of(path).values())) for path in side.paths()}
        held = [path for path, leaf in leaves.items() if isinstance(leaf, Held)]
        if problems := [why for path in held if (why := agreed(path, side))]:
            raise MoveError(f"{what} failed\n" + "\n".join(f"  {why}" for why in _first(problems)))
        if check is not None:
            check({path: (leaf.dtype, leaf.shape) for path, leaf in leaves.items() if isinstance(leaf, Held)})
        found: dict[str, Any] = {}
        reading = TensorReading(there.client, side.leaves, turn)
        for path, leaf in leaves.items():
            if isinstance(leaf, Plain):
                found[path] = leaf.value
            elif leaf.same in found:  # tied parameters stay one tensor
                found[path] = found[leaf.same]
            else:
                found[path] = new_thing(leaf.dtype, leaf.shape, leaf.kind)
                part = Part(whole(leaf.shape), (0,) * len(leaf.shape))
                reading.want(path, found[path], memory_of(found[path]), [part])
        try:
            reading.go()
        except BufferGoneError:
            deaths = lending.deaths()
            if not deaths:
                raise
            raise SupervisionError(f"{what} failed", deaths) from None
    return found


def all_to_all(
    here: Ranks, there: Ranks, name: str, axis: str | None, dim: int, from_axis: str | None, from_dim: int
) -> Moved:
    """Implement `ProcMesh.all_to_all`."""
    started = time.perf_counter()
    check_name(name)
    _check_session(there, here)
    what = f"moving {name!r} from {there.name} to {here.name}"
    _places(here, axis)  # raises for an unknown axis before the first request
    with _lending(there, what) as lending:
        sources = joined(name, lending.begin({name: name}), _places(there, from_axis)[1], from_dim)
        boxes = _boxes(here, [stop for _, stop in _whole(sources)], axis, dim, name)
        tallies = _read(
            here, partial(take, name, sources), what, _unchanged(here, name), lending, boxes, range(len(boxes))
        )
    return _moved(tallies, started)


def move_parts(
    here: Ranks,
    there: Ranks,
    lend: Callable[[int], Callable[[], Leaves]],
    read: Callable[..., T],
    sources_of: Callable[[Sequence[Leaves]], Sequence[Any]],
    what: str,
) -> ValueMesh[T]:
    """Make ranks read what ranks of another mesh lend, and return what the reading function returns.

    Args:
        here: the ranks that read.
        there: the ranks that lend.
        lend: makes the function that lends, for the number of the owner of the leases.
        read: called on each rank that reads, with its source and its number.
        sources_of: returns the source of each rank that reads, from all that was lent.
        what: what errors call it.
    """
    _check_session(there, here)
    what = f"{what} from {there.name} to {here.name}"
    with _lending(there, what) as lending:
        sources = sources_of(lending.lend(lend))
        try:
            return here.call(read, what, sources, range(len(sources))).get()
        except RanksError as error:
            is_gone = any(report.etype == "BufferGoneError" for report in error.reports.values())
            if is_gone and (deaths := lending.deaths()):
                raise SupervisionError(f"{what} failed, because ranks of the source have died", deaths) from None
            raise


def _places(at: Ranks, axis: str | None) -> tuple[int, list[int]]:
    """Return the number of parts along an axis, and the part of each rank; without an axis, one part per rank."""
    extent = at.region.extent
    if axis is None:
        return len(at.ranks), list(range(len(at.ranks)))
    if axis not in extent:
        raise KeyError(f"unknown axis {axis!r}; {list_axes(extent)}")
    return extent[axis], [extent.point(rank)[axis] for rank in range(len(at.ranks))]


def _boxes(at: Ranks, shape: Sequence[int], axis: str | None, dim: int, name: str) -> list[Box]:
    """Return the part of each rank of an evenly cut tensor."""
    count, places = _places(at, axis)
    dim = dim_of(dim, shape, name)
    cuts = [cut_evenly(shape[dim], count, place) for place in places]
    return [tuple(cut if i == dim else (0, size) for i, size in enumerate(shape)) for cut in cuts]


def _whole(sources: Sequence[Leaves]) -> Box:
    return next(whole(leaf.shape) for leaf in (source[""] for source in sources) if isinstance(leaf, Held))


def _unchanged(at: Ranks, name: str) -> str:
    return f"ranks of {at.name} that did not get their part keep the old value of {name!r}"


@contextlib.contextmanager
def _lending(source: Ranks, what: str) -> Iterator[_Leases]:
    """End the leases of the ranks in any case."""
    lending = _Leases(source, what)
    try:
        yield lending
    except BaseException:
        lending.abandon()
        raise
    lending.end()


def _read(
    here: Ranks,
    function: Callable[..., Tally],
    what: str,
    undefined: str,
    lending: _Leases | None,
    *values: Iterable[Any],
) -> Sequence[Tally]:
    """Make ranks read their parts; an error describes the state of the destination."""
    try:
        return here.call(function, what, *values).get().values()
    except RemoteInterrupt as error:
        raise RemoteInterrupt(f"{error}; {undefined}") from None
    except RanksError as error:
        is_gone = any(report.etype == "BufferGoneError" for report in error.reports.values())
        deaths = lending.deaths() if is_gone and lending is not None else {}
        if deaths:
            raise SupervisionError(
                f"{what} failed, because ranks of the source have died; {undefined}", deaths
            ) from None
        raise type(error)(f"{error.what}; {undefined}", error.reports, error.results) from None


def _moved(tallies: Iterable[Tally], started: float, fits: Fit | None = None) -> Moved:
    paths: Counter[str] = Counter()
    tensors = 0
    for tally in tallies:
        paths.update(tally.data_paths)
        tensors += tally.tensors
    missing, unexpected = (fits.missing, fits.unexpected) if fits else ((), ())
    return Moved(sum(paths.values()), time.perf_counter() - started, tensors, dict(paths), missing, unexpected)


def _pairs(names: str | Iterable[str] | Mapping[str, str]) -> dict[str, str]:
    """Return name on the source -> name on the destination."""
    if isinstance(names, str):
        names = (names,)
    pairs = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
    for name in (*pairs, *pairs.values()):
        check_name(name)
    if len(set(pairs.values())) < len(pairs):
        raise ValueError(f"can't copy two variables into one: {pairs}")
    return pairs


def _check_session(one: Ranks, other: Ranks) -> None:
    if one.client is not other.client:
        raise ValueError(
            f"meshes {one.name!r} and {other.name!r} belong to different sessions, whose ranks can't reach each other (a mesh "
            "that outlives the notebook has its own session): pull from one, push to the other, or bring up both the same way"
        )


def _size(nbytes: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"


def _some(names: Iterable[str]) -> str:
    """Quote the first names of a list."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(repr(name) for name in listed[:_SHOWN]) + more


def _first(problems: Sequence[str]) -> list[str]:
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return [*problems[:_SHOWN], *more]
