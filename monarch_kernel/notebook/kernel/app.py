"""Starts the kernel: ``python -m monarch_kernel -f CONNECTION_FILE``."""

from __future__ import annotations

import logging
from ipaddress import ip_address

from ipykernel.kernelapp import IPKernelApp

from monarch_kernel.notebook.kernel.kernel import MonarchKernel
from monarch_kernel.runtime.host.processes import raise_descriptor_limit

__all__ = ["NO_ENCRYPTION", "KernelApp", "main"]

NO_ENCRYPTION = "Kernel is running over TCP without encryption."
"""How ipykernel's warning begins; a terminal would show it above the first prompt."""

_DESCRIPTORS = 1 << 16
"""Descriptors are enough for the largest meshes; some programs that cells start close every descriptor up to the limit."""


class KernelApp(IPKernelApp):
    """ipykernel's application; it does not warn of eavesdropping where no packet leaves the machine."""

    def init_sockets(self) -> None:
        """Create the sockets."""
        self.log.addFilter(self.concerns)
        super().init_sockets()  # type: ignore[no-untyped-call]

    def concerns(self, record: logging.LogRecord) -> bool:
        """Whether a message of the log is about this kernel; only the superuser can listen to a loopback interface."""
        return not (str(record.msg).startswith(NO_ENCRYPTION) and _is_loopback(self.ip))


def _is_loopback(ip: str) -> bool:
    try:
        return ip_address(ip).is_loopback
    except ValueError:
        return ip == "localhost"


def main() -> None:
    """Launch the kernel of this process."""
    raise_descriptor_limit(_DESCRIPTORS)  # ipykernel alone needs 66
    KernelApp.launch_instance(kernel_class=MonarchKernel)
