"""Runs forward and backward of a step twice, and compares their gradients: implements `monarch_kernel.live.repeat`.

Theory of operation. A faulty processor, GPU or memory computes wrong gradients without an error. When the ranks have averaged
their gradients, all hold the same wrong ones, so that replicas do not differ. But two runs of the same code on one rank,
with the same random numbers, do. The gradients are compared where autograd computes them, before DistributedDataParallel
exchanges them, so that the rank is known. Those that do not pass there, as those of FSDP, are compared after each run. So are
others, except for those of DistributedDataParallel: it sums in another order after its first step.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from monarch_kernel.errors import format_ranks
from monarch_kernel.features.replicas.digests import mixed
from monarch_kernel.features.replicas.worker import walk

__all__ = ["Found", "repeat_text", "run_twice"]

_Digests = dict[str, list["int | bytes"]]
"""Name of a parameter -> digests of its gradients, in order."""

_MAX_NAMES = 100
_REMEDY = (
    "Usual causes: a faulty GPU, processor or memory; operations that are not deterministic "
    "(torch.use_deterministic_algorithms(True) finds them); a function that does not do the same twice. "
    "All ranks have stopped here; %mesh rollback goes back to a snapshot"
)


class Found(NamedTuple):
    """What differs between two runs on one rank.

    Attributes:
        step: the step.
        computed: names of parameters whose gradients differ where autograd has computed them.
        left: names of parameters whose gradients differ after the runs.
    """

    step: int
    computed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def run_twice(step: int, function: Callable[[], Any], modules: Mapping[str, Any]) -> tuple[Any, Found]:
    """Call a function twice from the same state; returns the value of the second call, and what differs.

    Gradients, buffers and the global random generators are those of one call afterwards.

    Args:
        step: the step.
        function: runs forward and backward.
        modules: the modules whose gradients it computes, by name.
    """
    import torch

    parameters = {
        path: each for name, module in modules.items() for kind, path, each in walk(name, module) if kind == "parameter"
    }
    sums = _summed_elsewhere(modules)
    gradients = [(each, each.grad, _copy(each.grad)) for each in parameters.values()]
    buffers = [
        (part, key, buffer, _copy(buffer))
        for module in modules.values()
        for part in module.modules()
        for key, buffer in part._buffers.items()
    ]
    with _same_random_numbers():
        _, computed, left = _run(function, parameters)
    with torch.no_grad():
        for parameter, gradient, value in gradients:
            parameter.grad = gradient
            if gradient is not None:
                gradient.copy_(value)
        for part, key, buffer, value in buffers:
            part._buffers[key] = buffer
            if buffer is not None:
                buffer.copy_(value)
    result, computed_again, left_again = _run(function, parameters)
    differing = _differing(left, left_again)
    return result, Found(
        step,
        _differing(computed, computed_again)[:_MAX_NAMES],
        tuple(name for name in differing if id(parameters[name]) not in sums)[:_MAX_NAMES],
    )


def repeat_text(by_rank: Mapping[int, Found]) -> str:
    """Return what differs between the two runs, the same text on each rank; empty if nothing does."""
    step = max(found.step for found in by_rank.values())
    computed = {rank: found.computed for rank, found in by_rank.items() if found.computed}
    left = {rank: found.left for rank, found in by_rank.items() if found.left}
    if not computed and not left:
        return ""
    where = "" if computed else ", after the ranks had exchanged them, so that any rank may be the cause"
    names = list(dict.fromkeys(name for each in (computed or left).values() for name in each))
    more = f" (and {len(names) - 1:,} more)" if len(names) > 1 else ""
    return (
        f"step {step:,}: the gradient of {names[0]}{more} is another one when forward and backward run twice, "
        f"on {format_ranks(sorted(computed or left))}{where}. {_REMEDY}"
    )


def _run(function: Callable[[], Any], parameters: Mapping[str, Any]) -> tuple[Any, _Digests, _Digests]:
    """Call a function; returns its value, and digests of the gradients: as computed, and as they are left."""
    computed: _Digests = {}

    def noting(name: str) -> Callable[[Any], None]:
        def note(gradient: Any) -> None:
            computed.setdefault(name, []).append(_digest(gradient))

        return note

    hooks = [each.register_hook(noting(name)) for name, each in parameters.items() if each.requires_grad]
    try:
        result = function()
    finally:
        for hook in hooks:
            hook.remove()
    left = {name: [_digest(each.grad)] for name, each in parameters.items() if each.grad is not None}
    return result, computed, left


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore the states of the global random generators at the end."""
    import torch

    cuda: Any = torch.cuda
    devices = [cuda.current_device()] if cuda.is_initialized() else []
    python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def _copy(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone()


def _digest(tensor: Any) -> int | bytes:
    return mixed(getattr(tensor, "_local_tensor", tensor))  # of a DTensor


def _differing(ones: _Digests, others: _Digests) -> tuple[str, ...]:
    return tuple(name for name in {**ones, **others} if ones.get(name) != others.get(name))


def _summed_elsewhere(modules: Mapping[str, Any]) -> set[int]:
    """The ids of parameters whose gradients DistributedDataParallel sums."""
    from torch.nn.parallel import DistributedDataParallel

    return {
        id(parameter)
        for module in modules.values()
        for part in module.modules()
        if isinstance(part, DistributedDataParallel)
        for parameter in part.parameters()
    }
