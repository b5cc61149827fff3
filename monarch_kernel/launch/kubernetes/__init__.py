"""The launcher for Kubernetes: each host is a pod of a cluster."""

from monarch_kernel.launch.kubernetes.host import PodHost
from monarch_kernel.launch.kubernetes.launcher import KubernetesLauncher

__all__ = ["KubernetesLauncher", "PodHost"]
