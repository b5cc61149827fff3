"""Snapshots of training state in the memory of ranks: taken between steps, kept on two ranks, and restored on request."""
