"""``monarch.rdma``: buffers with the results of Monarch, over the data paths of this product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from monarch_kernel import rdma as native
from monarch_kernel.integrations.monarch.missing import refuse
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future

__all__ = [
    "RDMAAction",
    "RDMABuffer",
    "RDMAReadTransferWarning",
    "RDMATcpFallbackWarning",
    "RDMAWriteTransferWarning",
    "get_rdma_backend",
    "is_ibverbs_available",
    "is_rdma_available",
    "pt_cuda_allocator_compatibility",
]


class RDMAReadTransferWarning(UserWarning):
    """For filters of warnings; nothing warns with it."""


class RDMAWriteTransferWarning(UserWarning):
    """For filters of warnings; nothing warns with it."""


class RDMATcpFallbackWarning(UserWarning):
    """For filters of warnings; nothing warns with it: `Transfer.path` names the data path."""


class RDMABuffer(native.RDMABuffer):
    """A buffer whose `drop` returns None, and can be repeated."""

    def drop(self) -> Future[Any]:
        """End the lease: the memory is released after the last transfer."""
        return _without_result(super().drop())


class RDMAAction(native.RDMAAction):
    """Several transfers that start together; the result is None."""

    def submit(self, timeout: float | None = None) -> Future[Any]:
        """Start all transfers; the arguments and errors are those of `monarch_kernel.rdma.RDMAAction.submit`."""
        return _without_result(super().submit(timeout))

    def fetch_add(self, src: RDMABuffer, dst: Any, add: int) -> NoReturn:
        """Raise an error, as in Monarch, which has the name and not yet the function."""
        raise NotImplementedError(_NO_ATOMICS)

    def compare_and_swap(self, src: RDMABuffer, dst: Any, compare: int, swap: int) -> NoReturn:
        """Raise an error, as in Monarch, which has the name and not yet the function."""
        raise NotImplementedError(_NO_ATOMICS)


_NO_ATOMICS = "memory of others is read and written, without atomic operations: let an endpoint of the owner do it"


def _without_result(future: Future[Any]) -> Future[Any]:
    finish = future.finish

    def nothing(answers: Sequence[Answer]) -> None:
        finish(answers)

    return future.read_with(nothing)


def is_rdma_available() -> bool:
    """Whether buffers can be used; they always can."""
    return True


def is_ibverbs_available() -> bool:
    """Whether buffers use verbs of InfiniBand directly; they use NIXL where it is installed, and otherwise none."""
    return False


def get_rdma_backend() -> str:
    """Return the network over which processes without shared memory reach each other."""
    return "tcp"


def pt_cuda_allocator_compatibility() -> bool:
    """Whether memory of torch's allocator for CUDA can be read; it can."""
    return True


def __getattr__(name: str) -> NoReturn:
    refuse("monarch.rdma", name)
