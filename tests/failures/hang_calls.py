"""Calls of torch's libraries in which ranks wait for each other: what a cell runs before, and what the call is named."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIBRARIES", "LibraryCall"]


@dataclass(frozen=True)
class LibraryCall:
    """A call in which all ranks of the default group meet.

    Attributes:
        call: the call, alone in a line.
        operations: names for it, any of which is right.
        setup: lines before it, which all ranks run.
        words: texts that the description must contain.
        where: the line of ``setup`` that waits, counted from 1, if it is not that of the call: a function or a thread.
    """

    call: str
    operations: tuple[str, ...]
    setup: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    where: int = 0


_MODEL = (
    "from torch.distributed.fsdp import fully_shard",
    "device_mesh = dist.init_device_mesh('cpu', (4,))",
    "model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))",
    "for layer in model: fully_shard(layer, mesh=device_mesh)",
    "fully_shard(model, mesh=device_mesh)",
)
_THREADS = ("import threading", "from concurrent.futures import ThreadPoolExecutor")

LIBRARIES = {
    "tensor parallel": LibraryCall(
        "model(x[:4].reshape(1, 4)).sum().item()",
        ("all_reduce",),
        (
            "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
            "model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))",
            "device_mesh = dist.init_device_mesh('cpu', (4,), mesh_dim_names=('tp',))",
            "model = parallelize_module(model, device_mesh, {'0': ColwiseParallel(), '1': RowwiseParallel()})",
        ),
    ),
    "full state": LibraryCall(
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))",
        ("all_gather",),
        (*_MODEL, "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict"),
    ),
    "clip": LibraryCall(
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()",
        ("all_reduce", "full_tensor"),
        (*_MODEL, "model(x).sum().backward()"),
    ),
    "distributed checkpoint": LibraryCall(
        "dcp.save({'x': x}, checkpoint_id=path[0])",
        ("gather_object", "scatter_object_list", "gather", "scatter", "all_gather", "broadcast", "barrier", "save"),
        (
            "import torch.distributed.checkpoint as dcp",
            "path = [__import__('tempfile').mkdtemp()]; dist.broadcast_object_list(path, 0)",
        ),
    ),
    "autograd": LibraryCall(
        "differentiable.all_reduce(x.requires_grad_()).sum().backward()",
        ("all_reduce",),
        ("import torch.distributed.nn.functional as differentiable",),
    ),
    "two works": LibraryCall(
        "wait_for([dist.all_reduce(x, async_op=True), dist.all_reduce(x + 1, async_op=True)])",
        ("all_reduce",),
        ("def wait_for(works):", "    for work in works: work.wait()"),
        where=2,
    ),
    "thread": LibraryCall(
        "run(None)",
        ("barrier",),
        (
            *_THREADS,
            "def meet():",
            "    dist.barrier()",
            "def run(_):",
            "    thread = threading.Thread(target=meet)",
            "    thread.start(); thread.join()",
        ),
        where=4,
    ),
    "pool": LibraryCall(
        "pool.submit(meet).result()",
        ("all_reduce",),
        (*_THREADS, "pool = ThreadPoolExecutor(1)", "def meet():", "    dist.all_reduce(x)"),
        where=5,
    ),
    "sub group": LibraryCall(
        "dist.all_reduce(x, group=dist.new_subgroups(4)[0])",
        ("all_reduce", "new_group", "new_subgroups"),
    ),
}
"""The calls by the kind of hang."""
