"""The speeds of links: those that the kernel and NVML tell, and no others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.runtime.host.link_speeds import LinkSpeed, gpu_speeds, links_text, network_speeds


def interface(root: Path, name: str, speed: str, *, is_real: bool = True, state: str = "up") -> None:
    folder = root / "net" / name
    folder.mkdir(parents=True)
    (folder / "speed").write_text(f"{speed}\n")
    (folder / "operstate").write_text(f"{state}\n")
    if is_real:
        (folder / "device").mkdir()


def test_only_interfaces_with_a_device_and_a_known_speed_that_are_up_are_links(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", "25000")
    interface(tmp_path, "eth1", "-1")
    interface(tmp_path, "eth2", "1000", state="down")
    interface(tmp_path, "veth7", "10000", is_real=False)
    (tmp_path / "net" / "lo").mkdir()
    interface(tmp_path, "bond0", "50000", is_real=False)
    (tmp_path / "net" / "bond0" / "bonding").mkdir()
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    assert network_speeds(str(tmp_path)) == [
        LinkSpeed("bond0", 6.25e9),
        LinkSpeed("eth0", 3.125e9),
        LinkSpeed("mlx5_0 port 1", 50e9),
    ]
    (port / "state").write_text("1: DOWN\n")
    assert len(network_speeds(str(tmp_path))) == 2
    assert network_speeds(str(tmp_path / "nowhere")) == []


class Unsupported(Exception):
    pass


@pytest.mark.parametrize("is_old", [False, True])
def test_the_pcie_connection_and_the_active_nvlinks_of_a_gpu_are_links(*, is_old: bool) -> None:
    def state(handle: Any, link: int) -> int:
        if link > 3:
            raise Unsupported
        return int(link != 2)

    def missing(handle: Any, link: int = 0) -> int:
        raise Unsupported

    nvml = SimpleNamespace(
        NVMLError=Unsupported,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda handle: 5,
        nvmlDeviceGetMaxPcieLinkWidth=lambda handle: 16,
        nvmlDeviceGetNvLinkState=missing if is_old else state,
        nvmlDeviceGetNvLinkVersion=missing if is_old else lambda handle, link: 6,
    )
    pcie, *nvlink = gpu_speeds(nvml, object())
    assert pcie == LinkSpeed("PCIe 5 x16", pytest.approx(63e9, rel=0.01))
    assert nvlink == ([] if is_old else [LinkSpeed("NVLink 4 x3", 75e9)])
    assert gpu_speeds(SimpleNamespace(NVMLError=Unsupported), object()) == []


def test_ranks_with_equal_links_have_one_line() -> None:
    links = (("eth0", 3.125e9),)
    assert links_text({0: links, 1: links, 2: (), 3: (("eth0", 1.25e9), ("PCIe 4 x16", 31.5e9))}) == [
        "links of [0-1], each way: eth0 2.9 GiB/s",
        "links of [3], each way: eth0 1.2 GiB/s, PCIe 4 x16 29 GiB/s",
    ]
    assert links_text({}) == []
