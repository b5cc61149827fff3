"""Training on a mesh; so far its process groups."""
