"""Meshes of processes, one a rank: cells run on them, variables are pushed and pulled, actors are spawned."""

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
    """Processes, one a rank; cells run on them, and actors are spawned on them."""

    def __init__(
        self,
        asker: Asker,
        region: Region,
        procs: Sequence[int],
        name: str,
        born: float,
        extent: Extent,
        session: Session | None = None,
    ) -> None:
        self._asker = asker
        self._session = session
        if isinstance(asker, Runtime):
            asker.faults.tell = call_fault_hook
        self._region = region
        self._base = procs
        self._born = born
        self._as_spawned = extent
        self.name = name

    def __repr__(self) -> str:
        return f"<ProcMesh {self.name} {self.extent}>"

    def _with_region(self, region: Region) -> ProcMesh:
        return ProcMesh(self._asker, region, self._base, self.name, self._born, self._as_spawned, self._session)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_procs, (self._region, tuple(self._base), self.name, self._as_spawned)

    @property
    def _runtime(self) -> Runtime:
        """The controller's; what only that knows or can do is not to be had elsewhere."""
        if not isinstance(self._asker, Runtime):
            raise RuntimeError(
                f"mesh {self.name!r} came here as an argument: this can be done only where the mesh was made"
            )
        return self._asker

    @property
    def _as_asked(self) -> Ranks:
        return Ranks(self._asker, self.procs, self.ranks, self._region, self._as_spawned, self.name)

    @cached_property
    def procs(self) -> tuple[int, ...]:
        """Numbers of the processes, unique in the session."""
        return tuple(self._base[rank] for rank in self._region.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Flat ranks in the mesh as it was spawned."""
        return tuple(self._region.ranks)

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the mesh as it was spawned."""
        return len(self._region) == len(self._base)

    @property
    def whole(self) -> ProcMesh:
        """All of the mesh as it was spawned."""
        return self._with_region(Region.whole(self._as_spawned))

    def process(self, rank: int) -> ProcMesh:
        """One process, by its flat rank in the mesh as spawned, as a mesh without axes."""
        return self._with_region(Region(Extent(), (rank,)))

    @property
    def initialized(self) -> Future[bool]:
        """Resolves when every process is up and has done what it was sent before."""
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
            cell: number to show in tracebacks and in the view.
            want_value: whether the value of the last expression is to be sent here.
            listen: gets what the cell writes and displays, on the leading thread; without it that is printed.
            rewind: to which snapshot a loop in it goes back.
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
        """Call a function on every rank as a cell, where cells run; arguments as for `run_cell` and `map`.

        Raises:
            TypeError: it is no plain function, or can't be sent.
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
        """Run code in the namespace of every rank; gives the value of its last expression."""
        check_type("code", code, str)
        finish = gather(self._region, f"code failed on {self.name}", RemoteError, read_value, self._as_spawned)
        return self._asker.request(self.procs, lambda id: pack(Run(id, code, 0, True)), "code", finish)

    def __getitem__(self, key: Any) -> Any:
        """``mesh["x"]`` pulls a variable as a `ValueMesh`; ``mesh[0]``, ``mesh[0:4]``, ``mesh[0, 1:3]`` give slices.

        A list gives the ranks with these places, along one axis: ``mesh[[0, 1, 3]]``; a `Point` gives the rank there.
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
        """Push a value to every rank's namespace, and wait until it is there.

        Of a `ValueMesh` every rank gets its own value; `per_rank` makes one of a list.

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
        """Refuse: a name is deleted where it is.

        Raises:
            TypeError: always.
        """
        check_name(key)
        raise TypeError(f"a name is deleted by a cell on the ranks: %remote {self.name} del {key}")

    def per_rank(self, values: Iterable[T]) -> ValueMesh[T]:
        """One value for each rank, in their order, for pushing: ``mesh["lr"] = mesh.per_rank([1e-3, 3e-4])``.

        Raises:
            ValueError: they are too few or too many.
        """
        return by_rank(self._region, values, f"{self.name}.per_rank()")

    def map(self, function: Callable[..., T], *values: Iterable[Any]) -> Future[ValueMesh[T]]:
        """Call a function on every rank, with the rank's own value of each list or `ValueMesh`, where cells run.

        The function travels with what it refers to here; a name that is not defined here means the rank's variable.

        Raises:
            TypeError: it is no plain function, or can't be sent.
            ValueError: there is not one value for each rank.
        """
        given = [by_rank(self._region, each, f"{self.name}.map(): values {i}") for i, each in enumerate(values, 1)]
        make = apply_messages(function, given, self.ranks)
        note = f"{getattr(function, '__name__', 'a function')}()"
        finish = gather(self._region, f"{note} failed on {self.name}", RemoteError, read_value, self._as_spawned)
        return self._asker.request(self.procs, make, note, finish)

    def scatter(self, name: str, tensor: Any, *, axis: str | None = None, dim: int = 0) -> Moved:
        """Cut a tensor along a dim, and give each rank its part under a name; waits for it.

        Args:
            name: of the variable; what it was before stays as it is where an error is raised for the rank.
            tensor: on the CPU, or a NumPy array; ranks get the same kind, in memory of their own.
            axis: the n-th ranks along it get the n-th part, whatever their places along other axes are; left out, each rank
                gets a part of its own, in the order of the ranks.
            dim: of the tensor. Where its size can't be divided the first parts are larger by one, as `torch.tensor_split`
                cuts; of fewer elements than ranks the last ones get none.

        Raises:
            TypeError: it has no memory that can be read as it is.
            IndexError: there is no such dim.
            KeyError: there is no such axis.
        """
        return scatter(self._as_asked, name, tensor, axis, dim)

    def gather(self, name: str, *, axis: str | None = None, dim: int = 0) -> Any:
        """Put the parts that ranks have together; gives the whole tensor, or NumPy array.

        Args:
            name: of the variable. If it is a DTensor that knows which part each rank has, and neither axis nor dim counts.
            axis: along which the parts follow each other; ranks along other axes have the same parts, in the same shapes, and
                one of them is read. Left out, each rank has a part of its own, in the order of the ranks.
            dim: of the tensor; parts may differ in size along it.

        Raises:
            MoveError: the parts do not make one tensor, or were written to meanwhile.
            RemoteError: a rank has no such variable.
            IndexError: there is no such dim.
            KeyError: there is no such axis.
        """
        return gather_parts(self._as_asked, name, axis, dim)

    def broadcast(self, name: str, value: Any) -> None:
        """Give all ranks the same value under a name: the verb for ``mesh[name] = value``, of which this is another spelling.

        Large tensors are stored once for all ranks of a machine; a rank that writes to one gets a copy of what it writes to.
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
        """Have a tensor that ranks of a mesh have in parts cut in another way, for the ranks here; rank to rank, and waits.

        ``b.all_to_all("x", a, dim=1)`` gives ranks of ``b`` columns of what ranks of ``a`` have in rows. Numbers and shapes of
        the meshes are any.

        Args:
            name: of the variable, there and here; here it is a new tensor, or NumPy array.
            source: the mesh that has it; left out, this one.
            axis: of this mesh, as in `scatter`.
            dim: along which it is cut for this mesh, as in `scatter`.
            from_axis: of the source, as in `gather`.
            from_dim: along which its parts follow each other there, as in `gather`.

        Raises:
            MoveError: the parts do not make one tensor, or were written to meanwhile.
            RemoteError: a rank has no such variable.
            SupervisionError: a rank has died.
        """
        there = self if source is None else source
        return all_to_all(self._as_asked, there._as_asked, name, axis, dim, from_axis, from_dim)

    def copy_state(
        self,
        source: ProcMesh,
        names: str | Iterable[str] | Mapping[str, str],
        *,
        strict: bool = True,
        cast: bool = False,
    ) -> Moved:
        """Copy variables of another mesh into those here, in place and rank to rank; waits for it.

        ``generator.copy_state(trainer, "model")`` brings a generator's weights up to date. Variables are modules, tensors,
        arrays, numbers, texts, and dicts and lists of these. Both meshes may have any numbers of ranks, and tensors that are
        sharded in any ways: DTensors say which part a rank has (FSDP2, tensor parallelism); what is no DTensor each rank has
        in full. Each rank reads what it needs from the nearest that has it. Parameters stay the objects that they are, so
        optimizers keep them.

        Args:
            source: the mesh that is read from; in its order of cells.
            names: of variables; or a dict, if they have other names here: ``{"model": "policy"}``.
            strict: whether both have to have the same tensors under them; else those that one alone has stay as they are.
            cast: whether tensors are converted to the dtypes that they have here.

        Raises:
            MoveError: shapes, dtypes or names do not fit, and nothing was changed; or the source has written to what was read.
            RemoteError: a rank has no such variable, or something that can't be moved.
            SupervisionError: a rank has died; if it did so in the midst of it, what is here is undefined.
        """
        return copy_state(self._as_asked, source._as_asked, names, strict=strict, cast=cast)

    def spawn(self, name: str, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> A:
        """Make an actor of a class on every rank; returns at once, a handle with the class's endpoints.

        Raises:
            TypeError: the arguments do not fit the constructor, or can't be sent.
            ValueError: the class is no `Actor`, or its endpoints can't be.
            SupervisionError: ranks were stopped.
        """
        check_type("name", name, str)
        endpoints = endpoints_of(cls, RESERVED)
        assert isinstance(cls, type)  # a Callable for type checkers, which then know what its constructor takes
        check_constructor(cls, args, kwargs)
        stopped = {rank: death for rank, death in self.deaths().items() if death.kind == "stopped"}
        if stopped:
            reports = {self._as_spawned.point(rank): death for rank, death in stopped.items()}
            raise SupervisionError(f"spawning {name} on {self.name} failed: it was not sent", reports, {})
        payload, frames = dump((cls, args, kwargs), f"class {cls.__name__} or its arguments")
        mesh = ActorMesh(self, self._region, name, self._asker.new_number(), cls, endpoints)
        # Ranks know their place in the process mesh as spawned; a mesh of actors on a slice counts from there.
        mesh.announce(payload, frames)
        return cast(A, mesh)

    def reload(self, *classes: type | str) -> Reloaded:
        """Have living actors, and other objects, go on with their classes as they are now in the notebook; waits for it.

        Concerned are all classes on the ranks that have the same module and qualified name, and what derives from them. State
        stays; methods, endpoints and class attributes are those of the new class. Classes of the notebook that a new one
        refers to, and that were defined anew, too, go along. A class with a method ``__reload__(self)`` has it called for
        each actor, before its next message.

        Args:
            classes: of the notebook; by its name, one that a cell has defined anew on the ranks; left out, all of the notebook
                that were defined anew.

        Raises:
            TypeError: what is given is no class, or one that is imported.
            EditError: it was refused, with the reasons; nothing has changed, on no rank.
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
        """The modules that `sync` would send, as they are in files now.

        Raises:
            ValueError: that is no module of yours.
        """
        if what is not None:
            return sources_for(what)
        finish = gather(self._region, "listing modules failed", RemoteError, read_value, self._as_spawned)
        listed = self._asker.request(self.procs, lambda id: pack(ListModules(id)), "", finish, quiet=True).get()
        names = dict.fromkeys(name for there in listed.values() for name in there)
        return [source for name in names if (source := find_source(name)) is not None]

    def sync(self, what: ModuleType | str | os.PathLike[str] | None = None, *, here: bool = True) -> Synced:
        """Send edited modules to the ranks, and have loaded anew what is imported there, with what depends on it; waits.

        State of objects stays; they go on with their classes as these are now. A module that fails, or a class whose objects
        can't follow, changes nothing on any rank.

        Args:
            what: a module or package, its name, or the path of a file or folder; left out, all modules of yours that are
                imported there.
            here: whether this process loads its own modules anew, too.

        Raises:
            ValueError: that is no module of yours.
            SyntaxError: a module has one; nothing was sent.
            EditError: it was refused, with the reasons; nothing has changed.
            RanksError: a module failed on a rank, and nothing has changed; or a ``__reload__`` failed.
        """
        sources = self.sources(what)
        place = Target(self._asker, self.procs, self._region, self._as_spawned, self.name)
        return sync_modules(place, sources, self._runtime.extension(EditingExtension).modules if here else None)

    def post_mortem(self, request: int) -> Future[ValueMesh[None]]:
        """Open the debugger where a request failed; resolves when it is left. Its prompts are told to who watches."""
        finish = gather(self._region, f"debugging {self.name}", RemoteError, read_value, self._as_spawned)
        return self._runtime.request(
            self.procs, lambda id: pack(PostMortem(id, request)), "a post-mortem", finish, quiet=True
        )

    def stops(self) -> list[StopEvent]:
        """What stands still in the debugger on these ranks, by rank."""
        return DebugPrompts(self._runtime).stops(self.procs)

    def interrupt(self, *, abort: bool = False) -> None:
        """Interrupt whatever the ranks run; idle ones are not touched.

        Args:
            abort: whether to abort the process groups of ranks that do not stop otherwise.
        """
        self._runtime.interrupt_ranks(self.procs, abort=abort)

    def doing(self) -> Future[dict[int, Doing | Failure]]:
        """What every rank does now, by flat rank; a rank that is not up answers with a `Failure`.

        It takes milliseconds, whatever the ranks run; one whose native code holds the GIL answers when that ends. The
        future then ends by ``cancel()``, with a `Failure` for each such rank.
        """

        def finish(answers: Sequence[Answer]) -> dict[int, Doing | Failure]:
            read = [answer if isinstance(answer, Failure) else read_value(answer) for answer in answers]
            return dict(zip(self.ranks, read, strict=True))

        return self._runtime.ask(self.procs, lambda id: pack(Look(id)), finish)

    def stop(self, reason: str = "stopped by client", *, grace_s: float = 2.0) -> Future[None]:
        """End the processes: those that take longer than ``grace_s`` seconds are killed.

        From now on calls raise. The future resolves when the processes are gone, and so when every ``__cleanup__`` has run or
        was killed: memory, devices and ports are free then. Those that are dead, or have never come up, count as gone.

        Raises:
            MeshDownError: the session was shut down.
            ValueError: this is the program's own process.
            SupervisionError: in the future, the Linux kernel did not end a process that was killed.
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
        """Start a new process in the place of each rank that has died, and have it make the actors that were there.

        The others go on, with their state. Handles stay good: what is called from now on waits for the new processes, while
        calls that had reached a dead one have failed, and are not repeated. An actor that is made again may take its state
        from the others (``__restore__``). Ranks that die meanwhile are replaced, too.

        Returns:
            The flat ranks that were replaced, when they are up and their actors are made.

        Raises:
            SupervisionError: ranks were stopped; in the future, new processes have died, too.
            ActorError: in the future, actors could not be made again.
        """
        return self._replace(None)

    def restart(self, *, grace_s: float = 2.0) -> Future[tuple[int, ...]]:
        """End the processes and `heal`; those that take longer than ``grace_s`` seconds to end are killed."""
        return self._replace(grace_s)

    def _replace(self, grace_s: float | None) -> Future[tuple[int, ...]]:
        """Have others take the places of those that are dead; with a grace, of those that live, too."""
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
        """How many processes have had the place of each rank before the one that is there, or that was last."""
        return self._runtime.incarnations(self.procs)

    def deaths(self) -> dict[int, Failure]:
        """Flat rank -> how it ended, of the ranks that are dead or stopped."""
        found = self._asker.deaths(self.procs)
        return {rank: found[proc] for rank, proc in zip(self.ranks, self.procs) if proc in found}

    @property
    def loops(self) -> list[SteeredLoop]:
        """The loops (`live.loop`) that its ranks are in, and the last that are over, in the order in which they began."""
        return [SteeredLoop(self._runtime, key) for key in LoopControl(self._runtime).keys(self.procs)]

    @property
    def loop(self) -> SteeredLoop:
        """The loop that its ranks have begun last.

        Raises:
            LookupError: there was none.
        """
        if not (loops := self.loops):
            raise LookupError(f"no rank of {self.name} has begun a loop: `for step in live.loop(...)`")
        return loops[-1]

    def tensorboard(self, folder: str | os.PathLike[str] | None) -> Path | None:
        """Have what its loops log written for TensorBoard from now on, each loop into a folder of its own: ``loop_0`` ...

        ``live.log`` is written as means over ranks, for each step; knobs and speed once a second. A loop that goes on by itself
        after a death goes on in its folder.

        Args:
            folder: on this machine, where they are; it is made if it is not there. None: nothing is written any more.

        Returns:
            The whole path of the folder.

        Raises:
            ModuleNotFoundError: the package ``tensorboard`` is not installed here.
            OSError: nothing can be written there.
            ValueError: this is a part of a mesh.
        """
        if not self.is_whole:
            raise ValueError(f"loops are written of whole meshes: {self.name}.tensorboard(), without an index")
        journal = None if folder is None else TensorBoardJournal(folder, self.name)
        LoopControl(self._runtime).write(self.name, journal)
        return None if journal is None else journal.folder

    def throughput(self) -> list[tuple[float, float]]:
        """Bytes a second that the ranks took in and sent out, together, in each of the last seconds, oldest first."""
        return TrafficControl(self._runtime).throughput(self.procs)

    def last_failures(self) -> dict[int, Failure]:
        """Flat rank -> its last failure, of those that have failed, and where nothing has succeeded since; also how it died."""
        found = zip(self.ranks, self._runtime.failures(self.procs))
        return {rank: failure for rank, failure in found if failure is not None}

    def names(self) -> dict[int, dict[str, str]]:
        """Flat rank -> the names that cells have defined there -> what kind of thing each is; the ranks are not asked."""
        return dict(zip(self.ranks, self._runtime.names(self.procs)))

    def look(self, rank: int, make: Callable[[int], Complete | Inspect | ListErrors]) -> Future[Any]:
        """Ask one rank about its namespace, or the errors it keeps; it answers at once, whatever it runs.

        Args:
            rank: flat rank in the mesh as it was spawned.
            make: gives the message for a request id.
        """

        def read(answers: Sequence[Answer]) -> Any:
            return None if isinstance(answers[0], Failure) else read_value(answers[0])

        return self._runtime.ask((self._base[rank],), lambda id: pack(make(id)), read)

    def logs(self) -> dict[int, list[LogRecord]]:
        """Flat rank -> the youngest part of all that it wrote: some megabytes on this machine, elsewhere one.

        Dead ranks are among them, until they are stopped, or their host is lost.
        """
        if self._session is None:
            raise RuntimeError(
                f"mesh {self.name!r} came here as an argument: its logs are read where the mesh was made"
            )
        return dict(zip(self.ranks, self._session.logs(self.procs)))

    def traffic(self, *, timeout_s: float = 5.0) -> Traffic:
        """What has gone to and from these ranks since they are up, as a table; all that ended before the call is in it.

        What came in between two calls is ``later - earlier``.

        Args:
            timeout_s: how long ranks may take to say, in seconds; they answer within milliseconds, unless native code holds
                their interpreter. Of those that do not it is what they have told before, a quarter of a second ago or more.
        """
        name = self.name if self.is_whole else f"{self.name}{format_ranks(self.ranks)}"
        return TrafficControl(self._runtime).table(self.procs, name, timeout_s)

    def view(self) -> MeshView:
        """The mesh as it is now, for showing."""
        return self._runtime.view(self._base, self.name, dict(self._as_spawned), time.monotonic() - self._born)


def check_constructor(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse arguments that do not fit."""
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
    """A mesh that came as an argument or as a result."""
    return ProcMesh(opener(), region, procs, name, time.monotonic(), extent)
