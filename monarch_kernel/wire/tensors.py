"""Memory of torch tensors travels apart from the pickle, as that of arrays does (PEP 574); torch would copy it into it, twice.

Only processes that have imported torch have tensors; in others this module does nothing.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["REDUCERS", "find_torch"]

KEPT_NBYTES = 1 << 16
"""Storages that are smaller are copied into memory of torch's own, which can be resized."""

REDUCERS: dict[type, Callable[[Any], Any]] = {}
"""How storages and tensors are pickled, by their types; for a dispatch table."""


def find_torch() -> bool:
    """Fill `REDUCERS` if torch has been imported; whether it is filled."""
    if not REDUCERS and getattr(sys.modules.get("torch"), "nn", None) is not None:  # it may be on the way
        import torch

        REDUCERS[torch.storage.TypedStorage] = _reduce_storage
        REDUCERS[torch.Tensor] = _reduce_tensor
    return bool(REDUCERS)


def _reduce_tensor(tensor: Any) -> Any:
    """Of a view, send what it shows, not all that is in the storage behind it."""
    if (
        tensor.is_leaf
        and tensor.device.type == "cpu"
        and str(tensor.layout) == "torch.strided"
        and not tensor.is_quantized
    ):
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < tensor.untyped_storage().nbytes():
            shown = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            shown.__dict__.update(tensor.__dict__)
            tensor = shown
    return tensor.__reduce_ex__(5)


def _reduce_storage(storage: Any) -> Any:
    untyped = storage._untyped_storage
    if untyped.device.type != "cpu" or not untyped.nbytes():
        return storage.__reduce_ex__(5)
    block = (ctypes.c_char * untyped.nbytes()).from_address(untyped.data_ptr())
    block._keeper = untyped
    return _rebuild_storage, (pickle.PickleBuffer(block), str(storage.dtype).removeprefix("torch."))


def _rebuild_storage(block: Any, dtype: str) -> Any:
    """Make a storage of memory that has arrived, without a copy unless it is small or can only be read."""
    import torch

    with memoryview(block) as view:
        is_readonly, nbytes = view.readonly, view.nbytes
    untyped = torch.frombuffer(bytearray(block) if is_readonly else block, dtype=torch.uint8).untyped_storage()
    if nbytes < KEPT_NBYTES:
        untyped = untyped.clone()  # type: ignore[no-untyped-call]
    kind: Any = torch.storage.TypedStorage
    return kind(wrap_storage=untyped, dtype=getattr(torch, dtype), _internal=True)
