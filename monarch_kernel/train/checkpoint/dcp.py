"""`torch.distributed.checkpoint`, for a group or for one process alone, and what it says of failures."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from monarch_kernel.train.checkpoint.unpickling import load_index, load_objects

__all__ = ["Refused", "files_of", "group_here", "read", "write"]

_ALONE = "torch.distributed is disabled, unavailable or uninitialized"


class Refused(Exception):
    """It could not be done; ``rank`` and ``cause`` say where first, and why; ``is_known``: the ranks have told each other."""

    def __init__(self, error: BaseException) -> None:
        self.is_known = isinstance(error, CheckpointException)
        failures = error.failures if isinstance(error, CheckpointException) else {}
        self.rank, caught = next(iter(failures.items()), (0, error))
        self.cause: BaseException = caught[0] if isinstance(caught, tuple) else caught
        super().__init__(f"{type(self.cause).__name__}: {self.cause}")


def group_here() -> dist.ProcessGroup | None:
    """The group of all ranks; None where this process is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.group.WORLD


def write(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write tensors, each rank its part, and have them on the disk; collective.

    Raises:
        Refused: on all ranks, if one fails.
    """
    with _quietly():
        save(
            tensors,
            storage_writer=FileSystemWriter(folder, sync_files=True),
            process_group=group,
            no_dist=group is None,
        )


def read(tensors: dict[str, Any], folder: Path, index: Metadata, group: dist.ProcessGroup | None) -> None:
    """Read into tensors, in place; collective.

    Args:
        tensors: nested dicts of them, and of what else the checkpoint has by these names, which is replaced.
        folder: of the checkpoint.
        index: of it, as `load_index` gives it.
        group: of the ranks; None for one alone.

    Raises:
        Refused: on all ranks, if one fails.
    """
    with _quietly():
        load(
            tensors,
            storage_reader=_Reader(folder, index),
            planner=_Planner(folder),
            process_group=group,
            no_dist=group is None,
        )


def files_of(folder: Path) -> set[str]:
    """The files, by name, that were written to a folder by all ranks."""
    stored = load_index(folder).storage_data or {}
    return {info.relative_path for info in stored.values()}


class _Reader(FileSystemReader):
    """Reads the parts of tensors; that of torch would unpickle the index with any code in it."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        self._index.storage_meta = self._index.storage_meta or StorageMeta()
        self._index.storage_meta.load_id = self.load_id
        return self._index


class _Planner(DefaultLoadPlanner):
    """Opens what is no tensor; that of torch would unpickle it with any code in it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], load_objects(value, self._folder, name))


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the warning that one process is alone; failures become `Refused`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _ALONE)
            yield
    except (Exception, CheckpointException) as error:  # the latter is none of the former
        raise Refused(error) from error
