"""Messages of tools: edits of classes and modules, the debugger, and traffic counts."""

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
    """Prepare an edit that gives live classes the members of new ones; answered with a `features.editing.preview.EditPreview`.

    ``payload`` is ``(output of dump_classes, text of their cells)``. ``edit`` is the number by which `Conclude` names the edit.
    ``names`` has classes that cells have defined again on the rank itself.
    """

    id: int
    edit: int
    payload: Payload
    names: tuple[str, ...] = ()


class ModuleSource(msgspec.Struct, array_like=True, frozen=True):
    """A module of the user: its file on the controller's machine, and its text; both are empty for a namespace package."""

    name: str
    file: str
    text: str
    is_package: bool


class Sync(Message, frozen=True):
    """Prepare to reload the imported modules that differ from these, and their dependents; answered as `Reload` is.

    When the rank imports another of these modules, it asks for the module (`Fetch`). ``edit`` is as in `Reload`.
    """

    id: int
    edit: int
    modules: tuple[ModuleSource, ...]


class ListModules(Message, frozen=True):
    """Ask for the names of the user's modules that the rank has imported."""

    id: int


class Reshaped(Message, frozen=True):
    """Report the endpoints of an actor's reloaded class, called ``kind``, to the handles of the actor. Handled out of band."""

    actor: int
    kind: str
    outlines: tuple[tuple[Any, ...], ...]


class Conclude(Message, frozen=True):
    """Apply a prepared edit if ``keep``, else drop it and change nothing; id 0 means no answer."""

    id: int
    edit: int
    keep: bool


class ReadMeters(Message, frozen=True):
    """Ask for the changed counts (`Metered`), which arrive before the answer, whatever runs. Handled out of band."""

    id: int


class ListErrors(Message, frozen=True):
    """Ask for the list of the errors that the rank keeps (`KeptError`), whatever runs. Handled out of band."""

    id: int


class PostMortem(Message, frozen=True):
    """Open the debugger where ``request`` failed; answered when the user leaves the debugger."""

    id: int
    request: int


class DebugInput(Message, frozen=True):
    """Send a line for prompt ``turn`` of the debugger in request ``id``; empty for the end of input. Handled out of band."""

    id: int
    turn: int
    line: str


class SkipBreakpoint(Message, frozen=True):
    """Refuse to ask a user at prompt ``turn``: the code of request ``id`` prints ``why`` and continues. Handled out of band."""

    id: int
    turn: int
    why: str


# rank -> controller


class Stopped(Message, frozen=True):
    """Report that the code of request ``id`` waits for a line of input in the debugger, at ``where``, and has printed ``text``.

    ``turn`` grows with each prompt. ``begins`` is set if the code was running before, and not between two debugger commands.
    """

    id: int
    turn: int
    where: str
    text: str
    prompt: str
    begins: bool
    written: tuple[int, int] = (0, 0)


class Continued(Message, frozen=True):
    """Report that the code of request ``id`` has left the debugger and continues."""

    id: int
    written: tuple[int, int] = (0, 0)


class Carried(msgspec.Struct, array_like=True, frozen=True):
    """Transfers from one process to another by a data path, since the process that counts them has started.

    ``seconds`` is the sum of the known durations; transfers at the same time are added, too.
    """

    source: int
    target: int
    path: str
    nbytes: int
    operations: int
    seconds: float


class Collected(msgspec.Struct, array_like=True, frozen=True):
    """A rank's collectives of one kind in a process group of ``ranks`` ranks, by a data path such as ``gloo``.

    ``seconds`` is how long Python waited in them. ``nbytes_in`` and ``nbytes_out`` are what the rank received and sent, as
    `features.traffic.bandwidth.moved` defines it. ``timed_nbytes`` is the size of those whose duration is known, and
    ``timed_s`` is their duration.
    """

    group: str
    operation: str
    nbytes: int
    operations: int
    seconds: float
    path: str = ""
    ranks: int = 0
    nbytes_in: int = 0
    nbytes_out: int = 0
    timed_nbytes: int = 0
    timed_s: float = 0.0

    def with_short_names(self, length: int) -> Collected:
        """The same counts, with names of at most so many characters."""
        if max(len(self.group), len(self.operation), len(self.path)) <= length:
            return self
        group, operation, path = (name[:length] for name in (self.group, self.operation, self.path))
        return msgspec.structs.replace(self, group=group, operation=operation, path=path)


class Metered(Message, frozen=True):
    """Report the counts that have changed in the last ``over_s`` seconds, with their current values.

    ``unread`` is the number of collectives in no count. ``is_repeat`` is set if the report has all counts for a new controller,
    also those that have not changed. The first report has ``links``, those of the machine and of the GPU whose speed is known:
    name, and bytes per second in each direction.
    """

    carried: tuple[Carried, ...]
    over_s: float
    collected: tuple[Collected, ...] = ()
    unread: int = 0
    is_repeat: bool = False
    links: tuple[tuple[str, float], ...] = ()
