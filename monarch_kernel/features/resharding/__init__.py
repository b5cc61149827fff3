"""Resharding: copies distributed tensors to ranks that shard them differently, and plans which rank reads what from which."""
