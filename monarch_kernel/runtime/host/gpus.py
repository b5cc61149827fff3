"""Memory use and utilization of this machine's GPUs, read by NVML, NVIDIA's management library, which comes with the driver."""

from __future__ import annotations

from typing import Any, NamedTuple

from monarch_kernel.runtime.host.resources import VISIBLE, gpus_named

__all__ = ["GpuMeters", "GpuReading"]


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
    """Reads GPUs; loads the library for the first reading, and does not try again if it does not work.

    GPU numbers are in the order of NVML, which is the bus order. CUDA's order is the same if all GPUs are of one kind, or with
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._works = True
        self._handles: dict[str, Any] = {}

    def read(self, environment: dict[str, str]) -> GpuReading:
        """Read the GPU of a rank with this environment; the reading is empty if the rank has no GPU, or several."""
        names = gpus_named(environment.get(VISIBLE, ""))
        if len(names) != 1 or not self._is_loaded():
            return GpuReading()
        try:
            if names[0] not in self._handles:
                self._handles[names[0]] = self._find(names[0])
            handle = self._handles[names[0]]
            if handle is None:
                return GpuReading()
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._nvml.NVMLError:
            return GpuReading()
        return GpuReading(int(memory.used), int(memory.total), self._percent(handle))

    def _is_loaded(self) -> bool:
        if self._nvml is None and self._works:
            import pynvml

            try:
                pynvml.nvmlInit()
                self._nvml = pynvml
            except pynvml.NVMLError:  # no driver, or one that needs another version of the library
                self._works = False
        return self._works

    def _find(self, name: str) -> Any:
        """Return the handle of the GPU with this name in CUDA_VISIBLE_DEVICES: a number, an identifier, or a prefix of one."""
        nvml = self._nvml
        count = nvml.nvmlDeviceGetCount()
        if name.isdigit():
            return nvml.nvmlDeviceGetHandleByIndex(int(name)) if int(name) < count else None
        if name.startswith("MIG-"):
            return nvml.nvmlDeviceGetHandleByUUID(name)
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        fitting = [handle for handle in handles if str(nvml.nvmlDeviceGetUUID(handle)).startswith(name)]
        return fitting[0] if len(fitting) == 1 else None

    def _percent(self, handle: Any) -> float:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except self._nvml.NVMLError:
            return 0.0
