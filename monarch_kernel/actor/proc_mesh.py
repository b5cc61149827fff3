"""Meshes of processes, one per rank: run cells, push and pull variables, spawn actors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

from monarch_kernel.actor.actor import Actor, endpoints_of
from monarch_kernel.actor.actor_mesh import RESERVED, ActorMesh
from monarch_kernel.actor.per_rank import apply_messages, by_rank, push_messages
from monarch_kernel.actor.pickle_errors import error_of_user
from monarch_kernel.actor.proc_device import ProcDevice
from monarch_kernel.actor.proc_editor import ProcEditor
from monarch_kernel.actor.proc_observer import ProcObserver
from monarch_kernel.actor.proc_tensors import ProcTensors
from monarch_kernel.actor.process_service import directory_of
from monarch_kernel.base.mesh import Extent, Point, Region, ValueMesh
from monarch_kernel.errors import ActorError, BootstrapError, PayloadError, RemoteError, SupervisionError
from monarch_kernel.features.live.controller import LoopControl
from monarch_kernel.features.tensors.sending import SENDING
from monarch_kernel.net.wire.codec import Packed, dump, pack
from monarch_kernel.net.wire.messages import (
    Ping,
    Pull,
    Push,
    Rewind,
    Run,
)
from monarch_kernel.runtime.controller.healing import Healing
from monarch_kernel.runtime.controller.runtime import Listener, Runtime
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.gather import (
    CellResult,
    check_name,
    check_new_name,
    check_title,
    check_type,
    gather,
    read_value,
)
from monarch_kernel.runtime.rpc.handles import client_for_unpickling
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC

__all__ = ["ProcMesh", "check_constructor"]

A = TypeVar("A", bound=Actor)
P = ParamSpec("P")
T = TypeVar("T")


class ProcMesh(ProcObserver, ProcTensors, ProcDevice, ProcEditor):
    """Processes, one per rank, that run cells and host actors."""

    def __repr__(self) -> str:
        return f"<ProcMesh {self.name} {self.extent}>"

    def with_region(self, region: Region) -> ProcMesh:
        """Return the processes of a region of the mesh as it was spawned."""
        part = ProcMesh(self._client, region, self._base, self.name, self.spawned_extent, self._session)
        part.place_on(self._hosts)
        return part

    _with_region = with_region  # for `Shaped`

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_procs, (self._region, tuple(self._base), self.name, self.spawned_extent, self._hosts)

    async def __aenter__(self) -> ProcMesh:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def whole(self) -> ProcMesh:
        """The whole mesh as it was spawned."""
        return self.with_region(Region.whole(self.spawned_extent))

    def process(self, rank: int) -> ProcMesh:
        """Return one process, by its flat rank in the mesh as spawned, as a mesh without axes."""
        return self.with_region(Region(Extent(), (rank,)))

    @property
    def initialized(self) -> Future[bool]:
        """A future that resolves when every process is up and has handled all earlier messages."""
        finish = gather(self._region, f"starting {self.name}", BootstrapError, read_value, self.spawned_extent)

        def up(answers: Sequence[Answer]) -> bool:
            finish(answers)
            return True

        return self._client.request(self.procs, lambda id: pack(Ping(id)), "ping", up, quiet=True)

    def run_cell(
        self,
        code: str,
        *,
        cell: int = 0,
        want_value: bool = False,
        listen: Listener | None = None,
        rewind: Rewind | None = None,
        needs_all: bool = False,
    ) -> Future[ValueMesh[CellResult]]:
        """Run code in the namespace of every rank, as a cell.

        Args:
            code: IPython syntax.
            cell: the number in tracebacks and in the view.
            want_value: whether the ranks send the value of the last expression.
            listen: gets the output and displays of the cell, on the I/O thread; without it they are printed.
            rewind: the snapshot that a loop in the cell goes back to.
            needs_all: whether the code makes sense only on all ranks of the mesh.
        """
        check_type("code", code, str)
        description = f"cell [{cell}]" if cell else "a cell"

        def read(answer: Value) -> CellResult:
            return CellResult(read_value(answer), answer.bundle)

        what = f"{description} failed on {self.name}"
        finish = gather(self._region, what, RemoteError, read, self.spawned_extent, needs_all=needs_all)
        return self.runtime.request(
            self.procs,
            lambda id: pack(Run(id, code, cell, want_value, rewind)),
            description,
            finish,
            listen=listen,
            is_cell=cell > 0,
        )

    def call_cell(
        self, function: Callable[[], Any], *, cell: int = 0, listen: Listener | None = None
    ) -> Future[ValueMesh[CellResult]]:
        """Call a function on the main threads of all ranks, which it needs, as a cell; arguments as for `run_cell` and `map`.

        Raises:
            TypeError: ``function`` is not a plain function, or can't be sent.
        """
        make = apply_messages(function, (), self.ranks)
        description = f"cell [{cell}]" if cell else "a function"
        finish = gather(
            self._region,
            f"{description} failed on {self.name}",
            RemoteError,
            lambda answer: CellResult(read_value(answer), answer.bundle),
            self.spawned_extent,
            needs_all=True,
        )
        return self.runtime.request(self.procs, make, description, finish, listen=listen, is_cell=cell > 0)

    def run(self, code: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        """Run code in the namespace of every rank, and return the value of its last expression; or call a function there.

        Args:
            code: IPython syntax, or a function. The function is sent as by `map`, and runs on the main thread.
            *args: what the function is called with, the same on every rank.
            **kwargs: the same, by name.

        Raises:
            TypeError: ``code`` is of another type, or the function does not take these arguments.
            PayloadError: the function or an argument can't be sent.
        """
        if isinstance(code, str):
            if args or kwargs:
                raise TypeError("run() takes arguments for a function, and none for code")
            finish = gather(self._region, f"code failed on {self.name}", RemoteError, read_value, self.spawned_extent)
            return self._client.request(self.procs, lambda id: pack(Run(id, code, 0, True)), "code", finish)
        if not callable(code):
            raise TypeError(f"code must be a str or a function, not {code!r} (of type {type(code).__name__})")
        return self._call(code, apply_messages(code, (), self.ranks, args=args, kwargs=kwargs, method="run"))

    def __getitem__(self, key: Any) -> Any:
        """``mesh["x"]`` pulls a variable as a `ValueMesh`; ``mesh[0]``, ``mesh[0:4]``, ``mesh[0, 1:3]`` are slices.

        A list selects ranks by index and gives them one axis: ``mesh[[0, 1, 3]]``. A `Point` selects the rank there.
        """
        if isinstance(key, list):
            return self.with_region(self._region.pick(key))
        if isinstance(key, Point):
            return self.with_region(self._region.slice(**key))
        if not isinstance(key, str):
            if isinstance(key, tuple) and any(isinstance(each, str) for each in key):
                raise TypeError(f"{self.name}[...] takes a slice or a name, not both; such as {self.name}[0:2]['x']")
            return self.with_region(self._region.index(key))
        check_name(key)
        finish = gather(
            self._region, f"pulling {key!r} from {self.name} failed", RemoteError, read_value, self.spawned_extent
        )
        return self._client.request(
            self.procs, lambda id: pack(Pull(id, key)), f"pull {key!r}", finish, quiet=True
        ).get()

    def __setitem__(self, key: str, value: Any) -> None:
        """Push a value to the namespace of every rank, and wait until it has arrived.

        If the value is a `ValueMesh`, each rank gets its own value; `per_rank` makes a `ValueMesh` of a list.

        Raises:
            ValueError: a `ValueMesh` has another extent, or the name is a keyword, or has a meaning to Python or the ranks.
            PayloadError: the value can't be sent.
        """
        check_new_name(key)
        make: Callable[[int], Packed | Sequence[Packed]]
        if isinstance(value, ValueMesh):
            make = push_messages(key, by_rank(self._region, value, f"{self.name}[{key!r}]"), self.ranks)
        else:
            payload, frames = dump(value, f"the value for {key!r} (a {type(value).__name__})", roots={key: value})
            make = lambda id: pack(Push(id, key, payload), frames)  # noqa: E731
        finish = gather(
            self._region, f"pushing {key!r} to {self.name} failed", RemoteError, read_value, self.spawned_extent
        )
        self._client.request(self.procs, make, f"push {key!r}", finish, quiet=True).get()

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
        return self._call(function, apply_messages(function, given, self.ranks))

    def _call(self, function: Callable[..., Any], make: Callable[[int], list[Packed]]) -> Future[ValueMesh[Any]]:
        description = f"{getattr(function, '__name__', 'a function')}()"
        finish = gather(
            self._region, f"{description} failed on {self.name}", RemoteError, read_value, self.spawned_extent
        )
        return self._client.request(self.procs, make, description, finish)

    def broadcast(self, name: str, value: Any) -> None:
        """Assign the same value to a variable on all ranks; the same as ``mesh[name] = value``.

        A machine stores a large tensor once for all its ranks. A rank that writes to it gets a copy of the pages that it
        writes.
        """
        self[name] = value

    def spawn(self, name: str, Class: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> A:
        """Spawn an actor of a class on every rank. Returns at once a handle with the endpoints of the class.

        Raises:
            TypeError: the arguments do not match the constructor, or can't be sent.
            ValueError: the class is not an `Actor`, its endpoints are invalid, or the name is longer than 200 characters.
            SupervisionError: ranks were stopped.
        """
        check_title("name", name)
        endpoints = endpoints_of(Class, RESERVED)
        assert isinstance(Class, type)  # a Callable tells type checkers what the constructor takes
        check_constructor(Class, args, kwargs)
        stopped = {rank: death for rank, death in self.deaths().items() if death.kind == "stopped"}
        if stopped:
            reports = {self.spawned_extent.point(rank): death for rank, death in stopped.items()}
            raise SupervisionError(f"spawning {name} on {self.name} failed: it was not sent", reports, {})
        roots = {Class.__name__: Class, **{f"args[{i}]": each for i, each in enumerate(args)}, **kwargs}
        parts: list[Any] = []
        SENDING.parts = parts
        try:
            payload, frames = dump((Class, args, kwargs), f"class {Class.__name__} or its arguments", roots=roots)
        except PayloadError as error:
            raise error_of_user(error) from error.__cause__
        finally:
            SENDING.parts = None
        mesh = ActorMesh(self, self._region, name, self._client.new_number(), Class, endpoints)
        # Ranks know their flat rank in the process mesh as spawned; regions of a mesh of actors use these numbers.
        ActorMesh.announce(mesh, payload, frames, parts)  # an endpoint may have this name
        return cast(A, mesh)

    def interrupt(self, *, abort: bool = False) -> None:
        """Interrupt the code that the ranks run. Idle ranks are not affected.

        Args:
            abort: whether to abort the process groups of ranks that do not stop otherwise.
        """
        self.runtime.interrupt_ranks(self.procs, abort=abort)

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
        if not isinstance(self._client, Runtime):  # on a rank: only the program ends processes
            return cast("Future[None]", directory_of(self._client).stop_procs.call_one(self, reason, grace_s))
        if self.is_whole:
            LoopControl(self.runtime).write(self.name, None)
        finish = gather(
            self._region, f"stopping {self.name}", SupervisionError, lambda answer: None, self.spawned_extent
        )

        def stopped(answers: Sequence[Answer]) -> None:
            finish(answers)

        return self.runtime.stop_ranks(self.procs, reason, stopped, grace_s)

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
        if not isinstance(self._client, Runtime):  # on a rank: only the program starts processes
            return cast("Future[tuple[int, ...]]", directory_of(self._client).replace_procs.call_one(self, grace_s))
        what = f"healing {self.name}"
        places = {proc: rank for rank, proc in zip(self.ranks, self.procs)}
        stopped = {rank: death for rank, death in self.deaths().items() if death.kind == "stopped"}
        if stopped:
            reports = {self.spawned_extent.point(rank): death for rank, death in stopped.items()}
            raise SupervisionError(f"{what} failed: it was stopped; bring up another", reports, {})

        def finish(healing: Healing) -> tuple[int, ...]:
            if healing.failures:
                gone = [failure for failure in healing.failures if failure[2].kind in ("lost", "stopped")]
                reports = {
                    self.spawned_extent.point(places[proc]): death for _, proc, death in gone or healing.failures
                }
                if gone:
                    raise SupervisionError(f"{what} failed", reports)
                raise ActorError(
                    f"{what}: {', '.join(sorted({description for description, *_ in healing.failures}))} failed",
                    reports,
                )
            return tuple(sorted(places[proc] for proc in healing.replaced))

        runtime = self.runtime
        gone = runtime.host_pool.gone(self.procs)
        new_hosts = runtime.session.replace_hosts
        hosts = new_hosts(gone) if gone else {}
        retire = "" if grace_s is None else "ended to be restarted"
        return runtime.replacement.heal(
            self.procs, finish, new_hosts=new_hosts, hosts=hosts, retire=retire, grace_s=grace_s or 0.0
        )


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


def _open_procs(region: Region, procs: Sequence[int], name: str, extent: Extent, hosts: Any = None) -> ProcMesh:
    """Make the mesh that this process received as an argument or a result."""
    mesh = ProcMesh(client_for_unpickling(), region, procs, name, extent)
    mesh.place_on(hosts)
    return mesh
