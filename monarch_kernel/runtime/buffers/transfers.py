"""Copies bytes between memory of this process and memory that another process lends, by the best data path."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from monarch_kernel.errors import BufferGoneError
from monarch_kernel.net.memory.exports import BufferHandle
from monarch_kernel.net.memory.layout import Memory
from monarch_kernel.net.memory.paths import DataPaths, OwnerGone, Transfer
from monarch_kernel.net.memory.threads import IdleThreads
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.runtime.buffers.device_paths import CudaPath, RdmaPath
from monarch_kernel.runtime.buffers.local_paths import MemoryPath, ProcessPath, Tables
from monarch_kernel.runtime.buffers.message_path import MessagesPath
from monarch_kernel.runtime.buffers.stream_path import NetworkPath
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.waits import Wait

__all__ = ["carry", "data_paths_of", "together"]

AT_ONCE_NBYTES = 8 << 20
"""The calling thread copies anything smaller itself: handing it to another thread would cost more."""

_THREADS = 4

_threads = IdleThreads("monarch-carrier", _THREADS)


def data_paths_of(client: Client) -> DataPaths:
    """Return all data paths of a process, the best first.

    Args:
        client: sends the requests of the process.
    """
    tables = Tables()
    paths = (
        ProcessPath(tables, client.exports),
        MemoryPath(tables),
        CudaPath(client, tables),
        RdmaPath(client, tables),
        NetworkPath(client, tables),
        MessagesPath(client),
    )
    return DataPaths(paths, client.meters)


def carry(
    client: Client, handle: BufferHandle, here: Memory, *, is_write: bool, keeper: object = None
) -> Future[Transfer]:
    """Copy lent memory into memory of this process, or the other way if ``is_write``.

    Args:
        client: the client of this process, which has its data paths.
        handle: the lent memory.
        here: memory of this process, of as many bytes.
        is_write: the direction.
        keeper: an object to keep alive until the transfer ends, such as a handle whose end ends the lease.
    """
    future: Future[Transfer] = Future(
        _Carrying(client), 0, lambda answers: done[0], description="a transfer with a buffer", procs=(handle.proc,)
    )
    done: list[Transfer] = []

    def work() -> None:
        try:
            done.append(client.paths.carry(handle, here, is_write=is_write))
        except OwnerGone as error:
            future.abandon(_gone(client, handle, str(error)))
        except Exception as error:
            future.abandon(error)
        else:
            future.resolve((), True)

    if handle.layout.nbytes <= AT_ONCE_NBYTES and client.paths.are_direct(handle):
        work()
    else:
        _threads.submit(lambda: _work_and_wake(client, work, keeper))
    return future


def together(futures: Sequence[Future[Transfer]]) -> Future[list[Transfer]]:
    """Combine one or more transfers into one future; it completes after all of them, with the first error if there is one."""
    whole: Future[list[Transfer]] = Future(futures[0].owner, 0, lambda _: [each.get(0) for each in futures])
    left = len(futures)
    lock = threading.Lock()

    def one_is_done() -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = not left
        if is_last:
            whole.resolve((), True)

    for each in futures:
        each.add_done_callback(one_is_done)
    return whole


def _work_and_wake(client: Client, work: Callable[[], None], keeper: object) -> None:
    work()
    client.submit(_nothing)  # wakes the thread that waits for the future in the transport


def _nothing() -> None:
    pass


def _gone(client: Client, handle: BufferHandle, why: str) -> BufferGoneError:
    """Create the error for the caller. It was never raised, so no frames keep memory or descriptors alive."""
    death = client.deaths((handle.proc,)).get(handle.proc)
    return BufferGoneError(f"the buffer can't be used any more: {why}" + (f" ({death.headline()})" if death else ""))


class _Carrying:
    """Owner of the futures of transfers, which can't be interrupted or cancelled."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def wait(self, waiter: Waiter, timeout_s: float | None) -> bool:
        return self.client.wait(waiter, timeout_s)

    def interrupt(self, id: int, *, abort: bool = False) -> None:
        pass

    def cancel(self, id: int) -> None:
        pass

    def attend(self, future: Future[Any]) -> None:
        self.client.attend(future)

    def on_slow_wait(self, wait: Wait) -> float | None:
        return self.client.on_slow_wait(wait)
