"""Converts between the objects of a program and the contents of a checkpoint: tensors by full name, and plain values."""

from __future__ import annotations

import difflib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

from monarch_kernel.base.text import one_line
from monarch_kernel.errors import CheckpointError
from monarch_kernel.train.checkpoint.atomic_directory import Contents
from monarch_kernel.train.checkpoint.given import Given
from monarch_kernel.train.checkpoint.unpickling import load_plain, other_names
from monarch_kernel.train.generators import stateful
from monarch_kernel.train.stateful_loaders import StatefulLoader

__all__ = ["States", "check_fits", "check_loadable", "collect", "dumped", "flat", "model_trained_by", "put_back"]

_MAX_LISTED = 8
_MAX_LINE = 300  # characters of a line in a list
_MOST_COMPARED = 1_000  # names of a file, for one that is much like another
_ALWAYS_LOADABLE = {bool, int, float, str, type(None)}  # exactly these classes, not subclasses


@dataclass
class States:
    """The states of objects, by the name that the user gives them.

    Attributes:
        kinds: name -> ``module``, ``optimizer``, ``state`` (an object with ``state_dict()``) or ``value``.
        tensors: states of modules and optimizers, in the form that `torch.distributed.checkpoint` takes.
        values: states of all other objects.
        buffers: full names of buffers of modules that are not distributed.
        model_of: name of an optimizer -> the module that it trains.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    model_of: dict[str, nn.Module] = field(default_factory=dict)


def collect(things: Mapping[str, Any], *, loads: bool = False) -> States:
    """Get the states of objects, with their tensors, not copies.

    Args:
        things: the objects, by name.
        loads: leave out the states of objects that are neither modules nor optimizers, because a load replaces them; some
            loaders start workers to give theirs.

    Raises:
        CheckpointError: an object can't be saved.
    """
    states = States()
    for name, given in things.items():
        thing = stateful(given)
        if not name.isidentifier():
            raise CheckpointError(f"{name!r} can't be a name in a checkpoint: use an identifier")
        if isinstance(thing, Given):
            states.kinds[name] = thing.kind
            (states.values if thing.kind == "state" else states.tensors)[name] = thing.state
            states.buffers |= {f"{name}.{key}" for key in thing.buffers}
        elif isinstance(thing, nn.Module):
            if any(param.is_meta for param in thing.parameters()):
                raise CheckpointError(f"{name} is on the meta device and has no values; parallelize or build it first")
            states.kinds[name] = "module"
            states.tensors[name] = get_model_state_dict(thing)
            states.buffers |= {f"{name}.{key}" for key in _buffers_in(states.tensors[name], thing)}
        elif isinstance(thing, Optimizer):
            states.kinds[name] = "optimizer"
            states.model_of[name] = model_trained_by(name, thing, things)
            states.tensors[name] = get_optimizer_state_dict(states.model_of[name], thing)
        elif callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
            states.kinds[name] = "state"
            if not loads:
                if isinstance(thing, StatefulLoader) and (why := thing.problem(things.values())):
                    raise CheckpointError(f"{name} is a {type(given).__name__}: {why}")
                states.values[name] = thing.state_dict()
        elif isinstance(thing, (DataLoader, Sampler)):
            raise CheckpointError(
                f"{name} is a {type(thing).__name__}, which can't go on in the middle of an epoch: pass "
                "checkpoint.Loader(DataLoader(data, batch_size=..., sampler=checkpoint.Sampler(data)))"
            )
        else:
            states.kinds[name] = "value"
            states.values[name] = thing
    return states


def _buffers_in(state: Mapping[str, Any], module: nn.Module) -> list[str]:
    """The keys of a module's buffers, found by address, because wrappers change their names in the module."""
    places = {buffer.data_ptr() for buffer in module.buffers() if not isinstance(buffer, DTensor)}
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return [key for key, value in tensors.items() if not isinstance(value, DTensor) and value.data_ptr() in places]


def model_trained_by(name: str, optimizer: Optimizer, things: Mapping[str, Any]) -> nn.Module:
    """The module whose parameters an optimizer trains, which knows their names; the optimizer only numbers them.

    Raises:
        CheckpointError: there is none among the arguments.
    """
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for thing in things.values():
        if isinstance(thing, nn.Module) and trained <= {id(param) for param in thing.parameters()}:
            return thing
    raise CheckpointError(
        f"{name} trains parameters of no module among the arguments; its state is saved by their names: add model=... (if the "
        "model was parallelized after the optimizer was created, the optimizer still trains the previous parameters)"
    )


def dumped(values: Mapping[str, Any]) -> bytes:
    """Serialise values that `check_loadable` has accepted."""
    buffer = io.BytesIO()
    torch.save(dict(values), buffer)
    return buffer.getvalue()


def check_loadable(values: Mapping[str, Any]) -> None:
    """Check that values can be read back without running code from the file.

    Raises:
        CheckpointError: a value can't be read so.
    """
    for name, value in values.items():
        if type(value) in _ALWAYS_LOADABLE:
            continue
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            load_plain(buffer)
        except Exception as error:  # pickling runs code of the user
            needs = ", ".join(other_names(buffer))
            why = f"it needs {needs}" if needs else str(error).splitlines()[0]
            raise CheckpointError(
                f"{name} is a {type(value).__name__}, which can't be saved so that it is safe to load: pass numbers, strings, "
                "tensors, lists and dicts of these, or an object with state_dict() and load_state_dict(); or allow its class: "
                f"torch.serialization.add_safe_globals([...]) ({why[:200]})"
            ) from None


def flat(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts and lists of tensors and numbers, joining names with dots like `torch.distributed.checkpoint`."""
    found: dict[str, Any] = {}
    items = tensors.items() if isinstance(tensors, Mapping) else enumerate(tensors)
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, (Mapping, list)) and len(value):
            found |= flat(value, f"{name}.")  # type: ignore[arg-type]
        else:
            found[name] = value
    return found


def check_fits(states: States, contents: Contents) -> None:
    """Check that a checkpoint has the states to load, with the same shapes.

    Raises:
        CheckpointError: states are missing or differ; the message lists their names.
    """
    for name, kind in states.kinds.items():
        theirs = contents.names.get(name)
        if theirs is None:
            raise CheckpointError(
                f"{contents.path} has no {name!r}; it has {', '.join(f'{key} ({of})' for key, of in contents.names.items())}"
            )
        if theirs != kind:
            raise CheckpointError(f"in {contents.path} {name!r} is a {theirs}, but here it is a {kind}")
        if kind in ("module", "optimizer"):
            _check_tensors(name, flat(states.tensors[name]), contents)


def _check_tensors(name: str, mine: Mapping[str, Any], contents: Contents) -> None:
    prefix = f"{name}."
    theirs = {key.removeprefix(prefix): about for key, about in contents.tensors.items() if key.startswith(prefix)}
    shapes = {key: tuple(value.shape) for key, value in mine.items() if isinstance(value, torch.Tensor)}
    missing = [key for key in shapes if key not in theirs]
    extra = [key for key in theirs if key not in shapes]
    other = [key for key in shapes if key in theirs and shapes[key] != theirs[key][0]]
    if not missing and not extra and not other:
        return
    lines = [f"the checkpoint {contents.path} does not fit {name}; nothing has changed"]
    lines += _listed("missing in the checkpoint", missing, lambda key: _near(key, extra))
    lines += _listed("only in the checkpoint", extra, lambda key: f" {theirs[key][1]}{list(theirs[key][0])}")
    lines += _listed(
        "of another shape", other, lambda key: f" {list(shapes[key])} here, {list(theirs[key][0])} in the checkpoint"
    )
    raise CheckpointError("\n".join(lines))


def _listed(what: str, keys: list[str], more: Any) -> list[str]:
    if not keys:
        return []
    lines = [f"  {what} ({len(keys):,}):", *(_line(f"    {key}{more(key)}") for key in keys[:_MAX_LISTED])]
    return lines + ([f"    and {len(keys) - _MAX_LISTED:,} more"] if len(keys) > _MAX_LISTED else [])


def _line(text: str) -> str:
    """Return a text with the name of a tensor as one line: in a file of another person it may be any text."""
    shown = one_line(text)
    return shown if len(shown) <= _MAX_LINE else f"{shown[:_MAX_LINE]}…"


def _near(key: str, others: list[str]) -> str:
    likely = [other for other in others[:_MOST_COMPARED] if len(other) <= 2 * len(key)]
    near = difflib.get_close_matches(key, likely, n=1, cutoff=0.7)
    return f" (it has {near[0]})" if near else ""


def put_back(name: str, thing: Any, states: States) -> None:
    """Load its state into an object, if it has one."""
    if isinstance(thing, Given):
        found = states.values if thing.kind == "state" else states.tensors
        if name in found:
            thing.load_state_dict(found[name])
    elif states.kinds[name] == "module":
        set_model_state_dict(thing, states.tensors[name])
    elif states.kinds[name] == "optimizer":
        set_optimizer_state_dict(states.model_of[name], thing, states.tensors[name])
    elif name in states.values:
        stateful(thing).load_state_dict(states.values[name])
