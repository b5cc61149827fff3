"""Answers of ranks as a mesh of values: ranks that answer alike get equal values, but share no object that can change."""

from __future__ import annotations

import pytest

from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.errors import ActorError, Failure, SupervisionError
from monarch_kernel.net.wire.codec import dump
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.gather import gather, read_value


def value(thing: object) -> Value:
    payload, frames = dump(thing)
    return Value(payload, frames, {})


def region(size: int) -> Region:
    return Region.whole(Extent({"ranks": size}))


def test_ranks_that_answer_alike_have_separate_values() -> None:
    alike, other = value([1]), value(7)
    lists = gather(region(4), "the call", ActorError, read_value)([alike, alike, other, alike])
    assert list(lists.values()) == [[1], [1], 7, [1]]
    lists.item(ranks=0).append(2)
    assert list(lists.values()) == [[1, 2], [1], 7, [1]]


@pytest.mark.parametrize("thing", [None, True, 3, 0.5, "text", b"bytes", 1j])
def test_a_value_that_can_not_change_is_read_once(thing: object) -> None:
    alike, read = value(thing), []

    def count(answer: Value) -> object:
        read.append(answer)
        return read_value(answer)

    assert list(gather(region(3), "the call", ActorError, count)([alike, alike, alike]).values()) == [thing] * 3
    assert len(read) == 1


def test_failures_among_equal_answers_keep_their_ranks() -> None:
    alike = value(1)
    failure = Failure("exception", "ValueError", "odd")
    answers: list[Answer] = [alike, failure, alike, failure]
    with pytest.raises(ActorError) as caught:
        gather(region(4), "the call", ActorError, read_value)(answers)
    assert {point.rank: report for point, report in caught.value.reports.items()} == {1: failure, 3: failure}
    assert {point.rank: found for point, found in caught.value.results.items()} == {0: 1, 2: 1}


@pytest.mark.parametrize(
    ("needs_all", "way_out"),
    [
        (False, "[1] is gone; slice it out, or heal the mesh (.heal())"),
        (True, "[1] is gone, and it needs all ranks: heal the mesh (.heal())"),
    ],
)
def test_what_was_not_sent_says_how_to_go_on(needs_all: bool, way_out: str) -> None:
    answers: list[Answer] = [Failure("lost", "NotSent", ""), Failure("lost", "RankDied", "killed")]
    with pytest.raises(SupervisionError) as caught:
        gather(region(2), "fit failed", ActorError, read_value, needs_all=needs_all)(answers)
    assert caught.value.what == f"fit failed: it was not sent, because {way_out}"
