"""What features add to a rank.

The module of a feature's part registers what installs it: a function of the `Rank`, or a class that takes it. Most of them add
handlers of messages (`Rank.extend`). What is registered before the process is a rank, as in the zygote, takes part in each rank
that is forked later. What is registered later, such as by the ``bootstrap`` of a mesh, is installed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["install_all", "register"]

Install = TypeVar("Install", bound=Callable[[Rank], object])


class _Registry:
    """What this process installs, in the order in which it was registered."""

    def __init__(self) -> None:
        self._rank: Rank | None = None
        self._installs: list[Callable[[Rank], object]] = []

    def add(self, install: Callable[[Rank], object]) -> None:
        self._installs.append(install)
        if self._rank is not None:
            install(self._rank)

    def install(self, rank: Rank) -> None:
        self._rank = rank
        for install in self._installs:
            install(rank)


_registry = _Registry()


def register(install: Install) -> Install:
    """Add a feature to this process when it becomes a rank, or now if it is one; a decorator."""
    _registry.add(install)
    return install


def install_all(rank: Rank) -> None:
    """Make this process a rank with all features that are registered."""
    _registry.install(rank)
