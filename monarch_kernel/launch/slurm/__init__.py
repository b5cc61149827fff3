"""The launcher for Slurm: each host is a node of a cluster."""

from monarch_kernel.launch.slurm.host import SlurmHost
from monarch_kernel.launch.slurm.launcher import SlurmLauncher

__all__ = ["SlurmHost", "SlurmLauncher"]
