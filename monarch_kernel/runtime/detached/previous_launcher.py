"""Recreates the launcher of a previous controller for the controller that attached to its mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import HostHandle, Launcher
from monarch_kernel.launch.registry import ENGINES, make_launcher
from monarch_kernel.net.wire.config import AgentConfig, Recipe

__all__ = ["PreviousLauncher"]


class PreviousLauncher:
    """Requests hosts from an engine with the options of a previous controller, whose hosts it knows by their machine names.

    The launcher is created for the first request. For an engine that needs the list of machines in use, which changes, each
    request creates a new launcher.

    Args:
        name: name of the engine.
        recipe: how the launcher was created; None if it can't be recreated.
        used: returns the machines on which hosts of the mesh run, and those of hosts that are gone.
    """

    def __init__(
        self, name: str, recipe: Recipe | None, used: Callable[[], tuple[Sequence[str], Sequence[str]]]
    ) -> None:
        self.name = name
        self._recipe = recipe
        self._used = used
        self._launchers: list[Launcher] = []

    def launch(self, configs: Sequence[AgentConfig]) -> Sequence[HostHandle]:
        """Request one host for each configuration.

        Raises:
            LaunchError: the launcher can't be recreated, or the engine has no host.
        """
        if self._recipe is None:
            raise LaunchError(
                f"an earlier kernel requested the hosts of this mesh from {self.name}, and this kernel can't request a "
                "replacement for a lost host; slice the lost host out, or end the mesh and bring it up again"
            )
        engine = ENGINES[self._recipe.engine]
        if not self._launchers or "occupied" in engine.takes:
            occupied, last_resort = self._used()
            common = {**self._recipe.common, "occupied": tuple(occupied), "last_resort": tuple(last_resort)}
            self._launchers.append(make_launcher(engine, self._recipe.options, **common))
        return self._launchers[-1].launch(configs)

    def progress(self) -> str:
        """Return what the engine reports about hosts that are not up yet."""
        return next((text for launcher in reversed(self._launchers) if (text := launcher.progress())), "")

    def close(self, timeout_s: float) -> None:
        """Release the hosts that were requested here."""
        for launcher in self._launchers:
            launcher.close(timeout_s)
