"""Captures the training state of models, optimizers and other objects, and restores it.

Theory of operation. Captured state is restored into objects that the same code has created on as many ranks. So each rank
captures its own state, of a `DTensor` its local shard. All tensors are copied into one block of memory, at memory bandwidth,
which can be shared with another process. Everything else is a small pickle, which refers to tensors by numbers.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import data

from monarch_kernel.net.wire.codec import Frame, keep
from monarch_kernel.net.wire.shared_classes import ByValuePickler
from monarch_kernel.train.generators import rng, stateful
from monarch_kernel.train.parallel.ddp_buckets import order_of_buckets, set_order_of_buckets, started_ddp
from monarch_kernel.train.parallel.reset_step import ddp_of, forget_step
from monarch_kernel.train.stateful_loaders import StatefulLoader

__all__ = ["Captured", "capture", "check", "names_at", "put_back", "set_random_state"]

_ALIGN = 64
_CONTAINERS = (list, dict, set, collections.deque)


class Captured(NamedTuple):
    """Captured state.

    Attributes:
        rest: everything but the elements of tensors, pickled.
        elements: the elements of all tensors, one after the other.
        places: where the elements of each tensor begin, and their number of bytes; only on the rank that captured them.
    """

    rest: Frame
    elements: Frame
    places: tuple[tuple[int, int], ...] = ()


class _Part:
    """The local shard of a DTensor; ``what`` is the shape, stride and placements of the DTensor."""

    def __init__(self, local: torch.Tensor, what: tuple[Any, ...]) -> None:
        self.local = local
        self.what = what


class _Lying(NamedTuple):
    """The location of a tensor's elements in the block."""

    at: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str


class _Pickler(ByValuePickler):
    """Pickles everything but the elements of tensors, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.pieces: list[memoryview] = []
        self.places: list[tuple[int, int]] = []
        self._nbytes = 0

    def persistent_id(self, value: Any) -> _Lying | None:
        if not isinstance(value, torch.Tensor):
            return None
        if isinstance(value, DTensor):
            raise TypeError(
                "a DTensor outside of modules and optimizers can't be restored: snapshot its .full_tensor() instead"
            )
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        lying = _Lying(self._nbytes, raw.nbytes, value.dtype, tuple(value.shape), str(value.device))
        if raw.nbytes:
            self.places.append((lying.at, lying.nbytes))
            self.pieces.append(memoryview(cast("Any", raw)))
            if gap := -raw.nbytes % _ALIGN:
                self.pieces.append(memoryview(bytes(gap)))
            self._nbytes += raw.nbytes + gap
        return lying


class _Unpickler(pickle.Unpickler):
    def __init__(self, captured: Captured) -> None:
        super().__init__(io.BytesIO(captured.rest))
        elements = captured.elements
        self._elements = (
            bytearray(elements) if memoryview(elements).readonly else elements
        )  # torch warns about read-only buffers

    def persistent_load(self, lying: _Lying) -> torch.Tensor:
        """Copy a tensor, because the captured state may be restored again."""
        if not lying.nbytes:
            return torch.empty(lying.shape, dtype=lying.dtype, device=lying.device)
        raw = torch.frombuffer(self._elements, dtype=torch.uint8, count=lying.nbytes, offset=lying.at)
        return raw.clone().view(lying.dtype).reshape(lying.shape).to(lying.device)


class _NamingUnpickler(pickle.Unpickler):
    """Puts the places of tensors where the tensors were."""

    def persistent_load(self, lying: _Lying) -> _Lying:
        return lying


def names_at(captured: Captured, places: Collection[tuple[int, int]]) -> list[str]:
    """The names of the tensors at some places.

    Args:
        captured: captured state, of which at most the elements are damaged.
        places: places of tensors.
    """
    states, random_state = _NamingUnpickler(io.BytesIO(captured.rest)).load()
    found: list[str] = []

    def walk(name: str, value: Any) -> None:
        if isinstance(value, _Part):
            value = value.local
        if isinstance(value, _Lying):
            if (value.at, value.nbytes) in places:
                found.append(name)
        elif isinstance(value, Mapping):
            for key, each in value.items():
                walk(name if key == "tensors" else f"{name}.{key}", each)
        elif isinstance(value, (list, tuple, set, collections.deque)):
            for number, each in enumerate(value):
                walk(f"{name}.{number}", each)

    for name, (_, state) in states.items():
        walk(name, state)
    walk("random numbers", random_state)
    return found


def check(things: Mapping[str, Any]) -> None:
    """Check that objects can be captured and restored.

    Raises:
        TypeError: an object can't be restored.
        ValueError: there is no object.
    """
    if not things:
        raise ValueError(
            "live.snapshot() needs the objects to restore: live.snapshot(model=model, optimizer=optimizer)"
        )
    for name, thing in things.items():
        _kind(name, thing)
        its = stateful(thing)
        if isinstance(its, StatefulLoader) and (why := its.problem(things.values())):
            raise TypeError(f"live.snapshot({name}=...): {why}")


def _kind(name: str, thing: Any) -> str:
    if isinstance(thing, nn.Module):
        return "module"
    if isinstance(thing, Optimizer):
        return "optimizer"
    its = stateful(thing)
    if callable(getattr(its, "state_dict", None)) and callable(getattr(its, "load_state_dict", None)):
        return "state"
    if isinstance(thing, _CONTAINERS):
        return type(thing).__name__
    if isinstance(thing, torch.Tensor):
        return "tensor"
    if isinstance(thing, (data.DataLoader, data.Sampler)):
        raise TypeError(
            f"live.snapshot({name}=...): a {type(thing).__name__} can't go on in the middle of an epoch; pass "
            "checkpoint.Loader(DataLoader(data, batch_size=..., sampler=checkpoint.Sampler(data)))"
        )
    raise TypeError(
        f"live.snapshot({name}=...): a {type(thing).__name__} can't be restored; modules, optimizers, tensors, "
        "random number generators, lists, dicts, sets, and objects with state_dict() and load_state_dict() can"
    )


def capture(things: Mapping[str, Any]) -> Captured:
    """Copy the state of objects, and of the random number generators of this process.

    Raises:
        MemoryError: there is not enough memory.
        TypeError: an object can't be captured.
    """
    states = {
        name: (_kind(name, thing), _CAPTURE.get(_kind(name, thing), _same)(thing)) for name, thing in things.items()
    }
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump((states, rng.state_dict()))
    return Captured(file.getvalue(), keep(pickler.pieces) if pickler.pieces else b"", tuple(pickler.places))


def put_back(things: Mapping[str, Any], captured: Captured) -> None:
    """Restore the captured state of objects; `set_random_state` restores the random number generators.

    Raises:
        RuntimeError: a model belongs to a process group that no longer exists, or torch can't reset an interrupted step.
        ValueError: the objects differ from those that were captured.
    """
    states, _ = _Unpickler(captured).load()
    if states.keys() != things.keys():
        raise ValueError(f"the snapshot has {', '.join(states)}, but live.snapshot now has {', '.join(things)}")
    for name, thing in things.items():
        kind, state = states[name]
        if kind != _kind(name, thing):
            raise ValueError(
                f"live.snapshot({name}=...): it was a {kind} when the snapshot was taken, but is a {_kind(name, thing)}"
            )
        _PUT_BACK[kind](name, thing, state)


def set_random_state(captured: Captured) -> None:
    """Restore the random number generators of this process (see `Generators`)."""
    _, state = _Unpickler(captured).load()
    rng.load_state_dict(state)


# -- kinds of objects


def _same(thing: Any) -> Any:
    return thing


def _of_module(module: nn.Module) -> dict[str, Any]:
    extra = {name: part.get_extra_state() for name, part in module.named_modules() if _has_extra_state(part)}
    buckets = {name: order_of_buckets(ddp) for name, ddp in _replicated(module).items()}
    return {
        "tensors": {name: _local(tensor) for name, tensor in _tensors(module).items()},
        "extra": extra,
        "buckets": buckets,
    }


def _replicated(module: nn.Module) -> dict[str, Any]:
    """The parts of a module whose gradients DDP averages, by name."""
    found = {name: ddp_of(part) for name, part in module.named_modules()}
    return {name: ddp for name, ddp in found.items() if ddp is not None}


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, including non-persistent ones; reshards FSDP modules first."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            cast("FSDPModule", part).reshard()
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _local(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, DTensor):
        local = tensor.to_local().detach()
        return _Part(local, (tuple(tensor.shape), tensor.stride(), tensor.placements))
    return tensor.detach()


def _into_module(name: str, module: nn.Module, state: dict[str, Any]) -> None:
    try:
        forget_step(module)
    except RuntimeError as error:
        raise RuntimeError(f"live.snapshot({name}=...): {error}, and then the cell of the loop") from error
    for param in module.parameters():
        param.grad = None
    tensors = _tensors(module)
    if tensors.keys() != state["tensors"].keys():
        differ = sorted(tensors.keys() ^ state["tensors"].keys())[:4]
        raise ValueError(
            f"live.snapshot({name}=...): its parameters or buffers differ from the snapshot ({', '.join(differ)})"
        )
    with torch.no_grad():
        for key, tensor in tensors.items():
            had = state["tensors"][key]
            here: torch.Tensor = cast("Any", tensor).to_local() if isinstance(tensor, DTensor) else tensor
            source = had.local if isinstance(had, _Part) else had
            if isinstance(had, _Part) != isinstance(tensor, DTensor) or here.shape != source.shape:
                is_spread = isinstance(had, _Part) or isinstance(tensor, DTensor)
                how = "is sharded differently" if is_spread else "has another shape"
                raise ValueError(
                    f"live.snapshot({name}=...): {key} {how} than when the snapshot was taken: this rank has "
                    f"{list(here.shape)} of it, but had {list(source.shape)}"
                )
            here.copy_(source)
    for at, extra in state["extra"].items():
        module.get_submodule(at).set_extra_state(extra)
    for at, order in state["buckets"].items():
        if order and (ddp := started_ddp(module.get_submodule(at))) is not None:
            set_order_of_buckets(ddp, order)


def _of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()
    return {**state, "state": {number: _mapped(each, _local) for number, each in state["state"].items()}}


def _into_optimizer(name: str, optimizer: Optimizer, state: dict[str, Any]) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def spread(number: int) -> Callable[[Any], Any]:
        def of(value: Any) -> Any:
            if not isinstance(value, _Part):
                return value
            shape, stride, placements = value.what
            mesh = params[number].device_mesh
            return DTensor.from_local(
                value.local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
            )

        return of

    try:
        whole = {number: _mapped(each, spread(number), _Part) for number, each in state["state"].items()}
        optimizer.load_state_dict({**state, "state": whole})
    except (AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"live.snapshot({name}=...): its parameters differ from the snapshot ({error})") from error


def _mapped(value: Any, function: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """Map all values of a type in nested dicts and lists."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(each, function, kind) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(each, function, kind) for each in value])
    return value


def _into_container(name: str, thing: Any, had: Any) -> None:
    thing.clear()
    (thing.update if isinstance(thing, (dict, set)) else thing.extend)(had)


def _into_tensor(name: str, tensor: torch.Tensor, had: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(had)


_CAPTURE: dict[str, Callable[[Any], Any]] = {
    "module": _of_module,
    "optimizer": _of_optimizer,
    "state": lambda thing: stateful(thing).state_dict(),
}
_PUT_BACK: dict[str, Callable[[str, Any, Any], None]] = {
    "module": _into_module,
    "optimizer": _into_optimizer,
    "state": lambda name, thing, state: stateful(thing).load_state_dict(state),
    "tensor": _into_tensor,
    **{kind.__name__: _into_container for kind in _CONTAINERS},
}
