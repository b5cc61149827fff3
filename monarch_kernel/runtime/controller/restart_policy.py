"""Automatic restarts of processes that died: how often, how soon, and when they are given up. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

__all__ = ["Follows", "Restart", "RestartPolicy", "Restarts"]

Restart = Literal["never", "rank", "mesh"]
"""What is replaced when a rank dies: nothing, that rank, or all ranks of its mesh."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """What to do when a rank of a mesh dies.

    The first restart happens at once, the second ``backoff_s`` seconds after the death, each further one after twice the time.
    Restarts longer than ``within_s`` ago are forgotten.

    Attributes:
        restart: What is replaced.
        max_restarts: How many restarts of one rank (or, with ``mesh``, of the mesh) may happen within ``within_s``.
        within_s: Seconds.
        backoff_s: The first wait, in seconds.
        max_backoff_s: The longest wait, in seconds.

    Raises:
        ValueError: ``restart`` is none of these, or a number is negative.
    """

    restart: Restart = "never"
    max_restarts: int = 3
    within_s: float = 300.0
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0

    def __post_init__(self) -> None:
        if self.restart not in get_args(Restart):
            raise ValueError(f"restart must be one of {', '.join(map(repr, get_args(Restart)))}, not {self.restart!r}")
        for name in ("max_restarts", "within_s", "backoff_s", "max_backoff_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(f"{name} must be a number of at least 0, not {value!r}")

    def wait_s(self, nth: int) -> float:
        """How long to wait before the ``nth`` restart within ``within_s``, counted from 1."""
        return min(self.max_backoff_s, self.backoff_s * 2.0 ** min(nth - 2, 64)) if nth > 1 else 0.0


class Follows(NamedTuple):
    """The outcome of a death: whether a restart follows, and a text for the user, which may be empty."""

    is_restarted: bool
    text: str


class Restarts:
    """The restarts of one mesh.

    Args:
        policy: What to do when a rank dies.
        ranks: All ranks of the mesh.
    """

    def __init__(self, policy: RestartPolicy, ranks: Iterable[int]) -> None:
        self.policy = policy
        self._ranks = tuple(ranks)
        self._past: dict[int, deque[float]] = {}  # unit -> when its restarts were due; see `_unit`
        self._due: dict[int, float] = {}

    @property
    def next_at(self) -> float:
        """When the next restart is due; infinity if none is."""
        return min(self._due.values(), default=float("inf"))

    def died(self, rank: int, now: float) -> Follows:
        """Return what follows from an unexpected death of a rank."""
        policy = self.policy
        if policy.restart == "never":
            return Follows(False, "")
        unit = self._unit(rank)
        whole = "the mesh" if policy.restart == "mesh" else "it"
        if unit in self._due:
            return self._follows(self._due[unit] - now)
        past = self._past.setdefault(unit, deque())
        while past and past[0] <= now - policy.within_s:
            past.popleft()
        if len(past) >= policy.max_restarts:
            times = f"{len(past)} time{'s' * (len(past) != 1)} within {policy.within_s:g} s"
            return Follows(False, f"{whole} is not restarted, because it was restarted {times}")
        wait_s = policy.wait_s(len(past) + 1)
        self._due[unit] = now + wait_s
        past.append(now + wait_s)
        return self._follows(wait_s)

    def due(self, now: float) -> tuple[int, ...]:
        """The ranks to replace now; each is given once."""
        units = [unit for unit, at in self._due.items() if at <= now]
        for unit in units:
            del self._due[unit]
        return self._ranks if units and self.policy.restart == "mesh" else tuple(units)

    def forget(self, rank: int) -> None:
        """Drop the restart planned for this rank alone: the program replaces it."""
        if self.policy.restart == "rank":
            self._due.pop(rank, None)

    def _unit(self, rank: int) -> int:
        return rank if self.policy.restart == "rank" else -1

    def _follows(self, wait_s: float) -> Follows:
        what = "the mesh is restarted" if self.policy.restart == "mesh" else "a new process replaces it"
        return Follows(True, f"{what} in {wait_s:.1f} s" if wait_s > 0.05 else what)
