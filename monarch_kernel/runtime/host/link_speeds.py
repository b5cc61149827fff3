"""Reads what the links of this machine can carry: its network from the kernel, PCIe and NVLink of a GPU from NVML."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from monarch_kernel.base.text import format_nbytes, plain
from monarch_kernel.errors import format_ranks
from monarch_kernel.runtime.host.gpus import GpuMeters

__all__ = ["LinkSpeed", "gpu_speeds", "link_speeds", "link_text", "links_text", "network_speeds"]

_PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Generation of PCIe -> bytes per second of a lane in one direction."""

_NVLINKS = {
    1: ("1", 20e9),
    2: ("2", 25e9),
    3: ("2", 25e9),
    4: ("3", 25e9),
    5: ("3", 25e9),
    6: ("4", 25e9),
    7: ("5", 50e9),
}
"""Version in NVML -> generation of NVLink, and bytes per second of a link in one direction."""

_MAX_NVLINKS = 18


class LinkSpeed(NamedTuple):
    """A link, and the bytes per second that it can carry in each direction."""

    name: str
    bytes_per_s: float


def link_speeds(environment: Mapping[str, str]) -> tuple[LinkSpeed, ...]:
    """Return the links of the machine, and of the GPU of a rank with this environment, whose speed is known."""
    found = network_speeds()
    GpuMeters().with_gpu(dict(environment), lambda nvml, handle: found.extend(gpu_speeds(nvml, handle)))
    return tuple(found)


def network_speeds(root: str = "/sys/class") -> list[LinkSpeed]:
    """Return the speeds of network interfaces and InfiniBand ports that are up, as the kernel has them.

    Interfaces without a device are left out, because their speed is made up; the loopback, bridges, and the pairs that connect
    containers are such ones.
    """
    found = []
    for name in _entries(f"{root}/net"):
        folder = f"{root}/net/{name}"
        if not any(os.path.exists(f"{folder}/{each}") for each in ("device", "bonding")):
            continue
        mbit_per_s = _read(f"{folder}/speed")  # -1 if the driver does not know it
        if mbit_per_s.isdigit() and int(mbit_per_s) and _read(f"{folder}/operstate") != "down":
            found.append(LinkSpeed(name, int(mbit_per_s) * 1e6 / 8))
    for device in _entries(f"{root}/infiniband"):
        for port in _entries(f"{root}/infiniband/{device}/ports"):
            folder = f"{root}/infiniband/{device}/ports/{port}"
            rate = re.match(r"([\d.]+) Gb/sec", _read(f"{folder}/rate"))
            if rate is not None and "ACTIVE" in _read(f"{folder}/state"):
                found.append(LinkSpeed(f"{device} port {port}", float(rate[1]) * 1e9 / 8))
    return found


def gpu_speeds(nvml: Any, handle: Any) -> list[LinkSpeed]:
    """Return the speeds of the PCIe connection of a GPU, and of its NVLinks together."""

    def ask(function: str, *args: Any) -> int:
        try:
            return int(getattr(nvml, function)(handle, *args))
        except (nvml.NVMLError, AttributeError):
            return 0

    found = []
    generation, width = ask("nvmlDeviceGetMaxPcieLinkGeneration"), ask("nvmlDeviceGetMaxPcieLinkWidth")
    if width and generation in _PCIE_LANE:
        found.append(LinkSpeed(f"PCIe {generation} x{width}", width * _PCIE_LANE[generation]))
    links = [link for link in range(_MAX_NVLINKS) if ask("nvmlDeviceGetNvLinkState", link) == 1]
    if links and (known := _NVLINKS.get(ask("nvmlDeviceGetNvLinkVersion", links[0]))) is not None:
        found.append(LinkSpeed(f"NVLink {known[0]} x{len(links)}", len(links) * known[1]))
    return found


def link_text(link: tuple[str, float]) -> str:
    """Describe a link: ``eth0 12 GiB/s``."""
    return f"{plain(link[0])} {format_nbytes(link[1])}/s"


def links_text(links: Mapping[int, tuple[tuple[str, float], ...]]) -> list[str]:
    """Describe the links of ranks, a line for each set of links; none if no speed is known."""
    ranks: dict[tuple[tuple[str, float], ...], list[int]] = {}
    for rank, its_links in sorted(links.items()):
        if its_links:
            ranks.setdefault(its_links, []).append(rank)
    return [
        f"links of {format_ranks(its_ranks)}, each way: " + ", ".join(map(link_text, its_links))
        for its_links, its_ranks in ranks.items()
    ]


def _entries(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:  # the loopback has no speed, nor has an interface that is down
        return ""
