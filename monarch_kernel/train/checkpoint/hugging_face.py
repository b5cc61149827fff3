"""Writes a model in the format of Hugging Face: safetensors files, their index, and the configuration.

Theory of operation. A safetensors file is the length of a header, the header, which is JSON with the dtype, shape and place of
each tensor, and the bytes of the tensors. All of the header is known from the shapes before any tensor is read, so a tensor is
written as soon as it is gathered, and no more than one is in memory. Readers: ``safetensors``, ``from_pretrained`` of
transformers, and what builds on these. The format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from monarch_kernel.errors import CheckpointError

__all__ = [
    "File",
    "bytes_of",
    "is_of_hugging_face",
    "other_files",
    "plan_files",
    "write_about",
    "write_file",
    "write_index",
]

MAX_FILE = 5_000_000_000
"""Most bytes of tensors in a file, unless a single tensor has more."""

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OURS = ("config.json", "generation_config.json", _ONE, _INDEX)

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True)
class File:
    """A file of a model.

    Attributes:
        name: its name.
        header: all before the bytes of the tensors.
        keys: the names of its tensors, in order.
        nbytes: bytes of its tensors.
    """

    name: str
    header: bytes
    keys: tuple[str, ...]
    nbytes: int


def plan_files(tensors: Mapping[str, torch.Tensor], max_nbytes: int = MAX_FILE) -> list[File]:
    """Divide tensors into files, in their order.

    Args:
        tensors: tensors of the whole shapes; their values are not read.
        max_nbytes: most bytes of tensors in a file, unless a single tensor has more.

    Raises:
        CheckpointError: the format has no such dtype.
    """
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} is {tensor.dtype}, which safetensors files can't hold: convert it, such as by .to(torch.bfloat16)"
            )
        if parts[-1] and size + tensor.nbytes > max_nbytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += tensor.nbytes
    count = len(parts)
    names = [_ONE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return [_file(name, {key: tensors[key] for key in keys}) for name, keys in zip(names, parts)]


def _file(name: str, tensors: Mapping[str, torch.Tensor]) -> File:
    about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        about[key] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned in memory that maps the file
    return File(name, len(text).to_bytes(8, "little") + text, tuple(tensors), end)


def write_file(folder: Path, file: File, contents: Iterable[memoryview]) -> None:
    """Write a file, and sync it to the disk.

    Args:
        folder: the folder.
        file: the file.
        contents: the bytes of its tensors, in order.

    Raises:
        OSError: it can't be written.
    """
    with (folder / file.name).open("wb") as target:
        target.write(file.header)
        for content in contents:
            target.write(content)
        target.flush()
        os.fsync(target.fileno())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, in the order in which a file has them."""
    raw: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def write_index(folder: Path, files: list[File]) -> None:
    """Write which file has which tensor, if there are several files."""
    if len(files) == 1:
        return
    about = {
        "metadata": {"total_size": sum(file.nbytes for file in files)},
        "weight_map": {key: file.name for file in files for key in file.keys},
    }
    _write(folder / _INDEX, json.dumps(about, indent=2).encode())


def write_about(folder: Path, module: nn.Module, dtype: torch.dtype, others: Mapping[str, Any]) -> None:
    """Write the configuration of a model of transformers, and the other objects that know how to save themselves.

    Args:
        folder: the folder.
        module: the model; one without a configuration needs no file.
        dtype: the dtype of its parameters.
        others: objects with ``save_pretrained``, such as a tokenizer.
    """
    inner = _inner(module)
    config: Any = getattr(inner, "config", None)
    if callable(getattr(config, "save_pretrained", None)):
        config = copy.deepcopy(config)
        config.architectures = [_class_of(inner).__name__]
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(dtype).removeprefix("torch."))
        config.save_pretrained(str(folder))
    generation = getattr(inner, "generation_config", None)
    for each in (generation, *others.values()):
        if callable(getattr(each, "save_pretrained", None)):
            each.save_pretrained(str(folder))
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _inner(module: nn.Module) -> nn.Module:
    """The module that the user has made, without what wraps it as a whole."""
    for name in (
        "_orig_mod",
        "module",
        "_orig_mod",
    ):  # torch.compile of DistributedDataParallel, or the other way around
        inner = module._modules.get(name)
        if isinstance(inner, nn.Module) and type(module).__module__.startswith("torch."):
            module = inner
    return module


def _class_of(module: nn.Module) -> type:
    """The class that the user knows: ``fully_shard`` makes a subclass of it."""
    return next(each for each in type(module).__mro__ if not each.__module__.startswith("torch.distributed."))


def is_of_hugging_face(folder: Path) -> bool:
    """Whether a folder holds a model in this format."""
    return any((folder / name).is_file() for name in (_ONE, _INDEX))


def other_files(folder: Path) -> list[str]:
    """List the files in a folder that no save in this format without other objects has written."""
    names = sorted(path.name for path in _entries(folder))
    return [
        name
        for name in names
        if name not in _OURS and not (name.startswith("model-") and name.endswith(".safetensors"))
    ]


def _entries(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
