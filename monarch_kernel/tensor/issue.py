"""Issues operations on distributed tensors: turns each into a record for the ranks, and makes the tensors that it returns.

Theory of operation
===================

`issue` runs for each ATen operation that has a distributed tensor among its arguments, below autograd. It must be quick, so it

- makes a key of the operation, the layouts of the tensors and the other arguments,
- looks up the `Entry` of the key, which has the layouts of the results,
- adds a record of integers to the open batch (`features.tensors.stream`), and
- makes wrappers for the results.

If there is no such entry, `propagation` finds the results, and the ranks get a definition. Numbers that can't influence a
layout (a learning rate) are no part of the key, but travel in the record.

Operations follow their arguments; where a new tensor is made is the business of `on_mesh.activate`. All tensors of an operation
are on the same ranks, a `Device`.

If the result is a number (``item()``) or has a shape that depends on values (``nonzero``), the thread waits for the ranks,
which must agree.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.errors import Failure, SupervisionError, TensorError, format_ranks
from monarch_kernel.features.tensors.functions import MAX_RESULTS
from monarch_kernel.features.tensors.messages import DefineOp
from monarch_kernel.features.tensors.records import Slot, count_holes
from monarch_kernel.features.tensors.stream import MAX_BEHIND, MAX_OPS, OpStream, Target, stream_of
from monarch_kernel.net.wire.codec import dump
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.tensor.crossing import to_mesh
from monarch_kernel.tensor.distributed_tensor import DistributedTensor, Part
from monarch_kernel.tensor.drawing import as_seed, is_random
from monarch_kernel.tensor.inventory import names_of
from monarch_kernel.tensor.lines import SIZE, Lines, Place, user_place
from monarch_kernel.tensor.picture import Picture
from monarch_kernel.tensor.propagation import (
    LAYOUTS,
    NOTHING,
    Argument,
    Layout,
    OpInfo,
    Outcome,
    Result,
    changed_by,
    info_of,
    learned_outcome,
    propagate,
    set_bits,
    templates_of,
    title_of,
)
from monarch_kernel.tensor.reading import agreed_layouts, agreed_value, described_result, fetch_shard
from monarch_kernel.tensor.reductions import reduce

__all__ = ["MAIN", "Blocked", "Device", "Entry", "Session", "common_device", "device_of", "issue", "result_of"]

MAX_ENTRIES = 20_000
"""Number of entries of a device, after which all are dropped: a program that never repeats itself must not fill the memory."""

MAIN = "main"
"""The stream of tensors that no other stream has."""

_MASK = SIZE - 1
_LEAF = pytree.tree_flatten(0)[1]
_make = torch.Tensor._make_wrapper_subclass


class Entry:
    """A kind of call: an operation with layouts of tensors and other arguments.

    Attributes:
        number: Its number on the ranks; -1 if they need not do anything.
        title: The name of the operation in errors.
        outcome: What it returns.
        single: The layout of the result, if that is one new tensor.
        argument: The argument that is the result, if it is one.
        n_new: The number of new tensors, or of values that only the ranks know.
        changed: The arguments that the operation changes.
    """

    __slots__ = ("argument", "changed", "n_new", "number", "outcome", "single", "title")

    def __init__(self, number: int, title: str, outcome: Outcome, changed: Sequence[Argument] = ()) -> None:
        self.number = number
        self.changed = changed
        self.title = title
        self.outcome = outcome
        parts = outcome.parts
        self.single: Layout | None = None
        self.argument: Any = None
        if parts is None:
            self.n_new = 1 if outcome.tree is None else outcome.tree.num_leaves
            return
        self.n_new = sum(part.layout is not None for part in parts)
        if outcome.tree == _LEAF:
            self.single, self.argument = parts[0].layout, parts[0].argument

    def returns(self) -> list[bool] | None:
        """The field of `DefineOp`."""
        if self.outcome.parts is None:
            return None if self.n_new == 1 else [True] * self.n_new
        if self.single is not None:
            return None
        return [part.layout is not None for part in self.outcome.parts] if self.n_new else []


class _ForgottenError(LookupError):
    """The ranks have forgotten an entry since `issue` found it."""


class Recorder(Protocol):
    """Records operations (`recording`)."""

    def check(self, device: Device) -> None:
        """Raise an error if an operation of a device can't be recorded."""
        ...

    def add(
        self, entry: Entry, op: int, first: int, ids: Sequence[int], ints: Sequence[int], floats: Sequence[float]
    ) -> None:
        """Add an operation; with the stream's lock held."""
        ...

    def made(self, part: Part) -> None:
        """Note the part of a new tensor."""
        ...

    def refuse_wait(self, title: str) -> NoReturn:
        """Raise the error about an operation that waits for values."""
        ...


class Session:
    """What the distributed tensors of one session share.

    Attributes:
        stream: The operations.
        lines: Where these were issued.
        devices: By processes and axes.
        recorder: Records operations; None if none does.
    """

    def __init__(self, stream: OpStream) -> None:
        self.stream = stream
        self.lines = Lines()
        self.devices: dict[Any, Device] = {}
        self.recorder: Recorder | None = None


_sessions: WeakKeyDictionary[Runtime, Session] = WeakKeyDictionary()


def device_of(mesh: ProcMesh, stream: str = MAIN) -> Device:
    """Return the ranks of a mesh as a device for a stream; meshes with the same processes and axes share one.

    Raises:
        SupervisionError: A rank is dead or was stopped.
    """
    runtime = mesh.runtime
    session = _sessions.get(runtime)
    if session is None:
        session = _sessions[runtime] = Session(stream_of(runtime))
    key = (mesh.procs, tuple(mesh.extent.items()), stream)
    device = session.devices.get(key)
    if device is None or device.target.lost:
        if deaths := mesh.deaths():
            way_out = _AFTER_STOP if _is_stopped(deaths) else "replace its dead ranks with .heal()"
            raise _death(mesh, deaths, f"{mesh.name} can't hold tensors: {way_out}")
        device = session.devices[key] = Device(mesh, session, stream)
    return device


_AFTER_STOP = "it was stopped; make tensors on another mesh, from %mesh up or spawn_procs()"


def _is_stopped(deaths: Mapping[int, Failure]) -> bool:
    return all(death.kind == "stopped" for death in deaths.values())


def _death(mesh: ProcMesh, deaths: Mapping[int, Failure], text: str) -> SupervisionError:
    return SupervisionError(text, {mesh.spawned_extent.point(rank): death for rank, death in deaths.items()})


class Device:
    """The ranks of a mesh, on which distributed tensors are.

    Args:
        mesh: The mesh; operations on the tensors name its axes.
        session: Its session.
        stream_name: The stream of its tensors.

    Attributes:
        target: The ranks as the stream knows them.
        frees: Ids of tensors that Python has dropped.
        entries: By key.
        has_sharded: Whether there was a sharded tensor.
        places: Ranks by their points, as meshes.
        outcomes: Of calls of functions whose entries the ranks do not have yet, by key.
    """

    blocked = ""
    has_seed = False
    """Whether the random numbers of sharded tensors have a seed."""

    def __init__(self, mesh: ProcMesh, session: Session, stream_name: str = MAIN) -> None:
        self.mesh = mesh
        self.stream_name = stream_name
        self.session = session
        self.stream = session.stream
        self.lines = session.lines
        self.target: Target = session.stream.new_target(mesh.procs)
        self.frees = self.target.frees
        self.entries: dict[tuple[Any, ...], Entry] = {}
        self.outcomes: dict[tuple[Any, ...], Outcome] = {}
        self.has_sharded = False
        self.places: dict[tuple[tuple[str, int], ...], ProcMesh] = {}
        self._first_entry = 0  # ranks have forgotten those before

    def describe_origin(self, op: int) -> str:
        """Say which line of the program made a tensor."""
        if op < 0:
            return "put there by the program"
        line, name = self.lines.describe(op), self.lines.name_of(op)
        return f"made by {name or 'an operation'}" + (f" in {line}" if line else "")

    def reduced(
        self,
        tensor: DistributedTensor,
        axes: Any,
        reduction: str,
        *,
        scatter: bool,
        in_place: bool,
        mesh: ProcMesh | None = None,
    ) -> DistributedTensor:
        """Return a tensor of this device reduced along axes of the mesh, on a part of that mesh."""
        if mesh is not None and not set(mesh.procs) <= set(self.mesh.procs):
            raise TensorError(
                f"reduce() keeps the result on ranks of {self.mesh.name}, and {mesh!r} has others: use .to_mesh(...) afterwards"
            )
        made = reduce(tensor, axes, reduction, scatter=scatter, in_place=in_place)
        return made if mesh is None else self._on(mesh, made)

    def describe_placements(self, tensor: DistributedTensor) -> str:
        """Say how a sharded tensor is placed; empty if each rank has its own tensor."""
        placements = LAYOUTS.of(tensor).placements
        return _placing().spelled(placements, self.mesh.extent) if placements else ""

    def picture_of(self, tensor: DistributedTensor) -> Picture | None:
        """Return the picture of a sharded tensor; None if each rank has its own tensor."""
        layout = LAYOUTS.of(tensor)
        extent = dict(self.mesh.extent)
        return Picture(layout.shape, layout.placements, extent, tuple(self.mesh.ranks)) if layout.placements else None

    def placed(self, tensor: DistributedTensor, what: str, placements: dict[str, Any]) -> DistributedTensor:
        """Return a sharded tensor of this device placed in another way."""
        placing = _placing()
        made: DistributedTensor = placing.local(tensor) if what == "local" else placing.redistribute(tensor, placements)
        return made

    def fetched_whole(self, tensor: DistributedTensor) -> torch.Tensor:
        """Return the whole of a sharded tensor of this device as a plain one."""
        whole: torch.Tensor = fetch_shard(_placing().full(tensor)).get()
        return whole

    def slice_of(self, tensor: DistributedTensor, axes: Mapping[str, Any]) -> DistributedTensor:
        """Return a tensor of this device on some of its ranks; both share memory."""
        return self._on(self.mesh.slice(**axes), tensor)

    def _on(self, mesh: ProcMesh, tensor: DistributedTensor) -> DistributedTensor:
        return device_of(mesh, self.stream_name).make("monarch::alias", [], LAYOUTS.of(tensor), tensor)

    def moved(self, tensor: DistributedTensor, mesh: ProcMesh) -> DistributedTensor:
        """Return a copy of a tensor of this device on another mesh."""
        return to_mesh(tensor, self, device_of(mesh, self.stream_name))

    def new(self, layout: Layout, id: int, op: int) -> DistributedTensor:
        """Make the wrapper of a tensor on the ranks."""
        shape, stride, offset, dtype, device, bits, placements, number = layout
        made: DistributedTensor = _make(
            DistributedTensor, shape, strides=stride, storage_offset=offset, dtype=dtype, device=device
        )
        if bits:
            set_bits(made, bits)
        if placements:
            self.has_sharded = True
        made._part = part = Part(id, number, self, op)
        if self.session.recorder is not None:
            self.session.recorder.made(part)
        return made

    def put(self, tensor: torch.Tensor) -> DistributedTensor:
        """Copy a plain tensor to all ranks.

        Raises:
            TypeError: It is not dense, or not on the CPU.
        """
        plain = tensor.detach()
        if plain.device.type != "cpu" or plain.layout != torch.strided:
            raise TypeError(f"put() takes a dense tensor on the CPU, not one of {plain.layout} on {plain.device}")
        plain = plain.contiguous()
        payload, frames = dump(plain, "the tensor")
        layout = LAYOUTS.make(tuple(plain.shape), plain.stride(), 0, plain.dtype, plain.device)
        return self.new(layout, self.stream.put(self.target, payload, frames), -1)

    def make(self, name: str, args: Sequence[Any], layout: Layout, *tensors: DistributedTensor) -> DistributedTensor:
        """Make a tensor by an operation of this package; ``args`` are templates of its further arguments."""
        return self.new(layout, *self._do(name, args, Outcome((Result(layout),), _LEAF), tensors))

    def seed_draws(self, seed: int) -> None:
        """Seed the random numbers of sharded tensors, in order with operations."""
        self.do("monarch::seed_draws", [["value", self.target.number], ["value", as_seed(seed)]])
        self.has_seed = True

    def do(self, name: str, args: Sequence[Any]) -> None:
        """Do an operation of this package that returns nothing; ``args`` are templates."""
        self._do(name, args, NOTHING, ())

    def _do(
        self, name: str, args: Sequence[Any], outcome: Outcome, tensors: Sequence[DistributedTensor]
    ) -> tuple[int, int]:
        key = (name, repr(args), *[tensor._part.layout for tensor in tensors], outcome.parts)
        entry = self.entries.get(key)
        if entry is None:
            templates = [*[["tensor"] for _ in tensors], *args]
            entry = self.define(key, name, name.partition("::")[2], outcome, templates, {}, [])
        try:
            return self.record(entry, [tensor._part.id for tensor in tensors], (), (), user_place(sys._getframe(2)))
        except _ForgottenError:
            return self._do(name, args, outcome, tensors)

    def entry_for(self, key: tuple[Any, ...], info: OpInfo, args: Any, kwargs: Any) -> Entry:
        """Make the entry of a call that was not made before."""
        outcome = propagate(info, args, kwargs)
        return self.entry_with(key, info, args, kwargs, outcome)

    def entry_with(
        self,
        key: tuple[Any, ...],
        info: OpInfo,
        args: Any,
        kwargs: Any,
        outcome: Outcome,
        *,
        is_learned: bool = False,
        is_drawn: bool = False,
    ) -> Entry:
        """Make the entry of a call with an outcome; one that is learned is not kept.

        ``is_drawn``: it takes random numbers for sharded tensors.
        """
        name, first = (
            ("monarch::draw", [["value", self.target.number], ["value", info.name]]) if is_drawn else (info.name, [])
        )
        changed = changed_by(info.op)
        parts = outcome.parts
        if parts and not changed and all(part.layout is None and part.argument is None for part in parts):
            entry = self.entries[key] = Entry(-1, info.title, outcome)
            return entry
        templates = templates_of(info, args, kwargs)
        places = [arg.position if arg.position < len(args) else arg.name for arg in changed]
        indexes = [index for place in places for index in templates.tensors.get(place, ())]
        title = title_of(info, args)
        entry = self.define(
            key, name, title, outcome, [*first, *templates.args], templates.kwargs, indexes, is_learned=is_learned
        )
        entry.changed = changed
        return entry

    def define(
        self,
        key: tuple[Any, ...],
        name: str,
        title: str,
        outcome: Outcome,
        args: list[Any],
        kwargs: dict[str, Any],
        changed: list[int],
        *,
        is_learned: bool = False,
    ) -> Entry:
        """Define an entry for the ranks, and keep it under its key unless it is learned."""
        self.make_room()
        entry = Entry(self.stream.new_entry(), title, outcome)
        returns = entry.returns()
        if is_learned:
            entry.n_new, returns = MAX_RESULTS, [True] * MAX_RESULTS
        counts, dtype = count_holes([*args, *kwargs.values()]), str(torch.get_default_dtype())[6:]
        definition = DefineOp(
            name, self.target.number, entry.number, args, kwargs, counts, returns, changed, dtype, is_learned
        )
        self.stream.define(self.target, definition)
        if not is_learned:
            self.entries[key] = entry
        return entry

    def make_room(self) -> None:
        """Drop all entries if there are too many."""
        if len(self.entries) >= MAX_ENTRIES:
            with self.stream.lock:
                self.entries.clear()
                self.outcomes.clear()
                self._first_entry = self.stream.new_entry()
                self.stream.forget_entries(self.target)

    def record(
        self, entry: Entry, ids: Sequence[int], ints: Sequence[int], floats: Sequence[float], place: Place
    ) -> tuple[int, int]:
        """Add an operation to the stream; return the id of its first new tensor, and its number.

        Raises:
            SupervisionError: A rank is dead or was stopped, and with it its parts of all tensors.
            _ForgottenError: Another thread has made the ranks forget the entry.
        """
        stream, target = self.stream, self.target
        if target.lost:
            self.refuse_lost()
        recorder = self.session.recorder
        if recorder is not None:
            recorder.check(self)
        if target.issued - target.acked >= MAX_BEHIND:
            stream.await_room(target)
        with stream.lock:
            stream.is_busy = True
            try:
                batch = stream.batch
                if batch is None or batch.target is not target:
                    batch = stream.open(target)
                if entry.number < self._first_entry:
                    raise _ForgottenError
                op, first = stream.next_op, stream.next_id
                stream.next_op = op + 1
                stream.next_id = first + entry.n_new
                self.lines.ring[op & _MASK] = (op, entry.title, *place)
                if recorder is not None:
                    recorder.add(entry, op, first, ids, ints, floats)
                target.issued += 1
                batch.count += 1
                if floats:
                    batch.floats.extend(floats)
                batch.words.extend((entry.number, first, *ids, *ints))
                if batch.count >= MAX_OPS:
                    stream.seal()
            except BaseException:  # an interrupt: the numbers of the next operations start in a new batch
                stream.seal()
                raise
            finally:
                stream.is_busy = False
        if not batch.is_submitted:
            stream.submit(batch)
        return first, op

    def record_here(self, entry: Entry, ids: Sequence[int]) -> tuple[int, int]:
        """Add an operation with tensors only, for the line that this thread runs."""
        return self.record(entry, ids, (), (), user_place(sys._getframe(1)))

    def refuse_lost(self) -> NoReturn:
        """Raise the error about the parts that are lost."""
        places = dict(zip(self.mesh.procs, self.mesh.ranks))
        deaths = {places[proc]: death for proc, death in self.target.lost.items()}
        if _is_stopped(deaths):
            raise _death(self.mesh, deaths, f"the tensors of {self.mesh.name} are gone: {_AFTER_STOP}")
        raise _death(
            self.mesh,
            deaths,
            f"the tensors of {self.mesh.name} can't be used: {format_ranks(deaths)} ended, and its parts are lost of "
            f"{names_of(self)}; replace it with .heal(), and restore what other ranks have with .refill()",
        )


class Blocked:
    """The device of a tensor that can't be used now.

    Args:
        device: The ranks that hold it.
        blocked: Why it can't be used.
    """

    def __init__(self, device: Any, blocked: str) -> None:
        self.frees = device.frees
        self.blocked = blocked

    def __getattr__(self, name: str) -> NoReturn:
        raise TensorError(self.blocked)


def issue(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, device: Device | None = None) -> Any:
    """Issue an ATen operation, and return its result.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: The others.
        device: Where to make the tensors of an operation that takes none.

    Raises:
        TensorError: It is wrong for these arguments, or not possible on distributed tensors.
        SupervisionError: A rank is dead or was stopped.
    """
    __tracebackhide__ = True
    info = info_of(func)
    if info.is_local:
        return func(*args, **(kwargs or {}))
    key: list[Any] = [info.number]
    ids: list[int] = []
    ints: list[int] = []
    floats: list[float] = []
    takes_literals = info.takes_literals
    values = args
    if (dtype := torch.get_default_dtype()) is not torch.float32:
        key.append(dtype)
    if kwargs:
        key.append(tuple(kwargs))
        values = (*args, *kwargs.values())
    try:
        for arg in values:
            kind = type(arg)
            if kind is DistributedTensor:
                part = arg._part
                if part.device is not device:
                    device = common_device(device, part.device)
                ids.append(part.id)
                key.append(part.layout)
            elif takes_literals and kind is float:
                floats.append(arg)
                key.append(float)
            elif takes_literals and kind is int and -(2**63) <= arg < 2**63:
                ints.append(arg)
                key.append(int)
            else:
                device = _add_to_key(key, ids, arg, device)
    except _PlainTensorError as error:
        if error.refusal and info.name != "aten::copy_.default":  # data for a tensor comes from anywhere, as on a GPU
            raise TensorError(error.refusal) from None
        return issue(func, *_with_plain_ones_put(info, args, kwargs or {}))
    assert device is not None
    full_key = tuple(key)
    entry = device.entries.get(full_key)
    if entry is None:
        if device.has_sharded and is_any_sharded(values):
            return learn(device, full_key, info, args, kwargs or {}, (ids, ints, floats))
        entry = device.entry_for(full_key, info, args, kwargs or {})
    if entry.changed:
        for each in entry.changed:
            written = each.of(args, kwargs or {})
            if type(written) is DistributedTensor and written._part.lent:
                raise TensorError(f"{entry.title} can't write to a tensor: {written._part.lent}")
    if entry.number < 0:
        parts = entry.outcome.parts or ()
        return pytree.tree_unflatten([part.constant for part in parts], entry.outcome.tree)
    try:
        first, op = device.record(entry, ids, ints, floats, user_place(sys._getframe(2)))
    except _ForgottenError:
        return issue(func, args, kwargs, device)
    for argument, layout in entry.outcome.relaid:
        _lay_out(argument.of(args, kwargs or {}), layout)
    if entry.single is not None:
        return device.new(entry.single, first, op)
    if entry.argument is not None:
        return entry.argument.of(args, kwargs or {})
    return result_of(device, entry, first, op, args, kwargs or {})


def is_any_sharded(values: Sequence[Any]) -> bool:
    """Whether there is a sharded tensor among arguments."""
    return any(
        bool(LAYOUTS.numbered(each._part.layout).placements)
        for each in pytree.tree_leaves(list(values))
        if type(each) is DistributedTensor
    )


def learn(
    device: Device,
    key: tuple[Any, ...],
    info: OpInfo,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    taken: tuple[Sequence[int], Sequence[int], Sequence[float]],
) -> Any:
    """Do an operation on sharded tensors for the first time: the ranks say what its result is.

    They have the sharded tensors of torch, whose rules say what is redistributed and how results are placed. The rules are not
    applied here: it would cost more than to wait for the ranks once.
    """
    is_drawn = is_random(info, args, kwargs)
    if is_drawn and not device.has_seed:
        device.seed_draws(torch.initial_seed() + device.target.number)  # a mesh that was healed goes on with others
    if info.name == "aten::_local_scalar_dense.default":
        return issue(info.op, (args[0].detach().redistribute(**dict.fromkeys(device.mesh.extent, "R")).local(),))
    unknown = Outcome(None, _LEAF)
    entry = device.entry_with(key, info, args, kwargs, unknown, is_learned=True, is_drawn=is_drawn)
    first, op = device.record(entry, *taken, user_place(sys._getframe(3)))
    if device.session.recorder is None:
        device.stream.drop_entry(device.target, entry.number)
    try:
        structure, found = described_result(device, first, entry.title)
    except BaseException:
        device.frees.extend(range(first, first + MAX_RESULTS))
        raise
    layouts = [LAYOUTS.make(*each) for each in found]
    made = [device.new(layout, first + place, op) for place, layout in enumerate(layouts)]
    outcome = learned_outcome(info.op, structure, layouts)
    if outcome is not None:
        device.entry_with(key, info, args, kwargs, outcome, is_drawn=is_drawn)
    flat, tree = pytree.tree_flatten(structure)
    parts = outcome.parts if outcome is not None and outcome.parts else [Result()] * len(flat)
    results = [
        part.argument.of(args, kwargs) if part.argument else made[each.index] if type(each) is Slot else each
        for part, each in zip(parts, flat)
    ]
    return pytree.tree_unflatten(results, tree)


def _placing() -> Any:
    """The module about placements, which uses this one."""
    return importlib.import_module("monarch_kernel.tensor.placements")


def _lay_out(tensor: Any, layout: Layout) -> None:
    """Give a wrapper the layout that its tensor on the ranks has now; it has no memory, so no operation need run."""
    with torch._C._DisableTorchDispatch():
        torch.ops.aten.as_strided_.default(tensor, layout.shape, layout.stride, layout.offset)
    tensor._part.layout = layout.number


class _PlainTensorError(Exception):
    """There is a plain tensor among the arguments.

    Attributes:
        refusal: What is wrong with it; empty if torch has made it for this operation, such as of the list in ``x[[0, 2]]``.
    """

    def __init__(self, refusal: str = "") -> None:
        super().__init__(refusal)
        self.refusal = refusal


_BORN_INSIDE = 5
"""Number of references to such a tensor in `_add_to_key`: only this code has any, while the program holds its own tensors. To
mistake one for the other does no harm: it is put on the ranks, or refused with the hint to put it."""


def _with_plain_ones_put(
    info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of an operation with plain tensors put on the device of the others.

    Raises:
        TensorError: The operation would change a plain tensor.
    """
    flat, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    device: Any = next(each._part.device for each in flat if type(each) is DistributedTensor)
    if any(_is_plain(argument.of(args, kwargs)) for argument in changed_by(info.op)):
        raise TensorError(f"{info.title} is not possible with distributed tensors: torch would write to a plain tensor")
    put = (lambda each: _placing().shard(device, each, {})) if is_any_sharded(flat) else device.put
    moved = [put(each) if _is_plain(each) else each for each in flat]
    there: tuple[Sequence[Any], Mapping[str, Any]] = pytree.tree_unflatten(moved, tree)
    return there


def _is_plain(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.dim() > 0 and not isinstance(arg, DistributedTensor)


def result_of(device: Device, entry: Entry, first: int, op: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make the result of an operation that returns anything else than one tensor."""
    outcome = entry.outcome
    if outcome is NOTHING:
        return None
    ids = range(first, first + entry.n_new)
    if outcome.parts is None and device.session.recorder is not None:
        device.frees.extend(ids)
        device.session.recorder.refuse_wait(entry.title)
    if outcome.parts is not None:
        new = iter(ids)
        flat = [
            device.new(part.layout, next(new), op)
            if part.layout is not None
            else part.argument.of(args, kwargs)
            if part.argument is not None
            else part.constant
            for part in outcome.parts
        ]
        return pytree.tree_unflatten(flat, outcome.tree)
    try:
        if outcome.is_value:
            value = agreed_value(device, first, entry.title)
            device.frees.append(first)
            return value
        found = agreed_layouts(device, ids, entry.title)
    except BaseException:
        device.frees.extend(ids)
        raise
    layouts = [LAYOUTS.make(*each) for each in found]
    return pytree.tree_unflatten([device.new(layout, id, op) for layout, id in zip(layouts, ids)], outcome.tree)


def _add_to_key(key: list[Any], ids: list[int], arg: Any, device: Device | None) -> Device | None:
    """Add an argument that is no distributed tensor to a key; return the device of the operation so far."""
    kind = type(arg)
    if kind is list or kind is tuple:
        key.append((list, len(arg)))
        for each in arg:
            if type(each) is DistributedTensor:
                part = each._part
                if part.device is not device:
                    device = common_device(device, part.device)
                ids.append(part.id)
                key.append(part.layout)
            else:
                device = _add_to_key(key, ids, each, device)
    elif isinstance(arg, torch.Tensor):
        if arg.dim() and sys.getrefcount(arg) <= _BORN_INSIDE:
            raise _PlainTensorError
        if arg.dim() or kind is not torch.Tensor or arg.requires_grad or arg.device.type != "cpu":
            text = (
                f"a tensor of this process, {tuple(arg.shape)} {str(arg.dtype)[6:]} on {arg.device}, can't be used with "
                "distributed tensors: move it to the ranks with mesh.put(x), or with mesh.shard(x) beside sharded tensors"
            )
            if arg.requires_grad or kind is not torch.Tensor or arg.device.type != "cpu":
                raise TensorError(text)
            raise _PlainTensorError(text)
        key.append((kind, arg.dtype, repr(arg.item())))
    elif kind is float:
        key.append((kind, arg.hex()))  # 0.0 and -0.0 differ, and nan equals nan
    else:
        key.append((kind, arg))
    return device


def common_device(one: Device | None, other: Any) -> Device:
    """The device of an operation that has tensors of both.

    Raises:
        TensorError: They differ.
    """
    if other.blocked:
        raise TensorError(other.blocked)
    if one is None:
        assert isinstance(other, Device)
        return other
    for each in (one, other):
        if each.target.lost:
            each.refuse_lost()
    if one.mesh.procs == other.mesh.procs and one.stream_name != other.stream_name:
        raise TensorError(
            f"an operation can't have tensors of two streams, {one.stream_name!r} and {other.stream_name!r}: lend one to the "
            "other stream with stream.borrow(x)"
        )
    names = " and ".join(f"{each.mesh.name} {dict(each.mesh.extent)}" for each in (one, other))
    shared = set(one.mesh.procs) & set(other.mesh.procs)
    hint = (
        "take the part on the smaller mesh with x.slice_mesh(...)"
        if shared
        else "fetch one, and put it on the other mesh"
    )
    raise TensorError(f"an operation can't have tensors of two meshes, {names}: {hint}")


DistributedTensor.dispatch = staticmethod(issue)
