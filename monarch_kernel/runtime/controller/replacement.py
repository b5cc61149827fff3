"""Replacement of ranks that have died, on request (`heal`) and automatically (`restart_when_lost`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from monarch_kernel.errors import LaunchError, MeshDownError
from monarch_kernel.runtime.controller.effects import Effect, RestartDue
from monarch_kernel.runtime.controller.healing import Healer, Healing
from monarch_kernel.runtime.controller.host_pool import HostPool, Loop
from monarch_kernel.runtime.controller.restart_policy import RestartPolicy
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.requests import Resolve

__all__ = ["NewHosts", "Replacement"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

NewHosts = Callable[["Collection[int]"], "Mapping[int, int]"]
"""Launches another host agent for each one that is gone, and returns their numbers; may take long."""

RESTART_GRACE_S = 2.0


class Replacement:
    """Replaces ranks; for any thread.

    Args:
        loop: Performs effects.
        state: The controller's state.
        host_pool: The hosts of the session.
        healer: Starts processes, and asks them for the actors that were there.
    """

    def __init__(self, loop: Loop, state: State, host_pool: HostPool, healer: Healer) -> None:
        self._loop = loop
        self._state = state
        self._host_pool = host_pool
        self._healer = healer
        self._new_hosts: dict[int, NewHosts] = {}

    def heal(
        self,
        procs: Sequence[int],
        finish: Callable[[Healing], T],
        *,
        new_hosts: NewHosts,
        hosts: Mapping[int, int] | None = None,
        retire: str = "",
        grace_s: float = 0.0,
    ) -> Future[T]:
        """Replace processes that are lost, and have the new ones make the actors that were there.

        Args:
            procs: The numbers. Live processes are left alone, and processes that are not up yet are waited for.
            finish: Makes the future's result of the outcome.
            new_hosts: Launches others in place of host agents that end meanwhile.
            hosts: For each host agent that has ended, the one that has replaced it.
            retire: Why live processes are ended, so that all are replaced; empty if they continue.
            grace_s: How long these may take to end, in seconds, before they are killed.

        Raises:
            MeshDownError: The session was shut down.
            LaunchError: Raised by the future: an engine has no host in place of one that has ended meanwhile.
        """
        healing = Healing()
        launched = set((hosts or {}).values())  # an agent that ends, too, is not replaced once more

        def begin(id: int, now: float) -> list[Effect]:
            def over() -> None:
                # Of several ranks that are killed together, some are known to be dead later than others. An agent that
                # something asked to end reports its dead ranks first, and starts no others: these wait for its end.
                lost = [proc for proc in procs if self._state.processes.is_lost(proc)]
                gone = [host for host in self._host_pool.gone(lost) if host not in launched]
                again = [proc for proc in lost if self._is_to_start(proc, healing, gone)]
                if not again:
                    self._loop.perform([Resolve(id, [], True)])
                elif gone:
                    self._in_background(lambda: launch(gone, again))
                else:
                    healing.forget(again)
                    self._loop.perform(self._healer.heal(again, healing, {}, time.monotonic()))

            def launch(gone: Sequence[int], again: Sequence[int]) -> None:
                try:
                    found = new_hosts(gone)
                except (LaunchError, MeshDownError) as error:
                    healing.error = error
                    self._loop.enter(lambda now: [Resolve(id, [], True)])
                    return
                launched.update(found.values())
                healing.forget(again)
                self._loop.enter(lambda now: self._healer.heal(again, healing, found, now))

            healing.over = over
            effects = self._state.processes.retire(procs, retire, grace_s, now) if retire else []
            return effects + self._healer.heal(procs, healing, hosts or {}, now)

        def done() -> T:
            if healing.error is not None:
                raise healing.error
            return finish(healing)

        return self._loop.promise(begin, lambda answers: done())

    def _is_to_start(self, proc: int, healing: Healing, gone: Collection[int]) -> bool:
        """Whether to start a process in place of a lost one: it was not replaced yet, or its host agent ends, or has ended."""
        host = self._host_pool.host_of(proc)
        if self._host_pool.is_gone(host):
            return host in gone
        return proc not in healing.replaced or not self._host_pool.starts_ranks(host)

    def restart_when_lost(self, procs: Sequence[int], policy: RestartPolicy, new_hosts: NewHosts) -> None:
        """Replace the processes of a mesh when they die.

        Args:
            procs: By rank.
            policy: When, and how often.
            new_hosts: Launches others in place of host agents that have ended.
        """
        self._new_hosts.update(dict.fromkeys(procs, new_hosts))
        self._loop.enter(lambda now: self._state.processes.restart_when_lost(procs, policy))

    def restart(self, due: RestartDue) -> None:
        """Carry out a restart that no caller waits for; on the I/O thread."""

        def replace(hosts: Mapping[int, int], now: float) -> list[Effect]:
            effects = self._state.processes.retire(due.procs, due.retire, RESTART_GRACE_S, now)
            return effects + self._healer.heal(due.procs, Healing(), hosts, now)

        def launch() -> None:
            hosts: Mapping[int, int] = {}
            try:
                hosts = new_hosts(gone)
            except MeshDownError:
                return
            except LaunchError:  # the ranks are lost once more, which is reported
                _log.exception("could not get a host in place of a lost one")
            self._loop.enter(lambda now: replace(hosts, now))

        gone = self._host_pool.gone(due.procs)
        if not gone:
            self._loop.perform(replace({}, time.monotonic()))  # at once: nothing else may find a dead rank there
            return
        new_hosts = self._new_hosts[due.procs[0]]
        self._in_background(launch)

    def _in_background(self, launch: Callable[[], None]) -> None:
        """Launch agents: these are new processes, which the thread that drives the loop must not wait for."""
        threading.Thread(target=launch, name="monarch-restart", daemon=True).start()
