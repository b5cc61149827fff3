"""The handle of a pod that is, or will be, a host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from monarch_kernel.launch.kubernetes.pods import TITLE, Json, is_up, waits_for, without_preemption
from monarch_kernel.launch.port_forward import Tunnel
from monarch_kernel.net.wire.config import AgentConfig

__all__ = ["PodHost"]


class PodHost:
    """A pod that is, or will be, a host.

    The attributes are for the launcher, which changes them under its lock.
    """

    def __init__(self, name: str, config: AgentConfig, remove: Callable[[PodHost, float], None]) -> None:
        self._remove = remove
        self.name = name
        self.config = config
        self.address = ""
        self.node = ""
        self.tunnel: Tunnel | None = None
        self.pod: Json | None = None
        self.end: str | None = None
        self.log: tuple[str, ...] = ()
        self.events: deque[Json] = deque(maxlen=10)
        self.trouble = ""
        self.trouble_since: float | None = None
        self.made_at: float | None = None
        self.has_secret = False
        self.is_asked_for = False
        self.is_being_made = False
        self.is_closing = False
        self.is_ending = False
        self.is_gone = False
        self.is_given_up = False

    def poll(self) -> str | None:
        """Return None while the pod runs or may still come up, else how it ended."""
        return self.end

    def log_tail(self) -> tuple[str, ...]:
        """Return warnings of the cluster, and the last lines of the agent that were fetched."""
        warnings = [
            f"{TITLE}: {event.get('reason', '')}: {without_preemption(event.get('message'))}"
            for event in list(self.events)
            if event.get("type") == "Warning"
        ]
        return (*warnings, *self.log)[-20:]

    def close(self, timeout_s: float) -> None:
        """Delete the pod and its secret; an agent that is shutting down has ``timeout_s`` seconds to end."""
        self._remove(self, timeout_s)

    @property
    def is_up(self) -> bool:
        """Whether its agent has started."""
        return self.pod is not None and is_up(self.pod)

    @property
    def is_in_cluster(self) -> bool:
        """Whether, as far as is known, the cluster has the pod, and it can be deleted."""
        is_made = self.made_at is not None or self.pod is not None
        return is_made and not self.is_gone and not self.is_given_up

    @property
    def runs(self) -> bool:
        """Whether its agent runs."""
        return self.is_in_cluster and self.is_up and not self.is_ending

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.is_up or self.end is not None or self.is_closing

    def made_before(self, moment: float) -> bool:
        """Return whether the pod existed at that time."""
        return self.made_at is not None and self.made_at < moment

    def waits_for(self) -> str:
        """Say what the pod waits for, in a few words."""
        if self.pod is None:
            return "asking for pods"
        return self.trouble if self.trouble_since is not None else waits_for(self.pod, self.events)
