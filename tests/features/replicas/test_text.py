"""The result of a check as text and as a truth value; without ranks."""

from __future__ import annotations

from monarch_kernel.actor.replica_check import ReplicaCheck, axes_of, skipped_by
from monarch_kernel.features.replicas.compare import Copy, compare


def checked(*digests: bytes, n: int = 1, **fields: object) -> ReplicaCheck:
    """The check of n tensors of the variable m; each rank has another digest."""
    copies = {
        rank: [Copy(f"m.{each}", "tensor", None, (2,), "float32", digest) for each in range(n)]
        for rank, digest in enumerate(digests)
    }
    return ReplicaCheck("t", len(digests), ("m",), compare(copies), **fields)  # type: ignore[arg-type]


def test_counts_agree_with_verbs() -> None:
    assert "t: 1 tensor of m is equal on 2 ranks" in repr(checked(b"1", b"1"))
    assert "t: 2 tensors of m are equal on 2 ranks" in repr(checked(b"1", b"1", n=2))
    assert "t: 1 of 1 tensor of m differs between 2 ranks" in repr(checked(b"1", b"2"))
    assert "t: 2 of 2 tensors of m differ between 2 ranks" in repr(checked(b"1", b"2", n=2))


def test_nothing_is_equal_if_nothing_was_compared() -> None:
    assert checked(b"1", b"1").is_equal
    alone = checked(b"1")
    assert not alone.is_equal
    assert repr(alone) == (
        "t: nothing to compare in m on 1 rank, so is_equal is False; replicas are compared between at least 2 ranks"
    )
    shards = compare({rank: [Copy("m", "tensor", (((rank, rank + 1),),), (1,), "float32", b"1")] for rank in range(2)})
    sharded = ReplicaCheck("t", 2, ("m",), shards)
    assert not sharded.is_equal
    assert repr(sharded).endswith("so is_equal is False; 1 tensor without a replica, as each rank has another shard")
    assert not ReplicaCheck("t", 2, (), compare({})).is_equal
    empty = ReplicaCheck("t", 2, ("m",), compare({0: [], 1: []}))
    assert repr(empty) == "t: nothing to compare in m on 2 ranks, so is_equal is False; no tensor is in it"
    buffer = Copy("m.mean", "buffer", None, (2,), "float32", b"1")
    sharded = {
        rank: [Copy("m.w", "parameter", (((rank, rank + 1),),), (1,), "float32", b"1"), buffer] for rank in range(2)
    }
    of_buffers = ReplicaCheck("t", 2, ("m",), compare(sharded))
    assert not of_buffers.is_equal
    assert repr(of_buffers) == (
        "t: only buffers have replicas in m on 2 ranks, so is_equal is False; 1 tensor without a replica, as each rank has "
        "another shard"
    )
    alone_on_dp = ReplicaCheck("t", 2, ("m",), shards, alone_on="dp")
    assert repr(alone_on_dp).endswith("so is_equal is False; no two of these ranks lie along the axis dp")


def test_what_is_not_compared_is_named_once() -> None:
    skipped = skipped_by({0: {"lazy.weight": "not initialized", "x": "a lock"}, 1: {"lazy.weight": "not initialized"}})
    text = repr(checked(b"1", b"1", skipped=skipped))
    assert text.endswith("\nnot compared: lazy.weight (not initialized), x (a lock on [0])")
    assert repr(checked(b"1", b"1", skipped=dict.fromkeys("abcdef", "a lock"))).endswith(", d (a lock), and 2 more")


def test_variables_of_the_ranks_along_an_axis_follow_it() -> None:
    stages = {rank: [Copy(f"stage{rank // 2}.a", "parameter", None, (2,), "float32", b"1")] for rank in range(4)}
    indexes = {rank: {"pp": rank // 2, "dp": rank % 2} for rank in range(4)}
    assert axes_of(compare(stages).differences, indexes) == ("pp",)
    stages[1] = []
    assert axes_of(compare(stages).differences, indexes) == ()
