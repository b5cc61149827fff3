"""Benchmarks that measure monarch_kernel and its peers side by side, on one machine, in one run."""
