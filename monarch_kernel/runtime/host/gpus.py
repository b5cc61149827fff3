"""What the GPUs of this machine hold and do, by NVML, NVIDIA's library for that, which comes with the driver."""

from __future__ import annotations

from typing import Any, NamedTuple

from monarch_kernel.runtime.host.resources import VISIBLE, gpus_named

__all__ = ["GpuMeters", "GpuReading"]


class GpuReading(NamedTuple):
    """One GPU, with all that uses it, whoever that is.

    Attributes:
        used_nbytes: memory that is taken.
        total_nbytes: memory that it has; 0 if nothing is known.
        percent: of the last moments, that in which something ran on it; 0 also where the driver does not tell (MIG).
    """

    used_nbytes: int = 0
    total_nbytes: int = 0
    percent: float = 0.0


class GpuMeters:
    """Reads GPUs; the library is loaded when the first is asked for, and not asked again where it does not work.

    Numbers are taken in the order of NVML, which is that of the bus. CUDA's own is the same where all GPUs are of one kind,
    or with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._works = True
        self._handles: dict[str, Any] = {}

    def read(self, environment: dict[str, str]) -> GpuReading:
        """The GPU that a rank with this environment has; nothing is known of one that has none, or several."""
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
            except pynvml.NVMLError:  # no driver, or one that another version of the library has to speak to
                self._works = False
        return self._works

    def _find(self, name: str) -> Any:
        """The GPU that CUDA_VISIBLE_DEVICES names so: a number, or an identifier, of which the beginning will do."""
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
