"""A Jupyter kernel that is the single controller of a cluster.

``%load_ext monarch_kernel`` gives ``%mesh`` and ``%%remote`` in any IPython; the kernel named ``monarch`` has them built in.
As a library: ``from monarch_kernel.actor import Actor, endpoint, this_host``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension"]

__version__ = "0.1.0"


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add the magics to an IPython shell: ``%load_ext monarch_kernel``."""
    from monarch_kernel.notebook.magics import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take the magics away, and end the meshes: ``%unload_ext monarch_kernel``."""
    from monarch_kernel.notebook.magics import unload

    unload(shell)
