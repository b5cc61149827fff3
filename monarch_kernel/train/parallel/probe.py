"""Runs one forward of an example, to find where each parameter is used, and what the forward costs.

Theory of operation. The forward runs on *fake* tensors, which have shapes, dtypes and devices, but no memory: so a model that
fits nowhere can be probed in milliseconds. Meanwhile, fake tensors replace the model's parameters and buffers. Code that
depends on values (``if x.sum() > 0``) fails on fake tensors. Then the forward runs once on real tensors, if the model has
values, and buffers that it writes are restored.

Global module hooks maintain the stack of running modules. A function mode sees each call of torch, and records the stack under
which a parameter is passed to it; a call that only reads a shape or a dtype is not a use. Tensors that autograd saves for the
backward are counted when they are saved, each storage once, for all modules that run.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from monarch_kernel.train.parallel.scan_model import module_names
from monarch_kernel.train.planning.model_facts import ModelFacts

__all__ = ["Example", "probe", "run"]

Example = Any
"""The arguments of a forward: a tensor, a tuple, a dict of keywords; or a function that takes the model and calls it."""

_ASKS = {
    *("__len__", "data_ptr", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "is_inference"),
    *("is_pinned", "is_shared", "ndimension", "nelement", "numel", "register_hook", "requires_grad_", "size"),
    *("storage_offset", "stride", "untyped_storage"),
}
"""Methods that do not use the values of a tensor."""
_GIVES = frozenset(("T", "H", "mT", "mH", "data", "real", "imag"))
"""Attributes that use the values of a tensor."""


def run(model: nn.Module, example: Example) -> Any:
    """Run the forward of a model on an example."""
    if isinstance(example, dict):
        return model(**example)
    if isinstance(example, (tuple, list)):
        return model(*example)
    if isinstance(example, torch.Tensor) or not callable(example):
        return model(example)
    return example(model)


def probe(
    model: nn.Module, example: Example, facts: ModelFacts, device: str, methods: Sequence[str] = ()
) -> ModelFacts:
    """Add the results of one forward to the facts about a model.

    Args:
        model: on any device, also on ``meta``.
        example: arguments of the forward.
        facts: the facts from `scan`.
        device: the later device of the model, if it is on ``meta``.
        methods: methods of the model that count as its forward.

    Raises:
        Exception: the forward raised it on real tensors.
    """
    names = module_names(model)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, _faked(names, mode, device) as fakes:
            seen = _watch(model, names, fakes, _placed(example, mode, device), methods)
        return _add_records(facts, seen, "fake")
    except Exception as error:
        why = f"on tensors without values its forward fails: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if any(param.is_meta for param in model.parameters()):
            return replace(facts, why_not=f"{why}; on the meta device there are no real tensors")
    with _restored(names):
        return _add_records(facts, _watch(model, names, _there(names), example, methods), "real")


class _Seen(TorchFunctionMode):
    """Records what a forward does.

    Attributes:
        uses: id of a parameter -> the stacks under which it was used.
        calls: module -> number of calls of its forward.
        saved: module -> bytes saved for the backward.
        given: module -> bytes of its arguments.
        flops: floating-point operations of the whole forward.
        written: names of parameters and buffers that were written to.
    """

    def __init__(self, names: dict[nn.Module, str], known: dict[int, str]) -> None:
        super().__init__()
        self.uses: dict[int, set[frozenset[str]]] = defaultdict(set)
        self.calls: dict[str, int] = defaultdict(int)
        self.saved: dict[str, int] = defaultdict(int)
        self.given: dict[str, int] = defaultdict(int)
        self.flops = 0
        self.written: set[str] = set()
        self.known = known
        self.stack: list[str] = []
        self._names = names
        self._counted: set[int] = set()
        self._alive: list[Any] = []  # else the address of a storage could be reused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _uses_values(func):
            for leaf in tree_leaves((args, kwargs or {})):
                if id(leaf) in self.known:
                    self.uses[id(leaf)].add(frozenset(self.stack))
        return func(*args, **(kwargs or {}))

    def enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(module)
        if name is not None:
            self.stack.append(name)
            self.calls[name] += 1
            if self.calls[name] == 1:
                self.given[name] = sum(_nbytes(leaf) for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if module in self._names:
            self.stack.pop()

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._counted and id(tensor) not in self.known:
            self._counted.add(storage._cdata)
            self._alive.append(storage)
            for name in {*self.stack, ""}:
                self.saved[name] += storage.nbytes()
        return tensor

    def skip(self, storages: Sequence[torch.Tensor]) -> None:
        """Exclude tensors of the model itself from the saved bytes."""
        self._counted.update(tensor.untyped_storage()._cdata for tensor in storages)


def _uses_values(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _GIVES
    return name not in _ASKS and name != "__set__"


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _watch(
    model: nn.Module,
    names: dict[nn.Module, str],
    tensors: dict[str, torch.Tensor],
    example: Example,
    methods: Sequence[str],
) -> _Seen:
    """Run the example and record it; ``tensors`` are the parameters and buffers of the model, by full name."""
    seen = _Seen(names, {id(tensor): name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)})
    versions = {name: tensor._version for name, tensor in tensors.items()}
    seen.skip(list(tensors.values()))
    counter = FlopCounterMode(display=False)
    hooks = [register_module_forward_pre_hook(seen.enter), register_module_forward_hook(seen.leave)]
    try:
        saving = torch.autograd.graph.saved_tensors_hooks(seen.save, lambda tensor: tensor)
        with _as_forward(model, methods, seen), saving, torch.enable_grad(), counter, seen:
            run(model, example)
    finally:
        for hook in hooks:
            hook.remove()
    seen.flops = counter.get_total_flops()
    seen.written = {name for name, tensor in tensors.items() if tensor._version != versions[name]}
    return seen


@contextlib.contextmanager
def _as_forward(model: nn.Module, methods: Sequence[str], seen: _Seen) -> Iterator[None]:
    """Put the model on the stack while one of these methods runs."""

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.stack.append("")
            try:
                return method(*args, **kwargs)
            finally:
                seen.stack.pop()

        return call

    for name in methods:
        model.__dict__[name] = counted(getattr(model, name))
    try:
        yield
    finally:
        for name in methods:
            del model.__dict__[name]


def _add_records(facts: ModelFacts, seen: _Seen, how: str) -> ModelFacts:
    """Add the records of a forward to the facts."""
    uses = {seen.known[key]: tuple(sorted(stacks, key=sorted)) for key, stacks in seen.uses.items()}
    params = [
        replace(
            param,
            uses=next((uses[name] for name in param.names if name in uses), ()),
            is_written=any(name in seen.written for name in param.names),
        )
        for param in facts.params
    ]
    modules = {
        name: replace(
            module,
            calls=seen.calls.get(name, 0),
            activation_nbytes=seen.saved.get(name, 0),
            input_nbytes=seen.given.get(name, 0),
        )
        for name, module in facts.modules.items()
    }
    own = {name for param in params for name in param.names}
    changed = [name for name in sorted(seen.written) if name not in own and not name.endswith("num_batches_tracked")]
    synced = {name for name, module in facts.modules.items() if module.kind == "SyncBatchNorm"}
    more = [name for name in changed if name not in facts.averaged and name.rpartition(".")[0] not in synced]
    return replace(
        facts,
        params=tuple(params),
        modules=modules,
        probed=how,
        flops=seen.flops,
        averaged=(*facts.averaged, *more),
    )


# Tensors to run on.


def _there(names: dict[nn.Module, str]) -> dict[str, torch.Tensor]:
    """The parameters and floating-point buffers of a model, by the first of their full names."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for module, name in names.items():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and (isinstance(tensor, nn.Parameter) or tensor.is_floating_point()):
                found.setdefault(id(tensor), (f"{name}.{key}" if name else key, tensor))
    return dict(found.values())


@contextlib.contextmanager
def _faked(names: dict[nn.Module, str], mode: FakeTensorMode, device: str) -> Iterator[dict[str, torch.Tensor]]:
    """Replace all parameters and buffers by fake tensors; tied ones stay tied."""
    known: dict[int, Any] = {}
    kept: list[tuple[dict[str, Any], str, Any]] = []
    for module in names:
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in known:
                    known[id(tensor)] = _fake(tensor, mode, device)
                kept.append((table, key, tensor))
    for table, key, tensor in kept:
        table[key] = known[id(tensor)]
    try:
        yield _there(names)
    finally:
        for table, key, tensor in kept:
            table[key] = tensor


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, device: str) -> torch.Tensor:
    if tensor.is_meta:
        size, stride = tensor.size(), tensor.stride()
        fake = torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)
    else:
        fake = mode.from_tensor(tensor.detach(), static_shapes=True)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _placed(example: Example, mode: FakeTensorMode, device: str) -> Example:
    """The example with fake tensors, on the later device of the model."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = (
            torch.empty_like(leaf, device=device)
            if leaf.is_meta
            else mode.from_tensor(leaf.detach(), static_shapes=True)
        )
        return made.requires_grad_(leaf.requires_grad)

    return tree_map(fake, example)


@contextlib.contextmanager
def _restored(names: dict[nn.Module, str]) -> Iterator[None]:
    """Restore the buffers and the random state after a forward on real tensors."""
    buffers = [tensor for module in names for tensor in module._buffers.values() if tensor is not None]
    kept = [(tensor, tensor.detach().clone()) for tensor in buffers]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
