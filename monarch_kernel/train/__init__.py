"""Training on a mesh: process groups, parallel models, checkpoints and snapshots."""
