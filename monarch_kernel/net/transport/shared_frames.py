"""Keeps large frames for processes of this machine in shared memory, and sends references in their place."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

from monarch_kernel.net.memory.layout import memory_of
from monarch_kernel.net.memory.mappings import Mappings
from monarch_kernel.net.memory.processes import is_ending
from monarch_kernel.net.memory.shared_blocks import STORED_NBYTES, Blocks, Reference, is_for_all
from monarch_kernel.net.transport.base import Peer
from monarch_kernel.net.wire.codec import PAYLOAD_STORE, Frame, Unreadable
from monarch_kernel.net.wire.tensor_frames import FOR_ALL

__all__ = ["for_all", "forget", "may_look_at", "may_look_at_parent", "refer", "resolve", "share"]

_ENDING_S = 10.0
"""How long a parent that is ending may take; it frees the memory of a whole Python process, which takes milliseconds."""

_MARK = 0xC1  # no msgpack value starts with it, so no header does
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[int, Reference])
_blocks = Blocks()
_mappings = Mappings()
os.register_at_fork(before=_blocks.before_fork, after_in_parent=_blocks.after_fork, after_in_child=_blocks.after_fork)


def share(in_memory: bool = True) -> None:
    """Check the size of values when they are pickled, and store large ones in shared memory if ``in_memory``."""
    PAYLOAD_STORE.check = _blocks.check
    PAYLOAD_STORE.is_for_all = is_for_all
    if in_memory:
        PAYLOAD_STORE.keep = _blocks.store
        PAYLOAD_STORE.from_nbytes = STORED_NBYTES


def for_all(value: memoryview) -> memoryview:
    """Copy bytes into memory that processes of this machine share when a value in it is sent to them.

    Raises:
        MemoryError: there is not enough memory; the text has the figures.
    """
    _blocks.check(value.nbytes)
    block = _blocks.store([value], is_for_all=True)
    FOR_ALL[memory_of(block).address] = block.obj
    return block


def may_look_at(pid: int) -> bool:
    """Whether the Linux kernel lets this process open files of another, such as anonymous memory files."""
    try:
        os.readlink(f"/proc/{pid}/fd/0")
    except PermissionError:
        return False
    except OSError:  # access is allowed, but there is no such file
        pass
    return True


def may_look_at_parent() -> bool:
    """Whether the Linux kernel lets this process open files of its parent, such as anonymous memory files.

    A parent that is ending refuses access, whatever it allowed before. This process then gets another parent, which is checked
    instead.
    """
    deadline = time.monotonic() + _ENDING_S
    while True:
        parent = os.getppid()
        may = may_look_at(parent)
        if os.getppid() == parent and (may or not is_ending(parent) or time.monotonic() > deadline):
            return may
        time.sleep(0.0005)


def refer(parts: Sequence[Frame], peer: Peer) -> Sequence[Frame]:
    """Replace the frames of a message that are in shared memory by references, for a process of this machine."""
    references: dict[int, Reference] = {}
    for i, part in enumerate(parts):
        if type(part) is memoryview and (len(part) >= STORED_NBYTES or is_for_all(part)):
            reference = _blocks.refer(part, peer)
            if reference is not None:
                references[i] = reference
    if not references:
        return parts
    rest = [b"" if i in references else part for i, part in enumerate(parts)]
    return [bytes((_MARK,)) + _encoder.encode(references), *rest]


def resolve(parts: list[Frame], peer: Peer) -> list[Frame]:
    """Open the referenced frames of a message of another process of this machine; a lost one becomes an `Unreadable`."""
    if len(parts) < 2 or not parts[0] or parts[0][0] != _MARK:
        return parts
    rest = parts[1:]
    try:
        references = _decoder.decode(parts[0][1:])
    except msgspec.DecodeError:
        return rest
    for i, reference in references.items():
        try:
            rest[i] = _mappings.open(reference, peer)
        except OSError as error:
            rest[i] = Unreadable((error.strerror or str(error)).encode())
    return rest


def forget(peer: Peer) -> None:
    """Release what is kept for a process that has died."""
    _mappings.forget(peer)
    _blocks.forget(peer)
