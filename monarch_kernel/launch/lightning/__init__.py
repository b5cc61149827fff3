"""The launcher for Lightning.ai: each host is a machine of a job."""

from monarch_kernel.launch.lightning.jobs import MachineHost
from monarch_kernel.launch.lightning.launcher import LightningLauncher

__all__ = ["LightningLauncher", "MachineHost"]
