"""Describes collectives for the traffic counts: those of Python by their calls, those of C++ at torch's dispatcher.

Theory of operation
===================

Each collective is an operator of torch's dispatcher, such as ``c10d::allreduce_``, whether it comes from Python, the reducer of
DistributedDataParallel, a functional collective, compiled code. So a kernel in Python for these operators sees those that
Python does not start. It has the dispatch key ``BackendSelect``, calls the kernel of the device, and then describes the
collective. No guard excludes this key; functional collectives and inference mode, in contrast, exclude the keys of autograd.

A kernel in Python costs about 10 us, also for the collectives that Python starts, which are described without it. So the
kernels are added in the first functional collective, for which the operators of ``_c10d_functional`` have a kernel from the
start. C++ code that gets its process group from Python, as the reducer does, needs none (`noting_groups`).

The flight recorder of torch would need no kernel, but it has no entries for the messages of gloo, and a read of it holds the
interpreter for 20 us per entry, each time for all entries.

A graph of CUDA runs its collectives again without the dispatcher: they are counted only when the graph is captured.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from time import perf_counter
from typing import Any, NamedTuple
from weakref import finalize, ref

from monarch_kernel.features.traffic.bandwidth import Moved, moved
from monarch_kernel.net.memory.counters import CollectiveKind
from monarch_kernel.train.process_group.noting_groups import NotingGroups

__all__ = ["METHODS", "Noted", "Operator", "Operators", "Seen"]

_log = logging.getLogger(__name__)

_MAX_MOVED = 4096
"""Sizes of collectives of a group for which it is kept what they move."""


class Operator(NamedTuple):
    """An operator or a method of a process group, and the positions of its arguments; -1 if it has none.

    Attributes:
        operation: name of the collective for users.
        outputs: the tensors that a rank receives into.
        inputs: the tensors that it gives.
        group: the process group; -1 in methods.
        rows: the numbers of rows that it receives from each rank; those that it sends follow.
    """

    operation: str
    outputs: int = 0
    inputs: int = 0
    group: int = -1
    rows: int = -1


METHODS = {
    "allreduce": Operator("all_reduce"),
    "allreduce_coalesced": Operator("all_reduce"),
    "broadcast": Operator("broadcast"),
    "reduce": Operator("reduce"),
    "allgather": Operator("all_gather", 0, 1),
    "_allgather_base": Operator("all_gather", 0, 1),
    "all_gather_single": Operator("all_gather", 0, 1),
    "all_gather_single_coalesced": Operator("all_gather", 0, 1),
    "allgather_coalesced": Operator("all_gather", 0, 1),
    "allgather_into_tensor_coalesced": Operator("all_gather", 0, 1),
    "gather": Operator("gather", 0, 1),
    "scatter": Operator("scatter", 0, 1),
    "reduce_scatter": Operator("reduce_scatter", 0, 1),
    "_reduce_scatter_base": Operator("reduce_scatter", 0, 1),
    "reduce_scatter_single": Operator("reduce_scatter", 0, 1),
    "reduce_scatter_single_coalesced": Operator("reduce_scatter", 0, 1),
    "reduce_scatter_tensor_coalesced": Operator("reduce_scatter", 0, 1),
    "alltoall": Operator("all_to_all", 0, 1),
    "alltoall_base": Operator("all_to_all", 0, 1, rows=2),
    "all_to_all_single": Operator("all_to_all", 0, 1, rows=2),
    "barrier": Operator("barrier", -1, -1),
    "send": Operator("send"),
    "recv": Operator("recv"),
    "recv_anysource": Operator("recv"),
    "monitored_barrier": Operator("monitored_barrier", -1, -1),
}
"""Methods of a process group that Python code calls."""

_OPERATORS = {
    "allreduce_": Operator("all_reduce", 0, 0, 1),
    "allreduce_coalesced_": Operator("all_reduce", 0, 0, 1),
    "broadcast_": Operator("broadcast", 0, 0, 1),
    "reduce_": Operator("reduce", 0, 0, 1),
    "allgather_": Operator("all_gather", 0, 1, 2),
    "_allgather_base_": Operator("all_gather", 0, 1, 2),
    "allgather_coalesced_": Operator("all_gather", 0, 1, 2),
    "allgather_into_tensor_coalesced_": Operator("all_gather", 0, 1, 2),
    "gather_": Operator("gather", 0, 1, 2),
    "scatter_": Operator("scatter", 0, 1, 2),
    "reduce_scatter_": Operator("reduce_scatter", 0, 1, 2),
    "_reduce_scatter_base_": Operator("reduce_scatter", 0, 1, 2),
    "reduce_scatter_tensor_coalesced_": Operator("reduce_scatter", 0, 1, 2),
    "alltoall_": Operator("all_to_all", 0, 1, 2),
    "alltoall_base_": Operator("all_to_all", 0, 1, 2, 3),
    "barrier": Operator("barrier", -1, -1, 1),
    "send": Operator("send", 0, 0, 1),
    "recv_": Operator("recv", 0, 0, 1),
    "recv_any_source_": Operator("recv", 0, 0, 1),
}
"""Names of operators in ``c10d``."""

_CALLERS = {
    "_c10d_functional": (
        "all_reduce",
        "all_reduce_",
        "all_reduce_coalesced",
        "all_reduce_coalesced_",
        "all_gather_into_tensor",
        "all_gather_into_tensor_out",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_out",
        "reduce_scatter_tensor_coalesced",
        "all_to_all_single",
        "broadcast",
        "broadcast_",
        "isend",
        "irecv",
        "batch_p2p_ops",
    ),
    "_dtensor": ("shard_dim_alltoall",),
}
"""Operators that call those of ``c10d``."""

_MakeKernel = Callable[[str, Callable[..., Any], Any], Callable[..., Any]]
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_MESSAGES = ("send", "recv")
_ALL_REDUCE = ("all_reduce", "cpu")
_NOTHING = (0, 0)


class Seen(NamedTuple):
    """A collective that was started.

    Attributes:
        started: when, by `time.perf_counter`.
        kind: what it is counted with.
        moved: what this rank moves in it.
        group: torch's name of its process group.
        is_on_cpu: whether it is over when Python has waited for it.
        members: the ranks in the group.
        number: how many collectives and messages the group has started, this one included.
    """

    started: float
    kind: CollectiveKind
    moved: Moved
    group: str
    is_on_cpu: bool
    members: tuple[int, ...]
    number: int


class Noted(NamedTuple):
    """What only the call of a collective tells; `Operators.describe` adds the rest.

    Attributes:
        started: when, by `time.perf_counter`.
        group: its process group.
        kind: what it is counted with.
        received: bytes of the tensors that this rank receives into.
        given: bytes of the tensors that it gives.
        is_root: whether this rank is the root of a collective that has one.
        own: of an all_to_all: the bytes that it receives from itself and sends to itself.
        is_on_cpu: whether it is over when Python has waited for it.
        number: how many collectives and messages the group has started, this one included.
    """

    started: float
    group: _Group
    kind: CollectiveKind
    received: int
    given: int
    is_root: bool
    own: tuple[int, int]
    is_on_cpu: bool
    number: int


class _Group:
    """A process group as collectives need it.

    Args:
        group: the group.
        label: its label for users.
        members: the ranks in it.
    """

    __slots__ = ("kinds", "label", "members", "moved", "name", "of", "rank", "ranks")

    def __init__(self, group: Any, label: str, members: tuple[int, ...]) -> None:
        self.of: Callable[[], Any] = ref(group)
        self.name = str(group.group_name)
        self.label = label
        self.rank = int(group.rank())
        self.ranks = int(group.size())
        self.members = members
        self.kinds: dict[tuple[str, str], CollectiveKind] = {}  # by operation and type of the device
        self.moved: dict[
            tuple[str, int, int, bool], Moved
        ] = {}  # by the arguments of `moved`: steps repeat their collectives


class Operators:
    """Describes collectives, and notes those that C++ code starts.

    Args:
        label: returns the label of a group for users, given torch's name and description of it.
        due: called for a collective of C++ that was started at `due_at` or later, by the thread that has started it, with what
            the operator or the method has returned. It sets another `due_at`.
        message: called when C++ has started a send or a recv, with torch's name of the group.

    Attributes:
        thread: its ``is_inside`` is whether a thread is in a call of Python, which reports the collective.
        noted: the collectives that C++ has started, in order, until `due` takes them.
        due_at: by `time.perf_counter`.
    """

    def __init__(
        self,
        label: Callable[[str, str], str],
        due: Callable[[Noted, Any], None],
        message: Callable[[str], None],
    ) -> None:
        self.thread = _Thread()
        self.noted: deque[Noted] = deque()
        self.due_at = 0.0
        self._label = label
        self._due = due
        self._message = message
        self._groups: dict[int, _Group] = {}  # by address; the weak reference tells whether it is still that group
        self._libraries: list[Any] = []  # the kernels end with them
        self._is_active = False
        self._lock = threading.Lock()
        self._groups_for_cpp = NotingGroups(self.started, self.thread)

    def install(self, dist: Any) -> None:
        """Add the kernels that say that C++ is about to start a collective, and give groups that note them to C++."""
        for name, operators in _CALLERS.items():
            self._add_kernels(name, operators, lambda operator, call, later: self._activating(call, later, dist))
        self._groups_for_cpp.install(dist, METHODS)

    def activate(self, dist: Any) -> None:
        """Report the collectives that C++ starts from now on."""
        with self._lock:
            if self._is_active:
                return
            self._is_active = True
            unbox = dist.ProcessGroup.unbox
            self._add_kernels(
                "c10d", _OPERATORS, lambda name, call, later: self._reporting(_OPERATORS[name], call, later, unbox)
            )

    def add(self, noted: Noted, result: Any) -> None:
        """Add a collective that C++ has started, given what its operator or method has returned."""
        self.noted.append(noted)
        if noted.kind.operation in _MESSAGES:
            self._message(noted.group.name)
        if noted.started >= self.due_at:
            self._due(noted, result)

    def started(self, method: str, group: Any, args: Sequence[Any], at: float, work: Any) -> None:
        """Note a collective that C++ has started by a method of a process group.

        Args:
            method: its name.
            group: the process group.
            args: the arguments.
            at: when it was started, by `time.perf_counter`.
            work: what the method has returned.
        """
        try:
            if method == "allreduce":
                self.add(self._note_all_reduce(group, args, at), work)
            else:
                self.add(self.note(METHODS[method], group, args, at), work)
        except Exception:  # a count must not fail a collective that works
            _log.debug("%s can't be counted", method, exc_info=True)

    def note(self, operator: Operator, group: Any, args: Sequence[Any], started: float) -> Noted:
        """Note what is needed of the call of a collective.

        Args:
            operator: its method or operator.
            group: its process group.
            args: the arguments.
            started: when it was started, by `time.perf_counter`.
        """
        known = self._groups.get(id(group))
        if known is None or known.of() is not group:
            known = self._add(group)
        operation, outputs, inputs, _, rows = operator
        if outputs < 0:
            device, received, given = _device_of_barrier(group), 0, 0
        else:
            device, received = _device_and_nbytes(args[outputs])
            if inputs == outputs:
                given = received
            elif device:
                given = _nbytes(args[inputs])
            else:  # this rank receives nothing
                device, given = _device_and_nbytes(args[inputs])
        kind = known.kinds.get((operation, device))
        if kind is None:
            kind = CollectiveKind(known.label, operation, _backend(group, device), known.ranks)
            known.kinds[operation, device] = kind
        own = _own(args, rows, received, given, known) if operation == "all_to_all" else _NOTHING
        is_root = operation in _ROOTED and _root(args) == known.rank
        return Noted(started, known, kind, received, given, is_root, own, device == "cpu", number_in(group))

    @staticmethod
    def describe(noted: Noted) -> Seen:
        """Describe a collective. Any thread may call this, and the process group may be gone."""
        started, group, kind, received, given, is_root, own, is_on_cpu, number = noted
        operation = kind.operation
        key = operation, received, given, is_root
        each = group.moved.get(key)
        if each is None or operation == "all_to_all":
            each = moved(operation, group.ranks, received, given, is_root=is_root, own_output=own[0], own_input=own[1])
            if len(group.moved) < _MAX_MOVED:
                group.moved[key] = each
        return Seen(started, kind, each, group.name, is_on_cpu, group.members, number)

    def _add_kernels(self, namespace: str, names: Iterable[str], make: _MakeKernel) -> None:
        """Add a kernel to the operators that this version of torch has."""
        import torch

        key = torch._C.DispatchKey.BackendSelect
        later = torch._C._dispatch_keyset_full_after(key)
        library: Any = _library(torch.library, namespace)
        for name in names:
            overload = getattr(getattr(getattr(torch.ops, namespace), name, None), "default", None)
            if overload is not None:
                library.impl(name, make(name, _redispatch(overload), later), key.name, with_keyset=True)
        self._libraries.append(library)

    def _activating(self, call: Callable[..., Any], later: Any, dist: Any) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_active:
                self.activate(dist)
            return call(keys & later, *args, **kwargs)

        return kernel

    def _reporting(
        self, operator: Operator, call: Callable[..., Any], later: Any, unbox: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        thread, at = self.thread, operator.group
        note = self._note_all_reduce if operator == _OPERATORS["allreduce_"] else partial(self.note, operator)

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if thread.is_inside:
                return call(keys & later, *args, **kwargs)
            started = perf_counter()
            result = call(keys & later, *args, **kwargs)
            try:
                self.add(note(unbox(args[at]), args, started), result)
            except Exception:  # a count must not fail a collective that works
                _log.debug("%s can't be counted", operator.operation, exc_info=True)
            return result

        return kernel

    def _note_all_reduce(self, group: Any, args: Sequence[Any], started: float) -> Noted:
        """Note an all_reduce as `note` does, with no other call: DistributedDataParallel has one for each bucket."""
        tensors = args[0]
        known = self._groups.get(id(group))
        if known is None or len(tensors) != 1 or known.of() is not group or not tensors[0].is_cpu:
            return self.note(_OPERATORS["allreduce_"], group, args, started)
        kind = known.kinds.get(_ALL_REDUCE)
        if kind is None or tensors[0].is_sparse:
            return self.note(_OPERATORS["allreduce_"], group, args, started)
        nbytes = tensors[0].nbytes
        return Noted(
            started, known, kind, nbytes, nbytes, False, _NOTHING, True, group._get_sequence_number_for_group()
        )

    def _add(self, group: Any) -> _Group:
        known = self._groups[id(group)] = _Group(
            group, self._label(group.group_name, group.group_desc), _members_of(group)
        )
        finalize(group, self._drop, id(group), known).atexit = False
        return known

    def _drop(self, key: int, known: _Group) -> None:
        """Forget a group that no longer exists."""
        if self._groups.get(key) is known:
            del self._groups[key]


def _library(module: Any, namespace: str) -> Any:
    return module.Library(namespace, "IMPL")  # it has no types


def _redispatch(overload: Any) -> Callable[..., Any]:
    """What calls the kernels of an operator below a dispatch key; without torch's function around it, where torch has it so."""
    return getattr(overload._handle, "redispatch_boxed", overload.redispatch)  # type: ignore[no-any-return]


def number_in(group: Any) -> int:
    """How many collectives and messages torch has counted in a group."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # no number yet
        return 0


def _members_of(group: Any) -> tuple[int, ...]:
    """The ranks in a group; none if torch does not know them."""
    import torch.distributed as dist

    return tuple(sorted(dist.distributed_c10d._world.pg_group_ranks.get(group, ())))


class _Thread(threading.local):
    is_inside = False


def _device_and_nbytes(value: Any) -> tuple[str, int]:
    """The type of the device of the first tensor in nested lists, empty if there is none, and the bytes of all of them."""
    first = value
    while type(first) is list or type(first) is tuple:
        if not first:
            return "", _nbytes(value)
        if len(first) == 1 and first is value:
            value = first[0]  # one tensor, as each bucket of DistributedDataParallel, needs no sum
        first = first[0]
    return "cpu" if first.is_cpu else str(first.device.type), _nbytes(value)


def _device_of_barrier(group: Any) -> str:
    """The type of the device for which a barrier waits: the CPU if the group has no other."""
    return next((str(device.type) for device in group._device_types if device.type != "cpu"), "cpu")


def _backend(group: Any, device: str) -> str:
    """The name of the backend of a group for a type of device, such as ``gloo``."""
    import torch

    return str(group._get_backend(torch.device(device)).name())


def _root(args: Sequence[Any]) -> int:
    """The root of a collective: an integer, or in the options."""
    for each in args:
        if type(each) is int:
            return each
        if hasattr(each, "rootRank"):
            return int(each.rootRank)
    return -1


def _own(args: Sequence[Any], rows: int, received: int, given: int, group: _Group) -> tuple[int, int]:
    """What a rank receives from itself, and sends to itself, in an all_to_all."""
    if rows < 0:
        return _nbytes(args[0][group.rank]), _nbytes(args[1][group.rank])
    parts = []
    for position, nbytes in ((rows, received), (rows + 1, given)):
        counts = args[position] if position < len(args) else ()
        parts.append(nbytes * counts[group.rank] // max(1, sum(counts)) if counts else nbytes // group.ranks)
    return parts[0], parts[1]


def _nbytes(value: Any) -> int:
    """Bytes of a tensor, or of the tensors in nested lists; 0 for other values."""
    kind = type(value)
    if kind is list or kind is tuple:
        return sum(map(_nbytes, value))
    if not _has_nbytes(kind):  # type: ignore[arg-type]
        return 0
    try:
        return int(value.nbytes)
    except RuntimeError:  # sparse tensors have no nbytes
        return int(value._indices().nbytes + value._values().nbytes) if value.is_sparse else 0


@cache
def _has_nbytes(kind: type) -> bool:
    return hasattr(kind, "nbytes")
