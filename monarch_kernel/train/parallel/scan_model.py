"""Collects the facts about a model that are known without running it: its parameters and modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from monarch_kernel.errors import PlanError
from monarch_kernel.train.planning.model_facts import ModelFacts, ModuleFacts, Needs, ParamFacts

__all__ = ["module_names", "named", "scan"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_OWN = frozenset(vars(nn.Module()))
_NORMS = nn.modules.batchnorm._NormBase
_PLAIN = (list, tuple, dict)


def scan(model: nn.Module, optimizer_nbytes: float = 8.0) -> ModelFacts:
    """Collect the facts about a model that need no example.

    Args:
        model: on any device, also on ``meta``.
        optimizer_nbytes: bytes of optimizer state per trainable element.

    Raises:
        PlanError: a parameter is not registered in the model, or the model is distributed already.
    """
    names = module_names(model)
    params = _params(names)
    views = dict(_views(names, params))
    facts = []
    for param, full in params.values():
        if isinstance(param, DTensor):
            raise PlanError(
                f"{full[0]} is a DTensor: the model is distributed already; create it again, and parallelize that"
            )
        facts.append(
            ParamFacts(
                names=full,
                shape=tuple(param.shape),
                dtype=str(param.dtype).removeprefix("torch."),
                itemsize=param.element_size(),
                trains=param.requires_grad,
                has_sparse_gradient=any(
                    _is_sparse(module, full) for module, name in names.items() if name in _owners(full)
                ),
                viewed_by=views.get(id(param), ""),
                is_strided=not param.is_contiguous(),
            )
        )
    modules = {
        name: ModuleFacts(
            name, type(module).__name__, has_forward=not isinstance(module, _CONTAINERS), needs=_needs(module, name)
        )
        for module, name in names.items()
    }
    return ModelFacts(tuple(facts), modules, averaged=tuple(_statistics(names)), optimizer_nbytes=optimizer_nbytes)


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Module -> its full name, each module once."""
    return {module: name for name, module in model.named_modules()}


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Full name -> parameter, for all names of each parameter."""
    return {name: param for param, full in _params(module_names(model)).values() for name in full}


def _params(names: Mapping[nn.Module, str]) -> dict[int, tuple[nn.Parameter, tuple[str, ...]]]:
    found: dict[int, tuple[nn.Parameter, tuple[str, ...]]] = {}
    for module, name in names.items():
        for key, param in module._parameters.items():
            if param is not None:
                full = f"{name}.{key}" if name else key
                found[id(param)] = (param, (*found.get(id(param), (param, ()))[1], full))
    return found


def _owners(full: tuple[str, ...]) -> set[str]:
    return {name.rpartition(".")[0] for name in full}


def _is_sparse(module: nn.Module, full: tuple[str, ...]) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def _needs(module: nn.Module, name: str) -> Needs | None:
    needs = getattr(module, "parallel_needs", None)
    if needs is not None and not isinstance(needs, Needs):
        raise PlanError(
            f"parallel_needs of {name or 'the model'} is a {type(needs).__name__}; it must be Needs(replicate=[...], why=...), "
            "from monarch_kernel.train.parallel"
        )
    return needs


def _statistics(names: Mapping[nn.Module, str]) -> Iterator[str]:
    """Buffers whose values would differ between ranks."""
    for module, name in names.items():
        if isinstance(module, _NORMS) and not isinstance(module, nn.SyncBatchNorm) and module.track_running_stats:
            for key in ("running_mean", "running_var"):
                if getattr(module, key) is not None:
                    yield f"{name}.{key}" if name else key


def _views(
    names: Mapping[nn.Module, str], params: Mapping[int, tuple[nn.Parameter, tuple[str, ...]]]
) -> Iterator[tuple[int, str]]:
    """Tensors that share the memory of a parameter, as (id of the parameter, name of the tensor).

    Raises:
        PlanError: there is a parameter or a module that is not registered in the model.
    """
    of_storage = {
        param.untyped_storage()._cdata: key for key, (param, _) in params.items() if not isinstance(param, DTensor)
    }
    for module, name in names.items():
        for attribute, value in _held(module):
            where = f"{name}.{attribute}" if name else attribute
            if isinstance(value, nn.Module):
                if value not in names and _is_trained(value):
                    raise PlanError(
                        f"{where} is a module ({type(value).__name__}) that is not registered in the model: its parameters and "
                        "buffers would be neither sharded nor averaged, could differ between ranks, and an optimizer of "
                        "model.parameters() does not train them; keep it in an nn.ModuleList or an nn.ModuleDict, and nested "
                        "lists and dicts in nested ones"
                    )
                continue
            if isinstance(value, nn.Parameter) and id(value) not in params:
                raise PlanError(
                    f"{where} is a parameter that is not registered in the model: it would be neither sharded nor averaged, "
                    "and an optimizer of model.parameters() does not train it; keep it in an nn.ParameterList or "
                    "nn.ParameterDict"
                )
            key = None if isinstance(value, DTensor) else of_storage.get(value.untyped_storage()._cdata)
            if key is not None:
                yield key, where


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | nn.Module]]:
    """Tensors of a module in buffers, plain attributes, lists, tuples and dicts; and modules in lists, tuples and dicts."""
    held: dict[str, Any] = {key: value for key, value in vars(module).items() if key not in _OWN}
    todo: list[tuple[str, Any]] = [*held.items(), *module._buffers.items()]
    todo = [(key, value) for key, value in todo if isinstance(value, (torch.Tensor, *_PLAIN))]
    seen: set[int] = set()
    for where, value in todo:  # `todo` grows meanwhile
        if not isinstance(value, _PLAIN):
            if isinstance(value, nn.Module) or not value.is_sparse:
                yield where, value
        elif id(value) not in seen:  # a container may contain itself
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            kinds = (torch.Tensor, nn.Module, *_PLAIN)
            todo += [(f"{where}[{key!r}]", each) for key, each in items if isinstance(each, kinds)]


def _is_trained(module: nn.Module) -> bool:
    """Whether training changes a module; a frozen one, such as a teacher, may be unregistered on purpose."""
    params = list(module.parameters())
    return any(param.requires_grad for param in params) if params else any(True for _ in module.buffers())
