"""One look at what the ranks of a mesh do, for code that must not wait: the ranks first, then the agents of silent ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from monarch_kernel.errors import Failure
from monarch_kernel.runtime.diagnostics.dumped_stacks import doing_of
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.diagnostics.waits import no_answer
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["Inspectable", "Inspection"]

_ANSWER_S = 1.0
_STATES_S = 0.3


class Inspectable(Protocol):
    """The part of `ProcMesh` that inspections use."""

    def doing(self, *, brief: bool = False) -> Future[dict[int, Doing | Failure]]:
        """Ask all ranks what they do; ``brief`` as in `ProcMesh.doing`."""
        ...

    def process_states(self, ranks: Sequence[int]) -> Mapping[int, Future[str]]:
        """Ask the agents of some ranks whether their processes are stopped; as `ProcMesh.process_states`."""
        ...


class Inspection:
    """One look, which begins when it is made.

    Args:
        mesh: the mesh.
        now: the time.
        brief: as in `ProcMesh.doing`.
    """

    def __init__(self, mesh: Inspectable, now: float, *, brief: bool = False) -> None:
        self.is_brief = brief
        self._mesh = mesh
        self._answers = mesh.doing(brief=brief)
        self._states: Mapping[int, Future[str]] | None = None
        self._until = now + _ANSWER_S

    def poll(self, now: float) -> dict[int, Doing | Failure] | None:
        """Return what each rank does; None if it is too early to say that."""
        if self._states is None:
            if not self._answers.done():
                if now < self._until:
                    return None
                self._answers.cancel()  # a rank has not answered
            silent = [rank for rank, answer in self._answers.get().items() if no_answer(answer)]
            self._states, self._until = self._mesh.process_states(silent) if silent else {}, now + _STATES_S
        if now < self._until and not all(state.done() for state in self._states.values()):
            return None
        found = self._answers.get()
        for rank, state in self._states.items():
            if state.done() and (doing := doing_of(state.get(), rank)) is not None:
                found[rank] = doing
        return found

    def cancel(self) -> None:
        """Let it be."""
        self._answers.cancel()
