"""Which calls of collectives fit together, as pure data."""

from __future__ import annotations

import os
from itertools import permutations
from pathlib import Path

import pytest

from monarch_kernel.train.process_group.call_check import Budget
from monarch_kernel.train.process_group.call_page import CallPage, Message, Published
from monarch_kernel.train.process_group.collective_calls import (
    Arguments,
    Call,
    Tensor,
    describe,
    difference,
    is_dense,
    message_mismatch_text,
    mismatch_text,
)


def tensor(*shape: int, dtype: str = "float32") -> Tensor:
    return Tensor(dtype, shape)


def given(*inputs: Tensor, to: tuple[Tensor, ...] = (), **rest: object) -> Arguments:
    return Arguments(inputs, to, **rest)  # type: ignore[arg-type]


F4, I4, D4 = tensor(4), tensor(4, dtype="int32"), tensor(4, dtype="float64")
SPARSE = Tensor("float32", (4,), "sparse_coo")
TURNED = Tensor("float32", (3, 2), "", (1, 3))

DIFFERENT = [
    ("all_reduce", given(F4, op="sum"), given(I4, op="sum"), "dtypes"),
    ("all_reduce", given(F4, op="sum"), given(tensor(8), op="sum"), "sizes"),
    ("all_reduce", given(tensor(2, 6), op="sum"), given(tensor(3, 4), op="sum"), "shapes"),
    ("all_reduce", given(F4, op="sum"), given(F4, op="max"), "reductions"),
    ("all_reduce", given(F4, F4, op="sum"), given(F4, op="sum"), "numbers of tensors"),
    ("all_reduce", given(F4, I4, op="sum"), given(I4, F4, op="sum"), "dtypes"),
    ("all_reduce", given(*[F4] * 20, op="sum"), given(*[F4] * 21, op="sum"), "numbers of tensors"),
    ("all_reduce", given(F4, op="sum"), given(SPARSE, op="sum"), "layouts"),
    ("all_reduce", given(tensor(3, 2), op="sum"), given(TURNED, op="sum"), "strides"),
    ("message", given(F4), given(I4), "dtypes"),
    ("message", given(F4), given(tensor(8)), "sizes"),
    ("message", given(tensor(2, 6)), given(tensor(3, 4)), "shapes"),
    ("broadcast", given(F4, root=0), given(D4, root=0), "dtypes"),
    ("broadcast", given(F4, root=0), given(F4, root=1), "roots"),
    ("reduce", given(F4, root=0, op="sum"), given(tensor(5), root=0, op="sum"), "sizes"),
    ("all_gather", given(F4, to=(F4, F4)), given(tensor(5), to=(tensor(5), tensor(5))), "sizes"),
    ("all_gather", given(F4, to=(tensor(8),)), given(I4, to=(tensor(8, dtype="int32"),)), "dtypes"),
    ("all_gather", given(F4), given(tensor(5)), "sizes"),  # functional: the output is not an argument
    ("reduce_scatter", given(F4, F4, to=(F4,), op="sum"), given(D4, D4, to=(D4,), op="sum"), "dtypes"),
    ("reduce_scatter", given(tensor(8), op="sum"), given(F4, op="sum"), "sizes"),
    ("gather", given(F4, to=(F4, F4), root=0), given(tensor(5), root=0), "sizes"),
    ("scatter", given(F4, F4, to=(F4,), root=0), given(to=(tensor(5),), root=0), "sizes"),
    ("scatter", given(F4, F4, to=(F4,), root=0), given(to=(I4,), root=0), "dtypes"),
    ("all_to_all", given(F4, to=(F4,)), given(tensor(8), to=(tensor(8),)), "sizes"),
    ("all_to_all", given(F4, to=(F4,), sent=(1, 3), received=(1, 3)), given(F4, to=(F4,)), "sizes"),
    ("all_to_all", given(F4, to=(F4,)), given(I4, to=(I4,)), "dtypes"),
]

FITTING = [
    ("all_reduce", given(F4, op="sum"), given(F4, op="sum")),
    ("all_reduce", given(tensor(), op="sum"), given(tensor(1), op="sum")),
    ("all_reduce", given(tensor(2, 1, 6), op="sum"), given(tensor(2, 6), op="sum")),
    ("all_reduce", given(tensor(2, 6), op="sum"), given(tensor(12), op="sum")),
    ("all_reduce", given(tensor(0), op="sum"), given(tensor(0, 3, dtype="int32"), op="sum")),
    ("all_reduce", given(SPARSE, op="sum"), given(SPARSE, op="sum")),
    ("all_reduce", given(TURNED, op="sum"), given(TURNED, op="sum")),
    ("all_reduce", given(TURNED, op="sum"), given(Tensor("float32", (3, 1, 2), "", (1, 1, 3)), op="sum")),
    ("message", given(tensor(2, 6)), given(tensor(12))),
    ("message", given(tensor(0)), given(tensor(0, dtype="int32"))),
    ("broadcast", given(tensor(2, dtype="complex64"), root=0), given(tensor(2, 2), root=0)),
    ("barrier", given(), given()),
    ("all_gather", given(F4, to=(F4, tensor(5))), given(tensor(5), to=(F4, tensor(5)))),
    ("all_gather", given(F4, to=(F4, F4)), given(F4, to=(tensor(8),))),
    ("reduce_scatter", given(F4, F4, to=(F4,), op="sum"), given(tensor(8), to=(F4,), op="sum")),
    ("gather", given(F4, to=(F4, tensor(5)), root=0), given(tensor(5), root=0)),
    ("scatter", given(F4, tensor(5), to=(F4,), root=0), given(to=(tensor(5),), root=0)),
    (
        "all_to_all",
        given(tensor(4, 3), to=(tensor(3, 3),), sent=(1, 3), received=(1, 2)),
        given(tensor(2, 3), to=(tensor(3, 3),), sent=(2, 0), received=(3, 0)),
    ),
    ("all_to_all", given(F4, to=(F4,), sent=(2, 2), received=(2, 2)), given(F4, to=(F4,))),
    ("all_to_all", given(F4, tensor(1), to=(F4, tensor(2))), given(tensor(2), F4, to=(tensor(1), F4))),
]


def calls(operation: str, first: Arguments, second: Arguments) -> tuple[Call, Call]:
    return describe(operation, first, 0, 2), describe(operation, second, 1, 2)


@pytest.mark.parametrize(("operation", "first", "second", "what"), DIFFERENT)
def test_calls_that_differ_are_found_by_both_ranks(
    operation: str, first: Arguments, second: Arguments, what: str
) -> None:
    one, other = calls(operation, first, second)
    assert difference(one, 0, other, 1) == difference(other, 1, one, 0) == what
    assert one.encode() != other.encode()


@pytest.mark.parametrize(("operation", "first", "second"), FITTING)
def test_calls_that_fit_are_not_refused(operation: str, first: Arguments, second: Arguments) -> None:
    one, other = calls(operation, first, second)
    assert difference(one, 0, other, 1) == difference(other, 1, one, 0) == ""


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((3, 2), (1, 3), True),
        ((2, 3, 4), (1, 8, 2), True),
        ((3, 1, 2), (1, 99, 3), True),
        ((4,), (2,), False),
        ((3, 2), (4, 1), False),
        ((3, 2), (0, 1), False),
    ],
)
def test_a_dense_tensor_has_no_gaps(shape: tuple[int, ...], strides: tuple[int, ...], dense: bool) -> None:
    assert is_dense(shape, strides) is dense


def test_every_two_collectives_differ() -> None:
    kinds = [describe(operation, first, 0, 2) for operation, first, _ in FITTING]
    for one, other in permutations(kinds, 2):
        if one.operation != other.operation:
            assert difference(one, 0, other, 1) == "collectives"


@pytest.mark.parametrize(("operation", "first", "second"), [case[:3] for case in [*DIFFERENT, *FITTING]])
def test_a_call_survives_its_bytes(operation: str, first: Arguments, second: Arguments) -> None:
    for call in calls(operation, first, second):
        assert Call.decode(call.encode()) == call
        assert call.text((0, 1)).startswith(operation)


def test_equal_calls_with_splits_may_not_fit() -> None:
    splits = given(tensor(6), to=(tensor(6),), sent=(1, 2, 3), received=(1, 2, 3))
    calls = {rank: (describe("all_to_all", splits, rank, 3), "line 3") for rank in range(3)}
    assert all(call.is_uneven for call, _ in calls.values())
    assert difference(calls[0][0], 0, calls[1][0], 1) == "sizes"
    text = mismatch_text(calls, "sizes", (4, 5, 6), "", 1)
    assert text.splitlines()[1:] == [
        "  [4-6] all_to_all of float32 (6), sends 1+2+3 elements, expects 1+2+3 elements: line 3",
        "  [4] sends 2 elements to [5], which expects 1",
    ]


def test_lists_that_torch_refuses_are_not_compared() -> None:
    few = describe("scatter", given(F4, to=(F4,), root=0), 0, 2)
    assert not difference(few, 0, describe("scatter", given(to=(F4,), root=0), 1, 2), 1)
    few = describe("gather", given(F4, to=(F4,), root=0), 0, 2)
    assert not difference(few, 0, describe("gather", given(F4, root=0), 1, 2), 1)


def test_the_text_has_each_call_with_its_ranks_and_line() -> None:
    one = describe("reduce", given(tensor(2, 6), root=1, op="sum"), 0, 4)
    other = describe("reduce", given(tensor(3, 4), root=1, op="sum"), 1, 4)
    found = {0: (one, "cell [3], line 2"), 1: (other, "cell [3], line 4"), 2: (one, "cell [3], line 2")}
    assert mismatch_text(found, "shapes", (4, 5, 6, 7), "tp", 9).splitlines() == [
        "the ranks of the process group 'tp' call reduce with different shapes (its collective 9); it was refused",
        "  [4,6] reduce of float32 (2, 6), sum, to rank 5: cell [3], line 2",
        "  [5] reduce of float32 (3, 4), sum, to rank 5: cell [3], line 4",
        "  [7] had not called it yet, or can't be compared",
    ]
    uneven = describe("all_to_all", given(F4, to=(F4,), sent=(1, 3), received=(2, 2)), 0, 2)
    assert uneven.text((0, 1)) == "all_to_all of float32 (4), sends 1+3 elements"


def test_the_headline_has_all_that_differs() -> None:
    of = [describe("all_reduce", given(each, op="sum"), 0, 3) for each in (tensor(4), tensor(8), tensor(4))]
    other = describe("all_reduce", given(tensor(4), op="max"), 2, 3)
    calls = {0: (of[0], "a"), 1: (of[1], "b"), 2: (other, "c")}
    text = mismatch_text(calls, "sizes", (0, 1, 2), "", 3)
    assert "call all_reduce with different sizes and reductions (its collective 3)" in text
    barrier = describe("barrier", given(), 3, 4)
    text = mismatch_text({**calls, 3: (barrier, "d")}, "collectives", (0, 1, 2, 3), "", 3)
    assert "call different collectives (its collective 3)" in text


# -- the page


@pytest.fixture
def pages(tmp_path: Path) -> list[CallPage]:
    return [CallPage(str(tmp_path / "page"), rank, 3) for rank in range(3)]


def published(operation: str = "all_reduce", *inputs: Tensor, line: str = "cell [1], line 2") -> Published:
    return Published(describe(operation, given(*inputs or (F4,), op="sum"), 0, 3), line)


def test_the_last_rank_that_maps_the_page_removes_its_name(pages: list[CallPage], tmp_path: Path) -> None:
    assert os.listdir(tmp_path) == []


def test_a_rank_finds_another_call_that_was_there_before(pages: list[CallPage]) -> None:
    assert not pages[0].publish(1, 0, published())
    assert not pages[1].publish(1, 0, published(line="cell [1], line 7"))
    assert pages[2].publish(1, 0, published("all_reduce", I4))
    found = pages[2].calls(1, 0)
    assert {rank: (call.tensors[0].dtype, line) for rank, (call, line) in found.items()} == {
        0: ("float32", "cell [1], line 2"),
        1: ("float32", "cell [1], line 7"),
        2: ("int32", "cell [1], line 2"),
    }


def test_calls_with_other_numbers_are_not_compared(pages: list[CallPage]) -> None:
    assert not pages[0].publish(1, 0, published())
    assert not pages[1].publish(2, 0, published("all_reduce", I4))
    assert not pages[1].publish(65, 0, published("all_reduce", I4))  # in the same slot, 64 collectives later
    assert set(pages[0].calls(1, 0)) == {0}


def test_ranks_that_have_missed_other_numbers_of_collectives_are_not_compared(pages: list[CallPage]) -> None:
    pages[0].publish(7, 3, published())
    pages[1].publish(7, 2, published("all_reduce", I4))
    assert set(pages[1].calls(7, 2)) == {1}


def test_a_withdrawn_call_is_not_compared(pages: list[CallPage]) -> None:
    pages[0].publish(1, 0, published("barrier"))
    pages[0].retract(1)
    assert not pages[1].publish(1, 0, published())


def test_a_record_that_is_being_overwritten_is_ignored(pages: list[CallPage]) -> None:
    pages[0].publish(1, 0, published())
    start = pages[0]._records + 512 * 3  # of number 1
    pages[0]._map[start + 10 : start + 12] = b"??"
    assert pages[1].publish(1, 0, published("all_reduce", I4))
    assert set(pages[1].calls(1, 0)) == {1}


def test_a_call_that_does_not_fit_into_the_page_is_not_compared(pages: list[CallPage]) -> None:
    huge = published("all_reduce", *[tensor(*range(1, 60))] * 6)
    pages[0].publish(1, 0, huge)
    pages[1].publish(1, 0, published("all_reduce"))
    assert set(pages[1].calls(1, 0)) == {1}
    long_line = published(line="x" * 1000)
    pages[0].publish(2, 0, long_line)
    call, line = pages[1].calls(2, 0)[0]
    assert call == long_line.call
    assert line == long_line.line
    assert 100 < len(line) < 1000


def test_the_text_of_the_first_refusal_is_that_of_all(pages: list[CallPage]) -> None:
    assert [page.refusal for page in pages] == [""] * 3
    assert pages[1].refuse("different dtypes") == "different dtypes"
    assert pages[2].refuse("something else") == "different dtypes"
    assert [page.refusal for page in pages] == ["different dtypes"] * 3
    assert pages[0].is_refused


# -- messages in the page


def message(*inputs: Tensor, line: str = "cell [1], line 2") -> Published:
    return Published(describe("message", given(*inputs or (F4,)), 0, 1), line)


def test_the_second_of_two_ranks_finds_a_message_that_differs(pages: list[CallPage]) -> None:
    first = Message(source=0, target=2, tag=5, number=1)
    assert pages[0].messages.publish(first, message(line="cell [1], line 7")) is None
    found = pages[2].messages.publish(first, message(I4))
    assert found is not None
    assert found[0].tensors == (F4,)
    assert found[1] == "cell [1], line 7"
    assert pages[2].messages.publish(first, message()) is None


@pytest.mark.parametrize(
    "other",
    [
        Message(0, 2, 5, 2),
        Message(0, 2, 6, 1),
        Message(0, 2, 5, 65),  # in the same place
        Message(1, 2, 5, 1),
        Message(2, 0, 5, 1),
    ],
)
def test_other_messages_are_not_compared(pages: list[CallPage], other: Message) -> None:
    pages[0].messages.publish(Message(0, 2, 5, 1), message())
    assert pages[2].messages.publish(other, message(I4)) is None


def test_a_message_with_its_own_sender_is_not_its_receiver(pages: list[CallPage]) -> None:
    pages[0].messages.publish(Message(0, 2, 0, 1), message())
    assert pages[0].messages.publish(Message(0, 2, 0, 1), message(I4)) is None


def test_a_withdrawn_message_is_not_compared(pages: list[CallPage]) -> None:
    first = Message(0, 1, 0, 1)
    pages[0].messages.publish(first, message())
    pages[0].messages.retract(first)
    assert pages[1].messages.publish(first, message(I4)) is None


@pytest.mark.parametrize("marked", [0, 1])
def test_messages_of_a_rank_that_can_not_number_them_are_not_compared(pages: list[CallPage], marked: int) -> None:
    pages[0].messages.publish(Message(0, 1, 0, 1), message())
    pages[marked].messages.mark()
    assert pages[1].messages.publish(Message(0, 1, 0, 1), message(I4)) is None
    pages[0].messages.publish(Message(0, 2, 0, 1), message())
    assert (pages[2].messages.publish(Message(0, 2, 0, 1), message(I4)) is None) == (marked == 0)


def test_huge_tags_and_calls_are_not_compared(pages: list[CallPage]) -> None:
    for each, published_first in (
        (Message(0, 1, 1 << 30, 1), message()),
        (Message(0, 1, 0, 1), message(*[tensor(*range(1, 60))] * 6)),
    ):
        pages[0].messages.publish(each, published_first)
        assert pages[1].messages.publish(each, message(I4)) is None


def test_the_text_of_a_message_has_both_calls() -> None:
    sent, received = (describe("message", given(each), 0, 1) for each in (F4, tensor(8)))
    text = message_mismatch_text((sent, "cell [3], line 2"), (received, "cell [3], line 4"), "sizes", 4, 6, "", 3)
    first = "two ranks of the default process group call send and recv of one message with tag 3 with different sizes"
    assert text.splitlines() == [
        f"{first}; it was refused",
        "  [4] send of float32 (4), to rank 6: cell [3], line 2",
        "  [6] recv of float32 (8), from rank 4: cell [3], line 4",
    ]


# -- the budget


def test_comparisons_are_limited_in_a_fast_loop_and_come_back_in_a_pause() -> None:
    budget = Budget()
    spent = [budget.spend(1 + i / 10_000) for i in range(100_000)]  # 10 s, 10,000 a second
    assert all(spent[:100])
    assert sum(spent) <= 100 + 10 * 400
    runs = "".join("x" if each else " " for each in spent).split()
    assert min(map(len, runs[:-1])) >= 90  # in a row, so that ranks in step compare the same calls
    assert all(budget.spend(12 + i / 10_000) for i in range(100))


def test_a_budget_that_is_used_up_says_when_it_resumes() -> None:
    budget = Budget()
    assert sum(budget.spend(1.0) for _ in range(101)) == 100
    assert budget.resumes_at == pytest.approx(1.25)
    assert not budget.spend(budget.resumes_at - 1e-6)
    assert budget.spend(budget.resumes_at)


def test_all_are_compared_in_a_slow_loop() -> None:
    budget = Budget()
    assert all(budget.spend(i / 300) for i in range(10_000))
