"""Exports a model of a checkpoint to a single file for other programs."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from glob import escape
from pathlib import Path
from typing import Any

import torch

from monarch_kernel.base.text import format_nbytes
from monarch_kernel.errors import CheckpointError
from monarch_kernel.net.memory.limits import room
from monarch_kernel.train.checkpoint.atomic_directory import Contents, as_path, describe
from monarch_kernel.train.checkpoint.checksums import Checksums, damaged
from monarch_kernel.train.checkpoint.dcp import Refused, read
from monarch_kernel.train.checkpoint.disk_errors import why
from monarch_kernel.train.checkpoint.unpickling import INDEX, load_index

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
            because it is damaged, or because that would run code), or the file can't be written.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise CheckpointError(
            "checkpoint.export needs the safetensors package: pip install 'monarch_kernel[checkpoint]'"
        ) from None
    contents = describe(path)
    if contents.names.get(name) != "module":
        modules = [key for key, kind in contents.names.items() if kind == "module"]
        raise CheckpointError(f"{contents.path} has no module {name!r}; it has {', '.join(modules) or 'none'}")
    sums = Checksums(contents.path, contents.checksums)
    index = load_index(contents.path, sums.content(INDEX))
    target = as_path(file, "export", "a file")
    _check_place(target, name)
    wanted: dict[str, Any] = {
        key.partition(".")[2]: _like(contents, key) for key in contents.tensors if key.startswith(f"{name}.")
    }
    nbytes, there = sum(tensor.nbytes for tensor in wanted.values()), room()
    if nbytes > there.nbytes:
        raise CheckpointError(
            f"{name} of {contents.path} takes {format_nbytes(nbytes)}, but there are {format_nbytes(there.nbytes)} {there.of}: "
            "export it on a machine with more memory"
        )
    if wrong := sums.damaged_tensors(index, [name]):
        raise damaged(contents.path, wrong)
    wanted = {key: torch.empty_like(tensor, device="cpu") for key, tensor in wanted.items()}
    try:
        read({name: wanted}, contents.path, index, None)
    except Refused as error:
        raise CheckpointError(f"{contents.path} can't be read: {why(error.cause).text}") from error.cause
    free = _free_text(target)
    for left in target.parent.glob(f".{escape(target.name)}.saving-*"):  # by an export that was killed
        with contextlib.suppress(OSError):
            left.unlink()
    # With a fixed name, another user of the folder could put a link there, and the export would write to its target.
    making = target.with_name(f".{target.name}.saving-{secrets.token_hex(4)}")
    try:
        save_file(wanted, making, {"format": "pt"})
        making.replace(target)
    except (OSError, SafetensorError) as error:
        found = why(error)
        raise CheckpointError(
            f"{target} was not written: {found.text} (it takes {format_nbytes(nbytes)}{free}); "
            f"{found.remedy[:1].lower()}{found.remedy[1:] or 'free some space, or use another path'}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            making.unlink(missing_ok=True)
    return target


def _like(contents: Contents, key: str) -> torch.Tensor:
    """A tensor without memory that has the shape and dtype of one of the checkpoint."""
    shape, dtype = contents.tensors[key]
    kind = vars(torch).get(dtype)
    if not isinstance(kind, torch.dtype):
        raise CheckpointError(
            f"in {contents.path} {key} has the dtype {dtype!r}, which torch {torch.__version__} does not have"
        )
    try:
        return torch.empty(shape, dtype=kind, device="meta")
    except RuntimeError as error:  # it would have more bytes than there are addresses
        raise CheckpointError(f"in {contents.path} {key} has the shape {list(shape)}: {error}") from None


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
