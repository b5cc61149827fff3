"""Requests the hosts of a notebook's mesh from an engine, waits for them, and gives them back."""

from __future__ import annotations

import time

from monarch_kernel.actor.host_mesh import hosts_of
from monarch_kernel.errors import LaunchError, RemoteInterrupt
from monarch_kernel.launch.base import Launcher
from monarch_kernel.launch.registry import ENGINES, make_launcher, plan_text
from monarch_kernel.net.wire.config import Recipe
from monarch_kernel.notebook.cells.display import LiveView
from monarch_kernel.notebook.cells.held_interrupts import HeldInterrupts
from monarch_kernel.notebook.syntax.up_arguments import UpOptions
from monarch_kernel.notebook.view.hosts import coming_text, missing_text
from monarch_kernel.runtime.controller.session import Session, current_session

__all__ = ["Allocation", "recipe_of", "request_text"]

_PUMP_S = 0.05
_FIRST_WORD_S = 1.0  # no progress is shown for hosts that are up sooner
_WAIT_S = 600.0
_OTHERS_S = 2.0
_CLOSE_S = 5.0


def recipe_of(options: UpOptions) -> Recipe:
    """Return the recipe that creates the launcher of a mesh."""
    common = {
        "python": options.python,
        "hosts": options.host_names,
        "gpus": options.per_host if options.gpus else 0,
    }
    return Recipe(options.engine, options.of_engine, common)


def _launcher(options: UpOptions) -> Launcher:
    recipe = recipe_of(options)
    return make_launcher(ENGINES[recipe.engine], recipe.options, **recipe.common)


def request_text(options: UpOptions) -> str:
    """Describe what the engine would be asked for, without asking it.

    Raises:
        LaunchError: a requirement of the engine is not installed.
    """
    launcher = _launcher(options)
    try:
        shown = {**options.of_engine}
        shown |= {"hosts": ",".join(options.host_names)} if options.host_names else {}
        shown |= {"gpus": options.per_host} if options.gpus else {}
        shown |= {"python": options.python}
        return plan_text(ENGINES[options.engine], launcher, options.hosts, shown)
    finally:
        launcher.close(_CLOSE_S)


class Allocation:
    """The hosts of one mesh.

    Args:
        options: the options of ``%mesh up``.
        session: the session of the mesh, if it has a separate one.

    Attributes:
        hosts: the hosts as a mesh.

    Raises:
        LaunchError: the engine can't be reached, or can never provide this many hosts.
    """

    def __init__(self, options: UpOptions, session: Session | None = None) -> None:
        self._options = options
        self._launcher = _launcher(options)
        self._wait_s = options.wait_s or _WAIT_S
        try:
            self.hosts = hosts_of(
                session or current_session(),
                self._launcher,
                options.hosts,
                timeout_s=self._wait_s,
                lost_after_s=options.lost_after_s,
            )
        except BaseException:
            self._launcher.close(_CLOSE_S)
            raise

    def wait(self, view: LiveView, interrupts: HeldInterrupts) -> None:
        """Wait until all hosts are up, and show the progress.

        Raises:
            LaunchError: some hosts did not come up; the text names them and says why.
            RemoteInterrupt: the wait was interrupted.
        """
        name = self._options.name
        begin = time.monotonic()
        shown_s = _FIRST_WORD_S - LiveView.EVERY_S
        waits_for = ""
        lost_at: float | None = None
        future = self.hosts.initialized
        while not future.wait(_PUMP_S):
            now = time.monotonic()
            if interrupts.count:
                future.cancel()
                raise RemoteInterrupt(f"interrupted while {name} waited for its hosts; they were given back")
            seen = self.hosts.view()
            waits_for = seen.waits_for or waits_for
            if seen.count("lost") and lost_at is None:
                lost_at = now
            if lost_at is not None and now > lost_at + _OTHERS_S:  # others may wait in a queue for a long time
                break
            if now - begin >= shown_s + LiveView.EVERY_S:
                shown_s = now - begin
                view.show_text(coming_text(name, seen, now - begin), first=view.is_new)
        seen = self.hosts.view()
        if seen.count("up") < len(seen.hosts):
            future.cancel()
            waited_s = time.monotonic() - begin
            missing = missing_text(name, seen, self._options.host_names, waited_s, said=waits_for)
            raise LaunchError("\n".join([missing, *self.hosts.hints()]))

    def warnings(self) -> tuple[str, ...]:
        """Return small differences between the hosts and this machine, such as those of versions, as warnings."""
        return tuple(f"{self._options.name}: {line}" for line in self.hosts.compare().warnings)

    def release(self) -> None:
        """Give all hosts back, whatever their state."""
        try:
            if not self.hosts.is_closed:
                self.hosts.shutdown().get()
        finally:
            self._launcher.close(_CLOSE_S)
