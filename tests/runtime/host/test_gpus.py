"""GPUs that can be used, and readings of them: by the real library without a driver, by a fake driver, and of a real GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from monarch_kernel.runtime.host.gpus import (
    GpuMeters,
    GpuReading,
    Inventory,
    gpu_ids,
    gpus_for_ranks,
    inventory_of_files,
    usable_gpus,
)

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
        self.denied: set[int] = set()
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", self._by_index)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", self._by_uuid)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: self.uuids[handle])
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", self._memory)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", self._rates)

    def _init(self) -> None:
        self.inits += 1

    def _by_index(self, index: int) -> int:
        if index in self.denied:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return index

    def _by_uuid(self, name: str) -> int:
        if name not in self.uuids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.uuids.index(name)

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


ONE = Inventory(["GPU-8932f937-aaaa"], lambda name: False)
TWO = Inventory(["GPU-8932f937-aaaa", "GPU-8932f937-bbbb"], lambda name: name == "MIG-1234")


@pytest.mark.parametrize(
    ("visible", "usable"),
    [
        (None, ["0", "1"]),
        ("1,0", ["1", "0"]),
        (" 1 , 0 ", ["1", "0"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("7", []),
        ("0,99,1", ["0"]),
        ("NoDevFiles", []),
        ("abc,,0", []),
        ("0,,1", ["0"]),
        ("0,0", []),
        ("1gpu,0x", ["1", "0"]),
        ("GPU-8932f937-b,GPU-8932f937-a", ["GPU-8932f937-b", "GPU-8932f937-a"]),
        ("GPU-8932f937", []),
        ("GPU-8932f937-a,1", ["GPU-8932f937-a"]),
        ("0,GPU-8932f937-b", ["0"]),
        ("MIG-1234", ["MIG-1234"]),
        ("MIG-9", []),
        ("bbbb", []),
    ],
)
def test_the_gpus_that_a_process_can_use_are_those_of_cuda(visible: str | None, usable: list[str]) -> None:
    assert usable_gpus(visible, TWO) == usable


def test_without_a_gpu_no_name_can_be_used() -> None:
    for visible in None, "0", "GPU-8932f937-aaaa", "MIG-1234":
        assert usable_gpus(visible, Inventory([], lambda name: True)) == []


@pytest.mark.parametrize(
    ("visible", "of_ranks"),
    [("0,0", ["0", "0"]), ("0,1,0", ["0"]), ("0,GPU-8932,0", ["0", "GPU-8932", "0"]), ("-1", []), ("abc,0", [])],
)
def test_several_ranks_may_have_the_same_gpu(visible: str, of_ranks: list[str]) -> None:
    assert gpus_for_ranks(visible, ONE) == of_ranks


def test_the_driver_says_which_gpus_can_be_used(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_ids() == ["0", "1"]
    assert gpu_ids("1,1,2") == ["1", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234,MIG-1")
    assert gpu_ids() == ["MIG-1234"]
    assert gpu_ids("0") == ["0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    assert gpu_ids() == []


def test_gpus_that_may_not_be_opened_have_no_number(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver.denied = {0}
    assert gpu_ids() == ["0"]
    assert gpu_ids("GPU-8932f937-a") == []
    assert GpuMeters().read(of("0")).used_nbytes == 2 * GIB


@pytest.mark.parametrize("environment", [of(""), of("-1")])
def test_a_process_that_may_use_no_gpu_loads_nothing(
    driver: Driver, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", environment["CUDA_VISIBLE_DEVICES"])
    assert gpu_ids() == []
    assert gpu_ids("") == []
    assert driver.inits == 0


def test_without_the_library_the_files_of_the_driver_are_read(tmp_path: Path) -> None:
    root = f"{tmp_path}/"
    assert list(inventory_of_files(root).uuids) == []
    (tmp_path / "dev").mkdir()
    for name in "nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm":
        (tmp_path / "dev" / name).touch()
    assert usable_gpus(None, inventory_of_files(root)) == ["0", "1"]  # CUDA numbers those that a container has
    assert usable_gpus("2", inventory_of_files(root)) == []
    for number, uuid in enumerate(TWO.uuids):
        folder = tmp_path / "proc" / "driver" / "nvidia" / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t NVIDIA X\nGPU UUID: \t {uuid}\n")
    assert list(inventory_of_files(root).uuids) == list(TWO.uuids)


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
