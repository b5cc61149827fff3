"""Digests of tensors, computed on the device of the tensor. They detect accidental differences, not forgeries."""

from __future__ import annotations

import io
from hashlib import blake2b
from typing import Any

__all__ = ["digest_of_bytes", "mixed"]

_MIX = -4417276706812531889  # an odd number with as many ones as zeros
_STEP = -7046029254386353131  # 2**64 over the golden ratio
_WORDS_CPU = 1 << 16  # of 8 bytes each: they stay in a cache
_WORDS = 1 << 22  # on other devices, where calls are expensive


def digest_of_bytes(*parts: bytes) -> bytes:
    """Return a digest of 16 bytes."""
    return blake2b(b"\0".join(parts), digest_size=16).digest()


def mixed(tensor: Any) -> int | bytes:
    """Mix the bytes of a tensor and their positions into a 64-bit number, on the tensor's device."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized:
        buffer = io.BytesIO()
        torch.save(tensor.cpu(), buffer)
        return digest_of_bytes(buffer.getvalue())
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() % 8 or raw.storage_offset() % 8:
        raw = torch.cat([raw, raw.new_zeros(-raw.numel() % 8)])
    words = raw.view(torch.int64)
    most = _WORDS_CPU if words.device.type == "cpu" else _WORDS
    salt = torch.arange(1, min(most, len(words)) + 1, device=words.device) * _STEP
    total = 0
    for chunk in words.split(most):
        mixed_words = (chunk ^ salt[: len(chunk)]).mul_(_MIX)
        mixed_words.bitwise_xor_(mixed_words >> 32).mul_(_MIX)
        total = (total * _MIX + int(mixed_words.sum())) % (1 << 64)
    return total
