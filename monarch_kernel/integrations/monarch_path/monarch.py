"""What ``import monarch`` finds where this directory is on the path: the alias of `monarch_kernel.integrations.monarch`."""

from __future__ import annotations

from monarch_kernel.integrations.monarch import NAME, install

if __name__ == NAME:  # and not the name in this package, under which tools import it
    install(shadow=True)  # Python has decided by the path
