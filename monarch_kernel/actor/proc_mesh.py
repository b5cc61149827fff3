"""Meshes of processes, one per rank: run cells, push and pull variables, spawn actors."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

from monarch_kernel.actor.actor import Actor, endpoints_of
from monarch_kernel.actor.actor_mesh import RESERVED, ActorMesh
from monarch_kernel.actor.fault_hook import call_fault_hook
from monarch_kernel.actor.per_rank import apply_messages, by_rank, push_messages
from monarch_kernel.actor.process_service import directory_of
from monarch_kernel.actor.reloading import Target, check_class, reload_classes, sync_modules
from monarch_kernel.actor.tensors import Moved, Ranks, all_to_all, copy_state, gather_parts, scatter
from monarch_kernel.base.events import MeshView, StopEvent
from monarch_kernel.base.mesh import Extent, Point, Region, Shaped, ValueMesh
from monarch_kernel.errors import ActorError, Failure, RemoteError, SupervisionError, format_ranks
from monarch_kernel.features.debugging.controller import DebugPrompts
from monarch_kernel.features.editing.classes import Key, classes_of_notebook, key_of
from monarch_kernel.features.editing.controller import EditingExtension
from monarch_kernel.features.editing.preview import Reloaded, Synced
from monarch_kernel.features.editing.sources import find_source, sources_for
from monarch_kernel.features.live.controller import LoopControl
from monarch_kernel.features.live.handle import SteeredLoop
from monarch_kernel.features.live.tensorboard import TensorBoardJournal
from monarch_kernel.features.traffic.controller import TrafficControl
from monarch_kernel.features.traffic.table import Traffic
from monarch_kernel.net.wire.codec import Packed, dump, pack
from monarch_kernel.net.wire.messages import (
    Complete,
    Inspect,
    ListErrors,
    ListModules,
    Look,
    ModuleSource,
    Ping,
    PostMortem,
    Pull,
    Push,
    Rewind,
    Run,
)
from monarch_kernel.runtime.controller.healing import Healing
from monarch_kernel.runtime.controller.runtime import Listener, Runtime
from monarch_kernel.runtime.controller.session import Session
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.host.logs import LogRecord
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.client import Asker
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.gather import CellResult, check_name, check_type, gather, read_value
from monarch_kernel.runtime.rpc.handles import Handle, opener
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC

__all__ = ["ProcMesh", "check_constructor"]

A = TypeVar("A", bound=Actor)
P = ParamSpec("P")
T = TypeVar("T")


class ProcMesh(Handle, Shaped):
    """Processes, one per rank, that run cells and host actors."""

    def __init__(
        self,
        asker: Asker,
        region: Region,
        procs: Sequence[int],
        name: str,
        started_at: float,
        extent: Extent,
        session: Session | None = None,
    ) -> None:
        self._asker = asker
        self._session = session
        if isinstance(asker, Runtime):
            asker.faults.tell = call_fault_hook
        self._region = region
        self._base = procs
        self._started_at = started_at
        self._as_spawned = extent
        self.name = name

    def __repr__(self) -> str:
        return f"<ProcMesh {self.name} {self.extent}>"

    def _with_region(self, region: Region) -> ProcMesh:
        return ProcMesh(self._asker, region, self._base, self.name, self._started_at, self._as_spawned, self._session)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_procs, (self._region, tuple(self._base), self.name, self._as_spawned)

    @property
    def _runtime(self) -> Runtime:
        """The runtime of the controller. It raises in other processes, which can't do what needs the controller."""
        if not isinstance(self._asker, Runtime):
            raise RuntimeError(
                f"mesh {self.name!r} came here as an argument: only the process that made the mesh can do this"
            )
        return self._asker

    @property
    def _as_targets(self) -> Ranks:
        return Ranks(self._asker, self.procs, self.ranks, self._region, self._as_spawned, self.name)

    @cached_property
    def procs(self) -> tuple[int, ...]:
        """The numbers of the processes, unique in the session."""
        return tuple(self._base[rank] for rank in self._region.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The flat ranks in the mesh as it was spawned."""
        return tuple(self._region.ranks)

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole mesh as it was spawned, not a slice."""
        return len(self._region) == len(self._base)

    @property
    def whole(self) -> ProcMesh:
        """The whole mesh as it was spawned."""
        return self._with_region(Region.whole(self._as_spawned))

    def process(self, rank: int) -> ProcMesh:
        """Return one process, by its flat rank in the mesh as spawned, as a mesh without axes."""
        return self._with_region(Region(Extent(), (rank,)))

    @property
    def initialized(self) -> Future[bool]:
        """A future that resolves when every process is up and has handled all earlier messages."""
        finish = gather(self._region, f"starting {self.name}", SupervisionError, read_value, self._as_spawned)

        def up(answers: Sequence[Answer]) -> bool:
            finish(answers)
            return True

        return self._asker.request(self.procs, lambda id: pack(Ping(id)), "ping", up, quiet=True)

    def run_cell(
        self,
        code: str,
        *,
        cell: int = 0,
        want_value: bool = False,
        listen: Listener | None = None,
        rewind: Rewind | None = None,
    ) -> Future[ValueMesh[CellResult]]:
        """Run code in the namespace of every rank, as a cell.

        Args:
            code: IPython syntax.
            cell: the number in tracebacks and in the view.
            want_value: whether the ranks send the value of the last expression.
            listen: gets the output and displays of the cell, on the I/O thread; without it they are printed.
            rewind: the snapshot that a loop in the cell goes back to.
        """
        check_type("code", code, str)
        note = f"cell [{cell}]" if cell else "a cell"

        def read(answer: Value) -> CellResult:
            return CellResult(read_value(answer), answer.bundle)

        finish = gather(self._region, f"{note} failed on {self.name}", RemoteError, read, self._as_spawned)
        return self._runtime.request(
            self.procs,
            lambda id: pack(Run(id, code, cell, want_value, rewind)),
            note,
            finish,
            listen=listen,
            is_cell=cell > 0,
        )

    def call_cell(
        self, function: Callable[[], Any], *, cell: int = 0, listen: Listener | None = None
    ) -> Future[ValueMesh[CellResult]]:
        """Call a function on the main thread of every rank, as a cell; the arguments are those of `run_cell` and `map`.

        Raises:
            TypeError: ``function`` is not a plain function, or can't be sent.
        """
        make = apply_messages(function, (), self.ranks)
        note = f"cell [{cell}]" if cell else "a function"
        finish = gather(
            self._region,
            f"{note} failed on {self.name}",
            RemoteError,
            lambda answer: CellResult(read_value(answer), answer.bundle),
            self._as_spawned,
        )
        return self._runtime.request(self.procs, make, note, finish, listen=listen, is_cell=cell > 0)

    def run(self, code: str) -> Future[ValueMesh[Any]]:
        """Run code in the namespace of every rank, and return the value of its last expression."""
        check_type("code", code, str)
        finish = gather(self._region, f"code failed on {self.name}", RemoteError, read_value, self._as_spawned)
        return self._asker.request(self.procs, lambda id: pack(Run(id, code, 0, True)), "code", finish)

    def __getitem__(self, key: Any) -> Any:
        """``mesh["x"]`` pulls a variable as a `ValueMesh`; ``mesh[0]``, ``mesh[0:4]``, ``mesh[0, 1:3]`` are slices.

        A list selects ranks by index and gives them one axis: ``mesh[[0, 1, 3]]``. A `Point` selects the rank there.
        """
        if isinstance(key, list):
            ranks = [self._region.ranks[index] for index in key]
            return self._with_region(Region(Extent({"ranks": len(ranks)}), tuple(ranks)))
        if isinstance(key, Point):
            return self._with_region(self._region.slice(**key))
        if not isinstance(key, str):
            if isinstance(key, tuple) and any(isinstance(each, str) for each in key):
                raise TypeError(f"{self.name}[...] takes a slice or a name, not both; such as {self.name}[0:2]['x']")
            return self._with_region(self._region.index(key))
        check_name(key)
        finish = gather(
            self._region, f"pulling {key!r} from {self.name} failed", RemoteError, read_value, self._as_spawned
        )
        return self._asker.request(
            self.procs, lambda id: pack(Pull(id, key)), f"pull {key!r}", finish, quiet=True
        ).get()

    def __setitem__(self, key: str, value: Any) -> None:
        """Push a value to the namespace of every rank, and wait until it has arrived.

        If the value is a `ValueMesh`, each rank gets its own value; `per_rank` makes a `ValueMesh` of a list.

        Raises:
            ValueError: a `ValueMesh` has another extent.
            PayloadError: the value can't be sent.
        """
        check_name(key)
        make: Callable[[int], Packed | Sequence[Packed]]
        if isinstance(value, ValueMesh):
            make = push_messages(key, by_rank(self._region, value, f"{self.name}[{key!r}]"), self.ranks)
        else:
            payload, frames = dump(value, f"the value for {key!r} (a {type(value).__name__})")
            make = lambda id: pack(Push(id, key, payload), frames)  # noqa: E731
        finish = gather(
            self._region, f"pushing {key!r} to {self.name} failed", RemoteError, read_value, self._as_spawned
        )
        self._asker.request(self.procs, make, f"push {key!r}", finish, quiet=True).get()

    def __delitem__(self, key: str) -> None:
        """Refuse to delete a variable, which only code on the ranks can do.

        Raises:
            TypeError: always.
        """
        check_name(key)
        raise TypeError(f"delete a variable with a cell on the ranks: %remote {self.name} del {key}")

    def per_rank(self, values: Iterable[T]) -> ValueMesh[T]:
        """Make a mesh of one value per rank, in order, for pushing: ``mesh["lr"] = mesh.per_rank([1e-3, 3e-4])``.

        Raises:
            ValueError: there are too few or too many values.
        """
        return by_rank(self._region, values, f"{self.name}.per_rank()")

    def map(self, function: Callable[..., T], *values: Iterable[Any]) -> Future[ValueMesh[T]]:
        """Call a function on the main thread of every rank, with the rank's own value of each list or `ValueMesh`.

        The function is sent with the objects that it refers to here. A name that is not defined here refers to the variable of
        the rank.

        Raises:
            TypeError: ``function`` is not a plain function, or can't be sent.
            ValueError: a list does not have one value for each rank.
        """
        given = [by_rank(self._region, each, f"{self.name}.map(): values {i}") for i, each in enumerate(values, 1)]
        make = apply_messages(function, given, self.ranks)
        note = f"{getattr(function, '__name__', 'a function')}()"
        finish = gather(self._region, f"{note} failed on {self.name}", RemoteError, read_value, self._as_spawned)
        return self._asker.request(self.procs, make, note, finish)

    def scatter(self, name: str, tensor: Any, *, axis: str | None = None, dim: int = 0) -> Moved:
        """Cut a tensor along a dimension, assign each rank its part as a variable, and wait until all ranks have it.

        Args:
            name: the name of the variable. A rank that fails keeps the old value.
            tensor: a tensor on the CPU, or a NumPy array. Ranks get the same kind, in separate memory.
            axis: ranks at index n along this axis get part n, whatever their indexes along other axes are. By default each rank
                gets a different part, in the order of the ranks.
            dim: the dimension of the tensor. If its size can't be divided evenly, the first parts are larger by one, as with
                `torch.tensor_split`; if there are fewer elements than ranks, the last ranks get none.

        Raises:
            TypeError: the memory of ``tensor`` can't be read directly.
            IndexError: there is no such dimension.
            KeyError: there is no such axis.
        """
        return scatter(self._as_targets, name, tensor, axis, dim)

    def gather(self, name: str, *, axis: str | None = None, dim: int = 0) -> Any:
        """Concatenate the parts of a tensor on the ranks, and return the whole tensor, or NumPy array.

        Args:
            name: the name of the variable. A DTensor knows which part each rank has, and ``axis`` and ``dim`` are ignored.
            axis: the axis along which the parts follow each other. Ranks along other axes have equal parts, of equal shapes,
                and one of them is read. By default each rank has a different part, in the order of the ranks.
            dim: the dimension of the tensor. The parts may differ in size along it.

        Raises:
            MoveError: the parts do not make one tensor, or a rank wrote to them meanwhile.
            RemoteError: a rank has no such variable.
            IndexError: there is no such dimension.
            KeyError: there is no such axis.
        """
        return gather_parts(self._as_targets, name, axis, dim)

    def broadcast(self, name: str, value: Any) -> None:
        """Assign the same value to a variable on all ranks; the same as ``mesh[name] = value``.

        A machine stores a large tensor once for all its ranks. A rank that writes to it gets a copy of the pages that it
        writes.
        """
        self[name] = value

    def all_to_all(
        self,
        name: str,
        source: ProcMesh | None = None,
        *,
        axis: str | None = None,
        dim: int = 0,
        from_axis: str | None = None,
        from_dim: int = 0,
    ) -> Moved:
        """Cut a tensor that another mesh has in parts into other parts for the ranks of this mesh, and wait until they have it.

        ``b.all_to_all("x", a, dim=1)`` gives ranks of ``b`` columns of a tensor that ranks of ``a`` have in rows. The meshes
        can have any number of ranks and any shape. The data goes from rank to rank.

        Args:
            name: the name of the variable on both meshes. Here it becomes a new tensor, or NumPy array.
            source: the mesh that has the tensor; by default this mesh.
            axis: the axis of this mesh, as in `scatter`.
            dim: the dimension that is cut for this mesh, as in `scatter`.
            from_axis: the axis of the source, as in `gather`.
            from_dim: the dimension along which the parts of the source follow each other, as in `gather`.

        Raises:
            MoveError: the parts do not make one tensor, or a rank wrote to them meanwhile.
            RemoteError: a rank has no such variable.
            SupervisionError: a rank has died.
        """
        there = self if source is None else source
        return all_to_all(self._as_targets, there._as_targets, name, axis, dim, from_axis, from_dim)

    def copy_state(
        self,
        source: ProcMesh,
        names: str | Iterable[str] | Mapping[str, str],
        *,
        strict: bool = True,
        cast: bool = False,
    ) -> Moved:
        """Copy variables of another mesh into those of this mesh, in place and from rank to rank, and wait until it is done.

        ``generator.copy_state(trainer, "model")`` updates the weights of a generator. Variables can be modules, tensors,
        arrays, numbers, strings, and dicts and lists of these. Both meshes can have any number of ranks, and tensors that are
        sharded in any way: a DTensor knows which part a rank has (FSDP2, tensor parallelism), and each rank has any other
        tensor in full. Each rank reads what it needs from the nearest rank that has it. Parameters stay the same objects, so
        optimizers keep them.

        Args:
            source: the mesh to read from. Its ranks serve the copy in the order of their cells.
            names: names of the variables; a dict if the names here are different: ``{"model": "policy"}``.
            strict: whether both meshes must have the same tensors in these variables. If False, a tensor that only one mesh has
                is left alone.
            cast: whether to convert tensors to the dtypes of this mesh.

        Raises:
            MoveError: shapes, dtypes or names do not match, and nothing was changed; or the source wrote to what was read.
            RemoteError: a rank has no such variable, or its value can't be moved.
            SupervisionError: a rank has died. If that was during the copy, the variables here are undefined.
        """
        return copy_state(self._as_targets, source._as_targets, names, strict=strict, cast=cast)

    def spawn(self, name: str, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> A:
        """Spawn an actor of a class on every rank. Returns at once a handle with the endpoints of the class.

        Raises:
            TypeError: the arguments do not match the constructor, or can't be sent.
            ValueError: the class is not an `Actor`, or its endpoints are invalid.
            SupervisionError: ranks were stopped.
        """
        check_type("name", name, str)
        endpoints = endpoints_of(cls, RESERVED)
        assert isinstance(cls, type)  # a Callable tells type checkers what the constructor takes
        check_constructor(cls, args, kwargs)
        stopped = {rank: death for rank, death in self.deaths().items() if death.kind == "stopped"}
        if stopped:
            reports = {self._as_spawned.point(rank): death for rank, death in stopped.items()}
            raise SupervisionError(f"spawning {name} on {self.name} failed: it was not sent", reports, {})
        payload, frames = dump((cls, args, kwargs), f"class {cls.__name__} or its arguments")
        mesh = ActorMesh(self, self._region, name, self._asker.new_number(), cls, endpoints)
        # Ranks know their flat rank in the process mesh as spawned; regions of a mesh of actors use these numbers.
        mesh.announce(payload, frames)
        return cast(A, mesh)

    def reload(self, *classes: type | str) -> Reloaded:
        """Switch living actors and other objects to the current classes of the notebook, and wait until they use them.

        This replaces all classes on the ranks that have the same module and qualified name, and updates their subclasses.
        Objects keep their state; methods, endpoints and class attributes come from the new class. If a new class refers to
        other classes of the notebook that were redefined, these are replaced, too. If a class has a method
        ``__reload__(self)``, each actor runs it before its next message.

        Args:
            classes: classes of the notebook, or names of classes that a cell has redefined on the ranks. By default all
                redefined classes of the notebook.

        Raises:
            TypeError: an argument is not a class, or is imported.
            EditError: the edit was refused, for the reasons in the text; nothing has changed on any rank.
            RanksError: ranks could not make the classes, and nothing has changed; or a ``__reload__`` failed.
        """
        place = Target(self._asker, self.procs, self._region, self._as_spawned, self.name)
        names = [cls for cls in classes if isinstance(cls, str)]
        given: list[tuple[type, Key | None]]
        given = [(cls, key_of(cls)) for cls in classes if not isinstance(cls, str) and check_class(cls)]
        if not classes:
            given = [(cls, None) for cls in classes_of_notebook()]
        return reload_classes(place, given, RESERVED, names)

    def sources(self, what: ModuleType | str | os.PathLike[str] | None = None) -> list[ModuleSource]:
        """List the modules that `sync` would send, with their current text in files.

        Raises:
            ValueError: ``what`` is not one of the user's modules.
        """
        if what is not None:
            return sources_for(what)
        finish = gather(self._region, "listing modules failed", RemoteError, read_value, self._as_spawned)
        listed = self._asker.request(self.procs, lambda id: pack(ListModules(id)), "", finish, quiet=True).get()
        names = dict.fromkeys(name for there in listed.values() for name in there)
        return [source for name in names if (source := find_source(name)) is not None]

    def sync(self, what: ModuleType | str | os.PathLike[str] | None = None, *, here: bool = True) -> Synced:
        """Send edited modules to the ranks, reload them and the modules that depend on them, and wait until that is done.

        Objects keep their state and switch to the new classes. If a module fails, or the objects of a class can't switch,
        nothing changes on any rank.

        Args:
            what: a module or package, its name, or the path of a file or folder. By default all of the user's modules that the
                ranks have imported.
            here: whether this process reloads its own modules, too.

        Raises:
            ValueError: ``what`` is not one of the user's modules.
            SyntaxError: a module has a syntax error; nothing was sent.
            EditError: the edit was refused, for the reasons in the text; nothing has changed.
            RanksError: a module failed on a rank, and nothing has changed; or a ``__reload__`` failed.
        """
        sources = self.sources(what)
        place = Target(self._asker, self.procs, self._region, self._as_spawned, self.name)
        return sync_modules(place, sources, self._runtime.extension(EditingExtension).modules if here else None)

    def post_mortem(self, request: int) -> Future[ValueMesh[None]]:
        """Open the debugger where a request failed. The future resolves when the user leaves it. Listeners get its prompts."""
        finish = gather(self._region, f"debugging {self.name}", RemoteError, read_value, self._as_spawned)
        return self._runtime.request(
            self.procs, lambda id: pack(PostMortem(id, request)), "a post-mortem", finish, quiet=True
        )

    def stops(self) -> list[StopEvent]:
        """List the code that is stopped in the debugger on these ranks, in the order of the ranks."""
        return DebugPrompts(self._runtime).stops(self.procs)

    def interrupt(self, *, abort: bool = False) -> None:
        """Interrupt the code that the ranks run. Idle ranks are not affected.

        Args:
            abort: whether to abort the process groups of ranks that do not stop otherwise.
        """
        self._runtime.interrupt_ranks(self.procs, abort=abort)

    def doing(self) -> Future[dict[int, Doing | Failure]]:
        """Return what every rank does now, by flat rank. A rank that is not up has a `Failure`.

        This takes milliseconds, whatever the ranks run. A rank whose native code holds the GIL answers when that ends;
        ``cancel()`` ends the future earlier, with a `Failure` for each such rank.
        """

        def finish(answers: Sequence[Answer]) -> dict[int, Doing | Failure]:
            read = [answer if isinstance(answer, Failure) else read_value(answer) for answer in answers]
            return dict(zip(self.ranks, read, strict=True))

        return self._runtime.ask(self.procs, lambda id: pack(Look(id)), finish)

    def stop(self, reason: str = "stopped by client", *, grace_s: float = 2.0) -> Future[None]:
        """End the processes. Processes that take longer than ``grace_s`` seconds are killed.

        Later calls raise. The future resolves when the processes are gone, so every ``__cleanup__`` has run or was killed, and
        memory, devices and ports are free. Processes that are dead, or never came up, count as gone.

        Raises:
            MeshDownError: the session was shut down.
            ValueError: the mesh is the program's own process.
            SupervisionError: raised by the future: the Linux kernel did not end a process that was killed.
        """
        if CONTROLLER_PROC in self.procs:
            raise ValueError(
                "the program's own process can't be stopped; ranks can, and shutdown_context() ends the session"
            )
        if not isinstance(self._asker, Runtime):  # on a rank: only the program ends processes
            return cast("Future[None]", directory_of(self._asker).stop_procs.call_one(self, reason, grace_s))
        if self.is_whole:
            LoopControl(self._runtime).write(self.name, None)
        finish = gather(self._region, f"stopping {self.name}", SupervisionError, lambda answer: None, self._as_spawned)

        def stopped(answers: Sequence[Answer]) -> None:
            finish(answers)

        return self._runtime.stop_ranks(self.procs, reason, stopped, grace_s)

    def heal(self) -> Future[tuple[int, ...]]:
        """Replace each rank that has died by a new process, which makes the actors of the rank again.

        The other ranks go on, with their state. Handles stay valid: new calls wait for the new processes. Calls that had
        reached a dead process have failed, and are not repeated. A new actor can take its state from the surviving ones
        (``__restore__``). Ranks that die meanwhile are replaced, too.

        Returns:
            A future of the flat ranks that were replaced. It resolves when they are up and their actors are made.

        Raises:
            SupervisionError: ranks were stopped. Raised by the future: new processes have died, too.
            ActorError: raised by the future: actors could not be made again.
        """
        return self._replace(None)

    def restart(self, *, grace_s: float = 2.0) -> Future[tuple[int, ...]]:
        """End the processes and `heal` the mesh. Processes that take longer than ``grace_s`` seconds are killed."""
        return self._replace(grace_s)

    def _replace(self, grace_s: float | None) -> Future[tuple[int, ...]]:
        """Replace the dead processes; with a grace time, replace the living ones, too."""
        if grace_s is not None and CONTROLLER_PROC in self.procs:
            raise ValueError("the program's own process can't be restarted; ranks can")
        if not isinstance(self._asker, Runtime):  # on a rank: only the program starts processes
            return cast("Future[tuple[int, ...]]", directory_of(self._asker).replace_procs.call_one(self, grace_s))
        what = f"healing {self.name}"
        places = {proc: rank for rank, proc in zip(self.ranks, self.procs)}
        stopped = {rank: death for rank, death in self.deaths().items() if death.kind == "stopped"}
        if stopped:
            reports = {self._as_spawned.point(rank): death for rank, death in stopped.items()}
            raise SupervisionError(f"{what} failed: it was stopped; bring up another", reports, {})

        def finish(healing: Healing) -> tuple[int, ...]:
            if healing.failures:
                gone = [failure for failure in healing.failures if failure[2].kind in ("lost", "stopped")]
                reports = {self._as_spawned.point(places[proc]): death for _, proc, death in gone or healing.failures}
                if gone:
                    raise SupervisionError(f"{what} failed", reports)
                raise ActorError(
                    f"{what}: {', '.join(sorted({note for note, *_ in healing.failures}))} failed", reports
                )
            return tuple(sorted(places[proc] for proc in healing.replaced))

        runtime = self._runtime
        gone = runtime.fleet.gone(self.procs)
        hosts = runtime.session.replace_hosts(gone) if gone else {}
        retire = "" if grace_s is None else "ended to be restarted"
        return runtime.heal(self.procs, finish, hosts=hosts, retire=retire, grace_s=grace_s or 0.0)

    def incarnations(self) -> tuple[int, ...]:
        """Return for each rank the number of processes that it had before the current one, or before the last one."""
        return self._runtime.incarnations(self.procs)

    def deaths(self) -> dict[int, Failure]:
        """Return flat rank -> how it ended, for the ranks that are dead or stopped."""
        found = self._asker.deaths(self.procs)
        return {rank: found[proc] for rank, proc in zip(self.ranks, self.procs) if proc in found}

    @property
    def loops(self) -> list[SteeredLoop]:
        """The running loops (`live.loop`) of the ranks, and the last finished ones, in the order in which they started."""
        return [SteeredLoop(self._runtime, key) for key in LoopControl(self._runtime).keys(self.procs)]

    @property
    def loop(self) -> SteeredLoop:
        """The loop that the ranks have started last.

        Raises:
            LookupError: no rank has started a loop.
        """
        if not (loops := self.loops):
            raise LookupError(f"no rank of {self.name} has started a loop: `for step in live.loop(...)`")
        return loops[-1]

    def tensorboard(self, folder: str | os.PathLike[str] | None) -> Path | None:
        """Write the logs of loops for TensorBoard from now on, each loop to a separate folder: ``loop_0`` ...

        Values of ``live.log`` are written for each step, as means over ranks; knobs and speed once a second. A loop that
        resumes automatically after a death goes on in its folder.

        Args:
            folder: the folder on this machine that holds the folders of the loops; created if it does not exist. None stops the
                writing.

        Returns:
            The absolute path of the folder.

        Raises:
            ModuleNotFoundError: the package ``tensorboard`` is not installed here.
            OSError: the folder can't be written to.
            ValueError: this is a slice of a mesh.
        """
        if not self.is_whole:
            raise ValueError(
                f"TensorBoard needs the loops of a whole mesh: call {self.name}.tensorboard() without an index"
            )
        journal = None if folder is None else TensorBoardJournal(folder, self.name)
        LoopControl(self._runtime).write(self.name, journal)
        return None if journal is None else journal.folder

    def throughput(self) -> list[tuple[float, float]]:
        """Return (received, sent) bytes per second of all ranks together, for each of the last seconds, oldest first."""
        return TrafficControl(self._runtime).throughput(self.procs)

    def last_failures(self) -> dict[int, Failure]:
        """Return flat rank -> its last failure, or how it died, for ranks where nothing has succeeded since."""
        found = zip(self.ranks, self._runtime.failures(self.procs))
        return {rank: failure for rank, failure in found if failure is not None}

    def names(self) -> dict[int, dict[str, str]]:
        """Return flat rank -> name that cells have defined there -> its kind. This sends no request to the ranks."""
        return dict(zip(self.ranks, self._runtime.names(self.procs)))

    def look(self, rank: int, make: Callable[[int], Complete | Inspect | ListErrors]) -> Future[Any]:
        """Ask one rank about its namespace, or about the errors it keeps. It answers at once, whatever it runs.

        Args:
            rank: the flat rank in the mesh as it was spawned.
            make: makes the message for a request id.
        """

        def read(answers: Sequence[Answer]) -> Any:
            return None if isinstance(answers[0], Failure) else read_value(answers[0])

        return self._runtime.ask((self._base[rank],), lambda id: pack(make(id)), read)

    def logs(self) -> dict[int, list[LogRecord]]:
        """Return flat rank -> the end of its log: some megabytes for ranks on this machine, one for ranks on other hosts.

        Dead ranks are included until they are stopped, or their host is lost.
        """
        if self._session is None:
            raise RuntimeError(
                f"mesh {self.name!r} came here as an argument: only the process that made the mesh can read its logs"
            )
        return dict(zip(self.ranks, self._session.logs(self.procs)))

    def traffic(self, *, timeout_s: float = 5.0) -> Traffic:
        """Return a table of all data that these ranks have sent and received since they started.

        It includes every transfer that ended before the call. The traffic between two calls is ``later - earlier``.

        Args:
            timeout_s: how long to wait for the ranks, in seconds. They answer within milliseconds, unless native code holds the
                GIL. For ranks that do not answer, the table has their last report, from a quarter of a second ago or earlier.
        """
        name = self.name if self.is_whole else f"{self.name}{format_ranks(self.ranks)}"
        return TrafficControl(self._runtime).table(self.procs, name, timeout_s)

    def view(self) -> MeshView:
        """Return the current state of the mesh, for display."""
        return self._runtime.view(self._base, self.name, dict(self._as_spawned), time.monotonic() - self._started_at)


def check_constructor(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check arguments against the signature of a constructor.

    Raises:
        TypeError: the arguments do not match.
    """
    if cls.__init__ is object.__init__:  # type: ignore[misc]
        if args or kwargs:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        return
    try:
        inspect.signature(cls).bind(*args, **kwargs)
    except TypeError as error:
        signature = inspect.signature(cls).replace(return_annotation=inspect.Signature.empty)
        raise TypeError(f"{cls.__name__}{signature}: {error}") from None


def _open_procs(region: Region, procs: Sequence[int], name: str, extent: Extent) -> ProcMesh:
    """Make the mesh that this process received as an argument or a result."""
    return ProcMesh(opener(), region, procs, name, time.monotonic(), extent)
