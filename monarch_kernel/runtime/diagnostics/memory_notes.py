"""Says what a process held when memory ran out: the variables with the most memory, and the memory of the machine.

It reads only what tensors and modules store, calls no code of the user, and does not import torch. When the memory of a GPU
runs out, it writes what torch's allocator holds to a file, too.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from monarch_kernel.base.text import format_nbytes
from monarch_kernel.runtime.diagnostics.reprs import describe_value, is_tensor

__all__ = ["memory_held", "memory_notes"]

_log = logging.getLogger(__name__)

_OUT_OF_MEMORY = re.compile(r"out of memory|can(?:'t|not) allocate memory", re.IGNORECASE)
_MAX_NAMES = 5
_MAX_VARIABLES = 2_000
_MAX_PARTS = 20_000
_MIN_NBYTES = 1 << 20


def memory_notes(error: BaseException, frames: list[FrameType]) -> tuple[str, ...]:
    """Return lines about the memory that was held; empty if the error is of another kind.

    Args:
        error: the exception.
        frames: the frames of the user's code, outermost first; their variables are examined.
    """
    is_of_torch = type(error).__name__ == "OutOfMemoryError"
    if not (is_of_torch or isinstance(error, MemoryError) or _is_text_of_torch(error)):
        return ()
    sizes: dict[str, tuple[int, Any]] = {}
    seen: set[int] = set()
    for name, value in _variables(frames):
        if id(value) not in seen and not name.startswith("_"):
            seen.add(id(value))
            sizes.setdefault(name, (_nbytes(value), value))
    largest = sorted(sizes.items(), key=lambda item: -item[1][0])[:_MAX_NAMES]
    shown = [
        f"  {format_nbytes(n)} {name}: {describe_value(value)}" for name, (n, value) in largest if n >= _MIN_NBYTES
    ]
    lines = ["the largest variables:", *shown] if shown else []
    if not is_of_torch and (held := memory_held()):
        lines.append(held)
    if is_of_torch and (written := _snapshot_written()):
        lines.append(written)
    return tuple(lines)


def _snapshot_written() -> str:
    """Write a snapshot of the memory of the GPU, and say where; empty if there is none.

    The text is the same for all ranks of a machine, so that their errors fold; the file is named by the process.
    """
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    folder = Path(tempfile.gettempdir(), f"monarch-memory-{os.getuid()}")
    try:
        if cuda is None or not cuda.is_initialized():
            return ""
        snapshot = pickle.dumps(cuda.memory._snapshot())
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():  # another user has made it
            return ""
        (folder / f"{os.getpid()}.pickle").write_bytes(snapshot)
    except Exception:  # the error of the user matters more
        _log.debug("no snapshot of the memory of the GPU", exc_info=True)
        return ""
    return (
        f"what the GPU held is in {folder}, in a file named by the pid: open it at https://docs.pytorch.org/memory_viz"
    )


def _is_text_of_torch(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def _variables(frames: list[FrameType]) -> Iterator[tuple[str, Any]]:
    spaces: dict[int, Mapping[str, Any]] = {}
    for frame in reversed(frames):
        spaces[id(frame)] = frame.f_locals
        spaces.setdefault(id(frame.f_globals), frame.f_globals)
    for space in spaces.values():
        yield from islice(list(space.items()), _MAX_VARIABLES)
        yield from islice(_attributes(space.get("self")), _MAX_VARIABLES)


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the object of a method holds, such as an actor; the parts of a module count with the module."""
    if owner is None or _is_of(owner, "nn", "Module"):
        return
    try:
        held = object.__getattribute__(owner, "__dict__")
    except AttributeError:  # a class with slots
        return
    yield from ((f"self.{name}", value) for name, value in list(held.items()))


def _nbytes(value: Any) -> int:
    """Return the memory of the tensors in a value; each memory counts once."""
    storages: dict[int, int] = {}
    for tensor in islice(_tensors(value), _MAX_PARTS):
        try:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        except Exception:  # a tensor without memory, such as a fake one
            continue
    return sum(storages.values())


def _tensors(value: Any, depth: int = 3) -> Iterator[Any]:
    if is_tensor(value):
        yield value
        grad = getattr(value, "grad", None) if value.is_leaf else None
        if grad is not None:
            yield grad
    elif depth and isinstance(value, (dict, list, tuple)):
        parts = dict.values(value) if isinstance(value, dict) else value
        for part in islice(list(parts), _MAX_PARTS):
            yield from _tensors(part, depth - 1)
    elif _is_of(value, "nn", "Module"):
        pending = [value]
        while pending:
            stored = vars(pending.pop())
            for key in ("_parameters", "_buffers"):
                yield from _tensors(stored.get(key) or {}, 1)
            pending += [child for child in (stored.get("_modules") or {}).values() if child is not None]
    elif depth and _is_of(value, "optim", "Optimizer"):
        yield from _tensors(dict(vars(value).get("state") or {}), 3)


def _is_of(value: Any, package: str, name: str) -> bool:
    kind = getattr(getattr(sys.modules.get("torch"), package, None), name, None)
    return kind is not None and issubclass(type(value), kind)


def memory_held() -> str:
    """Describe the memory of this process and of the machine, and a limit of ``ulimit -v``; empty where /proc does not say."""
    try:
        text = _text("self/status") + _text("meminfo")
    except OSError:
        return ""
    words = re.findall(r"^(VmRSS|VmSize|MemAvailable):\s+(\d+) kB", text, re.MULTILINE)
    found = {name: format_nbytes(int(number) * 1024) for name, number in words}
    if len(found) < 3:
        return ""
    held = f"the process held {found['VmRSS']}; the machine had {found['MemAvailable']} free when this was reported"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return held
    return f"{held}; the process has {found['VmSize']} of the {format_nbytes(limit)} of addresses that ulimit -v lets it have"


def _text(name: str) -> str:
    return (Path("/proc") / name).read_text()
