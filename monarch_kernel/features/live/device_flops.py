"""Peak FLOP/s of devices, for model FLOP utilisation."""

from __future__ import annotations

import re
import sys

__all__ = ["device_peak", "peak_of"]

_TERA = 1e12

_PEAKS = {
    "B200": 2250,
    "H200": 989.4,
    "GH200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756,
    "H100": 989.4,
    "H20": 148,
    "A100": 312,
    "A30": 165,
    "A10": 125,
    "A40": 149.7,
    "RTX A6000": 154.8,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 4090": 165.2,
    "RTX 3090": 71,
    "V100-PCIE": 112,
    "V100": 125,
    "T4": 65,
    "MI300X": 1307.4,
    "MI250X": 191.5,
}
"""Part of a device's name -> TFLOP/s of dense bfloat16 matrix products (float16 where the device has no bfloat16) that
accumulate in float32, from the vendors' data sheets. Each of the two dies of an MI250X is a device."""


def peak_of(device: str) -> float:
    """Peak floating-point operations per second of a device; 0 if the device is unknown.

    Args:
        device: name of the device, such as ``NVIDIA H100 80GB HBM3``.
    """
    words = re.sub(r"[-_ ]+", " ", device).casefold()
    for name in sorted(_PEAKS, key=len, reverse=True):
        if re.search(rf"(?<![a-z0-9]){re.escape(name.replace('-', ' ').casefold())}(?![a-z0-9])", words):
            return _PEAKS[name] * _TERA
    return 0.0


def device_peak() -> float:
    """Peak floating-point operations per second of the current device; 0 if it is not a GPU, or an unknown one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0.0
    return peak_of(torch.cuda.get_device_name())
