"""Meshes that outlive their kernel: their registry, and the kernels that attach to them again."""
