"""Messages of process groups, snapshots and live loops."""

from __future__ import annotations

from typing import Literal

import msgspec

from monarch_kernel.net.wire.messages.base import Message, Payload

__all__ = [
    "Change",
    "FetchSnapshot",
    "FormGroup",
    "HostStore",
    "KeepSnapshot",
    "Knob",
    "ListSnapshots",
    "Logged",
    "LoopGrant",
    "LoopLeft",
    "LoopReport",
    "LoopStarted",
    "StoreCall",
    "StoreOperation",
]


StoreOperation = Literal["set", "get", "wait", "check", "add", "append", "compare_set", "delete", "count"]


# controller -> rank


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


class Change(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What takes effect at the beginning of a step: a knob that is turned, or, without a name, the end of the loop."""

    step: int
    name: str
    value: int | float | str | bool | None = None


class LoopGrant(Message, frozen=True):
    """Steps below ``horizon`` of a loop may begin (`LoopStarted`): `features.live.pace.Grant`. Has its own lane."""

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


# rank -> controller


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


class LoopStarted(Message, frozen=True):
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
