"""Nodes of a Slurm cluster."""

from monarch_kernel.launch.slurm.host import SlurmHost
from monarch_kernel.launch.slurm.launcher import SlurmLauncher

__all__ = ["SlurmHost", "SlurmLauncher"]
