"""What meshes of processes and actors need of whoever carries their requests: the controller, or a rank that asks others."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol, TypeVar

from monarch_kernel.errors import Failure
from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.net.memory.exports import Lendings
from monarch_kernel.net.memory.paths import Roads
from monarch_kernel.net.wire.codec import Packed
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future, Owner
from monarch_kernel.runtime.rpc.ports import PortTable
from monarch_kernel.runtime.rpc.respawn_log import MakeSpawn
from monarch_kernel.runtime.rpc.stores import StoreTable

__all__ = ["Asker"]

T = TypeVar("T")


class Asker(Owner, Protocol):
    """Carries requests to processes, and their answers back.

    Attributes:
        ports: those that this process has open.
        stores: the stores of torch.distributed that it keeps.
        lendings: the memory that it has lent to others.
        meters: count what it carries.
        roads: to memory that others have lent.
        shared: what handles of one actor share, by its number.
    """

    ports: PortTable
    stores: StoreTable
    lendings: Lendings
    meters: Meters
    roads: Roads
    shared: MutableMapping[int, Any]

    def request(
        self,
        procs: Sequence[int],
        make: Callable[[int], Packed | Sequence[Packed]],
        note: str,
        finish: Callable[[Sequence[Answer]], T],
        rank: int | None = None,
        *,
        quiet: bool = False,
        spawned: tuple[int, MakeSpawn] | None = None,
    ) -> Future[T]:
        """Ask processes for one answer each; if one of them is dead nobody is asked.

        Args:
            procs: whom to ask.
            make: gives the message for a request id, or one for each process.
            note: what they do meanwhile, in the user's words.
            finish: makes the future's result of the answers.
            rank: for a future of one rank.
            quiet: whether nothing is written for it.
            spawned: the actor that it makes, and what gives the message for processes that come in place of others.
        """
        ...

    def ask(
        self, procs: Sequence[int], make: Callable[[int], Packed], finish: Callable[[Sequence[Answer]], T]
    ) -> Future[T]:
        """Ask processes something that they answer at once, whatever they are busy with; arguments as for `request`."""
        ...

    def tell(self, procs: Sequence[int], packed: Packed) -> None:
        """Send processes a message that has no answer."""
        ...

    def tell_all(self, packed: Packed) -> None:
        """Send all processes that are known a message that has no answer."""
        ...

    def actor_ended(self, actor: int, proc: int) -> None:
        """An actor that was spawned here has died, in a process that lives; with the baton held."""
        ...

    def forget_spawn(self, actor: int, procs: Sequence[int]) -> None:
        """Those that come in place of these processes are not to have an actor."""
        ...

    def deaths(self, procs: Sequence[int]) -> dict[int, Failure]:
        """Which of these processes are known to be dead or stopped, and how they ended."""
        ...

    def waiting_for(self, id: int) -> Sequence[int]:
        """The processes that have yet to answer a request; with the baton held."""
        ...

    def submit(self, do: Callable[[], object]) -> None:
        """Have something done with the baton held, soon."""
        ...

    def spawned(self, actor: int, name: str, owner: int, procs: Sequence[int], mesh: Any) -> None:
        """Say that a mesh of actors is about to be spawned in these processes: its owner is told when one of them fails."""
        ...

    def stopped(self, actor: int, procs: Sequence[int]) -> None:
        """Say that actors are about to be stopped in these processes, which is then no failure."""
        ...

    def new_number(self) -> int:
        """A number for a new actor or port, which says that this process has made it."""
        ...
