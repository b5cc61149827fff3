"""The rank's part of distributed tensors: does the operations of batches on its own tensors.

An operation that raises poisons its results and what it would have changed. Some operations only check their argument, and
return nothing, such as the check after a factorization. They poison all results of the operation that made the argument.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from monarch_kernel.features.tensors.blocks import BlockEntry
from monarch_kernel.features.tensors.collectives import Collectives
from monarch_kernel.features.tensors.drawing import Draws
from monarch_kernel.features.tensors.functions import (
    CallEntry,
    Namespace,
    Structured,
    flat_results,
    learned,
    load_function,
)
from monarch_kernel.features.tensors.messages import (
    DefineBlock,
    DefineCall,
    DefineFunction,
    DefineOp,
    DescribeResult,
    DescribeTensors,
    FetchTensors,
    FunctionInterrupted,
    InterruptFunction,
    MeasureTensors,
    OpsDone,
    PutTensor,
    ReportOps,
    RunOps,
    ShowTensor,
)
from monarch_kernel.features.tensors.parts import PARTS, layout_of, local_part
from monarch_kernel.features.tensors.records import (
    DROP,
    FORGET,
    FREE,
    MemoryUse,
    PackedTensor,
    Poison,
    TensorLayout,
    Wholes,
)
from monarch_kernel.features.tensors.rules import ShardedOp, plain_op
from monarch_kernel.features.tensors.sharding import sharded_ops
from monarch_kernel.features.tensors.sums import SUMS
from monarch_kernel.net.wire.codec import Frame, dump, encode_plain, load, pack, replace
from monarch_kernel.net.wire.messages import Message
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["Interpreter", "TensorWorker"]

REPORT_EVERY = 512
"""A rank reports after this many operations of a target."""

_FOR_BACKWARD = frozenset(("aten::mkldnn_rnn_layer.default",))
"""Operations that return what their backward needs only where gradients are enabled."""

MAX_SHOWN = 100
"""A tensor with more elements is shown as a summary."""


class Hole:
    """The place of an argument that a record has."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Entry:
    """An operation that records refer to.

    Args:
        message: its definition.
        function: does it.
    """

    def __init__(self, message: DefineOp, function: Callable[..., Any]) -> None:
        function = learned(function) if message.is_learned else function
        self.function = (
            function if message.default_dtype == "float32" else _with_default(function, message.default_dtype)
        )
        self.n_tensors, self.n_ints, self.n_floats = message.counts
        self.returns = message.returns
        self.changed = message.changed
        reader = _TemplateReader(message.counts)
        self._args = [reader.read(template) for template in message.args]
        self._kwargs = {name: reader.read(template) for name, template in message.kwargs.items()}
        self._holes = [(place, arg) for place, arg in enumerate(self._args) if _has_hole(arg)]
        self._has_named_holes = any(map(_has_hole, self._kwargs.values()))
        is_plain = all(type(arg) is Hole for arg in self._args) and not self._kwargs
        self.takes_only_tensors = is_plain and not (self.n_ints or self.n_floats)

    def call(self, values: Sequence[Any]) -> Any:
        """Do it; ``values`` are the tensors, the integers and the floats of a record."""
        args, kwargs = self._args.copy(), self._kwargs
        for place, arg in self._holes:
            args[place] = values[arg.index] if type(arg) is Hole else _filled(arg, values)
        if self._has_named_holes:
            kwargs = {name: _filled(arg, values) for name, arg in kwargs.items()}
        return self.function(*args, **kwargs)


def _with_default(function: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """Make a function that runs another one with a default dtype, which is one of the whole process."""
    import torch

    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return run


def _has_hole(arg: Any) -> bool:
    return any(map(_has_hole, arg)) if type(arg) is list else type(arg) is Hole


def _filled(arg: Any, values: Sequence[Any]) -> Any:
    if type(arg) is Hole:
        return values[arg.index]
    if type(arg) is list:
        return [_filled(item, values) for item in arg]
    return arg


class _TemplateReader:
    """Turns the templates of an entry into arguments, in the order of its records."""

    def __init__(self, counts: tuple[int, int, int]) -> None:
        n_tensors, n_ints, _ = counts
        self._next = {"tensor": 0, "int": n_tensors, "float": n_tensors + n_ints}

    def read(self, template: list[Any]) -> Any:
        import torch

        kind, *content = template
        if kind in self._next:
            index = self._next[kind]
            self._next[kind] = index + 1
            return Hole(index)
        if kind == "value":
            return content[0]
        if kind == "list":
            return [self.read(item) for item in content[0]]
        if kind == "scalar":
            value = complex(*content[0]) if isinstance(content[0], list) else content[0]
            return torch.tensor(value, dtype=getattr(torch, content[1]))
        if kind == "complex":
            return complex(*content)
        if kind == "device":
            return torch.device(content[0])
        if kind in ("dtype", "layout", "memory_format"):
            return getattr(torch, content[0])
        raise ValueError(f"unknown kind of argument {kind!r}")


AnyEntry = Entry | CallEntry | BlockEntry


class Interpreter:
    """Holds the tensors of a rank and does operations on them. No I/O.

    Args:
        own: operations of this package, by name.
        calling: makes the context in which functions of the program run.

    Attributes:
        tensors: by id; a `Poison` where an operation has failed.
        op: the number of the operation that runs, or was the last to run.
    """

    def __init__(
        self, own: Mapping[str, Callable[..., Any]], calling: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.tensors: dict[int, Any] = {}
        self.op = -1
        self._calling = calling
        self._own = own
        self._entries: dict[int, dict[int, AnyEntry]] = {}
        self._functions: dict[int, Callable[..., Any]] = {}
        self._structures: dict[int, Any] = {}  # id of the first tensor of a result -> its structure, until that is read
        self._made_with: dict[int, range] = {}  # id -> the ids of all results of its operation, if there were several

    def define(self, message: DefineOp) -> None:
        """Take the definition of an entry."""
        function = self._function(message.name, message.wholes)
        self._entries.setdefault(message.target, {})[message.entry] = Entry(message, function)

    def define_block(self, message: DefineBlock) -> None:
        """Take the definition of a block."""
        entries = self._entries.setdefault(message.target, {})
        entries[message.entry] = BlockEntry(message, entries, self)

    def define_function(self, message: DefineFunction, frames: Sequence[Frame], namespace: Namespace) -> None:
        """Take a function of the program; if it can't be loaded, calls fail."""
        try:
            self._functions[message.function] = load_function(message.payload, frames, namespace)
        except Exception as error:
            self._functions[message.function] = _raiser(error)

    def define_call(self, message: DefineCall, frames: Sequence[Frame]) -> None:
        """Take the definition of a call."""
        try:
            entry = CallEntry(message, frames, self._functions[message.function], self._calling)
        except Exception as error:  # an argument can't be unpickled
            payload, _ = dump(((), {}))
            entry = CallEntry(replace(message, payload=payload), (), _raiser(error), self._calling)
        self._entries.setdefault(message.target, {})[message.entry] = entry

    def result(self, first: int) -> list[Any]:
        """Describe the result of a call: its structure and the layouts of its tensors, or a `Poison`."""
        found = self.tensors.get(first)
        if isinstance(found, Poison):
            return [found]
        structure, count = self._structures.pop(first)
        return [structure, *(layout_of(self.tensors[id]) for id in range(first, first + count))]

    def run(self, message: RunOps) -> int:
        """Do the operations of a batch; return their number."""
        import torch

        words: list[int] = memoryview(message.words).cast("q").tolist()
        floats: list[Any] = memoryview(message.floats).cast("d").tolist()
        entries = self._entries.setdefault(message.target, {})
        position = used = 0
        op, end = message.first, len(words)
        with torch.no_grad(), SUMS.kept(message.follows):
            while position < end:
                number = words[position]
                if number < 0:
                    position = self._control(words, position, entries)
                    continue
                entry = entries[number]
                start = position + 2
                middle = start + entry.n_tensors
                first, ids = words[position + 1], words[start:middle]
                position = middle + entry.n_ints
                literals: Sequence[Any] = ()
                if not entry.takes_only_tensors:
                    literals = words[middle:position] + floats[used : used + entry.n_floats]
                self.do(entry, ids, literals, first, op)
                used += entry.n_floats
                op += 1
        return op - message.first

    def do(self, entry: AnyEntry, ids: Sequence[int], literals: Sequence[Any], first: int, op: int) -> None:
        """Do an operation.

        Args:
            entry: the entry of its record.
            ids: of the tensors that it takes.
            literals: integers and floats that are arguments.
            first: the id of its first new tensor.
            op: its number in the session.
        """
        tensors = self.tensors
        if not BlockEntry.is_failing:
            self.op = op
        try:
            if entry.takes_only_tensors:
                if len(ids) == 1:
                    result = entry.function(tensors[ids[0]])
                elif len(ids) == 2:
                    result = entry.function(tensors[ids[0]], tensors[ids[1]])
                else:
                    result = entry.function(*[tensors[id] for id in ids])
            elif len(ids) == 1:
                result = entry.call((tensors[ids[0]], *literals))
            else:
                result = entry.call([*[tensors[id] for id in ids], *literals])
        except Exception as error:
            self.fail(entry, ids, first, op, error)
            error.__traceback__ = None  # its frames refer to tensors
        else:
            if entry.returns is None:
                tensors[first] = result
            elif entry.returns:
                self._store(entry.returns, first, result)

    def put(self, id: int, value: Any) -> None:
        """Take a tensor of the program."""
        self.tensors[id] = value

    def memory(self) -> MemoryUse:
        """Return how many tensors there are, and how much memory they take."""
        storages = {}
        for each in self.tensors.values():
            if not isinstance(each, Poison) and hasattr(each, "untyped_storage"):
                storage = local_part(each).untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return MemoryUse(len(self.tensors), sum(storages.values()))

    def _function(self, name: str, wholes: Wholes | None) -> Callable[..., Any]:
        if name in self._own:
            return self._own[name]
        import torch

        namespace, _, rest = name.partition("::")
        operator, _, overload = rest.partition(".")
        try:
            found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
        except AttributeError as error:
            return _raiser(
                NotImplementedError(f"{name} is not known on this rank: import there what defines it ({error})")
            )
        # No sharded tensor can be there before this module is loaded.
        is_sharded = "torch.distributed.tensor" in sys.modules
        do = ShardedOp(found, wholes) if is_sharded else plain_op(found)
        return _with_gradients_enabled(do) if name in _FOR_BACKWARD else do

    def _control(self, words: Sequence[int], position: int, entries: dict[int, AnyEntry]) -> int:
        """Handle a record that is no operation; return the position after it."""
        if words[position] == FORGET:
            entries.clear()
            return position + 1
        if words[position] == DROP:
            entries.pop(words[position + 1], None)
            return position + 2
        if words[position] != FREE:
            raise ValueError(f"unknown record {words[position]}")
        end = position + 2 + words[position + 1]
        self.drop(words[position + 2 : end])
        return end

    def _store(self, returns: Sequence[bool], first: int, result: Any) -> None:
        if type(result) is Structured:
            self._structures[first] = result.structure, len(result)
        id = first
        for is_new, part in zip(returns, flat_results(result)):
            if is_new:
                self.tensors[id] = part
                id += 1
        if id - first > 1:
            self.note_results(range(first, id))

    def note_results(self, ids: range) -> None:
        """Note the ids of the results of one operation."""
        self._made_with.update(dict.fromkeys(ids, ids))

    def drop(self, ids: Iterable[int]) -> None:
        """Drop tensors."""
        tensors = self.tensors
        for id in ids:
            tensors.pop(id, None)
        for others in (self._made_with, self._structures):
            if others:
                for id in ids:
                    others.pop(id, None)

    def fail(self, entry: AnyEntry, ids: Sequence[int], first: int, op: int, error: Exception) -> None:
        """Poison what an operation would have made and changed, because it or an earlier one has failed."""
        tensors = self.tensors
        poison = next((tensors[id] for id in ids if isinstance(tensors.get(id), Poison)), None)
        if poison is None:
            poison = Poison(op, describe(error))
        made = 1 if entry.returns is None else sum(entry.returns)
        tensors.update(dict.fromkeys(range(first, first + made), poison))
        changed = [ids[index] for index in entry.changed]
        if not made and not changed:  # a check
            changed = [each for id in ids for each in self._made_with.get(id, (id,)) if each in tensors]
        for id in self._sharing(changed):
            tensors[id] = poison

    def _sharing(self, ids: Iterable[int]) -> set[int]:
        """The ids of tensors that share memory with one of these, and these."""
        memory = {_address(self.tensors[id]) for id in ids} - {0}
        return {*ids, *(id for id, each in self.tensors.items() if _address(each) in memory)}


def _address(tensor: Any) -> int:
    return 0 if isinstance(tensor, Poison) or not hasattr(tensor, "untyped_storage") else _data_ptr(tensor)


def _data_ptr(tensor: Any) -> int:
    try:
        return int(local_part(tensor).untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # a sparse tensor has none
        return 0


def _with_gradients_enabled(do: Callable[..., Any]) -> Callable[..., Any]:
    """Let an operation see that gradients are enabled; a rank records none, since no tensor of it requires one."""

    def with_gradients_enabled(*args: Any, **kwargs: Any) -> Any:
        import torch

        with torch.enable_grad():
            return do(*args, **kwargs)

    return with_gradients_enabled


def _raiser(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error.with_traceback(None)

    return fail


def rank_index(rank: int, ranks: Sequence[int], indexes: Sequence[int]) -> Any:
    """Make a tensor of the index of this rank along an axis: ``indexes`` are those of ``ranks``."""
    import torch

    return torch.tensor(indexes[list(ranks).index(rank)])


def described(tensor: Any) -> TensorLayout | Poison:
    """Describe how a tensor is in memory, or why it is lost."""
    return tensor if isinstance(tensor, Poison) else layout_of(tensor)


def summary(tensor: Any) -> str:
    """Describe a tensor in a line or a few: its elements, or, if there are many, statistics."""
    import torch

    tensor = local_part(tensor)
    if isinstance(tensor, Poison):
        return f"failed: {tensor.failure.headline()}"
    if not isinstance(tensor, torch.Tensor) or tensor.numel() <= MAX_SHOWN:
        return repr(tensor)
    parts = [f"shape {tuple(tensor.shape)}", str(tensor.dtype).removeprefix("torch.")]
    if not tensor.is_complex():
        numbers = tensor.double()
        finite = numbers[torch.isfinite(numbers)]
        if finite.numel():
            parts.append(f"min {finite.min():.4g}, mean {finite.mean():.4g}, max {finite.max():.4g}")
        if finite.numel() < numbers.numel():
            parts.append(f"{numbers.numel() - finite.numel():,} of {numbers.numel():,} elements are not finite")
    return ", ".join(parts)


_READS = (DescribeResult, DescribeTensors, FetchTensors, MeasureTensors, ShowTensor)
"""Requests that wait for operations."""


class _NewController(Message, frozen=True):
    """Posted by the rank to itself: another controller has attached."""


@register
class TensorWorker:
    """Handles the messages about distributed tensors on a rank.

    Attributes:
        mesh: The name of the mesh that the rank belongs to.
        proc: The number of its process.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.mesh, self.proc = rank.spec.mesh, rank.spec.proc
        self._lock = threading.RLock()
        self._progress = threading.Condition(self._lock)
        self._n_waiting = 0  # threads that wait for progress
        PARTS.table = self
        own, draws = rank.spec.rank, Draws()
        self._own_ops: dict[str, Callable[..., Any]] = {
            "monarch::rank_index": lambda ranks, indexes: rank_index(own, ranks, indexes),
            "monarch::alias": lambda tensor: tensor,
            "monarch::reduce": Collectives(own).reduce,
            **sharded_ops(),
            "monarch::draw": draws.draw,
            "monarch::seed_draws": draws.seed,
            "monarch::manual_seed": lambda seed, is_same: _manual_seed(seed if is_same else seed + own),
        }
        self._interpreter = Interpreter(self._own_ops, self._calling)
        self._done: dict[int, int] = {}
        self._reported: dict[int, int] = {}
        self._call = 0  # the number of the call that runs, to interrupt it
        self._cancelled: set[int] = set()  # operations whose functions must not begin
        rank.main.on_dropped = self._read_dropped
        rank.extend({InterruptFunction: self._interrupt_function}, on_main=False)
        rank.at_new_controller.append(lambda requests: rank.main.post(_NewController(), ()))
        rank.extend(
            {
                _NewController: self._start_over,
                DefineOp: lambda message, frames: self._interpreter.define(message),
                RunOps: self._run,
                PutTensor: self._put,
                ReportOps: lambda message, frames: self._report(message.target, self._done.get(message.target, 0)),
                DefineBlock: lambda message, frames: self._interpreter.define_block(message),
                DefineFunction: self._define_function,
                DefineCall: lambda message, frames: self._interpreter.define_call(message, frames),
                DescribeResult: lambda message, frames: rank.reply(message.id, self._interpreter.result(message.first)),
                FetchTensors: self._fetch,
                DescribeTensors: self._describe,
                ShowTensor: self._show,
                MeasureTensors: lambda message, frames: rank.reply(message.id, self._interpreter.memory()),
            },
            on_main=True,
        )

    def _run(self, message: RunOps, _: Sequence[Frame]) -> None:
        self._note(message.target, self._interpreter.run(message))

    def _note(self, target: int, count: int) -> None:
        """Note that so many operations of a target are done, and report it from time to time."""
        done = self._done[target] = self._done.get(target, 0) + count
        if self._n_waiting:
            with self._lock:
                self._progress.notify_all()
        if done - self._reported.get(target, 0) >= REPORT_EVERY:
            self._report(target, done)

    def _report(self, target: int, done: int) -> None:
        self._reported[target] = done
        if not self._rank.is_detached():
            self._rank.driver.submit(pack(OpsDone(target, done)))

    def _start_over(self, message: _NewController, _: Sequence[Frame]) -> None:
        """Drop the tensors of a controller that is gone; the next one counts from 0 again."""
        self._interpreter = Interpreter(self._own_ops, self._calling)
        self._done.clear()
        self._reported.clear()
        self._cancelled.clear()
        with self._lock:
            self._progress.notify_all()

    # -- interrupts

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Context in which a function of the program can be interrupted, as if it were a request.

        Raises:
            KeyboardInterrupt: It was interrupted before it started.
        """
        main = self._rank.main
        before = main.current
        main.current = self._call = self._rank.peers.new_number()
        try:
            with main.user_code():
                op = self._interpreter.op
                is_cancelled = op in self._cancelled
                self._cancelled = {each for each in self._cancelled if each > op}
                if is_cancelled:
                    raise KeyboardInterrupt
                yield
        finally:
            main.current, self._call = before, 0

    def _read_dropped(self, message: Any, abort: bool) -> None:
        """Interrupt the function for which a request waited that was interrupted, on all ranks; on the I/O thread."""
        if type(message) in _READS and self._interrupt(abort) and not self._rank.is_detached():
            self._rank.driver.submit(pack(FunctionInterrupted(self._interpreter.op, abort)))

    def _interrupt_function(self, message: InterruptFunction, _: Sequence[Frame]) -> None:
        """Interrupt a function that runs, or is still to begin; on the I/O thread."""
        op = self._interpreter.op
        if not (op == message.op and self._interrupt(message.abort)) and op <= message.op:
            self._cancelled = {*self._cancelled, message.op}

    def _interrupt(self, abort: bool) -> bool:
        """Interrupt the function that runs; returns whether one does."""
        call, main = self._call, self._rank.main
        if call:
            main.interrupted, main.delivered = call, 0
            self._rank.interrupt_executor(main, call, abort)
            self._rank.after_interrupt(main, call, abort)
        return bool(call)

    # -- for code of the rank (`parts`)

    def take(self, id: int, target: int, count: int) -> Any:
        """Return a tensor, a `Poison` or None; an actor's thread waits for so many operations of a target."""
        interpreter = self._interpreter
        if threading.get_ident() != self._rank.main.thread_id:
            with self._lock:
                self._n_waiting += 1
                try:
                    self._progress.wait_for(
                        lambda: self._done.get(target, 0) >= count or self._interpreter is not interpreter
                    )
                finally:
                    self._n_waiting -= 1
        return interpreter.tensors.get(id)

    def put(self, id: int, value: Any) -> None:
        """Add a tensor; on the main thread."""
        self._interpreter.put(id, value)

    def _define_function(self, message: DefineFunction, frames: Sequence[Frame]) -> None:
        self._interpreter.define_function(message, frames, lambda: self._rank.shell.namespace)

    def _put(self, message: PutTensor, frames: Sequence[Frame]) -> None:
        value: Any
        try:
            value = load(message.payload, frames)
        except Exception as error:
            value = Poison(-1, describe(error))
        self._interpreter.put(message.tensor, value)
        self._note(message.target, 1)

    def _fetch(self, message: FetchTensors, _: Sequence[Frame]) -> None:
        values = [self._interpreter.tensors.get(id) for id in message.tensors]
        self._rank.reply(message.id, as_answer(values), name="the tensor")

    def _describe(self, message: DescribeTensors, _: Sequence[Frame]) -> None:
        self._rank.reply(message.id, [described(self._interpreter.tensors.get(id)) for id in message.tensors])

    def _show(self, message: ShowTensor, _: Sequence[Frame]) -> None:
        self._rank.reply(message.id, summary(self._interpreter.tensors.get(message.tensor)))


def _manual_seed(seed: int) -> None:
    import torch

    torch.manual_seed(seed)


def plain(value: Any) -> Any:
    """Return a tensor as the program gets it: on the CPU, and with its elements as they are."""
    import torch

    if isinstance(value, torch.Tensor):
        return local_part(value.detach()).cpu().resolve_conj().resolve_neg()
    return value if value is None or isinstance(value, (bool, int, float, complex, Poison)) else _plain_parts(value)


PACKED_NBYTES = 1 << 12
"""Larger tensors are pickled, so that their memory travels apart."""


def as_answer(values: Sequence[Any]) -> bytes | list[Any]:
    """Return tensors as they travel to the program: to pickle small ones would cost more than all else of a fetch."""
    packed = [_packed(each) for each in values]
    return [plain(each) for each in values] if None in packed else encode_plain(packed)


def _packed(value: Any) -> PackedTensor | None:
    """Pack a tensor if it is small, dense, and on the CPU."""
    import torch

    if type(value) is not torch.Tensor or value.layout is not torch.strided or not value.is_cpu:
        return None
    nbytes = value.numel() * value.element_size()
    if not 0 < nbytes <= PACKED_NBYTES or value.is_conj() or value.is_neg() or value.is_quantized:
        return None
    here = value.contiguous()
    return PackedTensor(_NAMES[value.dtype], tuple(value.shape), ctypes.string_at(here.data_ptr(), nbytes))


class _Names(dict[Any, str]):
    """The names of dtypes, such as ``float32``."""

    def __missing__(self, dtype: Any) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_NAMES = _Names()


def _plain_parts(value: Any) -> Any:
    """Return the result of a function with plain tensors in it."""
    from torch.utils import _pytree as pytree

    return pytree.tree_map(lambda leaf: plain(leaf) if _is_tensor(leaf) else leaf, value)


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)
