"""Distributed tensors: the ranks of a mesh as one device, driven by the program with the operations of torch.

``with mesh.activate():`` makes new tensors on the ranks, one of the same shape on each. Operations on them return at once: the
program knows the shapes, and the ranks compute the values, in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch_kernel.errors import TensorError
from monarch_kernel.tensor.distributed_tensor import DistributedTensor
from monarch_kernel.tensor.nested import reduce, reduce_, slice_mesh, to_mesh
from monarch_kernel.tensor.on_mesh import get_active_mesh, manual_seed, no_mesh
from monarch_kernel.tensor.reading import fetch_shard, inspect, show
from monarch_kernel.tensor.recording import record
from monarch_kernel.tensor.remote import call_on_shard_and_fetch, remote
from monarch_kernel.tensor.streams import Stream, get_active_stream

if TYPE_CHECKING:
    from torch.distributed.tensor import Partial, Replicate, Shard

__all__ = [
    "DistributedTensor",
    "Partial",
    "Replicate",
    "Shard",
    "Stream",
    "TensorError",
    "call_on_shard_and_fetch",
    "fetch_shard",
    "get_active_mesh",
    "get_active_stream",
    "inspect",
    "manual_seed",
    "no_mesh",
    "record",
    "reduce",
    "reduce_",
    "remote",
    "show",
    "slice_mesh",
    "to_mesh",
]


def __getattr__(name: str) -> Any:
    if name in ("Partial", "Replicate", "Shard"):  # their import takes a second
        import torch.distributed.tensor

        return getattr(torch.distributed.tensor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
