"""An object's elements are found in memory, and copied in their order, whatever the strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.net.memory.layout import Layout, ProcessBlock, boxes, copy, matched, memory_of, paired, runs_of


@st.composite
def views(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """An array of up to three axes: a view of a larger one with any steps and order."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    whole = np.arange(int(np.prod(sizes)), dtype=draw(st.sampled_from(["u1", "i2", "f4", "c16"]))).reshape(sizes)
    view = whole[
        tuple(slice(draw(st.integers(0, size)), None, draw(st.sampled_from([1, 2, -1, -2]))) for size in sizes)
    ]
    return view.transpose(draw(st.permutations(range(len(sizes)))))


def same_kind(draw: st.DrawFn, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array of zeros of the same shape and dtype, as a view with other steps and order."""
    order = draw(st.permutations(range(like.ndim)))
    steps = [draw(st.sampled_from([1, 2, 3, -1, -2])) for _ in order]
    whole = np.zeros([like.shape[axis] * abs(step) for axis, step in zip(order, steps)], like.dtype)
    return whole[tuple(slice(None, None, step) for step in steps)].transpose(np.argsort(order))


@given(st.data())
def test_any_strides_are_copied_into_any_others(data: st.DataObject) -> None:
    source = data.draw(views())
    into = same_kind(data.draw, source)
    copy(memory_of(into).place, memory_of(source).place)
    assert into.tobytes() == source.tobytes()
    layout = memory_of(source).layout
    assert layout.nbytes == source.nbytes
    assert layout.is_contiguous == (source.flags.c_contiguous or not source.size)
    assert sum(nbytes for _, nbytes in runs_of(memory_of(source).place)) == source.nbytes


def test_long_rows_with_gaps_are_copied_row_by_row() -> None:
    source = np.arange(3_000_000, dtype="f8").reshape(1000, 3000)[:, ::3]
    into = np.zeros((1000, 1000), "f8").T
    copy(memory_of(into).place, memory_of(source).place)
    assert np.array_equal(into, source)


def test_unaligned_elements_are_copied_too() -> None:
    source = np.arange(30, dtype="u1").view([("a", "u1"), ("b", "<u2")])["b"]  # at odd addresses
    into = np.zeros(10, "<u2")
    copy(memory_of(into).place, memory_of(source).place)
    assert np.array_equal(into, source)
    spread = np.broadcast_to(np.float32(3), (4, 5))
    copy(memory_of(other := np.zeros((4, 5), "f4")).place, memory_of(spread).place)
    assert (other == 3).all()


@given(st.data())
def test_parts_are_bounded_and_make_the_whole(data: st.DataObject) -> None:
    source = data.draw(views())
    address, layout = memory_of(source).place
    into = np.zeros(source.size, source.dtype)
    most = data.draw(st.integers(source.itemsize, 200))
    at = memory_of(into).address
    for offset, box in boxes(layout, most):
        assert box.nbytes <= most
        copy(ProcessBlock(at, box.packed()), ProcessBlock(address + offset, box))
        at += box.nbytes
    assert into.tobytes() == source.tobytes()
    low, high = layout.span
    for offset, box in boxes(layout, most):
        assert low <= offset + box.span[0] <= offset + box.span[1] <= high or not box.nbytes


@given(st.lists(st.integers(1, 9), min_size=1), st.lists(st.integers(1, 9), min_size=1))
def test_two_lists_of_runs_are_cut_at_the_same_places(ours: list[int], theirs: list[int]) -> None:
    theirs.append(max(0, sum(ours) - sum(theirs)))
    ours.append(max(0, sum(theirs) - sum(ours)))
    here = [(100 * i, size) for i, size in enumerate(ours)]
    there = [(9_000 + 100 * i, size) for i, size in enumerate(theirs)]
    pairs = paired(here, there)
    assert [a + i for a, _, n in pairs for i in range(n)] == [a + i for a, n in here for i in range(n)]
    assert [b + i for _, b, n in pairs for i in range(n)] == [b + i for b, n in there for i in range(n)]


@pytest.mark.parametrize(
    ("tensor", "overlaps"),
    [
        (torch.zeros(1).expand(6), True),
        (torch.zeros(3, 1).expand(3, 2), True),
        (torch.zeros(10).as_strided((3, 3), (1, 1)), True),
        (torch.zeros(10).as_strided((4, 2), (2, 1)), False),
        (torch.zeros(4, 6)[:, ::2].t(), False),
        (torch.zeros(1).expand(1), False),
        (torch.zeros(1, 0).expand(6, 0), False),
    ],
)
def test_elements_that_share_an_address_are_detected(tensor: torch.Tensor, overlaps: bool) -> None:
    assert memory_of(tensor).layout.overlaps == overlaps


def test_a_flat_layout_or_bytes_take_the_shape_of_the_other() -> None:
    shaped = Layout("float32", 4, (2, 3), (4, 8))
    flat = Layout("float32", 4, (6,), (12,))
    raw = Layout("uint8", 1, (24,), (1,))
    assert matched(flat, shaped) == (Layout("float32", 4, (2, 3), (36, 12)), shaped)
    assert matched(shaped, flat) == (shaped, Layout("float32", 4, (2, 3), (36, 12)))
    assert matched(raw, shaped) == (shaped.packed(), shaped)
    assert matched(shaped, raw) == (shaped, shaped.packed())
    for other in (
        Layout("float32", 4, (3, 2), (8, 4)),
        Layout("uint8", 1, (24,), (2,)),
        Layout("float32", 4, (5,), (4,)),
    ):
        with pytest.raises(ValueError, match="the shapes are"):
            matched(shaped, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_layouts_of_tensors_agree_with_torch(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 6, dtype=dtype)[::2, 1:].t()
    address, layout, is_readonly, _, device = memory_of(tensor)
    assert address == tensor.data_ptr()
    assert (layout.shape, layout.dtype) == ((5, 2), str(dtype).removeprefix("torch."))
    assert layout.strides == tuple(stride * tensor.element_size() for stride in tensor.stride())
    assert not is_readonly
    assert device == ""


def test_bytes_can_only_be_read_and_bytearrays_can_be_written() -> None:
    assert memory_of(b"abc").is_readonly
    block = bytearray(3)
    memory = memory_of(block)
    source = memory_of(b"abc")
    copy(memory.place, source.place)
    assert block == b"abc"
    with pytest.raises(BufferError):  # its memory can't move while there is a reference to it
        block.extend(b"d")


@pytest.mark.parametrize(
    ("thing", "what"),
    [
        ([1, 2], "this list has no memory"),
        (torch.zeros(2, device="meta"), "the tensor is on meta"),
        (torch.eye(2).to_sparse(), "to_dense"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (np.zeros(2, ">f4"), "has the other byte order"),
        (np.zeros(2, "f4,i4"), "does not hold numbers"),
    ],
)
def test_unsupported_memory_is_refused_with_advice(thing: object, what: str) -> None:
    with pytest.raises(TypeError, match=what):
        memory_of(thing)
