"""Hosts that one can log in to."""

from monarch_kernel.launch.ssh.host import SshHost
from monarch_kernel.launch.ssh.launcher import SshLauncher

__all__ = ["SshHost", "SshLauncher"]
