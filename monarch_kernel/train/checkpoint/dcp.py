"""Wraps `torch.distributed.checkpoint`: reads and writes with a group or in a single process, and reports failures."""

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

from monarch_kernel.train.checkpoint.checksums import HashedFiles, Part
from monarch_kernel.train.checkpoint.unpickling import load_index, load_objects

__all__ = ["Refused", "files_of", "group_here", "read", "write"]

_ALONE = "torch.distributed is disabled, unavailable or uninitialized"


class Refused(Exception):
    """A read or write failed.

    Attributes:
        rank: the first rank on which it failed.
        cause: the error there.
        is_known: whether the ranks have exchanged their failures.
    """

    def __init__(self, error: BaseException) -> None:
        self.is_known = isinstance(error, CheckpointException)
        failures = error.failures if isinstance(error, CheckpointException) else {}
        self.rank, caught = next(iter(failures.items()), (0, error))
        self.cause: BaseException = caught[0] if isinstance(caught, tuple) else caught
        super().__init__(f"{type(self.cause).__name__}: {self.cause}")


def group_here() -> dist.ProcessGroup | None:
    """The group of all ranks; None in a single process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.group.WORLD


def write(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> dict[str, list[Part]]:
    """Write tensors and sync them to disk, each rank its shards; collective.

    Returns:
        The checksums of what this rank has written.

    Raises:
        Refused: it fails on any rank; raised on all ranks.
    """
    writer = FileSystemWriter(folder, sync_files=True)
    writer.fs = files = HashedFiles()
    with _quietly():
        save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    return files.parts


def read(tensors: dict[str, Any], folder: Path, index: Metadata, group: dist.ProcessGroup | None) -> None:
    """Read into tensors, in place; collective.

    Args:
        tensors: nested dicts of tensors, and of other objects that the checkpoint has by these names, which are replaced.
        folder: folder of the checkpoint.
        index: its index, as returned by `load_index`.
        group: group of the ranks; None for a single process.

    Raises:
        Refused: it fails on any rank; raised on all ranks.
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
    """The names of the files that all ranks have written to a folder."""
    stored = load_index(folder).storage_data or {}
    return {info.relative_path for info in stored.values()}


class _Reader(FileSystemReader):
    """Reads shards of tensors. Torch's reader would unpickle the index, and run any code in it."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        self._index.storage_meta = self._index.storage_meta or StorageMeta()
        self._index.storage_meta.load_id = self.load_id
        return self._index


class _Planner(DefaultLoadPlanner):
    """Loads objects that are not tensors. Torch's planner would unpickle them, and run any code in them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], load_objects(value, self._folder, name))


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress torch's warning about a single process, and convert failures to `Refused`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _ALONE)
            yield
    except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
        raise Refused(error) from error
