"""Texts of ranks are compared without what carries no meaning."""

from __future__ import annotations

import pytest

from monarch_kernel.base.steady_text import steady_message

PLACE = "[/src/gloo/gloo/transport/tcp/unbound_buffer.cc"
RECEIVES = f"{PLACE}:78] Timed out waiting 2000ms for recv operation"


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        (RECEIVES, f"{PLACE}:129] Timed out waiting 2000ms for send operation", True),
        (RECEIVES, f"{PLACE}:78] Timed out waiting 3000ms for recv operation", False),
        ("<Net at 0x7f00aa11>: no data", "<Net at 0x7f00bb22>: no data", True),
        ("peer [127.0.0.1]:5546 is gone", "peer [127.0.0.1]:5547 is gone", True),
        ("loss 0.25", "loss 0.26", False),
        ("[Rank 0] ALLREDUCE ran for 600012 milliseconds", "[Rank 1] ALLREDUCE ran for 600034 milliseconds", True),
        ("no batch after 1.5 s", "no batch after 1.52 s", True),
        ("diverged after 15 steps", "diverged after 16 steps", False),
        ("took 3 samples", "took 4 samples", False),
        ("rank 0: no shard", "rank 1: no shard", True),
        ("no shard of rank 1", "no shard of rank 1", False),
        ("got 12 bytes", "got 13 bytes", False),
        ("out of memory: tried 12 GiB", "out of memory: tried 13 GiB", True),
    ],
)
def test_messages_of_ranks_0_and_1_are_equal_without_what_varies(one: str, other: str, is_equal: bool) -> None:
    assert (steady_message(one, 0) == steady_message(other, 1)) is is_equal
