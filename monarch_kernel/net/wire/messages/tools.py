"""Messages of tools: edited modules, new shapes of state, the debugger, traffic."""

from __future__ import annotations

from typing import Any

import msgspec

from monarch_kernel.net.wire.messages.base import Message, Payload

__all__ = [
    "Carried",
    "Collected",
    "Conclude",
    "Continued",
    "DebugInput",
    "ListErrors",
    "ListModules",
    "Metered",
    "ModuleSource",
    "PostMortem",
    "ReadMeters",
    "Reload",
    "Reshaped",
    "SkipBreakpoint",
    "Stopped",
    "Sync",
]


# controller -> rank


class Reload(Message, frozen=True):
    """Prepare live classes to take over what new ones have; answer with the outcome (`features.editing.preview.EditPreview`).

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


class ReadMeters(Message, frozen=True):
    """Say what of your counts has changed (`Metered`), then answer, at once, whatever you do. Has its own lane."""

    id: int


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


class SkipBreakpoint(Message, frozen=True):
    """Nobody can be asked at prompt ``turn``: the code of request ``id`` says why, and goes on. Has its own lane."""

    id: int
    turn: int
    why: str


# rank -> controller


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


class Carried(msgspec.Struct, array_like=True, frozen=True):
    """What has gone from one process to another by a data path, since whoever counts it is there.

    ``seconds`` is how long it took, as far as that is known, of transfers at the same time together.
    """

    source: int
    target: int
    path: str
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
