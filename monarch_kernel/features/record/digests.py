"""Digests of batches and parameters, by which two runs are compared. They detect accidental differences, not forgeries.

The bytes of arrays and of tensors on the CPU go through XXH3 (`xxhash`), which is as fast as the memory. Other tensors are
mixed where they are (`features.replicas.digests`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from xxhash import xxh3_64

from monarch_kernel.features.replicas.digests import mixed

__all__ = ["digest_of", "parameters_digest"]

_MAX_DEPTH = 8
_MAX_ITEMS = 10_000

_Update = Callable[[Any], object]


def digest_of(value: Any) -> bytes:
    """Return a digest of 8 bytes of a batch: tensors on the CPU, arrays, numbers and texts, also nested.

    Of a tensor on another device, only dtype, shape and device count.
    """
    hashed = xxh3_64()
    _add(hashed.update, value, 0)
    return hashed.digest()


def parameters_digest(modules: Mapping[str, Any]) -> bytes:
    """Return a digest of 8 bytes of the parameters and buffers that this rank holds of some modules.

    Args:
        modules: name -> `torch.nn.Module`.
    """
    hashed = xxh3_64()
    for name, module in sorted(modules.items()):
        for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
            local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, the part of this rank
            if local.device.type != "meta":
                hashed.update(f"{name}.{path}".encode())
                hashed.update(_head(local.dtype, local.shape))
                _add_content(hashed.update, local)
    return hashed.digest()


@lru_cache(1024)
def _head(dtype: Any, shape: Sequence[int]) -> bytes:
    return f"{dtype}{tuple(shape)}".encode()


def _add(update: _Update, value: Any, depth: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        update(_head(value.dtype, value.shape))
        if value.is_cpu:
            _add_content(update, value)
        else:
            update(value.device.type.encode())
    elif isinstance(value, (str, int, float, bool, type(None))):
        update(f"{type(value).__name__}:{value!r}".encode("utf-8", "backslashreplace"))
    elif isinstance(value, bytes):
        update(value)
    elif depth >= _MAX_DEPTH:
        update(type(value).__name__.encode())
    elif isinstance(value, Mapping):
        update(b"{")
        for key, item in list(value.items())[:_MAX_ITEMS]:
            _add(update, key, depth + 1)
            _add(update, item, depth + 1)
    elif isinstance(value, (list, tuple)):
        update(b"[")
        for item in value[:_MAX_ITEMS]:
            _add(update, item, depth + 1)
    elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
        update(f"{value.dtype}{value.shape}".encode())
        update(value.tobytes() if value.dtype != object else repr(value.shape).encode())
    else:
        update(type(value).__qualname__.encode())
        if hasattr(value, "__dict__"):
            _add(update, vars(value), depth + 1)


def _add_content(update: _Update, tensor: Any) -> None:
    """Add the elements of a tensor, in their order, whatever the strides."""
    import torch

    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        found = mixed(tensor)
        update(found if isinstance(found, bytes) else found.to_bytes(8, "little"))
    elif (
        tensor.dtype in (torch.float32, torch.int64, torch.uint8)
        and not tensor.requires_grad
        and tensor.is_contiguous()
    ):
        update(tensor.numpy())  # the way of most batches, with the fewest calls
    else:
        update(tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy())
