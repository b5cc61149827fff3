"""Streams: which tensors an operation may use, and what a borrow forbids; on a rank in this process."""

from __future__ import annotations

import pytest
import torch

from monarch_kernel.tensor import Stream, TensorError, get_active_stream, inspect
from tests.tensor.in_process import InProcess


@pytest.fixture
def comm() -> Stream:
    """Another stream than the default one."""
    return Stream("comm")


def test_tensors_of_two_streams_do_not_mix(active: InProcess, comm: Stream) -> None:
    x = torch.ones(2)
    assert get_active_stream().name == "main"
    with comm.activate():
        assert get_active_stream().name == "comm"
        y = torch.ones(2)
        assert inspect(y + y).tolist() == [2, 2]
    with pytest.raises(
        TensorError, match=r"two streams, 'main' and 'comm': lend one to the other stream with stream.borrow"
    ):
        x + y
    assert inspect(x + torch.ones(2)).tolist() == [2, 2]


def test_a_borrow_shares_memory_and_nothing_may_write_to_it(active: InProcess, comm: Stream) -> None:
    x = torch.ones(2)
    lent, borrow = comm.borrow(x)
    assert inspect(lent + lent).tolist() == [2, 2]
    assert inspect(x + x).tolist() == [2, 2]
    for tensor in (x, lent):
        with pytest.raises(
            TensorError, match=r"torch.add_ can.t write to a tensor: it would be mutated while it is lent"
        ):
            tensor.add_(1)
    with pytest.raises(TensorError, match="can't be lent mutably while it is lent"):
        Stream("third").borrow(x, mutable=True)
    borrow.drop()
    borrow.drop()
    x.add_(1)
    assert inspect(x).tolist() == [2, 2]


def test_a_mutable_borrow_is_the_only_one_that_may_be_used(active: InProcess, comm: Stream) -> None:
    x = torch.ones(2)
    lent, borrow = comm.borrow(x, mutable=True)
    with borrow:
        lent.mul_(5)
        for use in (lambda: x + 1, lambda: inspect(x), lambda: comm.borrow(x)):
            with pytest.raises(TensorError, match=r"can't be used while it is lent to stream 'comm' in .*, mutably"):
                use()
        assert "can't be used while it is lent" in repr(x)
    assert inspect(x).tolist() == [5, 5]


def test_a_dropped_borrow_names_the_line_that_dropped_it(active: InProcess, comm: Stream) -> None:
    lent, borrow = comm.borrow(torch.ones(2))
    borrow.drop()
    with pytest.raises(TensorError, match=r"this tensor is dropped at .*test_streams.py, line .*: borrow.drop\(\)"):
        lent.abs()


def test_wrong_use(comm: Stream) -> None:
    with pytest.raises(ValueError, match="needs a name"):
        Stream("")
    with pytest.raises(TypeError, match="takes a distributed tensor, not a Tensor"):
        comm.borrow(torch.ones(1))  # type: ignore[arg-type]
