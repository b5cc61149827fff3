"""Readings of GPUs by the real library without a driver, by a fake driver, and of a real GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from monarch_kernel.runtime.host.gpus import GpuMeters, GpuReading
from monarch_kernel.runtime.host.processes import gpu_ids

GIB = 2**30
NOTHING = GpuReading()


def of(visible: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": visible}


class Driver:
    """Fake driver with two GPUs and a MIG partition of the second."""

    uuids = ("GPU-8932f937-aaaa", "GPU-8932f937-bbbb", "MIG-1234")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inits = 0
        self.is_gone = False
        monkeypatch.setattr(pynvml, "nvmlInit", self._init)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda i: i)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", self.uuids.index)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: self.uuids[handle])
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", self._memory)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", self._rates)

    def _init(self) -> None:
        self.inits += 1

    def _memory(self, handle: int) -> Any:
        if self.is_gone:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(used=(handle + 1) * GIB, total=80 * GIB)

    def _rates(self, handle: int) -> Any:
        if handle == 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=50 + handle)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


@pytest.mark.parametrize(
    ("visible", "reading"),
    [
        ("0", GpuReading(GIB, 80 * GIB, 50.0)),
        ("1", GpuReading(2 * GIB, 80 * GIB, 51.0)),
        ("GPU-8932f937-bb", GpuReading(2 * GIB, 80 * GIB, 51.0)),
        ("MIG-1234", GpuReading(3 * GIB, 80 * GIB, 0.0)),
        ("GPU-8932f937", NOTHING),  # a prefix of both
        ("2", NOTHING),
        ("0,1", NOTHING),
    ],
)
def test_the_gpu_of_a_rank_is_read(driver: Driver, visible: str, reading: GpuReading) -> None:
    assert GpuMeters().read(of(visible)) == reading


@pytest.mark.parametrize("environment", [{}, of(""), of("-1")])
def test_ranks_without_a_gpu_load_nothing(driver: Driver, environment: dict[str, str]) -> None:
    assert GpuMeters().read(environment) == NOTHING
    assert driver.inits == 0


def test_a_lost_gpu_has_an_empty_reading_and_is_read_again(driver: Driver) -> None:
    meters = GpuMeters()
    driver.is_gone = True
    assert meters.read(of("0")) == NOTHING
    driver.is_gone = False
    assert meters.read(of("0")).used_nbytes == GIB
    assert driver.inits == 1


@pytest.mark.skipif(bool(gpu_ids()), reason="there is a driver")
def test_readings_are_empty_without_a_driver() -> None:
    meters = GpuMeters()
    assert [meters.read(of("0")) for _ in range(2)] == [NOTHING, NOTHING]


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_ids(), reason="there is no CUDA device")
def test_a_real_gpu_is_read() -> None:
    reading = GpuMeters().read(of(gpu_ids()[0]))
    assert 0 < reading.used_nbytes < reading.total_nbytes
    assert 0 <= reading.percent <= 100
