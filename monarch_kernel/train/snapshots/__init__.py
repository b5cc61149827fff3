"""Snapshots of training in the memory of ranks: taken between steps, kept twice, and gone back to."""
