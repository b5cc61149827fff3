"""This machine's GPUs, by NVML, NVIDIA's management library, which comes with the driver: which there are, and their use.

CUDA numbers the GPUs that a process may open from 0. Its order is that of NVML, the bus order, if all GPUs are of one kind, or
with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "VISIBLE",
    "GpuMeters",
    "GpuReading",
    "Inventory",
    "gpu_ids",
    "gpus_for_ranks",
    "gpus_named",
    "inventory",
    "inventory_of_files",
    "usable_gpus",
]

VISIBLE = "CUDA_VISIBLE_DEVICES"

T = TypeVar("T")


class Inventory(NamedTuple):
    """The GPUs that processes of this user can open.

    Attributes:
        uuids: the identifier of each GPU, by its number; empty where it is unknown.
        has_partition: whether there is a partition (MIG) with this identifier.
    """

    uuids: Sequence[str]
    has_partition: Callable[[str], bool]

    def has(self, name: str) -> bool:
        """Whether an entry of CUDA_VISIBLE_DEVICES names exactly one GPU: by number, identifier, or a prefix of one."""
        if name.isdigit():
            return int(name) < len(self.uuids)
        if name.startswith("MIG-"):
            return bool(self.uuids) and self.has_partition(name)
        fits = [not uuid or uuid.startswith(name) for uuid in self.uuids]
        return name.startswith("GPU-") and (fits.count(True) == 1 or (any(fits) and not all(self.uuids)))


def usable_gpus(visible: str | None, found: Inventory) -> list[str]:
    """Return the GPUs that CUDA, and so torch, uses for a value of CUDA_VISIBLE_DEVICES.

    The list ends at the first entry that names no GPU, or is of another kind than the first. It is empty if one occurs twice.

    Args:
        visible: the value; None if the variable is not set.
        found: the GPUs.
    """
    if visible is None:
        return [str(number) for number in range(len(found.uuids))]
    names = gpus_named(visible)
    kinds = [re.match("GPU-|MIG-|", name) for name in names]
    if len(set(names)) < len(names):
        return []
    usable = []
    for name, kind in zip(names, kinds, strict=True):
        if not found.has(name) or kind is None or kinds[0] is None or kind[0] != kinds[0][0]:
            break
        usable.append(name)
    return usable


def gpus_for_ranks(visible: str, found: Inventory) -> list[str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names for ranks, one after the other; several may have the same one.

    The list ends at the first entry that names no GPU.
    """
    names = gpus_named(visible)
    return names[: next((i for i, name in enumerate(names) if not found.has(name)), len(names))]


def gpus_named(visible: str) -> list[str]:
    """Return the entries of a value of CUDA_VISIBLE_DEVICES before the first that is empty or negative.

    CUDA reads the digits with which an entry starts, and takes text without digits for no number.
    """
    names = []
    for entry in (entry.strip() for entry in visible.split(",")):
        number = re.match(r"\+?(\d+)", entry)
        name = str(int(number[1])) if number else entry
        if not name or name.startswith("-"):
            break
        names.append(name)
    return names


def gpu_ids(visible: str | None = None) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES spells them.

    Args:
        visible: value of CUDA_VISIBLE_DEVICES for ranks, in place of that of this process: see `gpus_for_ranks`.
    """
    if visible is not None:
        return gpus_for_ranks(visible, inventory()) if gpus_named(visible) else []
    of_process = os.environ.get(VISIBLE)
    if of_process is not None and not gpus_named(of_process):
        return []  # without loading a library
    return usable_gpus(of_process, inventory())


def inventory() -> Inventory:
    """Return the GPUs of this machine, by NVML, or else, where a driver lacks it, by the files of the driver."""
    nvml = _load()
    if nvml is None:
        return inventory_of_files()

    def has_partition(name: str) -> bool:
        try:
            nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError:
            return False
        return True

    return Inventory([_uuid(nvml, handle) for handle in _handles(nvml)], has_partition)


def inventory_of_files(root: str = "/") -> Inventory:
    """Return the GPUs by the files of the driver. Without NVML, partitions are taken for granted."""
    texts = []
    for path in sorted(glob.glob(f"{root}proc/driver/nvidia/gpus/*/information")):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                texts.append(file.read())
        except OSError:
            texts.append("")
    uuids = [found[1] if (found := re.search(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)", text, re.M)) else "" for text in texts]
    nodes = [path for path in glob.glob(f"{root}dev/nvidia*") if re.fullmatch(r"nvidia\d+", os.path.basename(path))]
    if len(nodes) != len(uuids):  # a container has fewer devices than the machine
        uuids = [""] * len(nodes)
    return Inventory(uuids, lambda name: True)


def _load() -> Any:
    """Return the library, ready for use; None without a driver, or if the driver needs another version."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _handles(nvml: Any) -> list[Any]:
    """Return the GPUs that this process may open: NVML also counts others, which CUDA does not number."""
    handles = []
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError:
        return []
    for number in range(count):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(number))
        except nvml.NVMLError:  # such as a GPU that belongs to another job
            continue
    return handles


def _uuid(nvml: Any, handle: Any) -> str:
    try:
        return str(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError:
        return ""


class GpuReading(NamedTuple):
    """Reading of one GPU, for all processes that use it.

    Attributes:
        used_nbytes: memory in use.
        total_nbytes: total memory; 0 if unknown.
        percent: share of the last sample period in which a kernel ran on it; also 0 if the driver does not report it (MIG).
    """

    used_nbytes: int = 0
    total_nbytes: int = 0
    percent: float = 0.0


class GpuMeters:
    """Reads GPUs; loads the library for the first reading, and does not try again if it does not work."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._works = True
        self._handles: dict[str, Any] = {}

    def read(self, environment: dict[str, str]) -> GpuReading:
        """Read the GPU of a rank with this environment; the reading is empty if the rank has no GPU, or several."""
        return self.with_gpu(environment, self._reading) or GpuReading()

    def with_gpu(self, environment: dict[str, str], use: Callable[[Any, Any], T]) -> T | None:
        """Call a function with the library and the GPU of a rank; None if the rank has no GPU, or several, or none works."""
        names = gpus_named(environment.get(VISIBLE, ""))
        if len(names) != 1 or not self._is_loaded():
            return None
        try:
            if names[0] not in self._handles:
                self._handles[names[0]] = self._find(names[0])
            handle = self._handles[names[0]]
            return None if handle is None else use(self._nvml, handle)
        except self._nvml.NVMLError:
            return None

    def _reading(self, nvml: Any, handle: Any) -> GpuReading:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return GpuReading(int(memory.used), int(memory.total), self._percent(handle))

    def _is_loaded(self) -> bool:
        if self._nvml is None and self._works:
            self._nvml = _load()
            self._works = self._nvml is not None
        return self._works

    def _find(self, name: str) -> Any:
        """Return the handle of the GPU with this name in CUDA_VISIBLE_DEVICES: a number, an identifier, or a prefix of one."""
        nvml = self._nvml
        if name.startswith("MIG-"):
            return nvml.nvmlDeviceGetHandleByUUID(name)
        handles = _handles(nvml)
        if name.isdigit():
            return handles[int(name)] if int(name) < len(handles) else None
        fitting = [handle for handle in handles if _uuid(nvml, handle).startswith(name)]
        return fitting[0] if len(fitting) == 1 else None

    def _percent(self, handle: Any) -> float:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except self._nvml.NVMLError:
            return 0.0
