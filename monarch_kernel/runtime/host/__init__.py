"""Processes on a machine of the mesh: the host agent, and the zygote that forks the ranks."""
