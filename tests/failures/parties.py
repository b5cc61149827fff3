"""Actors that export memory, and transfer bytes from and to the memory of others.

Their classes travel by value, once, so requests and results are plain tuples.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from monarch_kernel.actor import Actor, endpoint
from monarch_kernel.actor.channels import client_here
from monarch_kernel.errors import BufferGoneError
from monarch_kernel.rdma import Buffer, RDMAAction
from tests.failures.things import Content, Sketch, Thing

__all__ = ["CARRY_S", "Outcome", "Party", "Step"]

CARRY_S = 45.0
"""Deadline for a transfer, in seconds."""


class Step(NamedTuple):
    """A transfer to make.

    ``near`` describes the local end; ``content`` is the expected content, or the content to write.
    """

    buffer: Buffer
    near: Sketch
    content: Content
    is_write: bool


class Outcome(NamedTuple):
    """Result of a transfer: its data path or the reason why the buffer is gone, and any wrong bytes."""

    data_path: str
    nbytes: int
    gone: str
    wrong: str


class Party(Actor):
    """An actor that exchanges memory with others.

    It keeps no reference to exported memory, so only the export keeps the memory alive.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, weakref.ref[Any]] = {}

    @endpoint
    def lend(self, name: str, plain: Any, content: Content) -> Buffer:
        thing = Thing(Sketch(*plain))
        thing.fill(content)
        self._blocks[name] = weakref.ref(thing.block)
        return Buffer(thing.view())

    @endpoint
    def look(self, name: str, plain: Any, content: Content) -> str:
        """Compare exported memory with its expected content, at its owner; gives the difference."""
        block = self._blocks[name]()
        if block is None:
            return "the memory was freed while it is exported"
        return Thing(Sketch(*plain), block).difference(content)

    @endpoint
    def drop(self, buffer: Buffer) -> bool:
        return buffer.drop().get(CARRY_S)

    @endpoint
    def carry(self, plain: Sequence[Any], how: str) -> list[tuple[str, int, str, str]]:
        """Make transfers: one after the other, all at the same time, or as a batch."""
        steps = [Step(buffer, Sketch(*near), content, is_write) for buffer, near, content, is_write in plain]
        things = [Thing(step.near) for step in steps]
        for step, thing in zip(steps, things):
            if step.is_write:
                thing.fill(step.content)
        if how == "batch":
            return _batched(steps, things)
        futures: list[Any] = []
        for step, thing in zip(steps, things):
            futures.append(
                step.buffer.write_from(thing.view()) if step.is_write else step.buffer.read_into(thing.view())
            )
            if how == "in turn":
                futures[-1].wait(CARRY_S)
        return [_outcome(step, thing, future) for step, thing, future in zip(steps, things, futures)]

    @endpoint
    def tally(self) -> dict[str, int]:
        """Count what this process holds: descriptors by kind, threads by name, exports, and blocks that should be freed."""
        client_here().paths.close()  # frees what it keeps for the next transfer
        found: Counter[str] = Counter()
        for name in os.listdir("/proc/self/fd"):
            try:
                link = os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:  # the descriptor of the listing itself
                continue
            found["descriptor of " + re.sub(r"\d+", "N", link)] += 1
        found.update(f"thread {re.sub(r'[0-9]+', 'N', thread.name)}" for thread in threading.enumerate())
        if found["thread monarch-meters"]:  # there may be one, which ends a moment after the last transfer
            found["thread monarch-meters"] -= 1
        found["leases"] = len(client_here().exports)
        found["blocks"] = sum(block() is not None for block in self._blocks.values())
        return dict(found)


def _batched(steps: Sequence[Step], things: Sequence[Thing]) -> list[tuple[str, int, str, str]]:
    batch = RDMAAction()
    for step, thing in zip(steps, things):
        (batch.write_from if step.is_write else batch.read_into)(step.buffer, thing.view())
    future = batch.submit()
    try:
        transfers = future.get(CARRY_S)
    except BufferGoneError as error:  # one part is gone
        return [tuple(Outcome("", 0, str(error), "")) for _ in steps]
    return [
        tuple(Outcome(transfer.path, transfer.nbytes, "", _wrong(step, thing)))
        for step, thing, transfer in zip(steps, things, transfers)
    ]


def _outcome(step: Step, thing: Thing, future: Any) -> tuple[str, int, str, str]:
    try:
        transfer = future.get(CARRY_S)
    except BufferGoneError as error:
        return tuple(Outcome("", 0, str(error), ""))
    return tuple(Outcome(transfer.path, transfer.nbytes, "", _wrong(step, thing)))


def _wrong(step: Step, thing: Thing) -> str:
    """Compare the local end with its expected content, also after a write, which only reads from it."""
    return thing.difference(step.content)
