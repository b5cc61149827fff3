"""``monarch.job.spmd``: jobs for torchrun through TorchX, which this product does not have."""

from __future__ import annotations

from typing import NoReturn

from monarch_kernel.integrations.monarch.missing import refuse

__all__: list[str] = []


def __getattr__(name: str) -> NoReturn:
    refuse("monarch.job.spmd", name)
