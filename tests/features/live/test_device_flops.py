"""The peak of a device is known by the name that its driver reports."""

from __future__ import annotations

import pytest

from monarch_kernel.features.live.device_flops import peak_of


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX A6000", 154.8),
        ("Tesla V100-PCIE-16GB", 112),
        ("Tesla V100-SXM2-32GB", 125),
        ("Tesla T4", 65),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_the_peak_of_a_known_device(name: str, tera: float) -> None:
    assert peak_of(name) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "name", ["", "cpu", "NVIDIA T400", "NVIDIA A1000", "NVIDIA GeForce GTX 1080", "NVIDIA A10M", "NVIDIA L400"]
)
def test_the_peak_of_an_unknown_device_is_0(name: str) -> None:
    assert peak_of(name) == 0
