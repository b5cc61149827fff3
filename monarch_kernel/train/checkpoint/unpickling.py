"""Reads the pickled parts of a checkpoint without running code from the files.

A pickle names classes and functions, and unpickling calls them. `torch.distributed.checkpoint` pickles the index of a
checkpoint, and all objects that are not tensors. This module unpickles the index with only the few classes that an index needs,
and the objects with those that `torch.load` allows with ``weights_only=True``.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from monarch_kernel.errors import CheckpointError
from monarch_kernel.train.checkpoint.checksums import check_kind

__all__ = ["INDEX", "load_index", "load_objects", "load_plain", "other_names"]

INDEX = ".metadata"
"""The file in which `torch.distributed.checkpoint` stores the locations of tensors."""

_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # in checkpoints of older torch versions
_OF_INDEX = {
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_SHARDED, "MEM_FORMAT_ENCODING"),
    (_SHARDED, "TensorProperties"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}


_ENUMS = {"_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"}
_WITH_STATE = {(module, name) for module, name in _OF_INDEX if module.startswith("torch.distributed")}
_WITH_STATE -= {(module, name) for module, name in _OF_INDEX if name in _ENUMS}
"""Classes whose instances have a state in an index."""


class _IndexUnpickler(pickle._Unpickler):  # the C implementation has no hook for the state of objects
    """Unpickles an index; allows only the classes of an index, and sets the state only of their instances."""

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # some Python versions pickle a member of an Enum with it
            return _member
        if module.startswith("pathlib") and (module, name) in _OF_INDEX:  # the module depends on the Python version
            return Path
        if (module, name) in _OF_INDEX:
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        _refuse(self._path, [f"{module}.{name}"])

    def load_build(self) -> None:
        """Set the state of an object; refuse classes and functions, which would change for the whole process."""
        changed = self.stack[-2]  # type: ignore[attr-defined]
        if (type(changed).__module__, type(changed).__qualname__) not in _WITH_STATE:
            raise pickle.UnpicklingError(f"it sets the state of {changed!r}")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # type: ignore[dict-item]

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to an object outside of the file: {pid!r}")


def _member(kind: Any, name: str) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks for the attribute {name!r} of {kind!r}")
    return kind[name]


def _refuse(path: Path, names: list[str], what: str = "") -> NoReturn:
    way_out = (
        "an index never needs that: get the checkpoint from a source that you trust"
        if path.name == INDEX
        else "if you trust the checkpoint, allow them before you load it: torch.serialization.add_safe_globals([...])"
    )
    raise CheckpointError(
        f"{path} was not read: {what}it calls {', '.join(names)}, which can run code that the file brings; {way_out}"
    )


def load_index(folder: Path, content: bytes | None = None) -> Metadata:
    """Read the index of a checkpoint.

    Args:
        folder: folder of the checkpoint.
        content: the content of the file, if it is already read.

    Raises:
        CheckpointError: the file is damaged, needs a class that no index has, or refers to files outside of the folder; no code
            from it has run.
    """
    path = folder / INDEX
    try:
        if content is None:
            check_kind(path)
            content = path.read_bytes()
        index = _IndexUnpickler(content, path).load()
        places = _places(index)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{path} can't be read: {type(error).__name__}: {error}; load another checkpoint"
        ) from error
    for place in sorted(places):
        inner = PurePosixPath(place)
        if inner.is_absolute() or ".." in inner.parts:
            raise CheckpointError(f"{path} was not read: it refers to {place}, outside of the checkpoint")
        check_kind(folder / inner)
    return cast(Metadata, index)


def _places(index: Any) -> set[str]:
    """The names of the files to which an index refers.

    Raises:
        TypeError: it is not the index of a checkpoint.
    """
    if not isinstance(index, Metadata):
        raise TypeError(f"it contains a {type(index).__name__}, not the index of a checkpoint")
    described, stored = index.state_dict_metadata, index.storage_data or {}
    if not (isinstance(described, dict) and isinstance(stored, dict)):
        raise TypeError("it lists no tensors")
    for item, info in stored.items():
        if not (isinstance(item, MetadataIndex) and isinstance(info, _StorageInfo)):
            raise TypeError(f"it has a {type(item).__name__} and a {type(info).__name__} in the place of a tensor")
        if not (isinstance(item.fqn, str) and isinstance(info.relative_path, str)):
            raise TypeError("a name in it is no text")
        if not all(type(number) is int and number >= 0 for number in (info.offset, info.length)):
            raise TypeError("a place in it is no number")
    return {info.relative_path for info in stored.values()}


def load_objects(file: io.BytesIO, path: Path, what: str = "") -> Any:
    """Load a part of a checkpoint with `load_plain`.

    Args:
        file: a file that `torch.save` wrote.
        path: its path, for the error.
        what: name of the part of the checkpoint, for the error.

    Raises:
        CheckpointError: it is damaged, or needs a class or function that `load_plain` does not allow; no code from it has run.
    """
    try:
        return load_plain(file)
    except Exception as error:  # a damaged file can raise anything
        if names := other_names(file):
            _refuse(path, names, f"for {what} " if what else "")
        raise CheckpointError(
            f"{path} can't be read: {type(error).__name__}: {str(error).splitlines()[0]}; load another checkpoint"
        ) from error


def load_plain(file: io.BytesIO) -> Any:
    """Load a file that `torch.save` wrote, if it contains only tensors, numbers, strings, and collections of these.

    Raises:
        Exception: `torch.load` raises it for anything else; no code from the file has run.
    """
    with safe_globals(_numpy_scalars()):
        return torch.load(file, weights_only=True, map_location="cpu")


def other_names(file: io.BytesIO) -> list[str]:
    """The classes and functions that a file needs and `torch.load` refuses; empty if it is not an archive, or damaged."""
    file.seek(0)
    try:
        with safe_globals(_numpy_scalars()):
            return sorted(get_unsafe_globals_in_checkpoint(file))
    except (RuntimeError, ValueError, pickle.UnpicklingError):
        return []


def _numpy_scalars() -> list[Any]:
    """Functions and classes for NumPy scalars, which learning rates often are: they run no code from a file."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return []
    scalar = numpy.float64(0).__reduce__()[0]
    names = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")  # by the version that wrote the file
    kinds = {type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdgFDG"}
    return [*((scalar, name) for name in names), numpy.dtype, *kinds]
