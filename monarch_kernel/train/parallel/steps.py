"""Hooks for each step of a distributed model: average what neither FSDP nor DDP manages, and check the ranks.

Theory of operation
===================

A root forward that will have a backward is a step. At its end the ranks compare two things by one all-reduce of three numbers:

- a checksum of the units that they have entered. FSDP gathers the parameters of a unit when its forward starts, so ranks that
  enter different units (a branch that depends on the rank's data) would mix the parameters of two layers, without an error;
- whether an output is not finite. If one is not, all ranks run the forward again, with hooks on all modules. The error names
  the first module whose output is not finite although its inputs are, and the inputs of the model that are not finite.

When the gradient reaches the outputs, a callback is queued with autograd for the end of this backward. By then all gradients
exist. The callback averages the gradients of parameters that each rank holds whole over the ranks, and the buffers that differ
between ranks. It does so after each backward: where gradients accumulate over several backwards, averages of earlier ones stay
unchanged.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from monarch_kernel.errors import format_ranks
from monarch_kernel.train.parallel.cross_rank import hash_of
from monarch_kernel.train.parallel.reset_step import forget_step, is_in_backward

__all__ = ["AfterBackward", "Averages", "Checks", "same_batches"]


class AfterBackward:
    """Calls a function at the end of each backward through a model's outputs.

    Before a forward, it resets the state of an interrupted step.

    Args:
        model: the root module.
        then: the function to call.
    """

    def __init__(self, model: nn.Module, then: Callable[[], object]) -> None:
        self._then = then
        self._is_queued = False
        self._is_in_forward = False
        model.register_forward_pre_hook(self._forward_begins, prepend=True)
        model.register_forward_hook(self._forward_ends)

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        if is_in_backward():
            return
        if self._is_queued or self._is_in_forward:
            forget_step(module)
        self._is_queued = False
        self._is_in_forward = True

    def _forward_ends(self, module: nn.Module, args: Any, result: Any) -> None:
        self._is_in_forward = False
        if torch.is_grad_enabled():
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, grad: torch.Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._is_queued = False
        self._then()


class Averages:
    """Averages gradients and buffers over a group.

    Args:
        params: parameters that each rank of the group holds in the same form.
        buffers: buffers that differ between ranks.
        group: the group of the ranks.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], buffers: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        self._params = [param for param in params if param.requires_grad]
        self._buffers = buffers
        self._group = group
        self._takes_sparse = dist.get_backend(group) == "gloo"

    def __call__(self) -> None:
        """Average the current gradients and buffers; collective."""
        with torch.no_grad():
            self._average_gradients()
            for members in _alike(self._buffers):
                self._write(members, self._mean(torch.cat([buffer.reshape(-1) for buffer in members])))

    def _average_gradients(self) -> None:
        """Average gradients. If some ranks have no gradient of a parameter that others have, it counts as zero there."""
        for params in _alike(self._params):
            dense = [param for param in params if not _is_sparse(param)]
            has = torch.tensor([float(param.grad is not None) for param in params], device=params[0].device)
            dist.all_reduce(has, group=self._group)
            somebody_has = dict(zip(map(id, params), (count > 0 for count in has.tolist())))
            for param in params:
                if somebody_has[id(param)] and param.grad is None:
                    param.grad = torch.zeros_like(param)
            sparse = [param for param in params if param not in set(dense) and param.grad is not None]
            grads = [_local(param.grad) for param in dense if param.grad is not None]
            if grads:
                self._write(grads, self._mean(torch.cat([grad.reshape(-1) for grad in grads])))
            for param in sparse:
                param.grad = self._mean_of_sparse(param)

    def _mean(self, flat: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(flat, group=self._group)
        return flat.div_(self._group.size())

    def _mean_of_sparse(self, param: nn.Parameter) -> torch.Tensor:
        assert param.grad is not None
        grad = param.grad.coalesce() if param.grad.is_sparse else param.grad.to_sparse(1)
        if self._takes_sparse:
            dist.all_reduce(grad, group=self._group)
            return grad / self._group.size()
        return self._mean(grad.to_dense()).to_sparse(1)

    @staticmethod
    def _write(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, part in zip(tensors, torch.split(flat, sizes)):
            tensor.copy_(part.view_as(tensor))


def _alike(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    """Group tensors that can be concatenated: those with the same dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Any]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    yield from groups.values()


def _is_sparse(param: nn.Parameter) -> bool:
    return getattr(param, "_has_sparse_gradient", False)


def _local(grad: Any) -> torch.Tensor:
    local: torch.Tensor = grad.to_local() if isinstance(grad, DTensor) else grad
    return local


class Checks:
    """Compares the ranks at the end of each root forward of training.

    Args:
        model: the root module.
        names: full names of its modules.
        units: modules that are wrapped separately.
        group: the group of all ranks.
    """

    def __init__(
        self, model: nn.Module, names: Mapping[nn.Module, str], units: Sequence[nn.Module], group: dist.ProcessGroup
    ) -> None:
        self._model = model
        self._names = names
        self._group = group
        self._step = 0
        self._way: list[str] = []
        self._is_in = self._looks = False
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, with_kwargs=True)
        for unit in units:
            unit.register_forward_pre_hook(self._enter)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._is_in = torch.is_grad_enabled() and module.training and not self._looks
        self._way = []

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._is_in:  # not during recomputation in the backward
            self._way.append(self._names[module])

    def _end(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if not self._is_in:
            return
        self._is_in = False
        is_bad = 0.0
        device = "cpu"
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                device = tensor.device.type
                is_bad = max(is_bad, float(not _is_finite(tensor)))
        crc = zlib.crc32("\n".join(self._way).encode())
        maxima = torch.tensor([crc, -crc, is_bad], dtype=torch.float64, device=device)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._group)
        most, least, is_any_bad = maxima.tolist()
        if most != -least:
            self._report_branches()
        if is_any_bad:
            self._report_first(args, kwargs)
        self._step += 1

    def _report_branches(self) -> None:
        everyones: list[Any] = [None] * self._group.size()
        dist.all_gather_object(everyones, self._way, group=self._group)
        at = next(i for i, units in enumerate(zip_longest(*everyones)) if len(set(units)) > 1)
        there: dict[str, list[int]] = {}
        for rank, way in enumerate(everyones):
            there.setdefault(way[at] if at < len(way) else "no further one", []).append(rank)
        ways = ", ".join(f"{unit} on {format_ranks(ranks)}" for unit, ranks in there.items())
        raise RuntimeError(
            f"step {self._step}: the ranks entered different units of the model: after {at} equal ones comes "
            f"{ways}. A rank that enters another "
            "unit than the others takes part in the wrong all-gather, and gets parameters of another layer. Let all ranks take "
            "the same branch (decide by a value that is equal on all), or wrap fewer units: parallelize(..., units=[...])"
        )

    def _report_first(self, args: Any, kwargs: Any) -> None:
        """Run the forward again, to find the first module whose output is not finite."""
        first: list[str] = []
        given = _not_finite(self._model, args, kwargs)

        def look(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if not first and not _all_finite(result) and all(map(_is_sound, _floats((args, kwargs)))):
                first.append(self._names.get(module, "") or "the model itself")

        hooks = [module.register_forward_hook(look, with_kwargs=True) for module in self._names]
        self._looks = True
        try:
            with torch.no_grad():
                is_again = not _all_finite(self._model(*args, **kwargs))
        finally:
            self._looks = False
            for hook in hooks:
                hook.remove()
        everyones: list[Any] = [None] * self._group.size()
        bad = [name for name, param in self._model.named_parameters() if not _is_finite(_local(param.detach()))]
        dist.all_gather_object(everyones, (first[:1], bad, given, is_again), group=self._group)
        inputs: dict[str, list[int]] = {}
        for rank, (_, _, names, _) in enumerate(everyones):
            for name in names:
                inputs.setdefault(name, []).append(rank)
        said = []
        if inputs:
            words = ", ".join(f"{name} on {format_ranks(ranks)}" for name, ranks in inputs.items())
            said.append(f"inputs of the model are not finite: {words}; check the batch there")
        said += [
            f"on rank {rank} first the output of {names[0]}, whose inputs are finite"
            for rank, (names, *_) in enumerate(everyones)
            if names
        ]
        if not any(again for *_, again in everyones):
            said.append("in a second run it was finite on all ranks")
        text = "; ".join(said) or "no module has such an output for finite inputs"
        if params := sorted({name for _, names, *_ in everyones for name in names}):
            more = f" and {len(params) - 4} more" if len(params) > 4 else ""
            text += f". Parameters that are not finite: {', '.join(params[:4])}{more}: an earlier step made them so"
        raise FloatingPointError(f"step {self._step}: the output of the model is not finite: {text}")


def _not_finite(model: nn.Module, args: Any, kwargs: Any) -> list[str]:
    """Describe the arguments of a forward that are not finite."""
    try:
        given: dict[str, Any] = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # Python can't inspect the signature
        given = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    found = []
    for name, value in given.items():
        try:
            leaves = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(value)[0]]
        except ValueError:  # a container whose parts have no names
            leaves = [("", leaf) for leaf in tree_leaves(value)]
        for where, leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not _is_sound(leaf):
                has = "nan" if bool(_local(leaf.detach()).isnan().any()) else "inf"
                found.append(f"{name}{where} has {has}")
    return found


def _all_finite(tree: Any) -> bool:
    return all(map(_is_finite, _floats(tree)))


def _floats(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite. Checks the sum first, which takes one pass, and all elements only if it overflows."""
    tensor = _local(tensor.detach())
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _is_sound(tensor: torch.Tensor) -> bool:
    """Whether an input can give finite outputs: it may contain -inf, as attention masks do."""
    if _is_finite(tensor):
        return True
    local = _local(tensor.detach())
    return not bool((local.isnan() | local.isposinf()).any())


def same_batches(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Check at the first forward that all ranks of a group that splits matrices got the same inputs."""

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        sums = [hash_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        everyones: list[Any] = [None] * group.size()
        dist.all_gather_object(everyones, sums, group=group)
        if any(theirs != everyones[0] for theirs in everyones):
            raise ValueError(
                "ranks that split matrices got different batches, so the results would be wrong; pass the same batch on all "
                "ranks along that axis, for example by seeding the sampler with mesh.get_local_rank('dp')"
            )

    handle = model.register_forward_pre_hook(check, with_kwargs=True)
