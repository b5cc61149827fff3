"""Data paths to memory that its owner opens on request: by CUDA IPC, and by RDMA hardware.

Whether such a path works is known only after trying it. After a failure it is not tried again with that owner for a while, and
the transfer takes another path.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from monarch_kernel.errors import Failure
from monarch_kernel.net.memory import devices
from monarch_kernel.net.memory.exports import BufferHandle
from monarch_kernel.net.memory.layout import Layout, Memory, ProcessBlock, matched, paired, runs_of
from monarch_kernel.net.memory.paths import LARGE_SLAB_NBYTES, OwnerGone, PathUnavailable
from monarch_kernel.net.wire.codec import load, pack
from monarch_kernel.net.wire.messages import CloseBuffer, OpenBuffer
from monarch_kernel.runtime.buffers import nixl
from monarch_kernel.runtime.buffers.idle_cache import IdleCache
from monarch_kernel.runtime.buffers.local_paths import Tables
from monarch_kernel.runtime.buffers.message_path import error_of
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.client import Client

__all__ = ["CudaPath", "RdmaPath"]

KEPT_S = 10.0
"""How long an RDMA agent that is not in use is kept."""

BARRED_S = 60.0
LEAST_NBYTES = 1 << 20
"""For anything smaller, the request to open the memory to an owner on another machine does not pay off."""

_RUNS_AT_MOST = 4096
_ANY = Layout("", 1, (), ())


class _Opened:
    """Requests to owners to open memory, used by both data paths.

    Args:
        client: sends the requests.
        way: the field of `OpenBuffer`.
    """

    def __init__(self, client: Client, way: str) -> None:
        self._client = client
        self._way = way
        self._barred: dict[bytes, float] = {}

    def is_barred(self, handle: BufferHandle) -> bool:
        """Whether this path failed with this owner a short time ago."""
        return self._barred.get(handle.lent.cookie, 0.0) > time.monotonic()

    def bar(self, handle: BufferHandle, why: object) -> PathUnavailable:
        """Stop trying this path with an owner for a while."""
        self._barred[handle.lent.cookie] = time.monotonic() + BARRED_S
        return PathUnavailable(str(why))

    def ask(self, handle: BufferHandle) -> tuple[int, Any]:
        """Request that the owner opens the memory; return the id for `close`, and what is needed to access the memory.

        Raises:
            OwnerGone: the memory is no longer lent, or the owner has ended.
            PathUnavailable: the owner can't open the memory; it gets no such request again for a while.
        """
        opened: list[int] = []

        def make(id: int) -> Any:
            opened[:] = [id]
            return pack(OpenBuffer(id, handle.lent.cookie, *handle.lease, self._way))

        def finish(answers: Sequence[Answer]) -> Any:
            (answer,) = answers
            if isinstance(answer, Failure):
                raise self._refused(handle, answer)
            return load(answer.payload, answer.frames)

        how = self._client.request((handle.proc,), make, "opening memory", finish, quiet=True).get(warn_after_s=None)
        return opened[0], how

    def _refused(self, handle: BufferHandle, answer: Failure) -> BaseException:
        error = error_of(answer)
        return error if isinstance(error, OwnerGone) else self.bar(handle, error)

    def close(self, handle: BufferHandle, opened: int) -> None:
        """Tell the owner that the memory is not used any more."""
        self._client.tell((handle.proc,), pack(CloseBuffer(opened)))


class CudaPath:
    """Data path within a machine to device memory that another process lends: one copy, from device to device.

    A process that has not used a device yet does not take this path, because it costs hundreds of megabytes of device memory.
    """

    name = "cuda"
    is_direct = False
    takes_devices = True
    slab_nbytes = LARGE_SLAB_NBYTES

    def __init__(self, client: Client, tables: Tables) -> None:
        self._opening = _Opened(client, "cuda")
        self._tables = tables
        # Kept as long as the memory is lent: each opening is one more reference that the owner's allocator counts.
        self._cache: IdleCache[BufferHandle, Memory] = IdleCache("monarch-opened", float("inf"), self._is_lent)

    def leads_to(self, handle: BufferHandle) -> bool:
        return (
            bool(handle.device)
            and self._tables.is_local(handle.lent)
            and devices.are_in_use()
            and not self._opening.is_barred(handle)
        )

    def carry(self, handle: BufferHandle, here: Memory, *, is_write: bool) -> None:
        near, far = matched(here.layout, handle.layout)
        ours = here._replace(layout=near)
        key = handle._replace(base=0, address=0, layout=_ANY)  # all of the lent memory, whichever part is requested
        with self._tables.held(handle):  # which keeps the memory in place
            if not near.nbytes:
                return
            try:
                with self._cache.held(key, lambda: devices.opened(self._opening.ask(handle)[1], here.device)) as whole:
                    theirs = whole._replace(address=whole.address + handle.address - handle.base, layout=far)
                    devices.copy(*((theirs, ours) if is_write else (ours, theirs)))
            except (RuntimeError, TypeError) as error:  # from torch, and from the driver below it
                self._cache.drop(key)
                raise self._opening.bar(handle, error) from None

    def _is_lent(self, handle: BufferHandle) -> bool:
        try:
            with self._tables.held(handle):
                return True
        except (OwnerGone, PathUnavailable):
            return False

    def close(self) -> None:
        self._cache.close()


class RdmaPath:
    """Data path between machines with RDMA hardware and NIXL, for memory of the CPU and of devices."""

    name = "rdma"
    is_direct = False
    takes_devices = True
    slab_nbytes = LARGE_SLAB_NBYTES

    def __init__(self, client: Client, tables: Tables) -> None:
        self._client = client
        self._opening = _Opened(client, "rdma")
        self._tables = tables
        self._is_there: bool | None = None
        self._cache: IdleCache[bytes, nixl.Agent] = IdleCache("monarch-opened", KEPT_S)

    def leads_to(self, handle: BufferHandle) -> bool:
        if self._is_there is None:
            self._is_there = nixl.has_hardware() and nixl.is_installed()
        return (
            self._is_there
            and handle.layout.nbytes >= LEAST_NBYTES
            and not self._tables.is_local(handle.lent)
            and not self._opening.is_barred(handle)
        )

    def carry(self, handle: BufferHandle, here: Memory, *, is_write: bool) -> None:
        near, far = matched(here.layout, handle.layout)
        if near.nbytes and near.nbytes // min(near.run()[0], far.run()[0]) > _RUNS_AT_MOST:
            raise PathUnavailable("its elements are too far apart")
        theirs = runs_of(ProcessBlock(handle.address, far))
        pairs = paired(runs_of(ProcessBlock(here.address, near)), theirs)
        why = ""
        for _ in range(2):  # retry once, because what is kept of the owner may be outdated
            opened, how = self._opening.ask(handle)  # also for 0 bytes: the memory may be gone
            try:
                described = nixl.Described(*how)
                described.check(theirs, is_write=is_write)
                if pairs:
                    with self._cache.held(handle.lent.cookie, nixl.agent) as agent:
                        agent.carry(described, here._replace(layout=near), pairs, is_write=is_write)
                return
            except nixl.NixlUnreachable as error:
                why = str(error)  # the error itself would keep the objects of this frame alive
            finally:
                self._opening.close(handle, opened)
        raise self._opening.bar(handle, why)

    def close(self) -> None:
        self._cache.close()
