"""The ranks of a mesh as a device: which kinds of operations they know, and how one more operation is sent to them.

A `Device` makes the wrappers of its tensors. It keeps an `Entry` for each kind of call, which the ranks know by its number, and
adds a record for each call to the open batch of the session (`features.tensors.stream`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.errors import Failure, SupervisionError, TensorError, format_ranks
from monarch_kernel.features.tensors.functions import MAX_RESULTS
from monarch_kernel.features.tensors.messages import DefineOp
from monarch_kernel.features.tensors.records import Wholes, count_holes
from monarch_kernel.features.tensors.stream import MAX_BEHIND, MAX_OPS, OpStream, Target, stream_of
from monarch_kernel.net.wire.codec import dump
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.tensor.crossing import to_mesh
from monarch_kernel.tensor.distributed_tensor import DistributedTensor, Part
from monarch_kernel.tensor.drawing import as_seed
from monarch_kernel.tensor.inventory import TensorsOnView, copies_of, names_of
from monarch_kernel.tensor.lines import SIZE, Lines, Place, user_place
from monarch_kernel.tensor.picture import Picture
from monarch_kernel.tensor.propagation import (
    LAYOUTS,
    LEAF,
    NOTHING,
    Argument,
    Layout,
    OpInfo,
    Outcome,
    Result,
    changed_by,
    is_view,
    propagate,
    set_bits,
    templates_of,
    title_of,
)
from monarch_kernel.tensor.reading import fetch_shard
from monarch_kernel.tensor.reductions import reduce

__all__ = [
    "AFTER_STOP",
    "MAIN",
    "Blocked",
    "Device",
    "Entry",
    "ForgottenError",
    "Recorder",
    "Session",
    "common_device",
    "device_of",
    "is_stopped",
    "placing",
]

MAX_ENTRIES = 20_000
"""Number of entries of a device, after which all are dropped: a program that never repeats itself must not fill the memory."""

MAIN = "main"
"""The stream of tensors that no other stream has."""

_VIEWS = ("monarch::alias", "monarch::local", "monarch::from_local")
"""Operations of this package whose result has the memory of a tensor that they take."""

_MASK = SIZE - 1
_STRIDED = torch.strided
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
        is_view: Whether the new tensors have the memory of the first tensor that the operation takes.
    """

    __slots__ = ("argument", "changed", "is_view", "n_new", "number", "outcome", "single", "title")

    def __init__(self, number: int, title: str, outcome: Outcome, changed: Sequence[Argument] = ()) -> None:
        self.number = number
        self.changed = changed
        self.is_view = False
        self.title = title
        self.outcome = outcome
        parts = outcome.parts
        self.single: Layout | None = None
        self.argument: Any = None
        if parts is None:
            self.n_new = 1 if outcome.tree is None else outcome.tree.num_leaves
            return
        self.n_new = sum(part.layout is not None for part in parts)
        if outcome.tree == LEAF:
            self.single, self.argument = parts[0].layout, parts[0].argument

    def returns(self) -> list[bool] | None:
        """The field of `DefineOp`."""
        if self.outcome.parts is None:
            return None if self.n_new == 1 else [True] * self.n_new
        if self.single is not None:
            return None
        return [part.layout is not None for part in self.outcome.parts] if self.n_new else []


class ForgottenError(LookupError):
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
        stream.view = TensorsOnView(lambda: list(self.devices.values()))


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
            way_out = AFTER_STOP if is_stopped(deaths) else "replace its dead ranks with .heal()"
            raise _death(mesh, deaths, f"{mesh.name} can't hold tensors: {way_out}")
        device = session.devices[key] = Device(mesh, session, stream)
    return device


AFTER_STOP = "it was stopped; make tensors on another mesh, from %mesh up or spawn_procs()"
"""What to do after all ranks of a mesh were stopped."""


def is_stopped(deaths: Mapping[int, Failure]) -> bool:
    """Whether ranks have ended because their mesh was stopped."""
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
        self.queries = mesh.runtime.queries
        self.n_groups = 0
        """How many process groups had been formed when sharded tensors last got theirs (`ProcessQueries.n_groups_formed`)."""
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
        return placing().spelled(placements, self.mesh.extent) if placements else ""

    def picture_of(self, tensor: DistributedTensor) -> Picture | None:
        """Return the picture of a sharded tensor; None if each rank has its own tensor."""
        layout = LAYOUTS.of(tensor)
        extent = dict(self.mesh.extent)
        return Picture(layout.shape, layout.placements, extent, tuple(self.mesh.ranks)) if layout.placements else None

    def placed(self, tensor: DistributedTensor, what: str, placements: dict[str, Any]) -> DistributedTensor:
        """Return a sharded tensor of this device placed in another way."""
        way = placing()
        made: DistributedTensor = way.local(tensor) if what == "local" else way.redistribute(tensor, placements)
        return made

    def fetched_whole(self, tensor: DistributedTensor) -> torch.Tensor:
        """Return the whole of a sharded tensor of this device as a plain one."""
        whole: torch.Tensor = fetch_shard(placing().full(tensor)).get()
        return whole

    def slice_of(self, tensor: DistributedTensor, axes: Mapping[str, Any]) -> DistributedTensor:
        """Return a tensor of this device on some of its ranks; both share memory."""
        _refuse_sharded(tensor, "slice_mesh()", "x.local().slice_mesh(...)")
        return self._on(self.mesh.slice(**axes), tensor)

    def _on(self, mesh: ProcMesh, tensor: DistributedTensor) -> DistributedTensor:
        return device_of(mesh, self.stream_name).make("monarch::alias", [], LAYOUTS.of(tensor), tensor)

    def moved(self, tensor: DistributedTensor, mesh: ProcMesh, placements: Mapping[str, Any]) -> DistributedTensor:
        """Return a copy of a tensor of this device on another mesh."""
        here = device_of(mesh, self.stream_name)
        if LAYOUTS.of(tensor).placements:
            made: DistributedTensor = placing().to_mesh(tensor, here, placements)
            return made
        if placements:
            raise TensorError(
                "to_mesh() places sharded tensors, and each rank has its own of this one: use "
                "other.from_local(x.to_mesh(other), ...)"
            )
        return to_mesh(tensor, self, here)

    def new(self, layout: Layout, id: int, op: int) -> DistributedTensor:
        """Make the wrapper of a tensor on the ranks."""
        shape, stride, offset, dtype, device, bits, placements, number = layout
        made: DistributedTensor
        if torch.is_inference_mode_enabled():  # a view of a tensor from outside can't be a tensor of inference mode
            with torch.inference_mode(False):
                made = _make(DistributedTensor, shape, stride, offset, None, dtype, _STRIDED, device)
        else:  # by position: it is a fifth quicker
            made = _make(DistributedTensor, shape, stride, offset, None, dtype, _STRIDED, device)
        if bits:
            set_bits(made, bits)
        if placements:
            self.has_sharded = True
        made._part = part = Part(id, number, self, op)
        self.target.held[id] = number, op
        if self.session.recorder is not None:
            self.session.recorder.made(part)
        return made

    def adopt(self, part: Part, id: int) -> None:
        """Make a tensor of ranks that were replaced one of this device, under another id."""
        part.id, part.device = id, self
        self.target.held[id] = part.layout, part.op

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
        return self.new(layout, *self._do(name, args, Outcome((Result(layout),), LEAF), tensors))

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
        except ForgottenError:
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
        wholes: Wholes | None = None,
    ) -> Entry:
        """Make the entry of a call with an outcome; one that is learned is not kept.

        ``is_drawn``: it takes random numbers for sharded tensors. ``wholes`` as for `DefineOp`.
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
            key,
            name,
            title,
            outcome,
            [*first, *templates.args],
            templates.kwargs,
            indexes,
            is_learned=is_learned,
            wholes=wholes,
        )
        entry.changed, entry.is_view = changed, is_view(info.op)
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
        wholes: Wholes | None = None,
    ) -> Entry:
        """Define an entry for the ranks, and keep it under its key unless it is learned."""
        self.make_room()
        entry = Entry(self.stream.new_entry(), title, outcome)
        entry.is_view = name in _VIEWS
        returns = entry.returns()
        if is_learned:
            entry.n_new, returns = MAX_RESULTS, [True] * MAX_RESULTS
        counts, dtype = count_holes([*args, *kwargs.values()]), str(torch.get_default_dtype())[6:]
        definition = DefineOp(
            name, self.target.number, entry.number, args, kwargs, counts, returns, changed, dtype, is_learned, wholes
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
            ForgottenError: Another thread has made the ranks forget the entry.
        """
        stream, target = self.stream, self.target
        if target.lost:
            self.refuse_lost()
        recorder = self.session.recorder
        if recorder is not None:
            recorder.check(self)
        elif self.has_sharded and self.n_groups != self.queries.n_groups_formed:
            self.n_groups = self.queries.n_groups_formed
            placing().renew_groups(self)
        if target.issued - target.acked >= MAX_BEHIND:
            stream.await_room(target)
        with stream.lock:
            stream.is_busy = True
            try:
                batch = stream.batch
                if batch is None or batch.target is not target:
                    batch = stream.open(target)
                if entry.number < self._first_entry:
                    raise ForgottenError
                op, first = stream.next_op, stream.next_id
                stream.next_op = op + 1
                stream.next_id = first + entry.n_new
                self.lines.ring[op & _MASK] = (op, entry.title, *place)
                if recorder is not None:
                    recorder.add(entry, op, first, ids, ints, floats)
                target.issued += 1
                batch.count += 1
                if entry.is_view:
                    stream.note_views(target, first, entry.n_new, ids[0])
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
        if is_stopped(deaths):
            raise _death(self.mesh, deaths, f"the tensors of {self.mesh.name} are gone: {AFTER_STOP}")
        raise _death(
            self.mesh,
            deaths,
            f"the tensors of {self.mesh.name} can't be used: {format_ranks(deaths)} ended, and its parts are lost of "
            f"{names_of(self)}{copies_of(self, self.target.lost)}; replace it with .heal(), and restore what other "
            "ranks have with .refill()",
        )


def _refuse_sharded(tensor: DistributedTensor, what: str, instead: str) -> None:
    if LAYOUTS.of(tensor).placements:
        raise TensorError(f"{what} is for tensors of which each rank has its own; this one is sharded: use {instead}")


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


def placing() -> Any:
    """Return the module about placements, which uses this one."""
    return importlib.import_module("monarch_kernel.tensor.placements")


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
