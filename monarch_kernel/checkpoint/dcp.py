"""`torch.distributed.checkpoint`, for a group or for one process alone, and what it says of failures."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

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


def read(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Read into tensors, in place; collective.

    Raises:
        Refused: on all ranks, if one fails.
    """
    with _quietly():
        load(tensors, storage_reader=FileSystemReader(folder), process_group=group, no_dist=group is None)


def files_of(folder: Path) -> set[str]:
    """The files, by name, that were written to a folder by all ranks."""
    stored = FileSystemReader(folder).read_metadata().storage_data or {}
    return {info.relative_path for info in stored.values()}


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the warning that one process is alone; failures become `Refused`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _ALONE)
            yield
    except (Exception, CheckpointException) as error:  # the latter is none of the former
        raise Refused(error) from error
