"""Loads a checkpoint into existing objects, with any number of ranks and any sharding."""

from __future__ import annotations

import io
import os
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from monarch_kernel.errors import CheckpointError
from monarch_kernel.train.checkpoint.atomic_directory import VALUES, Contents, describe
from monarch_kernel.train.checkpoint.dcp import Refused, group_here, read
from monarch_kernel.train.checkpoint.saving import settle
from monarch_kernel.train.checkpoint.states import States, check_fits, collect, put_back
from monarch_kernel.train.checkpoint.unpickling import load_index, load_objects
from monarch_kernel.train.run_on_all import run_on_all_ranks

__all__ = ["load"]


def load(path: str | os.PathLike[str] | None, **things: Any) -> dict[str, Any]:
    """Load a checkpoint. All ranks call this, with the same names.

    The number of ranks and the sharding of the model may differ from those of the save.

    Args:
        path: path of the checkpoint.
        things: modules, optimizers and objects with ``load_state_dict()``, which get the state saved under these names.

    Returns:
        The plain values that were saved, by name.

    Raises:
        CheckpointError: there is no checkpoint, it does not fit, or its index or values would run code; then nothing has
            changed. Or it can't be read; then the state of the objects is undefined.
    """
    if path is None:
        raise CheckpointError("there is no checkpoint to load: checkpoint.latest(folder) returned None")
    settle("checkpoint.load(...)")
    group = group_here()

    found: list[tuple[Contents, States, Metadata, dict[str, Any]]] = []

    def look() -> None:
        contents = describe(path)
        for name, thing in things.items():
            if not hasattr(thing, "load_state_dict"):
                raise CheckpointError(
                    f"{name} is a {type(thing).__name__}, without load_state_dict(); load() returns values"
                )
        states = collect(things)
        check_fits(states, contents)
        file = contents.path / VALUES
        found.append((contents, states, load_index(contents.path), load_objects(io.BytesIO(file.read_bytes()), file)))

    run_on_all_ranks(group, f"load {path}", look, CheckpointError)
    contents, states, index, values = found[0]
    try:
        if states.tensors:
            read(states.tensors, contents.path, index, group)
    except Refused as error:
        raise CheckpointError(
            f"{contents.path} can't be read: {str(error).splitlines()[0]}; the state of the loaded objects is undefined now: "
            "load another checkpoint"
        ) from error
    states.values = {name: values[name] for name, kind in states.kinds.items() if kind == "state"}
    put_back(things, states)
    return {name: value for name, value in values.items() if contents.names.get(name) == "value"}
