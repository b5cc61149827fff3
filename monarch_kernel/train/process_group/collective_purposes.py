"""What collectives are for that torch starts itself: gradients of DistributedDataParallel, parameters and gradients of FSDP.

The reducer of DistributedDataParallel is C++ and holds its lock while it waits, so it can't be asked. It puts parameters in the
order in which their gradients become ready, which is the reverse of their order in the module, into buckets, and sums the
gradients of each bucket by one all_reduce. So the number of elements tells the parameters, unless several runs of parameters
have this number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from types import FrameType
from typing import Any
from weakref import WeakSet

from monarch_kernel.runtime.diagnostics.thread_frames import frames_of

__all__ = ["Purposes", "bucket_text", "reducer_text"]

_FSDP_FILE = "/_fully_shard/_fsdp_param_group.py"
_BACKWARD_FILE = "/torch/autograd/graph.py"
_GROUP_FILE = "/torch/distributed/distributed_c10d.py"
_MAX_DEPTH = 500
_FSDP = {"all_gather": "FSDP's all-gather", "reduce_scatter": "FSDP's reduce-scatter"}


class Purposes:
    """Knows the models of this process that are wrapped by DistributedDataParallel, once it is installed."""

    def __init__(self) -> None:
        self._models: WeakSet[Any] = WeakSet()

    def install(self) -> None:
        """Note each model that is wrapped from now on."""
        from torch.nn.parallel import DistributedDataParallel

        ddp: Any = DistributedDataParallel
        original: Callable[..., None] = ddp.__init__

        @wraps(original)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            self._models.add(model)

        ddp.__init__ = __init__

    def of(self, operation: str, numel: int, thread: int) -> str:
        """Say what a pending collective is for; empty if the user's code has started it, or that is not known.

        Args:
            operation: such as ``all_reduce``.
            numel: number of elements of its input.
            thread: the thread that has started it.
        """
        frames = frames_of(thread, _MAX_DEPTH)
        group = next((found for frame in frames if (found := _param_group(frame)) is not None), None)
        if group is not None:
            what = _FSDP.get(operation, "FSDP")
            module = str(getattr(group, "_module_fqn", None) or "")
            return f"{what} of {module}" if module else f"{what} of the root module"
        files = [frame.f_code.co_filename for frame in frames]
        is_of_reducer = operation == "all_reduce" and any(file.endswith(_BACKWARD_FILE) for file in files[:3])
        if not is_of_reducer or any(file.endswith(_GROUP_FILE) for file in files):
            return ""
        return reducer_text(list(self._models), numel)


def reducer_text(models: Sequence[Any], numel: int) -> str:
    """Say which gradients an all_reduce may sum that is pending in a backward pass.

    Args:
        models: the models that are wrapped by DistributedDataParallel.
        numel: number of elements of the all_reduce.

    Returns:
        The text of `bucket_text`. Empty for one element if a model was used in ``Join``: its forward pass starts an
        all_reduce of one element, and does not wait for it.
    """
    if numel == 1 and any(getattr(getattr(model, "_join_config", None), "enable", False) for model in models):
        return ""
    known = {bucket_text(_sizes(model), numel) for model in models} - {""}
    return known.pop() if len(known) == 1 else "DDP's gradients" if models else ""


def bucket_text(sizes: Sequence[tuple[str, int]], numel: int) -> str:
    """Name the parameters of a bucket.

    Args:
        sizes: name and number of elements of each parameter, in the order of the module.
        numel: number of elements of the bucket.

    Returns:
        Such as ``DDP's gradients of 0.weight and 0.bias``; without names if that is ambiguous, empty if nothing has this size.
    """
    found: list[list[str]] = []
    for first in range(len(sizes)):
        left = numel
        for last in range(first, len(sizes)):
            left -= sizes[last][1]
            if left == 0:
                found.append([name for name, _ in sizes[first : last + 1]])
            if left <= 0:
                break
    if not found:
        return ""
    if len(found) > 1:
        return "DDP's gradients"
    (names,) = found
    some = " and ".join(names) if len(names) < 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more"
    return f"DDP's gradients of {some}"


def _sizes(model: Any) -> list[tuple[str, int]]:
    module = model.module
    parameters: Iterable[tuple[str, Any]] = module.named_parameters()
    return [(name, int(each.numel())) for name, each in parameters if each.requires_grad]


def _param_group(frame: FrameType) -> Any:
    """The parameters of a module that FSDP handles in this frame; None for other frames."""
    if not frame.f_code.co_filename.endswith(_FSDP_FILE):
        return None
    found = frame.f_locals.get("self")
    return found if hasattr(found, "_module_fqn") else None
