"""Messages of cells, of calls of functions on a rank, and of their answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from monarch_kernel.errors import Failure
from monarch_kernel.net.wire.messages.base import Message, Payload
from monarch_kernel.net.wire.messages.tools import ModuleSource

__all__ = [
    "Apply",
    "Complete",
    "Failed",
    "Fetch",
    "Fetched",
    "Forget",
    "GetStacks",
    "Inspect",
    "Interrupt",
    "Names",
    "Owed",
    "Ping",
    "Pull",
    "Push",
    "Release",
    "Result",
    "Rewind",
    "Rich",
    "Run",
]


# controller -> rank


class Ping(Message, frozen=True):
    """Answer when all that came before has been done."""

    id: int


class Rewind(Message, frozen=True):
    """The next `live.snapshot` puts back what the snapshot ``key`` has, and the loop that follows goes on from its step.

    ``holders`` are the places of those who keep it for each rank of the mesh. In a recovery it comes with the cell that runs
    again, and is for the `live.snapshot` with the same number in that; else for the first one that follows.
    """

    id: int
    key: tuple[int, int, int]
    holders: tuple[int, ...]
    is_recovery: bool = False


class Run(Message, frozen=True):
    """Run a cell; answer with the value of its last expression if ``want_value``, else only with how it looks.

    With ``rewind`` a loop in it goes back to a snapshot, for the cell has run before.
    """

    id: int
    code: str
    cell: int
    want_value: bool = False
    rewind: Rewind | None = None


class Push(Message, frozen=True):
    """Set a variable in the rank's namespace."""

    id: int
    name: str
    payload: Payload


class Pull(Message, frozen=True):
    """Answer with a variable of the rank's namespace."""

    id: int
    name: str


class Apply(Message, frozen=True):
    """Call a function on the main thread; answer with its result.

    ``payload`` is ``(shared, args)``: the frames of ``(function, text of its cells)``, equal for all ranks, and the rank's own.
    """

    id: int
    payload: Payload


class Fetched(Message, frozen=True):
    """The module that was asked for as ``turn``; None if there is none. Has its own lane."""

    turn: int
    module: ModuleSource | None


class Interrupt(Message, frozen=True):
    """Raise KeyboardInterrupt in the code that runs request ``id``; if it waits its turn, drop it. Has its own lane.

    With ``abort``, abort the process groups of the rank if that does not help, whatever it waits for.
    """

    id: int
    abort: bool = False


class Release(Message, frozen=True):
    """Free the code that runs request ``id`` from the collective it has waited in for a while, if it does. Has its own lane.

    If rank ``dead`` of ``mesh`` has ended no collective with it ever ends: then it is freed at once, and from later ones, too.
    """

    id: int
    mesh: str = ""
    dead: int = -1


class Complete(Message, frozen=True):
    """Say at once, whatever runs, what may follow ``expression``; ``imports`` are names that the cell will have.

    Answered with a list of (text, kind); None if the expression means nothing, or can't be told without running code. An
    empty expression means the namespace, of which "names" are wanted.
    """

    id: int
    wanted: Literal["names", "attributes", "private attributes", "keys", "arguments"]
    expression: str
    imports: dict[str, str] = {}


class Inspect(Message, frozen=True):
    """Describe at once, whatever runs, what ``expression`` means: title -> text, or None; ``imports`` as in `Complete`."""

    id: int
    expression: str
    source: bool
    imports: dict[str, str] = {}


class GetStacks(Message, frozen=True):
    """Answer with what you do now (`runtime.diagnostics.stacks.Doing`), at once, whatever you do. Has its own lane."""

    id: int


class Forget(Message, frozen=True):
    """All answers to cell ``id`` are in: the next controller need not have yours. Only for ranks that keep a record."""

    id: int


# rank -> controller


class Owed(msgspec.Struct, array_like=True, frozen=True):
    """A request that a rank has not answered, or whose answer it keeps.

    ``age_s`` is how long ago it came, in seconds; ``cell`` its number if it is a cell whose answer is wanted still.
    """

    id: int
    note: str
    age_s: float
    cell: int | None = None


class Result(Message, frozen=True):
    """A request succeeded.

    ``written`` are the last marks that the rank set in stdout and stderr: what came before is shown before the request ends.
    ``collectives`` counts those it has started in its default process group; -1 where it has no usable group.
    """

    id: int
    payload: Payload
    bundle: dict[str, Any] = {}
    written: tuple[int, int] = (0, 0)
    collectives: int = -1


class Failed(Message, frozen=True):
    """A request failed; ``written`` and ``collectives`` as in `Result`."""

    id: int
    failure: Failure
    written: tuple[int, int] = (0, 0)
    collectives: int = -1


class Rich(Message, frozen=True):
    """A rich display (figure, HTML ...) made while request ``id`` ran; ``written`` as in `Result`: it comes after that."""

    id: int
    data: dict[str, Any]
    metadata: dict[str, Any]
    written: tuple[int, int] = (0, 0)


class Fetch(Message, frozen=True):
    """A module is wanted that this rank can't find, or that was edited."""

    turn: int
    name: str


class Names(Message, frozen=True):
    """What has changed in the user's namespace: name -> what kind of thing it is, and the names that have gone."""

    changed: dict[str, str]
    removed: tuple[str, ...] = ()
