"""Turns the answers of ranks into a mesh of values, or an error."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from monarch_kernel.base.mesh import Extent, Point, Region, ValueMesh
from monarch_kernel.errors import ActorDiedError, ActorError, Failure, RanksError, SupervisionError, format_ranks
from monarch_kernel.net.wire.codec import load
from monarch_kernel.runtime.rpc.answers import Answer, Value

__all__ = [
    "PREDEFINED",
    "CellResult",
    "check_name",
    "check_new_name",
    "check_title",
    "check_type",
    "error_for",
    "gather",
    "read_value",
]

T = TypeVar("T")

PREDEFINED = {
    "device": "device",
    "live": "module",
    "local_rank": "int",
    "mesh": "DeviceMesh",
    "rank": "int",
    "world_size": "int",
}
"""The names that cells find on each rank, with the kinds of their values."""

_MAX_TITLE = 200
_IMMUTABLE = frozenset({bool, bytes, complex, float, int, str, type(None)})


def gather(
    region: Region,
    what: str,
    error: type[RanksError],
    read: Callable[[Value], T],
    base: Extent | None = None,
    *,
    needs_all: bool = False,
) -> Callable[[Sequence[Answer]], ValueMesh[T]]:
    """Make a function that turns the answers of a region's ranks into a mesh of values, or raises.

    Args:
        region: Where the answers come from, in order.
        what: The request, in the user's words.
        error: Raised if ranks failed; a `SupervisionError` if a rank was lost or stopped.
        read: Returns the value of an answer.
        base: The mesh as spawned, if errors should name its ranks, and not those within the region.
        needs_all: Whether the request makes sense only for all ranks, so that a slice is no way out.
    """

    def point_of(index: int) -> Point:
        return region.extent.point(index) if base is None else base.point(region.ranks[index])

    def finish(answers: Sequence[Answer]) -> ValueMesh[T]:
        values = _read_all(answers, read)
        if len(values) == len(answers):
            return ValueMesh(region, values)
        reports: dict[Point, Failure] = {}
        succeeded: list[Point] = []
        for i, answer in enumerate(answers):
            if not isinstance(answer, Failure):
                succeeded.append(point_of(i))
            elif answer.etype != "NotSent":
                reports[point_of(i)] = answer
        said = what
        if len(reports) < len(answers) - len(values):
            dead = format_ranks(point.rank for point in reports)
            can_heal = all(report.kind == "lost" for report in reports.values())
            remedy = "heal the mesh (.heal())" if can_heal else "bring the mesh up again"
            are_gone, them = ("is gone", "it") if len(reports) == 1 else ("are gone", "them")
            way_out = f", and it needs all ranks: {remedy}" if needs_all else f"; slice {them} out, or {remedy}"
            said = f"{what}: it was not sent, because {dead} {are_gone}{way_out}"
        raise error_for(reports.values(), error)(said, reports, dict(zip(succeeded, values)))

    return finish


def _read_all(answers: Sequence[Answer], read: Callable[[Value], T]) -> list[T]:
    """Read the values of the answers that are no failures.

    Ranks that answer alike share one answer (`Requests.answer_all`). It is read for each of them, as they do not share an
    object that they could change.
    """
    values: list[T] = []
    last: Answer | None = None
    for answer in answers:
        if answer is last and type(values[-1]) in _IMMUTABLE:
            values.append(values[-1])
        elif not isinstance(answer, Failure):
            values.append(read(answer))
            last = answer
    return values


def error_for(reports: Iterable[Failure], error: type[RanksError] = ActorError) -> type[RanksError]:
    """Return the class of the error for failures of ranks: another than ``error``, if a rank or an actor has ended."""
    known = list(reports)
    if any(report.kind in ("lost", "stopped") for report in known):
        return SupervisionError
    return ActorDiedError if error is ActorError and any(report.is_fatal for report in known) else error


def read_value(answer: Value) -> Any:
    """Unpickle the answer of a rank."""
    return load(answer.payload, answer.frames)


class CellResult:
    """The result of a cell on one rank.

    Attributes:
        value: The value of its last expression; None unless it was requested.
        bundle: The representations of the value for display: MIME type -> data; empty if there is nothing to show.
    """

    __slots__ = ("bundle", "value")

    def __init__(self, value: Any, bundle: dict[str, object]) -> None:
        self.value = value
        self.bundle = bundle


def check_type(what: str, value: object, expected: type) -> None:
    """Refuse an argument of another type."""
    if not isinstance(value, expected):
        raise TypeError(f"{what} must be a {expected.__name__}, not {value!r} (of type {type(value).__name__})")


def check_title(what: str, text: object) -> None:
    """Refuse the name of a mesh or an actor that is too long for messages and views."""
    check_type(what, text, str)
    if len(str(text)) > _MAX_TITLE:
        raise ValueError(f"{what} has {len(str(text)):,} characters, but may have at most {_MAX_TITLE}")


def check_name(name: str) -> None:
    """Refuse a name that can't be a variable of a rank.

    Raises:
        ValueError: it is no variable name; the text says what a mesh takes.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{name!r} is no variable name; a mesh takes mesh['x'] for a variable, mesh[0:2] for a slice")
    if keyword.iskeyword(name):
        raise ValueError(f"{name!r} is a keyword of Python, and no variable name; choose another one, such as {name}_")


def check_new_name(name: str) -> None:
    """Refuse a name to which no value can be pushed.

    Raises:
        ValueError: it is no variable name, or Python or the ranks have given it a meaning.
    """
    check_name(name)
    if name.startswith("__") and name.endswith("__"):
        raise ValueError(
            f"{name!r} belongs to Python, and can't be pushed; choose a name without two underscores around it"
        )
    if name in PREDEFINED:
        raise ValueError(
            f"{name!r} has a meaning on each rank, which other cells use, and can't be pushed; choose another name, such as "
            f"my_{name}, or assign it in a cell on the ranks"
        )
