"""The launcher for Ray: each host is an actor of a Ray cluster."""

from monarch_kernel.launch.ray.launcher import RayHost, RayLauncher

__all__ = ["RayHost", "RayLauncher"]
