"""Copies memory of CUDA devices from and to pinned memory of the CPU, or within a process from one device to another.

Copies are of bytes, whatever the dtype: the elements get one more axis, of their bytes. They run on a separate stream, so they
do not wait for computations. As for their order: code that lends memory of a device, reads from or writes to it, first calls
`settle`, which waits for the work that its thread has queued on the device; and a copy has ended when it returns.
"""

from __future__ import annotations

import sys
from typing import Any

from monarch_kernel.net.memory import layout as plain
from monarch_kernel.net.memory.layout import Layout, Memory, memory_of

__all__ = ["are_in_use", "copy", "export", "fetch", "opened", "settle", "staging", "store"]


def settle(memory: Memory) -> None:
    """Wait until the work that the calling thread has queued on the memory's device is done, on its current stream."""
    if memory.device:
        import torch

        torch.cuda.current_stream(memory.keeper.device).synchronize()


def staging(memory: Memory) -> Memory:
    """Allocate CPU memory for the elements of a block of a device, packed; pinned, so that the device can reach it."""
    import torch

    block = torch.empty(memory.layout.nbytes, dtype=torch.uint8, pin_memory=memory.keeper.is_cuda)
    return memory_of(block)._replace(layout=memory.layout.packed())


def fetch(source: Memory) -> Memory:
    """Copy a block of a device to new CPU memory, as returned by `staging`."""
    block = staging(source)
    _copy(block, source)
    return block


def store(to: Memory, block: Memory) -> None:
    """Copy the content of CPU memory from `staging` to a block of a device."""
    _copy(to, block)


def copy(to: Memory, source: Memory) -> None:
    """Copy a block to another of the same shape and element size, wherever the two are."""
    if to.device and source.device:
        _copy(to, source)
    elif source.device:
        block = fetch(source)
        plain.copy(to.place, block.place)
    elif to.device:
        block = staging(to)
        plain.copy(block.place, source.place)
        store(to, block)
    else:
        plain.copy(to.place, source.place)


def are_in_use() -> bool:
    """Whether this process uses CUDA devices already."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def export(memory: Memory) -> tuple[Any, ...]:
    """Return what another process of the machine passes to `opened`, once, to reach the memory of a device: CUDA IPC, by torch.

    Raises:
        RuntimeError: CUDA can't share this memory, such as expandable segments of torch's allocator.
    """
    storage = memory.keeper.untyped_storage()
    return memory.address - storage.data_ptr(), memory.layout, storage._share_cuda_()


def opened(exported: tuple[Any, ...], device: str) -> Memory:
    """Open memory of another process, which must keep it in place; it stays open while there are references to the result.

    Args:
        exported: the result of `export` in that process.
        device: of this process, by which the memory is reached; that process may number the same devices differently.

    Raises:
        RuntimeError: CUDA does not let this process reach it.
    """
    import torch

    first, layout, (_, *handle) = exported
    at = torch.device(device or "cuda")
    index = torch.cuda.current_device() if at.index is None else at.index
    try:
        storage = torch.UntypedStorage._new_shared_cuda(index, *handle)
    except (RuntimeError, TypeError):
        counter, offset = handle[3:5]
        release: Any = torch.UntypedStorage._release_ipc_counter
        release(counter, offset, device=index)  # otherwise its owner keeps it forever
        raise
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return Memory(storage.data_ptr() + first, Layout(*layout), False, whole, str(storage.device))


def _copy(to: Memory, source: Memory) -> None:
    import torch

    if not to.layout.nbytes:
        return
    ours, theirs = _bytes(to), _bytes(source)
    device = next((each.device for each in (ours, theirs) if each.is_cuda), None)
    if device is None:
        ours.copy_(theirs)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        ours.copy_(theirs, non_blocking=True)
    stream.synchronize()


def _bytes(memory: Memory) -> Any:
    """View the elements of a block of a tensor with an axis of their bytes."""
    import torch

    storage = memory.keeper.untyped_storage()
    layout: Layout = memory.layout
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    first = memory.address - storage.data_ptr()
    return whole.set_(storage, first, (*layout.shape, layout.itemsize), (*layout.strides, 1))
