"""Reads and writes memory of other processes one-sidedly: the owner takes no part in it, and may be busy.

The names are those of PyTorch Monarch's ``monarch.rdma``. A buffer is a small handle, which can be sent as an argument or a
result. The bytes take the fastest data path between the two processes, which each `Transfer` names. A `shared` tensor needs no
transfer: processes of a machine have the same memory.

`shared` copies a tensor into a block that is sent as it is. To move a value that others refer to into shared memory, as
torch's ``share_memory_`` does, would leave arrays and exported buffers on freed memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

from monarch_kernel.actor.channels import client_here
from monarch_kernel.actor.context import context
from monarch_kernel.errors import Failure
from monarch_kernel.net.memory.devices import settle
from monarch_kernel.net.memory.exports import BufferHandle
from monarch_kernel.net.memory.layout import Layout, Memory, memory_of, view_of
from monarch_kernel.net.memory.leases import Lease, Lent
from monarch_kernel.net.memory.paths import Transfer
from monarch_kernel.net.transport.shared_frames import for_all
from monarch_kernel.net.wire.codec import load, pack
from monarch_kernel.net.wire.messages import EndExport
from monarch_kernel.net.wire.tensor_frames import tensor_in
from monarch_kernel.runtime.buffers.transfers import carry, together
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.handles import Handle

__all__ = ["Buffer", "RDMAAction", "RDMABuffer", "Transfer", "shared"]

T = TypeVar("T")
TensorT = TypeVar("TensorT")


class Buffer(Handle):
    """A handle on memory of the process that makes it, which can be sent to any process, as an argument or inside of one.

    The memory stays in place until `drop` is called in any process, the actor that made the buffer ends, or its process ends;
    for a handle that was never sent, until it is garbage-collected. A read returns what the memory holds at that moment: the
    program must order it with concurrent writes.

    Args:
        data: a tensor on the CPU or a CUDA device, a NumPy array, or anything with the buffer protocol; of any shape, dtype
            and strides. For a device, this waits for the work that the calling thread has queued on its current stream.

    Raises:
        TypeError: its memory can't be read as it is; the text says what to pass instead.
    """

    def __init__(self, data: Any) -> None:
        client = client_here()
        memory = memory_of(data)
        settle(memory)
        handle = client.exports.lend(memory, context().actor_instance.actor_id)
        ending = weakref.finalize(self, client.exports.end, handle.lease)
        ending.atexit = False
        self._settle(client, handle, ending)

    def _settle(self, client: Client, handle: BufferHandle, ending: Any = None) -> None:
        self._client = client
        self._handle = handle
        self._ending = ending  # ends the lease with this handle, unless the handle is sent
        self._whole: Buffer | None = None

    def __repr__(self) -> str:
        layout = self._handle.layout
        where = f" on {self._handle.device}" if self._handle.device else ""
        return f"<{type(self).__name__} {layout.dtype}{list(layout.shape)}{where} of process {self._handle.proc}>"

    def __reduce__(self) -> tuple[Any, ...]:
        ending = (self._whole or self)._ending
        if ending is not None:
            ending.detach()
        proc, lent, lease, *rest = self._handle
        return _open, (type(self), proc, tuple(lent), tuple(lease), *rest)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, as for a tensor."""
        return self._handle.layout.shape

    @property
    def dtype(self) -> str:
        """Name of the elements' type, as torch and NumPy call it."""
        return self._handle.layout.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._handle.layout.nbytes

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a buffer of one element has no length")
        return self.shape[0]

    def __getitem__(self, part: slice) -> Buffer:
        """Return a part along the first axis, such as ``buf[10:20]``; it ends with the whole."""
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise TypeError(f"a part of a buffer is buf[start:stop], not {part!r}")
        start, stop, _ = part.indices(len(self))
        layout, offset = self._handle.layout.rows(start, max(start, stop))
        other: Buffer = object.__new__(type(self))
        other._settle(self._client, self._handle._replace(layout=layout, address=self._handle.address + offset))
        other._whole = self._whole or self
        return other

    def size(self) -> int:
        """Return the number of bytes, as `nbytes` does."""
        return self.nbytes

    @property
    def backend(self) -> str:
        """The network over which processes without shared memory reach this one."""
        return "tcp"

    @property
    def owner(self) -> str:
        """The process whose memory it is."""
        return f"process {self._handle.proc}"

    def read_into(self, dst: Any, *, timeout: float | None = None) -> Future[Transfer]:
        """Copy the memory into ``dst``.

        Args:
            dst: a tensor, array or memoryview of the same dtype and shape, or flat with as many elements, or as many bytes. Of
                bytes there may be more; the rest is left as it is. Its content is undefined until the future has completed, and
                after an error.
            timeout: after so many seconds the future raises a TimeoutError; the transfer may still go on.

        Raises:
            TypeError: ``dst`` has another dtype, or is read-only.
            ValueError: it has another shape, or several elements share an address.
        """
        return _within(timeout, self._begin(self._memory(dst, is_write=False), is_write=False))

    def write_from(self, src: Any, *, timeout: float | None = None) -> Future[Transfer]:
        """Copy ``src`` into the memory; arguments and errors are those of `read_into`. A ``src`` of bytes may have fewer."""
        return _within(timeout, self._begin(self._memory(src, is_write=True), is_write=True))

    def _begin(self, here: Memory, *, is_write: bool) -> Future[Transfer]:
        part = self._first(min(here.layout.nbytes, self.nbytes))
        return carry(self._client, part._handle, here, is_write=is_write, keeper=self._whole or self)

    def _memory(self, thing: Any, *, is_write: bool) -> Memory:
        """Return the memory of the other end, if it fits."""
        here = memory_of(thing)
        settle(here)
        ours, theirs = here.layout, self._handle.layout
        what = "src" if is_write else "dst"
        if not is_write and here.is_readonly:
            raise TypeError("dst is read-only: pass writable memory")
        if is_write and self._handle.is_readonly:
            raise TypeError("the memory of the buffer is read-only")
        if (theirs if is_write else ours).overlaps:
            which = "the buffer" if is_write else "dst"
            raise ValueError(
                f"several elements of {which} share an address, as in an expanded tensor: pass a .clone() of it"
            )
        if "uint8" in (ours.dtype, theirs.dtype):
            fits = ours.nbytes <= theirs.nbytes if is_write else ours.nbytes >= theirs.nbytes
            if not fits:
                raise ValueError(f"{what} has {ours.nbytes:,} bytes, the buffer has {theirs.nbytes:,}")
            if ours.nbytes != theirs.nbytes and not (theirs if is_write else ours).is_contiguous:
                raise ValueError(f"{what} has another size than the buffer, so the larger one must be contiguous")
            return here if is_write or ours.nbytes == theirs.nbytes else _first_bytes(here, theirs.nbytes)
        if ours.dtype != theirs.dtype:
            raise TypeError(
                f"{what} has dtype {ours.dtype}, the buffer has {theirs.dtype}: convert it, or pass its bytes"
            )
        is_flat = len(ours.shape) == 1 and ours.nbytes == theirs.nbytes
        if ours.shape != theirs.shape and not is_flat:
            raise ValueError(f"{what} has shape {list(ours.shape)}, the buffer has {list(theirs.shape)}")
        return here

    def _first(self, nbytes: int) -> Buffer:
        """Return the first bytes of the memory as a buffer; for less than all of it, as flat bytes."""
        if nbytes == self.nbytes:
            return self
        part: Buffer = object.__new__(type(self))
        part._settle(self._client, self._handle._replace(layout=Layout("uint8", 1, (nbytes,), (1,))))
        part._whole = self._whole or self
        return part

    def drop(self) -> Future[bool]:
        """End the lease: the memory is released after the last transfer. The result is False if the lease had ended."""
        handle = self._handle
        client = self._client

        def finish(answers: Sequence[Answer]) -> bool:
            (answer,) = answers
            if isinstance(answer, Failure):  # the owner has ended, and the memory with it
                return False
            return bool(load(answer.payload, answer.frames))

        return client.request(
            (handle.proc,),
            lambda id: pack(EndExport(id, handle.lent.cookie, *handle.lease)),
            "dropping a buffer",
            finish,
        )


class RDMABuffer(Buffer):
    """A `Buffer`, under its name in Monarch."""


class RDMAAction:
    """Several transfers that start together."""

    def __init__(self) -> None:
        self._steps: list[tuple[Buffer, Any, bool]] = []

    def read_into(self, src: Buffer, dst: Any) -> RDMAAction:
        """Add a read; arguments are those of `Buffer.read_into`."""
        self._steps.append((src, dst, False))
        return self

    def write_from(self, dst: Buffer, src: Any) -> RDMAAction:
        """Add a write; arguments are those of `Buffer.write_from`."""
        self._steps.append((dst, src, True))
        return self

    def read_remote(self, dst: Any, src: Buffer) -> RDMAAction:
        """Add a read, like `read_into`; the local memory comes first."""
        return self.read_into(src, dst)

    def write_remote(self, dst: Buffer, src: Any) -> RDMAAction:
        """Add a write, like `write_from`."""
        return self.write_from(dst, src)

    def submit(self, timeout: float | None = None) -> Future[list[Transfer]]:
        """Start all transfers; the result lists them, in order. The first error is raised when all have completed.

        Args:
            timeout: after so many seconds the future raises a TimeoutError; transfers may still go on.

        Raises:
            TypeError: a transfer is invalid; then none is started. The same holds for ValueError.
        """
        steps = [
            (buffer, buffer._memory(thing, is_write=is_write), is_write) for buffer, thing, is_write in self._steps
        ]
        if not steps:
            return Future.resolved([])
        return _within(timeout, together([buffer._begin(here, is_write=is_write) for buffer, here, is_write in steps]))


def _within(timeout_s: float | None, future: Future[T]) -> Future[T]:
    """Make a future raise a TimeoutError after some time; the client of its owner then wakes the thread that waits."""
    if timeout_s is None or future.done():
        return future
    if not timeout_s > 0:
        raise ValueError(f"timeout must be more than 0 seconds, not {timeout_s}")

    def expire() -> None:
        if not future.done():
            future.abandon(TimeoutError(f"the transfer has not completed within {timeout_s} s"))
            future.owner.client.submit(lambda: None)

    timer = threading.Timer(timeout_s, expire)
    timer.name, timer.daemon = "monarch-transfer-timeout", True
    timer.start()
    future.add_done_callback(timer.cancel)
    return future


def _first_bytes(memory: Memory, nbytes: int) -> Memory:
    return memory._replace(layout=Layout("uint8", 1, (nbytes,), (1,)))


def _open(kind: type[Buffer], proc: int, lent: Any, lease: Any, base: int, at: int, layout: Any, *rest: Any) -> Buffer:
    buffer: Buffer = object.__new__(kind)
    buffer._settle(client_here(), BufferHandle(proc, Lent(*lent), Lease(*lease), base, at, Layout(*layout), *rest))
    return buffer


def shared(tensor: TensorT) -> TensorT:
    """Copy a tensor into memory that other processes share: a receiver of it, or of a view, writes to the same memory.

    The memory is shared by the processes of this machine to which this process sends the tensor, as an argument, a result, a
    variable, or inside of one. What these send on are copies, like everything that is not shared. The memory is released when
    the last of them has no tensor in it; a process that ends, or is killed, takes it from no other. The program must order the
    writes.

    Args:
        tensor: on the CPU, strided, of any dtype; its copy is contiguous.

    Raises:
        TypeError: it is not such a tensor; the text says what to pass instead.
        MemoryError: there is not enough memory; the text has the figures.
        PayloadError: raised in a receiver that can't share the memory, such as one on another host of a mesh.
    """
    value: Any = tensor
    if not hasattr(value, "untyped_storage"):
        raise TypeError(
            f"shared() takes a tensor, not {type(tensor).__name__}: for an array pass torch.from_numpy(array); .numpy() of the "
            "result is an array in the same memory"
        )
    memory = memory_of(value)
    if memory.device:
        raise TypeError(f"the tensor is on {memory.device}, and shared memory is on the CPU: pass tensor.cpu()")
    if value.is_quantized:
        raise TypeError("the tensor is quantized: pass tensor.int_repr(), and its scales")
    source = value.detach().contiguous()
    if not memory.layout.nbytes:
        return source.requires_grad_(value.requires_grad)  # type: ignore[no-any-return]
    block = for_all(view_of(source.data_ptr(), memory.layout.nbytes))
    dtype, strides = memory.layout.dtype, source.stride()
    return tensor_in(block, dtype, 0, source.shape, strides, requires_grad=value.requires_grad)  # type: ignore[no-any-return]
