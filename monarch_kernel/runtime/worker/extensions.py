"""Extensions: the parts that features add to a rank.

A feature's module registers a function of the `Rank`, or a class that takes it, which installs the feature. Most of them add
handlers of messages (`Rank.extend`). A feature that is registered before the process is a rank, as in the zygote, is part of
each rank that is forked later. A feature registered later, such as by the ``bootstrap`` of a mesh, is installed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["install_all", "register"]

Install = TypeVar("Install", bound=Callable[[Rank], object])


class _Registry:
    """The features of this process, in the order of registration."""

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
    """Decorator: install a feature when this process becomes a rank, or now if it is one."""
    _registry.add(install)
    return install


def install_all(rank: Rank) -> None:
    """Make this process a rank with all registered features."""
    _registry.install(rank)
