"""Operations on sharded tensors that treat each sample by itself: a rank does them on its samples, without a gather.

Torch has no rule for most of them, and that of the negative log likelihood takes the mean of the means of parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch_kernel.features.tensors.parts import is_sharded
from monarch_kernel.features.tensors.placing import redistributed, replicate

__all__ = ["BY_SAMPLE", "MEAN", "by_sample", "has_samples", "least_samples", "nll_loss", "nll_loss_backward"]

MEAN = 1
"""The number of the reduction to a mean in arguments of losses; 2 is the sum."""


class Rule:
    """How an operation that treats each sample by itself is done.

    Args:
        samples: Names of the arguments whose first dimension is that of samples; other tensors are replicated.
        results: For each result, ``samples`` or ``sum``, which adds up what the samples of each rank have given.
        n_dims: The number of dimensions of the first of them, if samples are there only then.
        count: The position of an argument that is the number of samples.
        sizes: The position of an argument that is the shape of a tensor of samples.
    """

    def __init__(
        self, samples: str, results: str = "samples", *, n_dims: int = 0, count: int = -1, sizes: int = -1
    ) -> None:
        self.samples = frozenset(samples.split())
        self.results = results.split()
        self.n_dims, self.count, self.sizes = n_dims, count, sizes


BY_SAMPLE = {
    "convolution": Rule("input"),
    "convolution_backward": Rule("grad_output input", "samples sum sum"),
    "native_group_norm": Rule("input", "samples samples samples", count=3),
    "native_group_norm_backward": Rule("grad_out input mean rstd", "samples sum sum", count=5),
    "im2col": Rule("self", n_dims=4),
    "col2im": Rule("self", n_dims=3),
    "avg_pool2d": Rule("self", n_dims=4),
    "avg_pool2d_backward": Rule("grad_output self", n_dims=4),
    "avg_pool3d": Rule("self", n_dims=5),
    "avg_pool3d_backward": Rule("grad_output self", n_dims=5),
    "max_pool2d_with_indices": Rule("self", "samples samples", n_dims=4),
    "max_pool2d_with_indices_backward": Rule("grad_output self indices", n_dims=4),
    "max_pool3d_with_indices": Rule("self", "samples samples", n_dims=5),
    "max_pool3d_with_indices_backward": Rule("grad_output self indices", n_dims=5),
    "_adaptive_avg_pool2d": Rule("self", n_dims=4),
    "_adaptive_avg_pool2d_backward": Rule("grad_output self", n_dims=4),
    "_adaptive_avg_pool3d": Rule("self", n_dims=5),
    "_adaptive_avg_pool3d_backward": Rule("grad_output self", n_dims=5),
    "adaptive_max_pool2d": Rule("self", "samples samples", n_dims=4),
    "adaptive_max_pool2d_backward": Rule("grad_output self indices", n_dims=4),
    "reflection_pad1d": Rule("self", n_dims=3),
    "reflection_pad1d_backward": Rule("grad_output self", n_dims=3),
    "reflection_pad2d": Rule("self", n_dims=4),
    "reflection_pad2d_backward": Rule("grad_output self", n_dims=4),
    "replication_pad1d": Rule("self", n_dims=3),
    "replication_pad1d_backward": Rule("grad_output self", n_dims=3),
    "replication_pad2d": Rule("self", n_dims=4),
    "replication_pad2d_backward": Rule("grad_output self", n_dims=4),
    "upsample_nearest1d": Rule("self"),
    "upsample_nearest1d_backward": Rule("grad_output", sizes=2),
    "upsample_nearest2d": Rule("self"),
    "upsample_nearest2d_backward": Rule("grad_output", sizes=2),
    "upsample_bilinear2d": Rule("self"),
    "upsample_bilinear2d_backward": Rule("grad_output", sizes=2),
    "upsample_bicubic2d": Rule("self"),
    "upsample_bicubic2d_backward": Rule("grad_output", sizes=2),
    "upsample_linear1d": Rule("self"),
    "upsample_linear1d_backward": Rule("grad_output", sizes=2),
    "grid_sampler_2d": Rule("input grid"),
    "grid_sampler_2d_backward": Rule("grad_output input grid", "samples samples"),
    "pixel_shuffle": Rule("self", n_dims=4),
    "pixel_unshuffle": Rule("self", n_dims=4),
}
"""Operations that treat each sample by itself, by the names of their schemas."""


def has_samples(base: str, args: Sequence[Any]) -> bool:
    """Whether an operation with these arguments treats each sample by itself, and not one sample as a whole."""
    rule = BY_SAMPLE[base]
    return not rule.n_dims or args[0].dim() == rule.n_dims


class Kinds:
    """How the tensors of an operation are placed that treats each sample by itself.

    Args:
        tensors: Its tensors, or None.
        samples: For each, whether its first dimension is that of samples.
        count: The number of samples.
        lead: The index of the tensor that says along which axes samples are sharded.
    """

    def __init__(self, tensors: Sequence[Any], samples: Sequence[bool], count: int, lead: int = 0) -> None:
        self.mesh = next(each.device_mesh for each in tensors if is_sharded(each))
        self.count = count
        self.samples = samples
        self.all_replicated = [replicate()] * self.mesh.ndim
        self.by_samples = [replicate()] * self.mesh.ndim
        leading = tensors[lead]
        shards, n_parts = [], 1
        if is_sharded(leading):
            shards = [axis for axis, each in enumerate(leading.placements) if each.is_shard(0)]
        for axis in shards:
            n_parts *= self.mesh.size(axis)
        # A rank without samples would get an error from some operations, and be alone with it.
        if shards and least_samples(count, [self.mesh.size(axis) for axis in shards]):
            for axis in shards:
                self.by_samples[axis] = leading.placements[axis]

    def local(self, tensors: Sequence[Any]) -> list[Any]:
        """The parts of this rank of the tensors."""
        return [
            each.redistribute(placements=self.by_samples if by_samples else self.all_replicated).to_local()
            if is_sharded(each)
            else each
            for each, by_samples in zip(tensors, self.samples)
        ]

    def wrapped(self, part: Any, kind: str) -> Any:
        """Make a result of its parts: one per sample, a sum over samples, or equal on all ranks."""
        import torch
        from torch.distributed.tensor import DTensor, Partial

        if part is None:
            return None
        part = part.contiguous()
        if kind == "samples":
            shape = torch.Size((self.count, *part.shape[1:])) if part.dim() else part.shape
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(part, self.mesh, self.by_samples, run_check=False, shape=shape, stride=stride)
        summed = [Partial() if each.is_shard() else each for each in self.by_samples]
        placed = summed if kind == "sum" else self.all_replicated
        return DTensor.from_local(part, self.mesh, placed, run_check=False)


def least_samples(count: int, sizes: Sequence[int]) -> int:
    """The smallest number of samples of a rank when they are split along axes in order."""
    for size in sizes:
        chunk = -(-count // size)
        count = max(0, count - chunk * (size - 1))
    return count


def by_sample(op: Any, rule: Rule, *args: Any, **kwargs: Any) -> Any:
    """Do an operation that treats each sample by itself, on the samples of this rank."""
    import torch

    names = [each.name for each in op._schema.arguments]
    given: dict[str, Any] = {**dict(zip(names, args)), **kwargs}
    places = [name for name, each in given.items() if isinstance(each, torch.Tensor)]
    tensors = [given[name] for name in places]
    by_samples = [name in rule.samples for name in places]
    lead = next((at for at, each in enumerate(tensors) if by_samples[at] and is_sharded(each)), 0)
    kinds = Kinds(tensors, by_samples, int(tensors[by_samples.index(True)].shape[0]), lead)
    given.update(zip(places, kinds.local(tensors)))
    first = given[next(name for name in places if name in rule.samples)]
    if rule.count >= 0:
        given[names[rule.count]] = first.shape[0]
        # Norms of groups take it that all are laid out alike, as torch's gradients see to for wholes.
        given.update({name: given[name].contiguous() for name in places})
    if rule.sizes >= 0:
        sizes = list(given[names[rule.sizes]])
        given[names[rule.sizes]] = [first.shape[0], *sizes[1:]]
    result = op(**given)
    if isinstance(result, torch.Tensor):
        return kinds.wrapped(result, rule.results[0])
    return tuple(kinds.wrapped(each, kind) for each, kind in zip(result, rule.results))


def nll_loss(op: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int) -> Any:
    """The negative log likelihood: the parts of the sum, and of the sum of weights, are added before they are divided."""
    import torch

    kinds = Kinds([x, target, weight], [True, True, False], 1 if x.dim() == 1 else x.shape[0])
    parts = kinds.local([x, target, weight])
    if not reduction:
        loss, total = op(*parts, 0, ignored)
        return kinds.wrapped(loss, "samples"), kinds.wrapped(total, "all")
    both = kinds.wrapped(torch.stack(op(*parts, 2, ignored)), "sum")
    loss, total = redistributed(both, kinds.all_replicated).to_local()
    return kinds.wrapped(loss / total if reduction == MEAN else loss, "all"), kinds.wrapped(total, "all")


def nll_loss_backward(
    op: Any, grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int, total: Any
) -> Any:
    """The gradient of `nll_loss` on the samples of this rank."""
    tensors = [grad, x, target, weight, total]
    kinds = Kinds(tensors, [not reduction, True, True, False, False], 1 if x.dim() == 1 else x.shape[0], lead=1)
    grad, x, target, weight, total = kinds.local(tensors)
    return kinds.wrapped(op(grad, x, target, weight, reduction, ignored, total), "samples")
