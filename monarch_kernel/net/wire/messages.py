"""Every message that travels between controller, host agents and ranks, on one screen.

Headers are msgspec structs: typed, validated, decoded without running code. What users send (arguments, results, classes)
is an opaque `Payload`, which only its receiver opens, after the sender has been authenticated.

``id`` is a request: every rank that is asked answers it once, with `Result` or `Failed`, to the process that has made it,
which the number tells (`runtime.rpc.ids`). A ``proc`` is the number of a rank's place, unique in a session, 0 that of the
controller's process; an ``incarnation`` counts the processes that have had the place before; a ``region`` is `Region.pack()`
of the mesh that was addressed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from monarch_kernel.errors import Failure, MeshFailure

__all__ = [
    "ActorEnded",
    "Apply",
    "Attach",
    "Backlog",
    "Call",
    "Carried",
    "Change",
    "CleansUp",
    "ClockRead",
    "CloseLoan",
    "Collected",
    "Complete",
    "Conclude",
    "Continued",
    "DebugInput",
    "EndLoan",
    "EndLoans",
    "EndStream",
    "Failed",
    "Fence",
    "Fetch",
    "FetchSnapshot",
    "Fetched",
    "Forget",
    "FormGroup",
    "Goodbye",
    "Hello",
    "HostHello",
    "HostStore",
    "Inspect",
    "Interrupt",
    "Join",
    "KeepSnapshot",
    "KillRanks",
    "Knob",
    "ListErrors",
    "ListModules",
    "ListSnapshots",
    "LogRead",
    "Logged",
    "Look",
    "LoopBegun",
    "LoopGrant",
    "LoopLeft",
    "LoopReport",
    "Lost",
    "Meet",
    "Message",
    "Metered",
    "ModuleSource",
    "Names",
    "OpenLoan",
    "OpenStreams",
    "Outlive",
    "Outlives",
    "Output",
    "OutputChunk",
    "Owed",
    "Part",
    "PassOver",
    "Payload",
    "PeerNews",
    "Ping",
    "PortSend",
    "PostMortem",
    "Preload",
    "Probe",
    "Pull",
    "Push",
    "RankSpec",
    "Reach",
    "ReadClock",
    "ReadLoan",
    "ReadLog",
    "ReadMeters",
    "Reading",
    "Readings",
    "Release",
    "Reload",
    "Reshaped",
    "Result",
    "Rewind",
    "Rich",
    "Run",
    "Software",
    "Spawn",
    "StartRanks",
    "StopActor",
    "Stopped",
    "StoreCall",
    "Sync",
    "Unhandled",
    "WriteLoan",
]


class Payload(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A pickled value: ``data`` inline while small; its out-of-band buffers are the message's next ``nframes`` frames."""

    data: bytes = b""
    nframes: int = 0


StoreOperation = Literal["set", "get", "wait", "check", "add", "append", "compare_set", "delete", "count"]


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Base of all messages; none is ever part of a cycle, so the garbage collector need not look at them."""


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


class Reload(Message, frozen=True):
    """Prepare living classes to become what new ones are; answer with what that comes to (`features.editing.worker.Prospect`).

    ``payload`` is ``(what dump_classes gave, text of their cells)``; ``edit`` is what `Conclude` calls it. ``names`` are
    classes that cells have defined anew on the rank itself.
    """

    id: int
    edit: int
    payload: Payload
    names: tuple[str, ...] = ()


class ModuleSource(msgspec.Struct, array_like=True, frozen=True):
    """A module of the user's: its file there where the controller is, and its text; both are empty for a namespace package."""

    name: str
    file: str
    text: str
    is_package: bool


class Sync(Message, frozen=True):
    """Load those of these modules anew that are imported and differ, and what depends on them; answer as to `Reload`.

    What is not imported yet is asked for when it is (`Fetch`). ``edit`` is what `Conclude` calls it.
    """

    id: int
    edit: int
    modules: tuple[ModuleSource, ...]


class ListModules(Message, frozen=True):
    """Answer with the names of the user's modules that are imported."""

    id: int


class Fetched(Message, frozen=True):
    """The module that was asked for as ``turn``; None if there is none. Has its own lane."""

    turn: int
    module: ModuleSource | None


class Reshaped(Message, frozen=True):
    """The class of an actor, called ``kind``, has these endpoints from now on; for handles of it. Has its own lane."""

    actor: int
    kind: str
    outlines: tuple[tuple[Any, ...], ...]


class Conclude(Message, frozen=True):
    """Do what was prepared for an edit, if ``keep``, or leave everything as it was; id 0: no answer."""

    id: int
    edit: int
    keep: bool


class HostStore(Message, frozen=True):
    """Open the store in which the ranks of your mesh meet; answer with (its name, address, port), as `FormGroup` has them."""

    id: int


class FormGroup(Message, frozen=True):
    """Join (or re-join) the default process group of torch.distributed, whose keys the process ``proc`` keeps in ``store``.

    ``address`` and ``port`` are for the variables of torchrun: nothing listens there.
    """

    id: int
    proc: int
    store: str
    address: str
    port: int


class StoreCall(Message, frozen=True):
    """Do something with keys of a store that you keep (`runtime.rpc.stores`); a process asks this of another. Has its own lane.

    ``get`` and ``wait`` are answered when all keys are there. ``amount`` is for ``add``.
    """

    id: int
    store: str
    operation: StoreOperation
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    amount: int = 0


class Spawn(Message, frozen=True):
    """Make an actor: ``payload`` is ``(class, args, kwargs)``; ``renewed`` is the class, pickled, if it was reloaded since.

    ``sources`` has the text of the code that is in no file, such as a notebook's cell, by its name. ``owner`` is the actor that
    has spawned it, in the process that has made the number ``actor``; 0 for the program itself. ``living`` is for a rank that
    has come in place of another: (rank, proc) of the same actor where it lives on.
    """

    id: int
    actor: int
    name: str
    region: tuple[Any, ...]
    payload: Payload
    sources: tuple[tuple[str, str], ...] = ()
    owner: int = 0
    living: tuple[tuple[int, int], ...] | None = None
    renewed: bytes = b""


class Call(Message, frozen=True):
    """Call an endpoint; ``payload`` is ``(args, kwargs)``, ``region`` the addressed part, None for all; id 0: no answer."""

    id: int
    actor: int
    method: str
    region: tuple[Any, ...] | None
    payload: Payload


class StopActor(Message, frozen=True):
    """Clean an actor up and forget it."""

    id: int
    actor: int
    reason: str


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


class Look(Message, frozen=True):
    """Answer with what you do now (`runtime.diagnostics.stacks.Doing`), at once, whatever you do. Has its own lane."""

    id: int


class ReadMeters(Message, frozen=True):
    """Say what of your counts has changed (`Metered`), then answer, at once, whatever you do. Has its own lane."""

    id: int


class Forget(Message, frozen=True):
    """All answers to cell ``id`` are in: the next controller need not have yours. Only for ranks that keep a record."""

    id: int


class Change(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What takes effect at the beginning of a step: a knob that is turned, or, without a name, the end of the loop."""

    step: int
    name: str
    value: int | float | str | bool | None = None


class LoopGrant(Message, frozen=True):
    """Steps below ``horizon`` of a loop may begin (`LoopBegun`): `features.live.pace.Grant`. Has its own lane."""

    request: int
    number: int
    horizon: int
    ahead: int
    changes: tuple[Change, ...] = ()
    is_paused: bool = False


class KeepSnapshot(Message, frozen=True):
    """Keep what the process in place ``owner`` had before a step, in case that process dies; answer when you have it.

    ``key`` is the request and number of the `live.snapshot` that it belongs to, and the step; at most ``most`` are kept of an
    owner, the newest. Has its own lane, as the two that follow.
    """

    id: int
    owner: int
    key: tuple[int, int, int]
    most: int
    payload: Payload


class ListSnapshots(Message, frozen=True):
    """Answer with the keys of the snapshots that you keep, by owner."""

    id: int


class FetchSnapshot(Message, frozen=True):
    """Answer with a snapshot that you keep."""

    id: int
    owner: int
    key: tuple[int, int, int]


class ListErrors(Message, frozen=True):
    """Answer at once, whatever runs, with a list of the errors (`KeptError`) that are kept. Has its own lane."""

    id: int


class PostMortem(Message, frozen=True):
    """Open the debugger where ``request`` failed; answer when it is left."""

    id: int
    request: int


class DebugInput(Message, frozen=True):
    """What was typed at prompt ``turn`` of the debugger that request ``id`` is in; empty: end of input. Has its own lane."""

    id: int
    turn: int
    line: str


class PassOver(Message, frozen=True):
    """Nobody can be asked at prompt ``turn``: the code of request ``id`` says why, and goes on. Has its own lane."""

    id: int
    turn: int
    why: str


# controller -> rank and host agent


class Attach(Message, frozen=True):
    """A new controller has taken the place of one that ended: say hello again, and what it missed.

    ``epoch`` counts the controllers; one that has been answered is not answered again.
    """

    token: str
    controller_pid: int
    epoch: int


# any -> any


class PortSend(Message, frozen=True):
    """A value, or an error, for a port of the process that has made its number."""

    port: int
    payload: Payload
    failure: Failure | None = None


class ReadLoan(Message, frozen=True):
    """Answer at once with a block of memory that you have lent, its elements one after the other, as the only frame.

    ``table``, ``entry`` and ``turn`` are the loan (`net.memory.leases`). The block begins ``offset`` bytes after the memory
    does.
    """

    id: int
    table: bytes
    entry: int
    turn: int
    offset: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class WriteLoan(Message, frozen=True):
    """Write elements, which are the only frame, into a block of memory that you have lent; it is described as in `ReadLoan`."""

    id: int
    table: bytes
    entry: int
    turn: int
    offset: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    payload: Payload


class OpenStreams(Message, frozen=True):
    """Listen for ``count`` streams, on which `ReadLoan` and `WriteLoan` come, each with what is read or written after it.

    Answer with the fields of an invitation (`runtime.buffers.streams`).
    """

    id: int
    count: int


class EndStream(Message, frozen=True):
    """Take nothing any more from the stream that was opened with this token; answer when nothing of it is still written."""

    id: int
    token: bytes


class OpenLoan(Message, frozen=True):
    """Answer with what it takes to reach memory that you have lent by a ``way`` that you take no part in: "cuda" or "rdma".

    What is opened for "rdma" stays where it is until `CloseLoan`, or the end of the process that has asked.
    """

    id: int
    table: bytes
    entry: int
    turn: int
    way: str


class CloseLoan(Message, frozen=True):
    """What was opened by this request is not used any more by who has asked."""

    opened: int


class EndLoan(Message, frozen=True):
    """Memory that you have lent is needed no more; answer with whether it was lent still."""

    id: int
    table: bytes
    entry: int
    turn: int


class EndLoans(Message, frozen=True):
    """All that you have lent for an owner is needed no more; answer with the loans of what was written to meanwhile."""

    id: int
    owner: int


# rank -> any


class Fence(Message, frozen=True):
    """Answer at once, whatever runs: all that you have sent me before has then arrived. Has its own lane."""

    id: int


class Probe(Message, frozen=True):
    """The wait ``wait`` lasts, and depends on ``request``, which you owe: pass it on if that waits, too. Has its own lane.

    ``path`` has the endpoints by way of which it has come, each with the one it is queued behind; ``round`` counts the probes
    of the wait. See `runtime.rpc.deadlock`.
    """

    wait: int
    round: int
    request: int
    path: tuple[tuple[str, str], ...]


class ActorEnded(Message, frozen=True):
    """To the process of its owner: an actor is over. Without a failure it was stopped; ``cause`` is what it did not handle."""

    actor: int
    failure: Failure | None
    cause: MeshFailure | None = None


# controller -> rank


class PeerNews(Message, frozen=True):
    """A process that you wanted to meet is up and listens at ``address``, or has ended (``death``).

    Without an address it is on another host, and reached by way of the host agent. One that ``is_replaced`` will have another
    in its place by itself: to owners of what was there that is no failure. Its place is that of ``rank`` in ``mesh``.
    """

    proc: int
    incarnation: int
    address: str
    death: Failure | None = None
    is_replaced: bool = False
    mesh: str = ""
    rank: int = -1


# rank -> controller


class Meet(Message, frozen=True):
    """Tell me when this process is up, and when it ends: I have something to ask it."""

    proc: int


class CleansUp(Message, frozen=True):
    """An actor of mine has a ``__cleanup__``: give me time for it when the session ends."""


class Logged(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a rank has logged under one name in steps that follow each other, of which ``step`` is the last.

    ``total`` is the sum of those ``count`` values that are finite; ``last`` is the last one, finite or not. The steps are
    among ``size``, a power of 2, which begin with a multiple of it.
    """

    step: int
    total: float
    count: int
    last: float
    size: int = 1


class Knob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Something that can be turned while a loop runs: what it is as long as nobody does, and between what it may be."""

    name: str
    value: int | float | str | bool | None
    low: float | None = None
    high: float | None = None


class LoopBegun(Message, frozen=True):
    """The code of a request begins a loop, its ``number``-th; ``steps`` is -1 where it has no end. Tell me how far I may go.

    Said to a new controller, too: then it is at ``step``, may begin those below ``horizon``, and is paused or not.

    Ranks stay less than ``apart`` steps apart, unless that is 0. One that ``recovers`` is to go on by itself if a rank dies.
    One that goes on where another was, in the request ``follows``, begins with ``step``; in a recovery with what was to change
    at later steps, too.
    """

    request: int
    number: int
    steps: int
    step: int = 0
    horizon: int = 0
    is_paused: bool = False
    apart: int = 0
    recovers: bool = False
    follows: int = 0
    is_recovery: bool = False


class LoopReport(Message, frozen=True):
    """It begins ``step``, and takes ``step_s`` for each; what was logged, and which knobs are new, since the last report.

    ``peak`` is how many floating-point operations a second its device can do; 0 if nobody knows, or it has logged none.
    """

    request: int
    number: int
    step: int
    step_s: float
    logged: dict[str, tuple[Logged, ...]] = {}
    knobs: tuple[Knob, ...] = ()
    peak: float = 0.0


class LoopLeft(Message, frozen=True):
    """It has left the loop, of which it has begun ``steps``."""

    request: int
    number: int
    steps: int


class Unhandled(Message, frozen=True):
    """Something has failed that no actor owns, but code which a cell has run on this rank."""

    failure: MeshFailure


class Owed(msgspec.Struct, array_like=True, frozen=True):
    """A request that a rank has not answered, or whose answer it keeps.

    ``age_s`` is how long ago it came, in seconds; ``cell`` its number if it is a cell whose answer is wanted still.
    """

    id: int
    note: str
    age_s: float
    cell: int | None = None


class Hello(Message, frozen=True):
    """First message of a rank, also to another rank, and its answer to `Attach`.

    ``token`` proves that it belongs to this session; ``address`` is where it listens to other ranks; ``shares`` whether it can
    open what other processes of its machine have in shared memory.
    """

    token: str
    proc: int
    pid: int
    device: str
    owed: tuple[Owed, ...] = ()
    address: str = ""
    shares: bool = False


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


class Stopped(Message, frozen=True):
    """The code of request ``id`` stands still in the debugger at ``where``, has said ``text`` and waits for a line of input.

    ``turn`` grows with each prompt; ``begins`` says that the code ran until now, and is not between two commands.
    """

    id: int
    turn: int
    where: str
    text: str
    prompt: str
    begins: bool
    written: tuple[int, int] = (0, 0)


class Continued(Message, frozen=True):
    """The code of request ``id`` has left the debugger and goes on."""

    id: int
    written: tuple[int, int] = (0, 0)


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


class Carried(msgspec.Struct, array_like=True, frozen=True):
    """What has gone from one process to another by a road, since whoever counts it is there.

    ``seconds`` is how long it took, as far as that is known, of transfers at the same time together.
    """

    source: int
    target: int
    road: str
    nbytes: int
    operations: int
    seconds: float


class Collected(msgspec.Struct, array_like=True, frozen=True):
    """What a rank has done of one kind of collective in a process group; ``seconds`` is for how long it stood in them."""

    group: str
    operation: str
    nbytes: int
    operations: int
    seconds: float


class Metered(Message, frozen=True):
    """The counts that have changed, as they are now; they have changed in the last ``over_s`` seconds.

    ``unread`` is how many collectives are in no count, for they were begun by C++.
    """

    carried: tuple[Carried, ...]
    over_s: float
    collected: tuple[Collected, ...] = ()
    unread: int = 0


# controller -> host agent


class RankSpec(msgspec.Struct, array_like=True, frozen=True):
    """All that a new rank needs to know; ``env`` is added to its environment before user code runs.

    Of a host that the controller does not know ``threads`` is 0 and ``device`` may be "auto": then the host settles them, and
    takes of ``cwd`` and ``sys_path`` what it has, too.
    ``incarnation`` counts the processes that this one comes after, each of which died in this place.
    ``bootstrap`` is a pickled function that it runs before any actor, with the text of its cells; empty for none.
    ``record`` is the file in which a rank that may outlive its controller says what it runs, on a host elsewhere a name in the
    agent's directory; empty for others.
    """

    proc: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    axes: tuple[tuple[str, int], ...]
    mesh: str
    device: str
    threads: int
    env: dict[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    record: str = ""
    incarnation: int = 0
    bootstrap: bytes = b""

    def succeeded(self, incarnation: int) -> RankSpec:
        """The same place for another process."""
        return msgspec.structs.replace(self, incarnation=incarnation)

    def recorded_in(self, directory: str) -> RankSpec:
        """With its record in this directory."""
        return msgspec.structs.replace(self, record=f"{directory}/{self.record}")

    def settled(self, device: str, env: dict[str, str]) -> RankSpec:
        """With what its host has found."""
        return msgspec.structs.replace(self, device=device, env=env)


class StartRanks(Message, frozen=True):
    """Start processes; one that takes the place of another is asked for when the other's `Lost` has come."""

    specs: tuple[RankSpec, ...]


class KillRanks(Message, frozen=True):
    """End processes: politely, and after ``grace_s`` seconds for certain; with ``keep_logs`` others will take their places."""

    procs: tuple[int, ...]
    grace_s: float
    keep_logs: bool = False


class Reach(Message, frozen=True):
    """These processes, which ranks of yours have to do with, are on a host; dial it there, if there are addresses."""

    host: int
    addresses: tuple[str, ...]
    peers: tuple[bytes, ...]


class Part(Message, frozen=True):
    """A host that yours has had to do with is gone: what is for it is dropped, and it is dialled no more."""

    host: int


class Join(Message, frozen=True):
    """Take the way to the controller by another agent from now on, which can be dialled at these addresses."""

    parent: int
    addresses: tuple[str, ...]


class Preload(Message, frozen=True):
    """Have these modules imported, as soon as there is nothing else to do, in the process that new ranks are forked from."""

    modules: tuple[str, ...]


class ReadClock(Message, frozen=True):
    """Say what time it is; ``sent`` is when this was asked, in seconds since 1970 by the controller's clock."""

    sent: float


class ReadLog(Message, frozen=True):
    """Answer with what is kept of a rank's output: the youngest part, of about ``max_nbytes`` bytes."""

    id: int
    proc: int
    max_nbytes: int


class Outlive(Message, frozen=True):
    """From now on keep everything when the controller ends, and wait for the next one: ``keep_s`` seconds, or for ever if 0."""

    id: int
    keep_s: float


class Goodbye(Message, frozen=True):
    """The controller leaves: end everything as in `KillRanks` and leave, too; or ``keep`` it for the next controller."""

    keep: bool = False
    grace_s: float = 0.0


# host agent -> controller


class Software(msgspec.Struct, array_like=True, frozen=True):
    """What a machine runs our processes with: version and path of Python, versions of packages (empty: not installed)."""

    python: str
    executable: str
    packages: dict[str, str]


class HostHello(Message, frozen=True):
    """First message of a host agent, and its answer to `Attach`: with (proc, incarnation) of its ranks that were replaced.

    ``addresses`` are where other hosts can dial it, the best first; empty where none has to. ``software`` is what it runs,
    which has to agree with the controller's.
    """

    token: str
    host: int
    hostname: str
    pid: int
    cpus: int
    gpus: int
    incarnations: tuple[tuple[int, int], ...] = ()
    addresses: tuple[str, ...] = ()
    software: Software | None = None


class ClockRead(Message, frozen=True):
    """It is ``at``, in seconds since 1970 by this host's clock; ``sent`` as it was asked."""

    sent: float
    at: float


class LogRead(Message, frozen=True):
    """What was asked for as ``id`` of a rank's output (`runtime.host.logs.log_records` reads it)."""

    id: int
    data: bytes


class Outlives(Message, frozen=True):
    """Answers `Outlive`."""

    id: int


class OutputChunk(msgspec.Struct, array_like=True, frozen=True):
    """Text that one rank wrote; ``end`` is the last mark that was read, or how many bytes were read where there is none.

    ``request`` is what started the processes that wrote it, of a pipe that was left to these; 0 for the rank's own pipe.
    ``also`` are other ranks of the host that wrote the same: the number and the ``end`` of each.
    """

    proc: int
    stream: Literal["stdout", "stderr"]
    text: str
    end: int
    dropped_lines: int = 0
    request: int = 0
    also: tuple[tuple[int, int], ...] = ()

    def of_each(self) -> Iterator[OutputChunk]:
        """The chunk of each rank that wrote this."""
        if not self.also:
            yield self
            return
        for proc, end in ((self.proc, self.end), *self.also):
            yield OutputChunk(proc, self.stream, self.text, end, self.dropped_lines, self.request)


class Output(Message, frozen=True):
    """What ranks wrote since the last such message; of each in the order in which it was read."""

    chunks: tuple[OutputChunk, ...]


class Backlog(Message, frozen=True):
    """What ranks wrote while there was no controller; a chunk for each stream at least, for its ``end``."""

    chunks: tuple[OutputChunk, ...]


class Reading(msgspec.Struct, array_like=True, frozen=True):
    """Memory (resident, bytes) and processor use (percent of one core) of a rank; and of its GPU, if that is known."""

    proc: int
    rss_nbytes: int
    cpu_percent: float
    gpu_nbytes: int = 0
    gpu_total_nbytes: int = 0
    gpu_percent: float = 0.0


class Readings(Message, frozen=True):
    """A reading of every rank of a host, and how many strangers it has refused by now."""

    ranks: tuple[Reading, ...]
    strangers: int = 0


class Lost(Message, frozen=True):
    """A rank's process ended, or could not be started (``reason``)."""

    proc: int
    exit_code: int
    signal: int
    reason: str
    last_lines: tuple[str, ...]
    rss_nbytes: int
