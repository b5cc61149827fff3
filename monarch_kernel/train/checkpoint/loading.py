"""Reading a checkpoint into what is there, however many ranks have which part of it."""

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
from monarch_kernel.train.run_on_all import together

__all__ = ["load"]


def load(path: str | os.PathLike[str] | None, **things: Any) -> dict[str, Any]:
    """Read a checkpoint; all ranks call it, with the same names.

    They may be more or less than those that saved it, and have the model spread in another way.

    Args:
        path: of the checkpoint.
        things: modules, optimizers and what has ``load_state_dict()``, which get what was saved by these names.

    Returns:
        The plain values that were saved, by name.

    Raises:
        CheckpointError: there is none, it does not fit, or its index or its values would run code that is in them; nothing has
            changed. Or it can't be read, and then what was to be loaded is undefined.
    """
    if path is None:
        raise CheckpointError("there is no checkpoint to load: checkpoint.latest(folder) has found none")
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

    together(group, f"load {path}", look, CheckpointError)
    contents, states, index, values = found[0]
    try:
        if states.tensors:
            read(states.tensors, contents.path, index, group)
    except Refused as error:
        raise CheckpointError(
            f"{contents.path} can't be read: {str(error).splitlines()[0]}; what was to be loaded is undefined now: "
            "load another one"
        ) from error
    states.values = {name: values[name] for name, kind in states.kinds.items() if kind == "state"}
    put_back(things, states)
    return {name: value for name, value in values.items() if contents.names.get(name) == "value"}
