"""Messages of process groups, snapshots and live loops."""

from __future__ import annotations

from typing import Literal

import msgspec

from monarch_kernel.net.wire.messages.base import Message, Payload

__all__ = [
    "Change",
    "EndGroup",
    "FetchSnapshot",
    "FormGroup",
    "HostStore",
    "KeepSnapshot",
    "Knob",
    "ListSnapshots",
    "Logged",
    "LoopAlarm",
    "LoopGrant",
    "LoopLeft",
    "LoopPreempted",
    "LoopReport",
    "LoopStarted",
    "LoopStep",
    "SealSnapshot",
    "SkipGroupNames",
    "StoreCall",
    "StoreOperation",
    "Trajectories",
    "Trajectory",
]


StoreOperation = Literal["set", "get", "wait", "check", "add", "append", "compare_set", "delete", "count"]


# controller -> rank


class HostStore(Message, frozen=True):
    """Open the store for the rendezvous of a mesh; answered with its (name, address, port), the fields of `FormGroup`."""

    id: int


class FormGroup(Message, frozen=True):
    """Join (or rejoin) the default process group of torch.distributed. Process ``proc`` has its keys in ``store``.

    ``address`` and ``port`` are for the environment variables of torchrun; nothing listens there.
    """

    id: int
    proc: int
    store: str
    address: str
    port: int


class SkipGroupNames(Message, frozen=True):
    """Name the next process groups as if ``count`` groups had been made; other ranks have made so many."""

    count: int


class EndGroup(Message, frozen=True):
    """End the process groups of these ranks (of all, without ``members``): a rank refuses a collective in one of them.

    Ranks send it to each other. ``store`` and ``round`` say in which default group; if the receiver has another one by now, it
    does nothing. Handled out of band.
    """

    store: str
    round: int
    members: tuple[int, ...]


class StoreCall(Message, frozen=True):
    """Use keys of a store in the receiver (`runtime.rpc.store_server`); any process may send this. Handled out of band.

    ``get`` and ``wait`` are answered when all keys exist. ``amount`` is for ``add``.
    """

    id: int
    store: str
    operation: StoreOperation
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    amount: int = 0


class Change(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A change at the start of a step: the new value of a knob, or, if ``name`` is empty, the end of the loop.

    A name that no knob has (`features.live.pace.PREEMPTION`) makes ranks save their work.
    """

    step: int
    name: str
    value: int | float | str | bool | None = None


class LoopGrant(Message, frozen=True):
    """Allow a rank to start the steps of a loop below ``horizon``; see `features.live.pace.Grant`. Handled out of band."""

    request: int
    number: int
    horizon: int
    ahead: int
    changes: tuple[Change, ...] = ()
    is_paused: bool = False


class KeepSnapshot(Message, frozen=True):
    """Keep a snapshot of the process ``owner`` before a step, in case that process dies; answered when it is stored.

    ``key`` is the request and the number of its `live.snapshot`, and the step. The receiver keeps the newest ``most`` snapshots
    of an owner. This, `ListSnapshots` and `FetchSnapshot` are handled out of band.
    """

    id: int
    owner: int
    key: tuple[int, int, int]
    most: int
    payload: Payload


class SealSnapshot(Message, frozen=True):
    """The checksums of a snapshot that the receiver keeps, or will keep: `KeepSnapshot` may arrive later. Has no answer."""

    owner: int
    key: tuple[int, int, int]
    seal: bytes


class ListSnapshots(Message, frozen=True):
    """Ask for the keys of the snapshots that the receiver keeps, by owner."""

    id: int


class FetchSnapshot(Message, frozen=True):
    """Ask for a snapshot that the receiver keeps."""

    id: int
    owner: int
    key: tuple[int, int, int]


# rank -> controller


class Logged(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Values that a rank has logged under one name in successive steps, the last of which is ``step``.

    ``total`` is the sum of the finite values, and ``count`` their number. ``last`` is the last value, finite or not. The steps
    lie within ``size`` steps that begin at a multiple of ``size``, a power of 2.
    """

    step: int
    total: float
    count: int
    last: float
    size: int = 1


class LoopAlarm(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Something that is wrong with a value that a rank has logged.

    ``kind`` is ``nan`` for a value that is not finite, ``spike`` for one far above ``usual``, the median of the last ones.
    ``about`` says what else is known of the step. ``module`` says in which module the value begins; it comes a step later, in a
    repetition of the alarm. ``is_more`` is true if another value of the rank is not finite at that time, and has an alarm.
    """

    kind: str
    name: str
    step: int
    value: float
    usual: float = 0.0
    about: str = ""
    module: str = ""
    is_more: bool = False


class Knob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A value that users can change while a loop runs: its value until one does, and its bounds."""

    name: str
    value: int | float | str | bool | None
    low: float | None = None
    high: float | None = None


class LoopStarted(Message, frozen=True):
    """Report that the code of a request starts a loop; answered with a `LoopGrant`.

    A rank also sends this to a new controller, about a loop that runs.

    Attributes:
        number: The number of the loop among the loops of the request.
        steps: The number of steps; -1 if the loop has no end.
        step: The first step, or the current step if the loop runs already.
        horizon: The steps below this number may start already.
        is_paused: Whether the loop is paused already.
        apart: Ranks stay less than this number of steps apart; 0 for any distance.
        recovers: Whether the loop resumes automatically if a rank dies.
        follows: The request of the loop that this one continues; 0 if there is none.
        is_recovery: Whether this loop also takes over the changes to later steps of the loop that it continues.
        age_s: How long ago the rank started the loop.
        hooks: Kind of a `LoopAlarm` -> what this rank wants then: ``stop``, ``rollback``, ``skip``, or ``call`` for a function
            that it calls.
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
    age_s: float = 0.0
    hooks: dict[str, str] = {}


class LoopReport(Message, frozen=True):
    """Report that a rank starts ``step``, and what it has logged, and which knobs are new, since the last report.

    A step takes ``step_s`` seconds, without pauses. ``peak`` is the peak number of floating-point operations per second of the
    rank's device; it is 0 if unknown, or if the rank has not logged "flops". A step waits ``loader_s`` seconds for a loader.
    """

    request: int
    number: int
    step: int
    step_s: float
    logged: dict[str, tuple[Logged, ...]] = {}
    knobs: tuple[Knob, ...] = ()
    peak: float = 0.0
    alarms: tuple[LoopAlarm, ...] = ()
    loader_s: float = 0.0


class Trajectory(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A sample: what was generated for a prompt, its reward, and the version of the weights that generated it."""

    prompt: str
    completion: str
    reward: float | None = None
    version: int | None = None


class Trajectories(Message, frozen=True):
    """Show the last samples of a rank; since its last such message it has had ``count`` of them, which may be more."""

    count: int
    samples: tuple[Trajectory, ...]


class LoopStep(Message, frozen=True):
    """Report the step that a rank is in, because it has reported nothing for a second and may hang."""

    request: int
    number: int
    step: int


class LoopLeft(Message, frozen=True):
    """Report that a rank has left a loop, of which it has started ``steps`` steps."""

    request: int
    number: int
    steps: int


class LoopPreempted(Message, frozen=True):
    """Report that SIGTERM ends a rank that is in a loop: all ranks of the loop save their work before the same step."""

    request: int
    number: int
