"""Machines of Lightning.ai."""

from monarch_kernel.launch.lightning.jobs import MachineHost
from monarch_kernel.launch.lightning.launcher import LightningLauncher

__all__ = ["LightningLauncher", "MachineHost"]
