"""Exports a model of a checkpoint to a single file for other programs."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from monarch_kernel.base.text import format_nbytes
from monarch_kernel.errors import CheckpointError
from monarch_kernel.net.memory.limits import room
from monarch_kernel.train.checkpoint.atomic_directory import describe
from monarch_kernel.train.checkpoint.dcp import Refused, read
from monarch_kernel.train.checkpoint.unpickling import load_index

__all__ = ["export"]


def export(path: str | os.PathLike[str], file: str | os.PathLike[str], name: str = "model") -> Path:
    """Write a module of a checkpoint to a safetensors file, in a single process without ranks.

    Args:
        path: path of the checkpoint.
        file: the file to write; it appears once it is complete.
        name: name under which the module was saved.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: there is no such module, it is larger than the free memory, the checkpoint can't be read (for example
            because that would run code), or the file can't be written.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise CheckpointError("checkpoint.export needs the safetensors package: pip install safetensors") from None
    contents = describe(path)
    if contents.names.get(name) != "module":
        modules = [key for key, kind in contents.names.items() if kind == "module"]
        raise CheckpointError(f"{contents.path} has no module {name!r}; it has {', '.join(modules) or 'none'}")
    index = load_index(contents.path)
    target = Path(file).absolute()
    _check_place(target, name)
    wanted: dict[str, Any] = {
        key.partition(".")[2]: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for key, (shape, dtype) in contents.tensors.items()
        if key.startswith(f"{name}.")
    }
    nbytes, there = sum(tensor.nbytes for tensor in wanted.values()), room()
    if nbytes > there.nbytes:
        raise CheckpointError(
            f"{name} of {contents.path} takes {format_nbytes(nbytes)}, but there are {format_nbytes(there.nbytes)} {there.of}: "
            "export it on a machine with more memory"
        )
    wanted = {key: torch.empty_like(tensor, device="cpu") for key, tensor in wanted.items()}
    try:
        read({name: wanted}, contents.path, index, None)
    except Refused as error:
        raise CheckpointError(f"{contents.path} can't be read: {error}") from error
    free = _free_text(target)
    making = target.with_name(f".{target.name}.saving")
    try:
        save_file(wanted, making, {"format": "pt"})
        making.replace(target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{target} was not written: {type(error).__name__}: {error} (it takes {format_nbytes(nbytes)}{free}); "
            "free some space, or use another path"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            making.unlink(missing_ok=True)
    return target


def _check_place(target: Path, name: str) -> None:
    if target.is_dir():
        raise CheckpointError(
            f"{target} is a directory: use the path of a file, such as {target / f'{name}.safetensors'}"
        )
    if not target.parent.is_dir():
        raise CheckpointError(f"{target} can't be written: there is no directory {target.parent}; create it first")


def _free_text(target: Path) -> str:
    try:
        return f", and {format_nbytes(shutil.disk_usage(target.parent).free)} were free there"
    except OSError:
        return ""
