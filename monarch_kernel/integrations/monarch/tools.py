"""``monarch.tools``: Monarch's command line, which this product does not have."""

from __future__ import annotations

from typing import NoReturn

from monarch_kernel.integrations.monarch.missing import refuse

__all__: list[str] = []
__path__: list[str] = []
"""As Monarch's, it is a package: see `SUBMODULES`."""


def __getattr__(name: str) -> NoReturn:
    reason = (
        "is missing: it starts jobs from Monarch's command line; use monarch.job (SlurmJob, KubernetesJob, ProcessJob), or "
        "%mesh up --on slurm in a notebook"
    )
    refuse("monarch.tools", name, reason)
