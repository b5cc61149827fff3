"""Starts the kernel: ``python -m monarch_kernel -f CONNECTION_FILE``."""

from __future__ import annotations

from ipykernel.kernelapp import IPKernelApp

from monarch_kernel.notebook.kernel.kernel import MonarchKernel

__all__ = ["main"]


def main() -> None:
    """Launch the kernel of this process."""
    IPKernelApp.launch_instance(kernel_class=MonarchKernel)
