"""``monarch.job``: hosts by the names of meshes, from this machine, Slurm or Kubernetes.

A job of Monarch runs on when its program has ended, and another program attaches to it. Here hosts end with the program; a mesh
of a notebook that outlives it is `%mesh up --detach`. So `state` always brings up new hosts, and ``cached_path`` has no effect.
"""

from __future__ import annotations

from typing import NoReturn

from monarch_kernel.integrations.monarch.forwarding import PortForwarder
from monarch_kernel.integrations.monarch.jobs import (
    JobState,
    JobTrait,
    LocalJob,
    MeshAdminConfig,
    ProcessJob,
    TelemetryConfig,
    hosts_from_config,
)
from monarch_kernel.integrations.monarch.kubernetes_job import KubernetesJob
from monarch_kernel.integrations.monarch.missing import refuse
from monarch_kernel.integrations.monarch.slurm_job import SlurmJob
from monarch_kernel.integrations.monarch.terminal import shell

__all__ = [
    "JobState",
    "JobTrait",
    "KubernetesJob",
    "LocalJob",
    "MeshAdminConfig",
    "PortForwarder",
    "ProcessJob",
    "SlurmJob",
    "TelemetryConfig",
    "hosts_from_config",
    "shell",
]

__path__: list[str] = []
"""As Monarch's, it is a package: see `SUBMODULES`."""


def __getattr__(name: str) -> NoReturn:
    refuse("monarch.job", name)
