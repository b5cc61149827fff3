"""Ranks without processes: an interpreter for each rank, which gets the encoded messages at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.errors import Failure
from monarch_kernel.features.tensors.controller import TensorExtension
from monarch_kernel.features.tensors.messages import (
    DefineBlock,
    DefineCall,
    DefineFunction,
    DefineOp,
    DescribeResult,
    DescribeTensors,
    FetchTensors,
    PutTensor,
    RunOps,
)
from monarch_kernel.features.tensors.stream import OpStream
from monarch_kernel.features.tensors.worker import Interpreter, as_answer, described, rank_index
from monarch_kernel.net.wire.codec import Packed, dump, join, load, split
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.requests import Send
from monarch_kernel.tensor.device import device_of
from monarch_kernel.tensor.on_mesh import no_mesh
from monarch_kernel.tensor.propagation import LAYOUTS


class Mesh(SimpleNamespace):
    """What devices use of a mesh of processes."""

    def __len__(self) -> int:
        return len(self.procs)


class InProcess:
    """A controller and its ranks in this process, for `OpStream`: messages are encoded, and handled at once.

    Args:
        n: Number of ranks.
        is_held: Whether items wait until ``go``, as in a session whose I/O thread is busy.
    """

    def __init__(self, n: int = 1, *, is_held: bool = False) -> None:
        self.interpreters = {proc: self._interpreter(proc) for proc in range(n)}
        self.before_requests: list[Callable[[], None]] = []
        self.closed = False
        self.namespaces: dict[int, dict[str, Any]] = {proc: {"rank": proc} for proc in range(n)}
        self.queries = SimpleNamespace(has_group=lambda procs: True, n_groups_formed=0)
        self.is_held = is_held
        self.items: list[Callable[[float], list[Any]]] = []
        self.messages: list[Any] = []
        self.on_wait: Callable[[], object] = lambda: None
        self.core = SimpleNamespace(to_rank=self._to_rank, ranks={}, n_sent=0, n_open=0)
        self._extension = TensorExtension(self.core)  # type: ignore[arg-type]
        self.stream = OpStream(self)  # type: ignore[arg-type]
        extent = Extent({"r": n})
        self.mesh: Any = Mesh(
            name="t", extent=extent, procs=tuple(range(n)), ranks=tuple(range(n)), region=Region.whole(extent),
            spawned_extent=extent, runtime=self, slice=lambda **axes: self._one(axes["r"]), size=lambda axis=None: n,
        )  # fmt: skip
        self.mesh.whole = self.mesh
        self.mesh.deaths = dict
        self.device = device_of(self.mesh)

    def index(self) -> torch.Tensor:
        """Make a tensor that is the rank of each rank."""
        numbers = ["list", [["value", rank] for rank in self.interpreters]]
        return self.device.make(
            "monarch::rank_index", [numbers, numbers], LAYOUTS.make((), (), 0, torch.int64, torch.device("cpu"))
        )

    def _interpreter(self, rank: int) -> Interpreter:
        return Interpreter(
            {
                "monarch::rank_index": lambda ranks, indexes: rank_index(rank, ranks, indexes),
                "monarch::alias": lambda tensor: tensor,
            }
        )

    def _one(self, rank: int) -> Any:
        region = Region(Extent({}), (rank,))
        return Mesh(**{**vars(self.mesh), "procs": (rank,), "ranks": (rank,), "region": region})

    # -- as a runtime

    def extension(self, kind: Any) -> TensorExtension:
        return self._extension

    def deaths(self, procs: Sequence[int]) -> dict[int, Failure]:
        return {}

    def enter(self, item: Callable[[float], list[Any]]) -> None:
        self.items.append(item)
        if not self.is_held:
            self.go()

    def go(self) -> None:
        """Handle what was submitted, in order."""
        with no_mesh.activate():  # the ranks make plain tensors
            while self.items:
                for effect in self.items.pop(0)(0.0):
                    self._deliver(int(effect.peer), effect.packed)

    def submit(self, do: Callable[[], object]) -> None:
        def item(now: float) -> list[Any]:
            do()
            return []

        self.enter(item)

    def wait(self, waiter: Any, timeout_s: float | None) -> bool:
        """Call ``on_wait``, which must make the waiter ready."""
        self.go()
        assert not waiter.ready
        self.on_wait()
        assert waiter.ready
        return True

    def tell(self, procs: Sequence[int], packed: Packed) -> None:
        for prepare in self.before_requests:
            prepare()

        def item(now: float) -> list[Any]:
            self.core.n_sent += 1
            return [Send(str(proc).encode(), packed) for proc in procs]

        self.enter(item)

    def request(
        self, procs: Sequence[int], make: Callable[[int], Packed], description: str, finish: Any, quiet: bool = False
    ) -> Future[Any]:
        for prepare in self.before_requests:
            prepare()
        self.go()
        self.core.n_sent += 1
        answers: list[Answer] = []
        for proc in procs:
            payload, frames = dump(self._deliver(proc, make(1)))
            answers.append(Value(payload, frames, {}))
        return Future.resolved(finish(answers))

    # -- as the ranks

    def _to_rank(self, proc: int, packed: Packed) -> list[Any]:
        return [Send(str(proc).encode(), packed)]

    def _deliver(self, proc: int, packed: Packed) -> Any:
        interpreter = self.interpreters[proc]
        for message, frames in split(join([packed])):
            self.messages.append(message)
            if isinstance(message, DefineOp):
                interpreter.define(message)
            elif isinstance(message, RunOps):
                interpreter.run(message)
            elif isinstance(message, DefineBlock):
                interpreter.define_block(message)
            elif isinstance(message, DefineFunction):
                interpreter.define_function(message, frames, lambda: self.namespaces[proc])
            elif isinstance(message, DefineCall):
                interpreter.define_call(message, frames)
            elif isinstance(message, DescribeResult):
                return interpreter.result(message.first)
            elif isinstance(message, PutTensor):
                interpreter.put(message.tensor, load(message.payload, frames))
            elif isinstance(message, FetchTensors):
                return as_answer([interpreter.tensors[id] for id in message.tensors])
            elif isinstance(message, DescribeTensors):
                return [described(interpreter.tensors[id]) for id in message.tensors]
        return None
