"""Distributed tensors beside those of other libraries: ``python -m benchmarks.tensors`` (``make bench-tensors``).

Each library is a separate script, `benchmarks.tensors.ours`, ``.monarch``, ``.jax`` and so on, which prints a line of JSON
for each figure. `benchmarks.runner` runs them in turns.
"""
