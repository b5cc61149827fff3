"""The launcher of a controller that is gone: made again by the one that has taken its mesh up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import HostHandle, Launcher
from monarch_kernel.launch.registry import ENGINES, make_launcher
from monarch_kernel.net.wire.config import AgentConfig, Recipe

__all__ = ["EarlierLauncher"]


class EarlierLauncher:
    """Asks an engine for more hosts as an earlier controller did, whose hosts it knows by the names of their machines.

    A launcher is made when one is first asked for; and for an engine that has to be told which machines are in use each time,
    for they change.

    Args:
        name: of the engine.
        recipe: how the launcher was made; None if it can't be made again.
        used: gives the machines where hosts of the mesh run, and those where some did that are gone.
    """

    def __init__(
        self, name: str, recipe: Recipe | None, used: Callable[[], tuple[Sequence[str], Sequence[str]]]
    ) -> None:
        self.name = name
        self._recipe = recipe
        self._used = used
        self._launchers: list[Launcher] = []

    def launch(self, configs: Sequence[AgentConfig]) -> Sequence[HostHandle]:
        """Ask for one host for each.

        Raises:
            LaunchError: it can't be asked, or has none.
        """
        if self._recipe is None:
            raise LaunchError(
                f"the hosts of this mesh were asked of {self.name} by an earlier kernel, and this one can't ask for another in "
                "the place of one that is lost; slice it out, or end the mesh and bring it up again"
            )
        engine = ENGINES[self._recipe.engine]
        if not self._launchers or "occupied" in engine.takes:
            occupied, doubted = self._used()
            common = {**self._recipe.common, "occupied": tuple(occupied), "doubted": tuple(doubted)}
            self._launchers.append(make_launcher(engine, self._recipe.options, **common))
        return self._launchers[-1].launch(configs)

    def progress(self) -> str:
        """What the engine says of those that are not up yet."""
        return next((text for launcher in reversed(self._launchers) if (text := launcher.progress())), "")

    def close(self, timeout_s: float) -> None:
        """Give back what was asked for here."""
        for launcher in self._launchers:
            launcher.close(timeout_s)
