"""Sends the memory of torch tensors apart from the pickle, like that of arrays (PEP 574); torch itself would copy it twice.

A tensor on a GPU travels through pinned memory of the CPU, and arrives on the GPU of the receiver with the same number, or on
its current one if it has none with that number. Only processes that have imported torch have tensors; in others this module
does nothing.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from monarch_kernel.errors import PayloadError

__all__ = ["APART_NBYTES", "FOR_ALL", "REDUCERS", "find_torch", "tensor_in"]

KEPT_NBYTES = 1 << 16
"""Smaller storages are copied into memory allocated by torch, which can be resized."""

APART_NBYTES = 1 << 12
"""Larger memory of values travels apart from the pickle."""

REDUCERS: dict[type, Callable[[Any], Any]] = {}
"""Reducers of storages and tensors by type; for the dispatch table of a pickler."""

FOR_ALL: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Memory that receivers share with this process, by its address; tensors in it are sent as references."""


def find_torch() -> bool:
    """Fill `REDUCERS` if torch has been imported; returns whether it is filled."""
    if not REDUCERS and getattr(sys.modules.get("torch"), "nn", None) is not None:  # its import may be in progress
        import torch

        REDUCERS[torch.storage.TypedStorage] = _reduce_storage
        REDUCERS[torch.Tensor] = _reduce_tensor
    return bool(REDUCERS)


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor; of a view, send only its elements, not all of the storage."""
    if tensor.is_cuda and tensor.is_leaf and str(tensor.layout) == "torch.strided" and not tensor.is_quantized:
        return _reduce_on_gpu(tensor)
    if not (tensor.is_leaf and tensor.is_cpu and str(tensor.layout) == "torch.strided" and not tensor.is_quantized):
        return tensor.__reduce_ex__(5)
    if FOR_ALL and _is_plain(tensor) and (block := FOR_ALL.get(tensor.untyped_storage().data_ptr())) is not None:
        return tensor_in, (
            pickle.PickleBuffer(block),
            str(tensor.dtype)[6:],
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.requires_grad,
        )
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes and _is_plain(tensor) and _is_dense(tensor):
        return _rebuild_tensor, (
            _elements(tensor, nbytes),
            str(tensor.dtype)[6:],  # without "torch."
            tuple(tensor.shape),
            tensor.stride(),
            tensor.requires_grad,
        )
    if nbytes < tensor.untyped_storage().nbytes():
        shown = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        shown.__dict__.update(tensor.__dict__)
        tensor = shown
    return tensor.__reduce_ex__(5)


def _reduce_on_gpu(tensor: Any) -> Any:
    if not (tensor.numel() and _is_plain(tensor) and _is_dense(tensor)):
        return tensor.__reduce_ex__(5)
    import torch

    here = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)  # dense: it keeps the strides
    here.copy_(tensor.detach())
    return _rebuild_on_gpu, (tensor.device.index, tensor.requires_grad, _reduce_tensor(here))


def _rebuild_on_gpu(index: int, requires_grad: bool, reduced: Any) -> Any:
    """Make a tensor of received memory on a GPU.

    Raises:
        PayloadError: this process has no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise PayloadError(
            f"a tensor on cuda:{index} was sent to a process that can use no GPU: send a copy of it on the CPU, tensor.cpu()"
        )
    rebuild, arguments = reduced
    there = index if index < torch.cuda.device_count() else torch.cuda.current_device()
    tensor = rebuild(*arguments).to(f"cuda:{there}")
    return tensor.requires_grad_() if requires_grad else tensor


def _elements(tensor: Any, nbytes: int) -> Any:
    """Return the memory from the first element on, apart from the pickle unless that costs more than a copy."""
    if nbytes <= APART_NBYTES:
        return ctypes.string_at(tensor.data_ptr(), nbytes)
    block: Any = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    block._keeper = tensor
    return pickle.PickleBuffer(block)


def _is_plain(tensor: Any) -> bool:
    """Whether it is only numbers in memory: no attributes, no hooks, and no names, which torch once had."""
    return not (
        tensor.__dict__
        or tensor._backward_hooks
        or tensor.is_conj()
        or tensor.is_neg()
        or any(getattr(tensor, "names", ()))
    )


def _is_dense(tensor: Any) -> bool:
    """Whether its elements are adjacent in memory, in any order."""
    if tensor.is_contiguous():
        return True
    nbytes = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride != nbytes:
                return False
            nbytes *= size
    return True


def _rebuild_tensor(block: Any, dtype: str, shape: Any, strides: Any, requires_grad: bool) -> Any:
    """Make a tensor of received memory."""
    import torch

    if len(block) < KEPT_NBYTES:
        elements = torch.frombuffer(bytearray(block), dtype=getattr(torch, dtype))
        tensor = elements.as_strided(shape, strides).clone()
    else:
        tensor = torch.empty(0, dtype=getattr(torch, dtype), device="cpu").set_(_as_storage(block), 0, shape, strides)
    return tensor.requires_grad_() if requires_grad else tensor


def tensor_in(block: Any, dtype: str, offset: int, shape: Any, strides: Any, requires_grad: bool) -> Any:
    """Make a tensor in memory that processes share, also in the receiver.

    Args:
        block: the memory.
        dtype: by its name.
        offset: of its first element, in elements.
        shape: of the tensor.
        strides: in elements.
        requires_grad: of the tensor.

    Raises:
        PayloadError: the memory is a copy, since the sender's can't be reached.
    """
    import torch

    with memoryview(block) as view:
        if not getattr(view.obj, "is_for_all", False):
            raise PayloadError(
                "a tensor made by shared() was sent to a process that can't share its memory, such as one on another host: "
                "send it a .clone(), or an RDMABuffer"
            )
    storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    tensor = torch.empty(0, dtype=getattr(torch, dtype), device="cpu").set_(storage, offset, shape, strides)
    return tensor.requires_grad_() if requires_grad else tensor


def _reduce_storage(storage: Any) -> Any:
    untyped = storage._untyped_storage
    if untyped.device.type != "cpu" or not untyped.nbytes():
        return storage.__reduce_ex__(5)
    block = (ctypes.c_char * untyped.nbytes()).from_address(untyped.data_ptr())
    block._keeper = untyped
    return _rebuild_storage, (pickle.PickleBuffer(block), str(storage.dtype).removeprefix("torch."))


def _rebuild_storage(block: Any, dtype: str) -> Any:
    """Make a storage of received memory."""
    import torch

    kind: Any = torch.storage.TypedStorage
    return kind(wrap_storage=_as_storage(block), dtype=getattr(torch, dtype), _internal=True)


def _as_storage(block: Any) -> Any:
    """Return received memory as a storage, without a copy unless it is small or read-only."""
    import torch

    with memoryview(block) as view:
        is_readonly, nbytes = view.readonly, view.nbytes
    untyped = torch.frombuffer(bytearray(block) if is_readonly else block, dtype=torch.uint8).untyped_storage()
    return untyped.clone() if nbytes < KEPT_NBYTES else untyped  # type: ignore[no-untyped-call]
