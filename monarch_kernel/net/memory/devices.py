"""Memory of CUDA devices: copied from and to memory of the CPU that is pinned, or within a process from one to another.

What is copied are bytes, whatever the dtype: the elements get one more axis, of their bytes. Copies are made on a stream of
their own, so they do not wait for what is computed meanwhile. As for the order: whoever lends memory, reads from or writes to
it, calls `settle` before, which waits for what that thread has asked of the device; and a copy is over when it returns.
"""

from __future__ import annotations

import sys
from typing import Any

from monarch_kernel.net.memory import layout as plain
from monarch_kernel.net.memory.layout import Layout, Memory, memory_of

__all__ = ["are_in_use", "copy", "export", "fetch", "opened", "settle", "staging", "store"]


def settle(memory: Memory) -> None:
    """Wait until what the calling thread has asked of the device of this memory is done, on its current stream."""
    if memory.device:
        import torch

        torch.cuda.current_stream(memory.keeper.device).synchronize()


def staging(memory: Memory) -> Memory:
    """Memory of the CPU for the elements of a block of a device, one after the other; pinned, so that the device reaches it."""
    import torch

    block = torch.empty(memory.layout.nbytes, dtype=torch.uint8, pin_memory=memory.keeper.is_cuda)
    return memory_of(block)._replace(layout=memory.layout.packed())


def fetch(source: Memory) -> Memory:
    """A copy of a block of a device, as `staging`."""
    block = staging(source)
    _copy(block, source)
    return block


def store(to: Memory, block: Memory) -> None:
    """Copy to a block of a device what its `staging` holds."""
    _copy(to, block)


def copy(to: Memory, source: Memory) -> None:
    """Copy a block to another one of the same shape and size of elements, wherever the two are."""
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
    """What another process of the machine passes to `opened`, once, to reach the memory of a device: CUDA IPC, by torch.

    Raises:
        RuntimeError: CUDA can't share this memory, as some that torch's allocator has made expandable.
    """
    storage = memory.keeper.untyped_storage()
    return memory.address - storage.data_ptr(), memory.layout, storage._share_cuda_()


def opened(exported: tuple[Any, ...], device: str) -> Memory:
    """Memory of another process, which must keep it where it is; open as long as somebody has this.

    Args:
        exported: by that process.
        device: of this process by which it is reached; that process may number the same devices in another way.

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
        release(counter, offset, device=index)  # else it is kept there for ever
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
    """The elements of a block of a tensor, with an axis of their bytes."""
    import torch

    storage = memory.keeper.untyped_storage()
    layout: Layout = memory.layout
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    first = memory.address - storage.data_ptr()
    return whole.set_(storage, first, (*layout.shape, layout.itemsize), (*layout.strides, 1))
