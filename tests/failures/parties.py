"""Actors that lend memory, and carry bytes from and to what others have lent.

Their classes travel by value, once; so what is sent to them, and comes back, are plain tuples.
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
from monarch_kernel.actor.channels import asker_here
from monarch_kernel.errors import BufferGoneError
from monarch_kernel.rdma import Buffer, RDMAAction
from tests.failures.things import Content, Sketch, Thing

__all__ = ["CARRY_S", "Outcome", "Party", "Step"]

CARRY_S = 45.0
"""By then every transfer has ended."""


class Step(NamedTuple):
    """A transfer to be made; ``near`` is the thing at the end of who makes it, ``content`` what is to be found, or written."""

    buffer: Buffer
    near: Sketch
    content: Content
    is_write: bool


class Outcome(NamedTuple):
    """What has come of one: which road it took, or why the buffer was gone, and what is wrong, if anything is."""

    road: str
    nbytes: int
    gone: str
    wrong: str


class Party(Actor):
    """One of those between whom bytes are carried. It keeps nothing that it lends: the loan does."""

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
        """What is wrong with memory that is lent, seen by its owner."""
        block = self._blocks[name]()
        if block is None:
            return "it was let go, and is lent"
        return Thing(Sketch(*plain), block).difference(content)

    @endpoint
    def drop(self, buffer: Buffer) -> bool:
        return buffer.drop().get(CARRY_S)

    @endpoint
    def carry(self, plain: Sequence[Any], how: str) -> list[tuple[str, int, str, str]]:
        """Make transfers: one after the other, all begun at first, or as a batch."""
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
        """What this process holds: descriptors by kind, threads by name, loans, and blocks that nobody should need."""
        asker_here().roads.close()  # what is kept for the next transfer
        found: Counter[str] = Counter()
        for name in os.listdir("/proc/self/fd"):
            try:
                link = os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:  # of the listing itself
                continue
            found["descriptor of " + re.sub(r"\d+", "N", link)] += 1
        found.update(f"thread {re.sub(r'[0-9]+', 'N', thread.name)}" for thread in threading.enumerate())
        found["loans"] = len(asker_here().lendings)
        found["blocks"] = sum(block() is not None for block in self._blocks.values())
        return dict(found)


def _batched(steps: Sequence[Step], things: Sequence[Thing]) -> list[tuple[str, int, str, str]]:
    batch = RDMAAction()
    for step, thing in zip(steps, things):
        (batch.write_from if step.is_write else batch.read_into)(step.buffer, thing.view())
    future = batch.submit()
    try:
        transfers = future.get(CARRY_S)
    except BufferGoneError as error:  # of one of them
        return [tuple(Outcome("", 0, str(error), "")) for _ in steps]
    return [
        tuple(Outcome(transfer.road, transfer.nbytes, "", _wrong(step, thing)))
        for step, thing, transfer in zip(steps, things, transfers)
    ]


def _outcome(step: Step, thing: Thing, future: Any) -> tuple[str, int, str, str]:
    try:
        transfer = future.get(CARRY_S)
    except BufferGoneError as error:
        return tuple(Outcome("", 0, str(error), ""))
    return tuple(Outcome(transfer.road, transfer.nbytes, "", _wrong(step, thing)))


def _wrong(step: Step, thing: Thing) -> str:
    """What is wrong at this end: also of what was only read from."""
    return thing.difference(step.content)
