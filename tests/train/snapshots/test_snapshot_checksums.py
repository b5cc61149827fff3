"""Checksums of snapshots find a flipped bit, and are computed while training continues."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import nn

from monarch_kernel.net.wire.messages import KeepSnapshot, Payload, Rewind, SealSnapshot
from monarch_kernel.train.snapshots.buddy_store import Snapshots
from monarch_kernel.train.snapshots.capture import Captured, capture, names_at
from monarch_kernel.train.snapshots.snapshot_checksums import Sealer, seal_of, wrong_places

KEY = (7, 1, 40)


def taken() -> tuple[Captured, bytes]:
    """A snapshot, and its seal."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    captured = capture({"model": model, "optimizer": optimizer, "losses": [torch.ones(3)]})
    captured = captured._replace(elements=bytes(captured.elements))
    return captured, seal_of(captured.rest, captured.elements, captured.places)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_flipped_bit_of_any_tensor_is_found_and_named() -> None:
    captured, seal = taken()
    assert wrong_places(captured.rest, captured.elements, seal) == []
    names = set()
    for at, nbytes in captured.places:
        bit = random.Random(at).randrange(8 * at, 8 * (at + nbytes))
        changed = captured._replace(elements=flipped(bytes(captured.elements), bit))
        wrong = wrong_places(changed.rest, changed.elements, seal)
        assert wrong == [(at, nbytes)]
        (name,) = names_at(changed, wrong)
        names.add(name)
    assert len(names) == len(captured.places)
    assert {"model.0.weight", "model.1.running_mean", "losses.0", "random numbers.torch"} <= names
    assert any(name.startswith("optimizer.state.0.exp_avg") for name in names)


def test_a_flipped_bit_of_the_description_is_found() -> None:
    captured, seal = taken()
    for bit in random.Random(0).sample(range(8 * len(captured.rest)), 50):
        assert wrong_places(flipped(bytes(captured.rest), bit), captured.elements, seal) is None


def test_a_sealer_that_is_late_skips_all_but_the_newest() -> None:
    gate, sealed = threading.Event(), []

    def done(key: tuple[int, int, int], seal: bytes) -> None:
        gate.wait()
        sealed.append(key)

    sealer = Sealer(done)
    for step in range(5):
        sealer.submit((1, 1, step), b"rest", b"elements", [(0, 8)])
    gate.set()
    sealer.wait()
    assert sealed[-1] == (1, 1, 4)
    assert len(sealed) <= 3
    sealer.wait()


class _Buddy:
    """The connection to a buddy that answers with some frames."""

    def __init__(self, frames: tuple[bytes, ...]) -> None:
        self.frames = frames
        self.told: list[Any] = []

    def request(self, procs: Any, make: Any, description: str, finish: Any, **options: Any) -> Any:
        return self

    def get(self, timeout: float) -> Any:
        return self

    def tell(self, procs: Any, packed: Any) -> None:
        self.told.append(packed)


class _Rank:
    """A rank without a process."""

    def __init__(self, frames: tuple[bytes, ...] = ()) -> None:
        from types import SimpleNamespace

        self.spec = SimpleNamespace(proc=0, rank=0, world_size=2, local_world_size=2)
        self.peers = _Buddy(frames)
        self.rewind = None
        self.sent: list[Any] = []

    def extend(self, handlers: Any, **options: Any) -> None:
        pass

    def submit(self, function: Any) -> None:
        function()

    def send_answer_now(self, id: int, packed: Any) -> None:
        self.sent.append(packed)


REWIND = Rewind(0, KEY, (0, 1), False)


def test_a_damaged_snapshot_is_replaced_by_that_of_the_buddy() -> None:
    captured, seal = taken()
    rank = _Rank((bytes(captured.rest), bytes(captured.elements), seal))
    snapshots = Snapshots(rank)  # type: ignore[arg-type]
    snapshots.keep(KEY, captured, 2)
    assert snapshots._fetch(REWIND)[:2] == captured[:2]
    assert len(rank.peers.told) == 1
    kept = snapshots._kept[0][KEY]
    rest, elements = kept.frames
    snapshots._kept[0][KEY] = kept._replace(frames=(rest, flipped(bytes(elements), 99)))
    assert snapshots._fetch(REWIND)[:2] == captured[:2]
    rank.peers.frames = (bytes(rest), flipped(bytes(elements), 99), seal)
    with pytest.raises(RuntimeError) as caught:
        snapshots._fetch(REWIND)
    assert str(caught.value) == (
        "the snapshot of step 40 of rank 0 is damaged, and was not used: the checksum of model.0.weight is wrong. Go back to "
        "an earlier one (%mesh rollback STEP), or load a checkpoint"
    )


def test_a_buddy_keeps_the_seal_whichever_arrives_first() -> None:
    captured, seal = taken()
    for first in (True, False):
        rank = _Rank()
        snapshots = Snapshots(rank)  # type: ignore[arg-type]
        keep = KeepSnapshot(1, 1, KEY, 2, Payload(b"", 2))
        if first:
            snapshots._keep_seal(1, KEY, seal)
        snapshots._handle_keep(keep, (captured.rest, captured.elements))
        if not first:
            snapshots._keep_seal(1, KEY, seal)
        assert snapshots._seals[1][KEY] == seal
        assert SealSnapshot(1, KEY, seal).seal == seal
