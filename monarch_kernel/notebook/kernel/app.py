"""Starts the kernel: ``python -m monarch_kernel -f CONNECTION_FILE``."""

from __future__ import annotations

from ipykernel.kernelapp import IPKernelApp

from monarch_kernel.notebook.kernel.kernel import MonarchKernel
from monarch_kernel.runtime.host.processes import raise_descriptor_limit

__all__ = ["main"]

_DESCRIPTORS = 1 << 16
"""Descriptors are enough for the largest meshes; some programs that cells start close every descriptor up to the limit."""


def main() -> None:
    """Launch the kernel of this process."""
    raise_descriptor_limit(_DESCRIPTORS)  # ipykernel alone needs 66
    IPKernelApp.launch_instance(kernel_class=MonarchKernel)
