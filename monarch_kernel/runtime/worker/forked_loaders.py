"""Keeps forked processes from shutting down the DataLoader workers of the process that forked them.

An iterator of torch's DataLoader that is garbage in a rank is also garbage in the processes that the rank forks, such as the
workers of the next DataLoader. Where these collect it, torch asks for the state of its workers, which are not their children,
and prints a traceback that ends with ``can only test a child process``.
"""

from __future__ import annotations

import os
from functools import wraps
from types import ModuleType
from typing import Any

from monarch_kernel.base.after_import import after_import
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["leave_workers_of_parents"]


def leave_workers_of_parents(module: ModuleType) -> None:
    """Make iterators do nothing at their end in a process that has not started their workers.

    Args:
        module: ``torch.utils.data.dataloader``.
    """
    kind: Any = getattr(module, "_MultiProcessingDataLoaderIter", None)
    original = getattr(kind, "__del__", None)
    if original is None or hasattr(original, "monarch_kernel"):
        return

    @wraps(original)
    def end(iterator: Any) -> None:
        workers = vars(iterator).get("_workers") or ()
        if all(getattr(worker, "_parent_pid", os.getpid()) == os.getpid() for worker in workers):
            original(iterator)

    end.monarch_kernel = True  # type: ignore[attr-defined]
    kind.__del__ = end


@register
def _install(_: Rank) -> None:
    after_import("torch.utils.data.dataloader", leave_workers_of_parents)
