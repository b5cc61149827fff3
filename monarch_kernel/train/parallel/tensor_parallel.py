"""Splits matrices among ranks, and checks on a copy that the outputs and gradients of the model stay the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_leaves

from monarch_kernel.errors import PlanError
from monarch_kernel.train.parallel.probe import Example, run
from monarch_kernel.train.planning.tensor_split import has_partner

__all__ = ["prove", "split_modules"]

_TOLERANCE = 1e-3


def split_modules(model: nn.Module, tensor: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Split modules of a model along a one-dimensional mesh; ``tensor``: full name -> ``colwise`` or ``rowwise``."""
    linears = {name: style for name, style in tensor.items() if isinstance(model.get_submodule(name), nn.Linear)}

    def style_of(name: str) -> ParallelStyle:
        """Activations between a colwise layer and a rowwise layer beside it stay split; all others are whole on each rank."""
        between = Shard(-1) if name in linears and has_partner(name, linears) else Replicate()
        if tensor[name] == "colwise":
            return ColwiseParallel(output_layouts=between)
        return RowwiseParallel(input_layouts=between, output_layouts=Replicate())

    parallelize_module(model, mesh, {name: style_of(name) for name in tensor})


def prove(model: nn.Module, tensor: Mapping[str, str], mesh: DeviceMesh, example: Example) -> None:
    """Compare the model with a split copy on the example, forward and backward, without dropout.

    Raises:
        PlanError: outputs or gradients differ.
    """
    split = copy.deepcopy(model)
    named = ", ".join(list(tensor)[:4]) + (", …" if len(tensor) > 4 else "")
    try:
        split_modules(split, tensor, mesh)
        theirs = _outcome(split, example)
    except Exception as error:
        raise PlanError(
            f"split along {mesh.mesh_dim_names[0] if mesh.mesh_dim_names else 'the mesh'} ({named}), the model does not run: "
            f"{type(error).__name__}: {error}\n"
            "code that assumes the sizes of a whole layer (a view by the number of heads, an index into a weight) meets a part "
            "of it: write -1 for the split dim, or do not split that layer"
        ) from error
    for (name, mine), (_, other) in zip(_outcome(model, example), theirs):
        scale = max(1.0, float(mine.abs().max())) if mine.numel() else 1.0
        if mine.shape != other.shape or float((mine - other).abs().max() if mine.numel() else 0) > _TOLERANCE * scale:
            raise PlanError(
                f"split as requested ({named}), the model computes something else: {name} differs; a colwise layer returns a "
                "part of its outputs, which only elementwise code and the rowwise layer that follows may use"
            )


def _outcome(model: nn.Module, example: Example) -> list[tuple[str, torch.Tensor]]:
    """The whole outputs and gradients of an example."""
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            outputs = [_whole(leaf) for leaf in tree_leaves(run(model, example)) if _is_float(leaf)]
            generator = torch.Generator().manual_seed(0)
            weighed = [
                (output * torch.rand(output.shape, generator=generator).to(output)).sum()
                for output in outputs
                if output.requires_grad
            ]
            found = [(f"output {i}", output.detach()) for i, output in enumerate(outputs)]
            if weighed:
                torch.autograd.backward(torch.stack(weighed).sum())
        for name, param in model.named_parameters():
            if param.grad is not None:
                found.append((f"the gradient of {name}", _whole(param.grad).clone()))
        return found
    finally:
        model.zero_grad(set_to_none=True)
        for module, mode in was_training.items():
            module.training = mode


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.to_dense() if whole.is_sparse else whole
