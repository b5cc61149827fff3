"""Layouts of memory that other processes may read or write: tensors, arrays, anything with the buffer protocol.

Elements have an order (C order), whatever the strides, so memory with any strides can be copied into memory with any others
that has as many elements: as *runs*, stretches of contiguous bytes, if these are long, and otherwise row by row.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

__all__ = ["Layout", "Memory", "ProcessBlock", "boxes", "copy", "matched", "memory_of", "paired", "runs_of", "view_of"]

_FORMATS = {
    "?": "bool", "b": "int8", "B": "uint8", "c": "uint8", "h": "int16", "H": "uint16", "i": "int32", "I": "uint32",
    "l": "int64", "L": "uint64", "q": "int64", "Q": "uint64", "e": "float16", "f": "float32", "d": "float64",
    "Zf": "complex64", "Zd": "complex128",
}  # fmt: skip
"""Codes of Python's `struct` -> names of dtypes."""

_WORDS: dict[int, Literal["Q", "I", "H", "B"]] = {8: "Q", 4: "I", 2: "H", 1: "B"}

LONG_RUN_NBYTES = 4096
"""Shorter runs are copied faster row by row than one by one."""


class Layout(NamedTuple):
    """The arrangement of elements in memory: ``strides`` in bytes, ``dtype`` by the name that torch and NumPy have for it."""

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of all elements, without the gaps between them."""
        return self.itemsize * math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are adjacent, in C order."""
        return self.run()[0] == self.nbytes

    def rows(self, start: int, stop: int) -> tuple[Layout, int]:
        """Return the layout of ``[start:stop]`` along the first axis, and the offset of its start in bytes."""
        rest = (stop - start, *self.shape[1:])
        return self._replace(shape=rest), start * self.strides[0]

    def box(self, at: Sequence[int], shape: Sequence[int]) -> tuple[Layout, int]:
        """Return the layout of ``shape`` elements from the index ``at`` on, and the offset of its start in bytes."""
        return self._replace(shape=tuple(shape)), sum(i * stride for i, stride in zip(at, self.strides, strict=True))

    def run(self) -> tuple[int, int]:
        """Return the number of contiguous bytes in a run, and the number of leading axes, which lead from run to run."""
        if not self.nbytes:
            return 0, 0
        run, outer = self.itemsize, len(self.shape)
        while outer and (self.shape[outer - 1] == 1 or self.strides[outer - 1] == run):
            run *= self.shape[outer - 1]
            outer -= 1
        return run, outer

    @property
    def is_scattered(self) -> bool:
        """Whether the runs are so short that their number determines the cost."""
        return 0 < self.run()[0] < min(LONG_RUN_NBYTES, self.nbytes)

    @property
    def overlaps(self) -> bool:
        """Whether several elements may share an address, like those of an expanded tensor."""
        end = self.itemsize
        for stride, size in sorted((abs(stride), size) for stride, size in zip(self.strides, self.shape) if size > 1):
            if stride < end:
                return bool(self.nbytes)
            end = stride * (size - 1) + end
        return False

    @property
    def span(self) -> tuple[int, int]:
        """The first byte and the end of the elements, relative to the first element; (0, 0) if there are none."""
        if not self.nbytes:
            return 0, 0
        reach = [(size - 1) * stride for size, stride in zip(self.shape, self.strides)]
        return sum(min(0, each) for each in reach), sum(max(0, each) for each in reach) + self.itemsize

    def packed(self) -> Layout:
        """Return a contiguous layout of the same elements."""
        return self._replace(strides=_packed_strides(self.shape, self.itemsize))

    def folded(self, shape: tuple[int, ...]) -> Layout:
        """Return a layout with one axis reshaped to several."""
        return self._replace(shape=shape, strides=_packed_strides(shape, self.strides[0]))

    def first_row(self) -> Layout:
        """Return the layout of the first element along the first axis, without that axis."""
        return self._replace(shape=self.shape[1:], strides=self.strides[1:])


def _packed_strides(shape: tuple[int, ...], step: int) -> tuple[int, ...]:
    strides: list[int] = []
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


class ProcessBlock(NamedTuple):
    """A block of memory of some process."""

    address: int
    layout: Layout


class Memory(NamedTuple):
    """The memory of an object's elements; ``keeper`` keeps the memory in place while there is a reference to it.

    ``device`` is empty for memory of the CPU. Only `net.memory.devices` may access memory elsewhere, such as on ``cuda:0``.
    """

    address: int
    layout: Layout
    is_readonly: bool
    keeper: Any
    device: str = ""

    @property
    def place(self) -> ProcessBlock:
        """The address and the layout."""
        return ProcessBlock(self.address, self.layout)


class _PyBuffer(ctypes.Structure):
    """Py_buffer of CPython's C API (PEP 3118)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_STRIDED = 0x18  # PyBUF_STRIDES


def memory_of(thing: Any) -> Memory:
    """Find an object's elements: a torch tensor on the CPU or a CUDA device, or anything with the buffer protocol.

    Raises:
        TypeError: its memory can't be read as it is; the text says what to pass instead.
    """
    if hasattr(thing, "data_ptr") and hasattr(thing, "untyped_storage"):
        return _of_tensor(thing)
    try:
        view = memoryview(thing)
    except TypeError:
        raise TypeError(
            f"{_called(thing)} has no memory to read or write: pass a tensor, a NumPy array or a memoryview"
        ) from None
    dtype = _FORMATS.get(view.format.lstrip("@=<"))
    if dtype is None:
        if view.format.startswith((">", "!")):
            raise TypeError(f"{_called(thing)} has the other byte order: convert it, or pass it as bytes: .view('u1')")
        raise TypeError(
            f"{_called(thing)} does not hold numbers (its format is {view.format!r}): pass it as bytes: .view('u1')"
        )
    if view.suboffsets:
        raise TypeError(f"{_called(thing)} is not one block of memory: copy it")
    assert view.shape is not None
    assert view.strides is not None
    return Memory(_address(view), Layout(dtype, view.itemsize, view.shape, view.strides), view.readonly, view)


def _of_tensor(tensor: Any) -> Memory:
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(
            f"the tensor is on {tensor.device}, and only memory of the CPU and of CUDA devices can be read: pass tensor.cpu()"
        )
    if str(tensor.layout) != "torch.strided":
        raise TypeError(
            f"a tensor of layout {tensor.layout} is not one block of memory: pass its parts, or tensor.to_dense()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError("the tensor is a lazy conjugate or negative: pass tensor.resolve_conj().resolve_neg()")
    if hasattr(tensor, "to_local"):
        raise TypeError("a DTensor has only a part of its elements here: pass tensor.to_local()")
    itemsize = tensor.element_size()
    dtype = str(tensor.dtype).removeprefix("torch.")
    strides = tuple(stride * itemsize for stride in tensor.stride())
    device = "" if tensor.device.type == "cpu" else str(tensor.device)
    return Memory(tensor.data_ptr(), Layout(dtype, itemsize, tuple(tensor.shape), strides), False, tensor, device)


def _address(view: memoryview) -> int:
    raw = _PyBuffer()
    _get_buffer(view, ctypes.byref(raw), _STRIDED)
    try:
        return int(raw.buf or 0)
    finally:
        _release_buffer(ctypes.byref(raw))


def _called(thing: Any) -> str:
    return f"this {type(thing).__name__}"


def runs_of(place: ProcessBlock) -> list[tuple[int, int]]:
    """Return the stretches of contiguous bytes of a block: (address, nbytes), in the order of its elements."""
    address, layout = place
    run, outer = layout.run()
    starts = [address]
    for size, stride in zip(layout.shape[:outer], layout.strides[:outer]):
        starts = [start + i * stride for start in starts for i in range(size)]
    return [(start, run) for start in starts] if run else []


def view_of(address: int, nbytes: int) -> memoryview:
    """Return memory of this process as bytes; the caller must keep it in place."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def paired(ours: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Cut two lists of runs of the same total length at the same places: (our address, their address, nbytes)."""
    pairs: list[tuple[int, int, int]] = []
    rest = list(reversed(theirs))
    for address, nbytes in ours:
        while nbytes:
            other, left = rest.pop()
            taken = min(nbytes, left)
            pairs.append((address, other, taken))
            address, nbytes = address + taken, nbytes - taken
            if taken < left:
                rest.append((other + taken, left - taken))
    return pairs


def matched(one: Layout, other: Layout) -> tuple[Layout, Layout]:
    """Give two layouts the same shape and element size; a flat layout, or one of bytes, takes the shape of the other.

    Raises:
        ValueError: that is not possible; the text has the shapes.
    """
    if one.itemsize != other.itemsize and one.nbytes == other.nbytes:
        if one.is_contiguous:
            return other.packed(), other
        if other.is_contiguous:
            return one, one.packed()
    elif one.shape == other.shape:
        return one, other
    elif len(one.shape) == 1 and one.nbytes == other.nbytes:
        return one.folded(other.shape), other
    elif len(other.shape) == 1 and one.nbytes == other.nbytes:
        return one, other.folded(one.shape)
    raise ValueError(f"the shapes are {list(one.shape)} and {list(other.shape)}")


def boxes(layout: Layout, max_nbytes: int) -> list[tuple[int, Layout]]:
    """Cut a layout into parts of at most ``max_nbytes``, or of one element if that is larger: (offset in bytes, layout)."""
    if layout.nbytes <= max_nbytes or not layout.shape:
        return [(0, layout)]
    row, _ = layout.rows(0, 1)
    if row.nbytes > max_nbytes:  # cut each row
        inner = boxes(row.first_row(), max_nbytes)
        return [(i * layout.strides[0] + offset, box) for i in range(layout.shape[0]) for offset, box in inner]
    count = max_nbytes // row.nbytes
    cuts = [layout.rows(i, min(i + count, layout.shape[0])) for i in range(0, layout.shape[0], count)]
    return [(offset, box) for box, offset in cuts]


def copy(to: ProcessBlock, source: ProcessBlock) -> None:
    """Copy a block of this process to another of the same shape and element size; long runs without the GIL."""
    if (to.layout.is_scattered or source.layout.is_scattered) and _walks(to.layout) and _walks(source.layout):
        for row, other in zip(_rows_of(to), _rows_of(source)):
            row[:] = other
    else:
        for into, out_of, nbytes in paired(runs_of(to), runs_of(source)):
            ctypes.memmove(into, out_of, nbytes)


def _walks(layout: Layout) -> bool:
    """Whether elements are at multiples of their size along the last axis, each at its own address."""
    return layout.strides[-1] != 0 and layout.strides[-1] % layout.itemsize == 0


def _rows_of(place: ProcessBlock) -> Iterator[memoryview]:
    """Yield each row along the last axis as a view of words, which the interpreter copies in one step."""
    address, (_, itemsize, shape, strides) = place
    word = math.gcd(itemsize, 8)
    parts = range(0, itemsize, word)  # elements of 16 bytes are copied as two halves
    count, stride = shape[-1], strides[-1]
    starts = [address]
    for size, step in zip(shape[:-1], strides[:-1]):
        starts = [start + i * step for start in starts for i in range(size)]
    for start in starts:
        low = min(start, start + (count - 1) * stride)
        raw = (ctypes.c_char * ((count - 1) * abs(stride) + itemsize)).from_address(low)
        words = memoryview(raw).cast("B").cast(_WORDS[word])
        step = stride // word
        for part in parts:
            first = part // word + (0 if step > 0 else (count - 1) * -step)
            stop = first + (count - 1) * step + (1 if step > 0 else -1)
            yield words[first : stop if stop >= 0 else None : step]
