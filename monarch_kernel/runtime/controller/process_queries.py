"""Questions about processes that the controller answers from its records, from any thread and without a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch_kernel.errors import Failure
from monarch_kernel.net.wire.messages import RankSpec
from monarch_kernel.runtime.controller.process_records import RankRecord

__all__ = ["ProcessQueries"]


class ProcessQueries:
    """Reads the records of processes; answers have the order of the numbers given.

    Args:
        ranks: By number of the process; owned by the caller.

    Attributes:
        n_groups_formed: How often a mesh of this session was made to form its process group.
    """

    def __init__(self, ranks: Mapping[int, RankRecord]) -> None:
        self._ranks = ranks
        self.n_groups_formed = 0

    def specs(self, procs: Sequence[int]) -> tuple[RankSpec, ...]:
        """What the processes were started with."""
        return tuple(self._ranks[proc].spec for proc in procs)

    def places(self, procs: Sequence[int]) -> list[tuple[str, int]]:
        """The mesh and the flat rank of each process; an empty name for the program itself."""
        records = [self._ranks.get(proc) for proc in procs]
        return [("", 0) if record is None else (record.spec.mesh, record.spec.rank) for record in records]

    def incarnations(self, procs: Sequence[int]) -> tuple[int, ...]:
        """How many processes had each number before the current one."""
        records = [self._ranks.get(proc) for proc in procs]
        return tuple(0 if record is None else record.spec.incarnation for record in records)

    def deaths(self, procs: Sequence[int]) -> dict[int, Failure]:
        """By number, how those of the processes ended that are dead or stopped."""
        records = [self._ranks.get(proc) for proc in procs]
        return {record.spec.proc: record.death for record in records if record is not None and record.death is not None}

    def failures(self, procs: Sequence[int]) -> list[Failure | None]:
        """The last failure of each process; None if a later request has succeeded."""
        records = [self._ranks.get(proc) for proc in procs]
        return [None if record is None else record.failure for record in records]

    def names(self, procs: Sequence[int]) -> list[dict[str, str]]:
        """The namespace of each process: name -> kind."""
        records = [self._ranks.get(proc) for proc in procs]
        return [{} if record is None else record.names.copy() for record in records]

    def share_group(self, procs: Sequence[int]) -> bool:
        """Whether the default process groups of the processes are usable and have one size, as far as is known.

        Calls of actors and cells on a part of a mesh can leave them otherwise.
        """
        records = [self._ranks.get(proc) for proc in procs]
        sizes = {record.group_size for record in records if record is not None} - {-1}
        return len(sizes) <= 1 and -2 not in sizes

    def has_group(self, procs: Sequence[int]) -> bool:
        """Whether the last answers of all these processes say that they have a usable default group of just them."""
        return all(proc in self._ranks and self._ranks[proc].group_size == len(procs) for proc in procs)

    def pending(self, procs: Sequence[int]) -> list[list[int]]:
        """The requests that each process has yet to answer."""
        records = [self._ranks.get(proc) for proc in procs]
        return [[] if record is None else list(record.open_requests) for record in records]
