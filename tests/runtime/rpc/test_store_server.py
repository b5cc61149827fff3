"""Stores of torch.distributed: keys, and requests that wait for keys."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_kernel.net.wire.codec import join, load, split
from monarch_kernel.net.wire.messages import Failed, Result, StoreCall
from monarch_kernel.runtime.rpc.store_server import StoreTable


@pytest.fixture
def table() -> StoreTable:
    table = StoreTable()
    table.open("s")
    return table


def hear(
    table: StoreTable, id: int, operation: Any, *keys: str, values: tuple[bytes, ...] = (), amount: int = 0
) -> Any:
    """Perform an operation; returns the answers by request: values, or the text of an error."""
    found = {}
    for answered, packed in table.handle(StoreCall(id, "s", operation, keys, values, amount)):
        ((message, frames),) = split(join([packed]))
        assert isinstance(message, (Result, Failed))
        assert message.id == answered
        found[answered] = message.failure.message if isinstance(message, Failed) else load(message.payload, frames)
    return found


def test_requests_wait_for_all_their_keys(table: StoreTable) -> None:
    assert hear(table, 1, "wait", "a", "b") == {}
    assert hear(table, 2, "get", "b") == {}
    assert table.n_waiting == 2
    assert hear(table, 3, "set", "a", values=(b"1",)) == {3: None}
    assert hear(table, 4, "add", "b", amount=2) == {4: 2, 1: None, 2: [b"2"]}
    assert table.n_waiting == 0


def test_a_request_whose_caller_gave_up_is_not_answered(table: StoreTable) -> None:
    hear(table, 1, "get", "a")
    table.forget(1)
    assert hear(table, 2, "append", "a", values=(b"x",)) == {2: None}
    assert hear(table, 3, "append", "a", values=(b"y",)) == {3: None}
    assert hear(table, 4, "get", "a") == {4: [b"xy"]}


def test_a_key_that_is_deleted_before_others_come_is_an_error(table: StoreTable) -> None:
    hear(table, 1, "set", "a", values=(b"",))
    hear(table, 2, "get", "a", "b")
    assert hear(table, 3, "delete", "a") == {3: True}
    assert hear(table, 4, "set", "b", values=(b"",)) == {4: None, 2: "the key 'a' was deleted"}


def test_a_comparison_decides_whether_a_key_is_set(table: StoreTable) -> None:
    assert hear(table, 1, "compare_set", "a", values=(b"other", b"new")) == {1: b"other"}
    assert hear(table, 2, "check", "a") == {2: False}
    assert hear(table, 3, "compare_set", "a", values=(b"", b"1")) == {3: b"1"}
    assert hear(table, 4, "compare_set", "a", values=(b"2", b"3")) == {4: b"1"}
    assert hear(table, 5, "compare_set", "a", values=(b"1", b"3")) == {5: b"3"}
    assert hear(table, 6, "count") == {6: 1}


def test_a_closed_store_answers_waiting_requests_and_refuses_others(table: StoreTable) -> None:
    hear(table, 1, "get", "a")
    ((id, packed),) = table.close("s")
    ((message, _),) = split(join([packed]))
    assert id == 1
    assert isinstance(message, Failed)
    assert "closed" in message.failure.message
    assert "closed" in hear(table, 2, "set", "a", values=(b"",))[2]
    assert table.close("s") == []
    assert len(table) == 0


def small(max_nbytes: int = 2000) -> StoreTable:
    table = StoreTable(max_nbytes)
    table.open("s")
    return table


def is_refused(answer: Any) -> bool:
    return isinstance(answer, str) and "may keep 2.0 KiB" in answer and "delete_key" in answer


@pytest.mark.parametrize(
    ("operation", "values"),
    [("set", (b"x" * 3000,)), ("append", (b"x" * 3000,)), ("compare_set", (b"", b"x" * 3000)), ("add", ())],
)
def test_a_full_store_refuses_what_makes_it_larger_and_keeps_the_rest(
    operation: str, values: tuple[bytes, ...]
) -> None:
    table = small()
    key = "k" if values else "k" * 3000
    assert hear(table, 1, "set", "a", values=(b"1",)) == {1: None}
    assert is_refused(hear(table, 2, operation, key, values=values)[2])
    assert hear(table, 3, "get", "a") == {3: [b"1"]}
    assert hear(table, 4, "count") == {4: 1}


def test_many_small_keys_fill_a_store_and_deleting_one_makes_room() -> None:
    table = small()
    answers = [hear(table, id, "set", f"{id}", values=(b"",))[id] for id in range(20)]
    n_kept = answers.count(None)
    assert 5 <= n_kept < 15
    assert all(map(is_refused, answers[n_kept:]))
    assert hear(table, 20, "set", "0", values=(b"1",)) == {20: None}  # no larger than before, but for a byte
    assert hear(table, 21, "delete", "1") == {21: True}
    assert hear(table, 22, "set", "new", values=(b"",)) == {22: None}


def test_values_that_are_replaced_and_deleted_take_no_room() -> None:
    table = small()
    for id in range(0, 500, 5):
        assert hear(table, id, "set", "a", values=(b"x" * 1000,)) == {id: None}
        assert hear(table, id + 1, "append", "a", values=(b"y" * 500,)) == {id + 1: None}
        assert hear(table, id + 2, "compare_set", "b", values=(b"", b"2")) == {id + 2: b"2"}
        assert hear(table, id + 3, "delete", "b") == {id + 3: True}
        assert hear(table, id + 4, "delete", "a") == {id + 4: True}


def test_requests_that_wait_take_room_until_they_end() -> None:
    table = small()
    answers = [hear(table, id, "wait", f"{id}" * 100) for id in range(10, 20)]
    assert any(map(is_refused, (each.get(id) for id, each in enumerate(answers, 10))))
    for id in range(10, 20):
        table.forget(id)
    for id in range(100, 600):  # each gives up before the key is there
        assert hear(table, id, "wait", "never") == {}
        table.forget(id)
    assert hear(table, 600, "wait", "a") == {}
    assert hear(table, 601, "set", "a", values=(b"x" * 1000,)) == {601: None, 600: None}


def test_two_requests_with_one_number_do_no_harm(table: StoreTable) -> None:
    hear(table, 1, "wait", "a")
    hear(table, 1, "wait", "b")
    assert hear(table, 2, "set", "a", values=(b"",)) == {2: None}
    assert hear(table, 3, "set", "b", values=(b"",)) == {3: None, 1: None}
