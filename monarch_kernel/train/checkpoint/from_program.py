"""Checkpoints of distributed tensors: a program that drives ranks saves and loads what these hold.

The program sends the states of its modules and optimizers, with a reference in place of each distributed tensor. Each rank
finds its own part there, and all ranks save or load as if a cell had called `saving.save` or `loading.load`. So the checkpoint
is the same, and tensors never come to the program. A load writes into the parts, which are those of the tensors of the program.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from monarch_kernel.errors import CheckpointError, RemoteError
from monarch_kernel.train.checkpoint import loading, saving
from monarch_kernel.train.checkpoint.atomic_directory import Contents, as_path
from monarch_kernel.train.checkpoint.given import Given
from monarch_kernel.train.checkpoint.resizing import Loaded
from monarch_kernel.train.checkpoint.states import model_trained_by
from monarch_kernel.train.generators import stateful

__all__ = ["load", "save"]


@functools.wraps(saving.save)
def save(path: str | os.PathLike[str], *unnamed: Any, wait: bool = True, **things: Any) -> Any:
    """Save a checkpoint, as `saving.save` does, also of distributed tensors."""
    mesh = _mesh_of(things)
    if mesh is None:
        return saving.save(path, *unnamed, wait=wait, **things)
    if not wait:
        raise CheckpointError(
            "checkpoint.save(wait=False) is not possible for distributed tensors: leave wait out, or save in a "
            "cell on the ranks"
        )
    where = as_path(path, "save")
    saving.refuse_unnamed("save", unnamed)
    given = {name: _given(name, thing, things) for name, thing in things.items()}
    _call(mesh, functools.partial(_save, str(where), given), f"saving {where}")
    return None


@functools.wraps(loading.load)
def load(
    path: str | os.PathLike[str] | None, *unnamed: Any, on_resize: str = "refuse", **things: Any
) -> dict[str, Any]:
    """Load a checkpoint, as `loading.load` does, also into distributed tensors."""
    mesh = _mesh_of(things)
    if mesh is None or path is None:
        return loading.load(path, *unnamed, on_resize=on_resize, **things)
    where = as_path(path, "load")
    saving.refuse_unnamed("load", unnamed)
    given = {name: _given(name, thing, things) for name, thing in things.items()}
    request = functools.partial(_load, str(where), given, on_resize)
    values, contents, loaded = _call(mesh, request, f"loading {where}")[0]
    for name, state in loaded.items():
        _take(name, things, given[name], state)
    return Loaded(values, contents, len(mesh))


# -- on the ranks


def _save(path: str, things: dict[str, Any]) -> bool:
    saving.save(path, **things)
    return True


def _load(path: str, things: dict[str, Any], on_resize: str) -> tuple[dict[str, Any], Contents, dict[str, Any]]:
    values = loading.load(path, on_resize=on_resize, **things)
    assert isinstance(values, Loaded)
    loaded = {name: thing.loaded for name, thing in things.items() if isinstance(thing, Given)}
    return dict(values), values.contents, loaded


# -- in the program


def _tensor(module: str) -> Any:
    """A module of `monarch_kernel.tensor`, which is above this package: a program with distributed tensors has imported it."""
    return importlib.import_module(f"monarch_kernel.tensor.{module}")


def _tensors_in(thing: Any) -> Iterator[Any]:
    yield from _tensor("inventory").tensors_in(thing)


def _mesh_of(things: Mapping[str, Any]) -> Any:
    """Return the ranks that hold the distributed tensors among objects; None if there are none.

    Raises:
        CheckpointError: They are on several meshes, or on a part of one.
    """
    if "monarch_kernel.tensor" not in sys.modules:
        return None
    by_mesh = {each.mesh.procs: each.mesh for thing in things.values() for each in _tensors_in(thing)}
    if not by_mesh:
        return None
    meshes = list(by_mesh.values())
    if len(meshes) > 1:
        names = " and ".join(repr(mesh) for mesh in meshes)
        raise CheckpointError(
            f"a checkpoint has the tensors of one mesh, and these are on {names}: save each by itself"
        )
    if not meshes[0].is_whole:
        raise CheckpointError(
            f"a checkpoint needs all ranks of a mesh, and the tensors are on {meshes[0]!r}: make them on the whole mesh"
        )
    return meshes[0]


def _call(mesh: Any, function: Any, description: str) -> Sequence[Any]:
    """Call a function on all ranks, after all operations that were issued before, and return their results.

    Raises:
        CheckpointError: The save or the load has failed.
        SupervisionError: A rank is dead.
    """
    _tensor("reductions").form_group(mesh)
    try:
        found: Sequence[Any] = _tensor("crossing").ranks_of(mesh).call(function, description).get().values()
    except RemoteError as error:
        texts = {failure.message for failure in error.reports.values() if failure.etype == CheckpointError.__name__}
        if len(texts) != 1:
            raise
        raise CheckpointError(texts.pop()) from error
    return found


def _given(name: str, given: Any, things: Mapping[str, Any]) -> Any:
    """Return an object as the ranks get it."""
    thing = stateful(given)
    if isinstance(thing, _tensor("distributed_tensor").DistributedTensor):
        raise CheckpointError(f"{name} is a tensor; name it in a dict: {name}={{'{name}': tensor}}")
    if isinstance(thing, nn.Module):
        buffers = tuple(key for key, _ in thing.named_buffers())
        state: Any = get_model_state_dict(thing)
        return Given("module", state, buffers, _marks(state))
    if isinstance(thing, Optimizer):
        state = get_optimizer_state_dict(model_trained_by(name, thing, things), thing)
        return Given("optimizer", state, (), _marks(state))
    if isinstance(thing, dict) and next(_tensors_in(thing), None) is not None:
        return Given("module", thing, (), _marks(thing))
    if callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
        return Given("state", thing.state_dict())
    return thing


def _marks(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _marks(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_marks(value) for value in state]
    return isinstance(state, _tensor("distributed_tensor").DistributedTensor)


def _take(name: str, things: Mapping[str, Any], given: Given, loaded: Any) -> None:
    """Give an object of the program what was loaded besides the distributed tensors, which the ranks have loaded in place."""
    thing = stateful(things[name])
    if given.kind == "state":
        if loaded is not None:
            thing.load_state_dict(loaded)
        return
    state = _merged(given.state, loaded)
    if given.kind == "optimizer":
        set_optimizer_state_dict(model_trained_by(name, thing, things), thing, state)
    elif isinstance(thing, dict):
        thing.update(state)
    elif _has_more(given.is_distributed):
        thing.load_state_dict(state)


def _merged(mine: Any, loaded: Any) -> Any:
    """Return a state of the program with the values that were loaded."""
    if isinstance(mine, Mapping) and isinstance(loaded, Mapping):
        return {key: _merged(mine.get(key), value) for key, value in loaded.items()}
    if isinstance(mine, Sequence) and isinstance(loaded, list) and len(mine) == len(loaded):
        return [_merged(one, other) for one, other in zip(mine, loaded)]
    return mine if loaded is None else loaded


def _has_more(is_distributed: Any) -> bool:
    """Whether a state has anything besides distributed tensors."""
    return any(each is False for each in is_distributed.values())
