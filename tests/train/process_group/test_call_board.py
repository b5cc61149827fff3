"""Calls of collectives that ranks of different hosts publish in the store of their group, with a store of torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from monarch_kernel.train.process_group.call_board import CallBoard
from monarch_kernel.train.process_group.call_page import Message, Published
from monarch_kernel.train.process_group.collective_calls import Arguments, Tensor, describe

FLOATS = Published(describe("all_reduce", Arguments((Tensor("float32", (4,)),), op="sum"), 0, 2), "line 3")
INTS = Published(describe("all_reduce", Arguments((Tensor("int32", (4,)),), op="sum"), 1, 2), "line 5")


class Broken:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        raise dist.DistNetworkError("it is gone")


@pytest.fixture
def store() -> Any:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


def test_the_later_rank_gets_the_call_of_the_first_one(store: Any) -> None:
    first, later = CallBoard(store, 0), CallBoard(store, 1)
    assert first.publish(7, 0, FLOATS) is None
    assert later.publish(7, 0, INTS) == (0, FLOATS.call, "line 3")
    assert later.publish(8, 0, INTS) is None
    assert first.publish(8, 0, FLOATS) == (1, INTS.call, "line 5")


def test_calls_after_other_numbers_of_uncompared_collectives_are_not_compared(store: Any) -> None:
    CallBoard(store, 0).publish(7, 0, FLOATS)
    assert CallBoard(store, 1).publish(7, 1, INTS) is None


def test_a_withdrawn_call_is_not_compared(store: Any) -> None:
    first = CallBoard(store, 0)
    first.publish(7, 0, FLOATS)
    first.retract(7)
    assert CallBoard(store, 1).publish(7, 0, INTS) is None


def test_the_later_rank_of_a_message_gets_the_call_of_the_other_one(store: Any) -> None:
    sender, receiver = CallBoard(store, 0), CallBoard(store, 1)
    message = Message(0, 1, 0, 1)
    assert receiver.publish_message(message, INTS) is None
    assert sender.publish_message(message._replace(tag=3), FLOATS) is None
    assert sender.publish_message(message, FLOATS) == (INTS.call, "line 5")
    sender.retract(message._replace(tag=3))
    assert receiver.publish_message(message._replace(tag=3), INTS) is None


def test_the_store_keeps_a_bounded_number_of_calls(store: Any) -> None:
    board = CallBoard(store, 0)
    for number in range(200):
        board.publish(number, 0, FLOATS)
    assert store.num_keys() <= 66


def test_the_text_of_the_first_refusal_is_that_of_all(store: Any) -> None:
    first, later = CallBoard(store, 0), CallBoard(store, 1)
    assert first.refusal == ""
    assert later.refuse("different dtypes") == "different dtypes"
    assert first.refuse("different sizes") == "different dtypes"
    assert first.refusal == "different dtypes"


def test_without_a_store_nothing_is_compared() -> None:
    board = CallBoard(Broken(), 0)
    assert board.publish(1, 0, FLOATS) is None
    assert board.refusal == ""
    assert board.refuse("different dtypes") == "different dtypes"
