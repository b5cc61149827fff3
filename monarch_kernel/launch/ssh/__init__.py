"""The launcher for SSH: each host is a machine that the user can log in to."""

from monarch_kernel.launch.ssh.host import SshHost
from monarch_kernel.launch.ssh.launcher import SshLauncher

__all__ = ["SshHost", "SshLauncher"]
