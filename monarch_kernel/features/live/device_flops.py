"""What devices can compute at most, for model FLOP utilisation."""

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
"""Part of a device's name -> 10^12 operations a second, of matrices of bfloat16 (float16, where it has no other) with sums in
float32, none of them sparse: from the makers' data sheets. Of an MI250X each of its two dies is a device."""


def peak_of(device: str) -> float:
    """Floating-point operations a second that a device can do at most; 0 if it is not known.

    Args:
        device: its name, such as ``NVIDIA H100 80GB HBM3``.
    """
    words = re.sub(r"[-_ ]+", " ", device).casefold()
    for name in sorted(_PEAKS, key=len, reverse=True):
        if re.search(rf"(?<![a-z0-9]){re.escape(name.replace('-', ' ').casefold())}(?![a-z0-9])", words):
            return _PEAKS[name] * _TERA
    return 0.0


def device_peak() -> float:
    """Floating-point operations a second that the current device can do; 0 if it is no GPU, or one that is not known."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0.0
    return peak_of(torch.cuda.get_device_name())
