"""What the clients of the controller and of ranks have in common (`runtime.rpc.client`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.net.memory.exports import ExportTable
from monarch_kernel.runtime.rpc.ports import PortTable
from monarch_kernel.runtime.rpc.requests import Requests
from monarch_kernel.runtime.rpc.store_server import StoreTable
from monarch_kernel.runtime.rpc.waits import MAY_GO_ON, PendingFuture

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ClientBase", "Supervising"]


class Supervising(Protocol):
    """The part of a supervisor that clients call."""

    def spawned(self, actor: int, name: str, owner: int, procs: Sequence[int], mesh: Any) -> None:
        """Actors are about to be spawned."""
        ...

    def stopped(self, actor: int, procs: Sequence[int]) -> None:
        """Actors are about to be stopped."""
        ...


class ClientBase(ABC):
    """The tables of one process that asks others.

    Args:
        proc: The number of the process.
        requests: Its requests that have not resolved.
        ids: Makes ids of requests, actors and ports.
        meters: Count what it carries.

    Attributes:
        before_requests: Functions to call before a request or a message to ranks is submitted, on the thread that makes it.
            A feature that collects messages in batches ends its batch there.
    """

    def __init__(self, proc: int, requests: Requests, ids: Iterator[int], meters: Meters) -> None:
        self.ports = PortTable()
        self.stores = StoreTable()
        self.exports = ExportTable(proc)
        self.meters = meters
        self.shared: MutableMapping[int, Any] = WeakValueDictionary()
        self.before_requests: list[Callable[[], None]] = []
        self._requests = requests
        self._ids = ids

    @property
    @abstractmethod
    def _supervising(self) -> Supervising: ...

    @abstractmethod
    def submit(self, do: Callable[[], object]) -> None:
        """Run a function on the I/O thread, soon."""

    @property
    def client(self) -> Self:
        """This client: handles in its answers send requests through it."""
        return self

    def new_number(self) -> int:
        """Make the id of a new actor or port, which says that this process has made it."""
        return next(self._ids)

    def _new_request(self) -> int:
        """Make the id of a new request, after what other parts have to send first."""
        self._before_sending()
        return next(self._ids)

    def _before_sending(self) -> None:
        for prepare in self.before_requests:
            prepare()

    def waiting_for(self, id: int) -> Sequence[int]:
        """Return the processes that have yet to answer a request; on the I/O thread."""
        return self._requests.waiting_for(id)

    def interrupt_work(self, futures: Sequence[PendingFuture], interrupt: Callable[[], object]) -> str:
        """Interrupt the processes of some futures; describe that, because the effect is not known here."""
        interrupt()
        if not any(future.id for future in futures):  # no process has a request for it, as for a transfer of memory
            return MAY_GO_ON
        return "the wait was interrupted, and the interrupt was sent to the ranks that work for it"

    def actor_ended(self, actor: int, proc: int) -> None:
        """An actor that was spawned here has died, in a process that lives; on the I/O thread."""
        self._requests.respawn_log.ended(actor, proc)

    def forget_spawn(self, actor: int, procs: Sequence[int]) -> None:
        """Do not spawn an actor again in processes that replace these."""
        self.submit(lambda: self._requests.respawn_log.forget(procs, actor))

    def spawned(self, actor: int, name: str, owner: int, procs: Sequence[int], mesh: Any) -> None:
        """A mesh of actors is about to be spawned in these processes: its owner learns of their failures."""
        self._supervising.spawned(actor, name, owner, procs, mesh)

    def stopped(self, actor: int, procs: Sequence[int]) -> None:
        """Actors are about to be stopped in these processes, which is no failure."""
        self._supervising.stopped(actor, procs)
