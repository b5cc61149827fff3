"""Messages of run records."""

from __future__ import annotations

from typing import NamedTuple

from monarch_kernel.net.wire.codec import add_messages
from monarch_kernel.net.wire.messages import Message

__all__ = ["DataFile", "EventNoted", "NoteState", "Noted", "SetRecording", "StateNoted", "Step"]


class SetRecording(Message, frozen=True):
    """Start or stop to note what a record needs; ``every`` is the number of steps between two hashes of the parameters."""

    is_on: bool
    every: int = 100


class NoteState(Message, frozen=True):
    """Ask for the state of the random generators before a cell. The main thread handles it in its turn."""

    cell: int


class StateNoted(Message, frozen=True):
    """The state of the random generators of a rank before a cell, by library, and the modules of the user that it has loaded.

    A state that the rank has sent before is empty. ``digests`` has the digest of each.
    """

    cell: int
    digests: dict[str, bytes]
    states: dict[str, bytes]
    files: dict[str, str]


class Step(NamedTuple):
    """Digests of one step of a loop: kind (``batch``, ``parameters``, ``generators``) -> 8 bytes."""

    step: int
    digests: dict[str, bytes]


class DataFile(NamedTuple):
    """A file that a data set reads: its path, size, time of change, and a hash of its first and its last MiB."""

    path: str
    nbytes: int
    changed_at: float
    hash: str


class Noted(Message, frozen=True):
    """What a rank has noted of a loop since its last note.

    ``sources`` describes data loaders that are new, and ``data_files`` the files that they read; ``files`` has path and hash
    of modules of the user that are new.
    """

    request: int
    number: int
    steps: tuple[Step, ...]
    sources: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    data_files: tuple[DataFile, ...] = ()


class EventNoted(Message, frozen=True):
    """Something happened on a rank, such as that a checkpoint is complete. ``request`` is 0 outside of a loop."""

    kind: str
    text: str
    request: int = 0
    number: int = 0
    step: int = -1


add_messages(SetRecording, NoteState, StateNoted, Noted, EventNoted)
