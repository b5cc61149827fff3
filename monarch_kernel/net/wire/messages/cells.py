"""Messages that run cells and call functions on a rank, and their answers."""

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
    "OpenRequest",
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
    """Ask for an answer after the main thread has handled everything that arrived before."""

    id: int


class Rewind(Message, frozen=True):
    """Make the next `live.snapshot` restore the snapshot ``key``, and the loop after it continue from that step.

    ``holders`` has, for each rank of the mesh, the process that keeps its snapshot. In a recovery this is part of the `Run` of
    the repeated cell, and applies to the `live.snapshot` with the same number in that cell; otherwise it applies to the next.
    """

    id: int
    key: tuple[int, int, int]
    holders: tuple[int, ...]
    is_recovery: bool = False


class Run(Message, frozen=True):
    """Run a cell; answered with the value of its last expression if ``want_value``, else only with its display data.

    ``rewind`` is set if the cell runs again and a loop in it returns to a snapshot.
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
    """Ask for the value of a variable in the rank's namespace."""

    id: int
    name: str


class Apply(Message, frozen=True):
    """Call a function on the main thread; answered with its result.

    ``payload`` is ``(shared, args)``: the frames of ``(function, text of its cells)``, which are the same for all ranks, and
    the arguments for this rank.
    """

    id: int
    payload: Payload


class Fetched(Message, frozen=True):
    """Answer the `Fetch` with the same ``turn``: the module, or None if there is none. Handled out of band."""

    turn: int
    module: ModuleSource | None


class Interrupt(Message, frozen=True):
    """Raise KeyboardInterrupt in the code of request ``id``, or drop the request if it is queued. Handled out of band.

    If that does not help and ``abort`` is set, the rank aborts its process groups, whatever it waits for.
    """

    id: int
    abort: bool = False


class Release(Message, frozen=True):
    """Free the code of request ``id`` from a collective in which it has waited for a while, if any. Handled out of band.

    If rank ``dead`` of ``mesh`` has ended, no collective with it ever completes: the rank frees the code at once, also from
    later collectives.
    """

    id: int
    mesh: str = ""
    dead: int = -1


class Complete(Message, frozen=True):
    """Ask for completions of ``expression``; answered at once, whatever runs.

    The answer is a list of (text, kind); None if the expression means nothing, or can't be evaluated without running code. An
    empty expression, with "names" wanted, means the namespace. ``imports`` has names that the cell will import.
    """

    id: int
    wanted: Literal["names", "attributes", "private attributes", "keys", "arguments"]
    expression: str
    imports: dict[str, str] = {}


class Inspect(Message, frozen=True):
    """Ask for a description of ``expression``; answered at once, whatever runs.

    The answer maps titles to texts; None if the expression means nothing. ``imports`` is as in `Complete`.
    """

    id: int
    expression: str
    source: bool
    imports: dict[str, str] = {}


class GetStacks(Message, frozen=True):
    """Ask for the current activities (`runtime.diagnostics.stacks.Doing`), whatever runs. Handled out of band.

    With ``brief``, collectives of groups that have started more since the last look are left out (`RankGroup.pending`).
    """

    id: int
    brief: bool = False


class Forget(Message, frozen=True):
    """Allow a rank with a record to drop its answer to cell ``id``: the answers of all ranks have arrived."""

    id: int


# rank -> controller


class OpenRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request that a rank has not answered, or whose answer it keeps.

    ``age_s`` is the time since it arrived, in seconds. ``cell`` is the number of the cell, if its answer is still needed.
    """

    id: int
    description: str
    age_s: float
    cell: int | None = None


class Result(Message, frozen=True):
    """Report that a request succeeded.

    ``written`` has the last marks that the rank set in stdout and stderr; output before them is shown before the request ends.
    ``collectives`` is the number of collectives that the rank has started in its default process group; -1 without a group, -2
    if the group is unusable. ``groups`` is the number of process groups that it has made; -1 without a group, or if unknown.
    ``group_size`` is the number of ranks in the default group; 0 without a group, -1 if the answer does not say. The sum of
    ``unmatched`` over all ranks of a request is 0 modulo 2^64 if each message between two of them has been sent and received.
    """

    id: int
    payload: Payload
    bundle: dict[str, Any] = {}
    written: tuple[int, int] = (0, 0)
    collectives: int = -1
    groups: int = -1
    group_size: int = -1
    unmatched: int = 0


class Failed(Message, frozen=True):
    """Report that a request failed; all but ``failure`` is as in `Result`."""

    id: int
    failure: Failure
    written: tuple[int, int] = (0, 0)
    collectives: int = -1
    groups: int = -1
    group_size: int = -1
    unmatched: int = 0


class Rich(Message, frozen=True):
    """Show a rich display (figure, HTML, ...) of request ``id``; it follows the output before ``written``, as in `Result`."""

    id: int
    data: dict[str, Any]
    metadata: dict[str, Any]
    written: tuple[int, int] = (0, 0)


class Fetch(Message, frozen=True):
    """Ask for a module that this rank can't find, or that was edited; answered with `Fetched`."""

    turn: int
    name: str


class Names(Message, frozen=True):
    """Report changes of the user's namespace: ``changed`` maps names to kinds of values; names in ``removed`` are gone."""

    changed: dict[str, str]
    removed: tuple[str, ...] = ()
