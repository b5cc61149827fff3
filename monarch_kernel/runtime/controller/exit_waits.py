"""Requests that resolve when processes have ended, for `ProcMesh.stop` and `HostMesh.stop`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from monarch_kernel.errors import Failure
from monarch_kernel.net.wire.messages import Payload
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.requests import Resolve

__all__ = ["EXIT_WAIT_S", "ExitWaits"]

EXIT_WAIT_S = 10.0
"""How long after SIGKILL a process may take to end, in seconds: the Linux kernel frees its memory and that of its device."""


@dataclass(slots=True)
class _Ending:
    """A request. ``left`` are the processes of ``procs`` that have not ended; after ``deadline`` they count as stuck."""

    procs: Sequence[int]
    left: set[int]
    deadline: float


class ExitWaits:
    """The requests that wait for processes to end."""

    def __init__(self) -> None:
        self._endings: dict[int, _Ending] = {}

    def add(self, id: int, procs: Sequence[int], left: Iterable[int], deadline: float) -> list[Effect]:
        """Add a request that waits for the processes in ``left``; the others of ``procs`` have ended."""
        self._endings[id] = _Ending(procs, set(left), deadline)
        return self._resolve(lambda ending: not ending.left)

    def ended(self, procs: Sequence[int]) -> list[Effect]:
        """Note that these processes have ended, and resolve requests that waited for them."""
        for ending in self._endings.values():
            ending.left.difference_update(procs)
        return self._resolve(lambda ending: not ending.left)

    def due(self, now: float) -> list[Effect]:
        """Resolve the requests whose deadline has passed."""
        return self._resolve(lambda ending: now >= ending.deadline)

    def _resolve(self, is_over: Callable[[_Ending], bool]) -> list[Effect]:
        effects: list[Effect] = []
        for id, ending in list(self._endings.items()):
            if is_over(ending):
                del self._endings[id]
                effects.append(Resolve(id, [_answer(proc in ending.left) for proc in ending.procs], True))
        return effects


def _answer(is_stuck: bool) -> Answer:
    if not is_stuck:
        return Value(Payload(), (), {})
    what = f"it has not ended {EXIT_WAIT_S:.0f} s after SIGKILL was due: a device driver may hold it, or its host hangs"
    return Failure("lost", "NotEnded", what)
