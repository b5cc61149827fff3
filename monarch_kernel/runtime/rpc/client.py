"""The interface that meshes use to send requests: implemented by the controller, and by ranks that call others."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol, TypeVar

from monarch_kernel.errors import Failure
from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.net.memory.exports import ExportTable
from monarch_kernel.net.memory.paths import DataPaths
from monarch_kernel.net.wire.codec import Packed
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future, FutureOwner
from monarch_kernel.runtime.rpc.ports import PortTable
from monarch_kernel.runtime.rpc.respawn_log import MakeSpawn
from monarch_kernel.runtime.rpc.store_server import StoreTable
from monarch_kernel.runtime.rpc.waits import PendingFuture

__all__ = ["Client"]

T = TypeVar("T")


class Client(FutureOwner, Protocol):
    """Carries requests to processes, and their answers back.

    Attributes:
        ports: The open ports of this process.
        stores: The stores of torch.distributed that it keeps.
        exports: The memory that it has exported to other processes.
        meters: Counters of what it sends and receives.
        paths: Data paths to memory that others have exported.
        shared: State that the handles of one actor share, by the actor's number.
    """

    ports: PortTable
    stores: StoreTable
    exports: ExportTable
    meters: Meters
    paths: DataPaths
    shared: MutableMapping[int, Any]

    def request(
        self,
        procs: Sequence[int],
        make: Callable[[int], Packed | Sequence[Packed]],
        description: str,
        finish: Callable[[Sequence[Answer]], T],
        rank: int | None = None,
        *,
        quiet: bool = False,
        spawned: tuple[int, MakeSpawn] | None = None,
    ) -> Future[T]:
        """Request one answer from each process; if one of them is dead, nothing is sent.

        Args:
            procs: The processes to ask.
            make: Makes the message for a request id, or one for each process.
            description: What the processes do meanwhile, in the user's words.
            finish: Makes the future's result from the answers.
            rank: The flat rank, for a future of one rank.
            quiet: Whether no output belongs to the request.
            spawned: The actor that the request makes, and what makes the message for processes that replace these.
        """
        ...

    def ask(
        self, procs: Sequence[int], make: Callable[[int], Packed], finish: Callable[[Sequence[Answer]], T]
    ) -> Future[T]:
        """Request something that processes answer at once, even if they are busy; arguments as for `request`."""
        ...

    def tell(self, procs: Sequence[int], packed: Packed) -> None:
        """Send processes a message that has no answer."""
        ...

    def tell_all(self, packed: Packed) -> None:
        """Send all known processes a message that has no answer."""
        ...

    def actor_ended(self, actor: int, proc: int) -> None:
        """Note that an actor that was spawned here has died, in a process that lives; on the I/O thread."""
        ...

    def forget_spawn(self, actor: int, procs: Sequence[int]) -> None:
        """Do not make an actor again in processes that replace these."""
        ...

    def deaths(self, procs: Sequence[int]) -> dict[int, Failure]:
        """Those of these processes that are known to be dead or stopped, and how they ended."""
        ...

    def waiting_for(self, id: int) -> Sequence[int]:
        """The processes that have not answered a request yet; on the I/O thread."""
        ...

    def interrupt_work(self, futures: Sequence[PendingFuture], interrupt: Callable[[], object]) -> str:
        """Call a function that interrupts the processes of some futures, and describe its effect; may wait for it a moment."""
        ...

    def submit(self, do: Callable[[], object]) -> None:
        """Run a function on the I/O thread, soon."""
        ...

    def spawned(self, actor: int, name: str, owner: int, procs: Sequence[int], mesh: Any) -> None:
        """Register a mesh of actors before it is spawned: its owner gets a message when one of the actors fails."""
        ...

    def stopped(self, actor: int, procs: Sequence[int]) -> None:
        """Note that actors are about to be stopped in these processes, so that their end is no failure."""
        ...

    def new_number(self) -> int:
        """Return a number for a new actor or port; it contains the number of this process."""
        ...
