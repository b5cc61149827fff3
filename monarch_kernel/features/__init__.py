"""What is added to meshes: steered loops, edited code, traffic, resharding. Each feature is one folder."""
