"""Loops on many ranks that are steered while they run: who may begin which step, and what has become of it. No I/O."""
