"""What runs on a machine of the mesh: its host agent, the zygote that forks ranks, and the ranks themselves."""
