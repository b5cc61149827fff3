"""Stores of torch.distributed: keys, and requests that wait for keys."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_kernel.net.wire.codec import join, load, split
from monarch_kernel.net.wire.messages import Failed, Result, StoreCall
from monarch_kernel.runtime.rpc.stores import StoreTable


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
