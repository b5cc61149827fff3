"""A Jupyter kernel that is the single controller of a cluster.

``%load_ext monarch_kernel`` gives ``%mesh`` and ``%%remote`` in any IPython; the kernel named ``monarch`` has them built in.
As a library: ``from monarch_kernel.actor import Actor, endpoint, this_host``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch_kernel.base import aliases

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from monarch_kernel.integrations import lightning as lightning
    from monarch_kernel.integrations import monarch as compat  # noqa: F401 - its other name
    from monarch_kernel.integrations import vllm as vllm
    from monarch_kernel.train import checkpoint as checkpoint
    from monarch_kernel.train import parallel as parallel
    from monarch_kernel.train import record as record
    from monarch_kernel.train import snapshots as snapshots
    from monarch_kernel.train import spmd as spmd

__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension"]

__version__ = "0.1.0"

aliases.install(
    {
        "monarch_kernel.actor.hosts": "monarch_kernel.actor.host_mesh",
        "monarch_kernel.compat": "monarch_kernel.integrations.monarch",
        "monarch_kernel.checkpoint": "monarch_kernel.train.checkpoint",
        "monarch_kernel.lightning": "monarch_kernel.integrations.lightning",
        "monarch_kernel.parallel": "monarch_kernel.train.parallel",
        "monarch_kernel.record": "monarch_kernel.train.record",
        "monarch_kernel.snapshots": "monarch_kernel.train.snapshots",
        "monarch_kernel.spmd": "monarch_kernel.train.spmd",
        "monarch_kernel.vllm": "monarch_kernel.integrations.vllm",
    }
)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add the magics to an IPython shell: ``%load_ext monarch_kernel``."""
    from monarch_kernel.notebook.magics.magics import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics, and end the meshes: ``%unload_ext monarch_kernel``."""
    from monarch_kernel.notebook.magics.magics import unload

    unload(shell)
