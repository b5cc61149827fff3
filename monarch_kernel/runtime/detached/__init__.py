"""Detached meshes, which outlive their kernel: their registry, and the sessions of the kernels that attach to them."""
