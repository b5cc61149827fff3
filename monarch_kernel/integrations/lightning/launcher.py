"""The launcher: what the Trainer's methods would do in the notebook they do on the ranks of a mesh."""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import cloudpickle

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.errors import PayloadError
from monarch_kernel.integrations.lightning.predictions import in_order
from monarch_kernel.integrations.lightning.program import Job, run_job
from monarch_kernel.integrations.lightning.registry import find_notebook
from monarch_kernel.integrations.lightning.sync_back import take_home
from monarch_kernel.net.wire.codec import Frame, dump
from monarch_kernel.notebook.cells.cell import Lane, RemoteCell, run_in_foreground
from monarch_kernel.notebook.cells.display import Sink
from monarch_kernel.notebook.cells.output import CellOutput
from monarch_kernel.train.process_group.worker import GroupStore

__all__ = ["LaunchFailed", "MeshLauncher"]

_DEPTH = 6  # how far into an object we look for what can't be pickled


class LaunchFailed(BaseException):
    """Ranks have failed, or were interrupted.

    Lightning ends the program when a launcher raises KeyboardInterrupt, and tells callbacks of any exception, which have been
    told on the ranks. So it gets this one, which none of its handlers is for but the last, and gives it to
    `OnMesh.on_exception`, where the true one goes on to the user.
    """

    def __init__(self, error: BaseException, trainer: Any) -> None:
        super().__init__(str(error))
        self._error = error
        self._trainer = trainer
        self._callbacks = trainer.callbacks
        trainer.callbacks = []

    def raise_own(self) -> NoReturn:
        """Leave the Trainer as one that was interrupted, and raise what was raised on the ranks."""
        trainer = self._trainer
        trainer.callbacks = self._callbacks
        trainer._teardown()
        trainer.state.stage = None
        raise self._error from None


class MeshLauncher:
    """Has methods of a Trainer run on all ranks of a mesh; what Lightning asks of a launcher.

    Args:
        strategy: whose launcher it is.
        mesh: all of it.
    """

    is_interactive_compatible = True

    def __init__(self, strategy: Any, mesh: ProcMesh) -> None:
        self._strategy = strategy
        self._mesh = mesh
        self._script: _Script | None = None

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run a method of the Trainer on all ranks, and take over what has become of it.

        Raises:
            PayloadError: something that is to travel can't be pickled; which.
            LaunchFailed: it failed on ranks, or was interrupted.
        """
        if trainer is None:
            raise TypeError("MonarchStrategy runs what a Trainer does, and this comes from none")
        job = Job(function.__name__, trainer, args, kwargs, self._globals())
        parts: list[Any] = []
        try:
            texts, parts = _packed(job, function)
            work = functools.partial(run_job, texts, parts)
            notebook = find_notebook()
            if notebook is None:
                self._script = self._script or _Script(self._mesh)
                values = self._script.call(work)
            else:
                values = notebook.call(self._mesh, work)
        except (Exception, KeyboardInterrupt) as error:
            raise LaunchFailed(error, trainer) from None
        finally:
            # The traceback of an error holds this frame. Views of memory that CPython's garbage collector finds in a cycle with
            # what has them open make it crash (3.11), so none may be left for it.
            parts.clear()
        told = values.values()
        take_home(trainer, told[0].weights, told[0].news)
        if told[0].batches is None:
            return told[0].result
        return in_order([(each.result, each.batches) for each in told])

    def kill(self, signum: int) -> None:
        """Ranks end with their mesh, not with the notebook's Trainer."""

    def _globals(self) -> Any:
        """What of this process the ranks should have, too: the seed, the state of random generators, flags of torch."""
        module = importlib.import_module(f"{self._strategy.package}.strategies.launchers.multiprocessing")
        seeds = {name: os.environ[name] for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS") if name in os.environ}
        return module._GlobalStateSnapshot.capture(), seeds


class _Script:
    """Cells of a program that is no notebook: there is no other one, and what they write is printed."""

    def __init__(self, mesh: ProcMesh) -> None:
        self._lane = Lane(mesh, GroupStore().form)

    def call(self, function: Callable[[], Any]) -> ValueMesh[Any]:
        lane = self._lane
        output = CellOutput(lane.mesh, Sink(None), lane.slots, raw=False)
        cell = RemoteCell(lane, lane.mesh, function, number=0, want_value=True, output=output)
        results = run_in_foreground(cell)
        return ValueMesh(results.extent, [result.value for result in results.values()])


# What travels.


def _packed(job: Job, function: Callable[..., Any]) -> tuple[dict[str, str], list[Any]]:
    """Pickle a job, once for all ranks, with the text of the notebook's cells that its code comes from.

    Raises:
        PayloadError: something in it can't be pickled.
    """
    try:
        payload, frames = dump(job, "the Trainer")
    except PayloadError as error:
        if isinstance(error.__cause__, MemoryError):
            raise
        raise PayloadError(_culprit_text(job, function, error)) from None
    parts: tuple[Frame, ...] = (payload.data, *frames) if payload.data else frames
    code = bytes(parts[0])  # those after it are tensors
    texts = {
        file: "".join(linecache.getlines(file))
        for file in list(linecache.cache)
        if file.encode() in code and not os.path.exists(file)
    }
    return texts, [pickle.PickleBuffer(part) for part in parts]


def _culprit_text(job: Job, function: Callable[..., Any], error: PayloadError) -> str:
    """Say what of a job can't be pickled: the innermost attribute that can't be."""
    bound = inspect.signature(function).bind(*job.args, **job.kwargs)
    candidates = [*bound.arguments.items(), ("trainer.strategy", job.trainer.strategy)]
    candidates += [(f"trainer.callbacks[{i}]", each) for i, each in enumerate(job.trainer.callbacks)]
    candidates += [(f"trainer.loggers[{i}]", each) for i, each in enumerate(job.trainer.loggers)]
    for name, value in candidates:
        if (why := _trouble(value)) is not None:
            name, value, why = _innermost(name, value, why)
            return (
                f"{name} (a {type(value).__name__}) can't be sent to the ranks: {why}. Make it there, such as in setup() or "
                "configure_model(), or leave it out in __getstate__()"
            )
    return f"the Trainer can't be sent to the ranks: {error}"


def _innermost(name: str, value: Any, why: str) -> tuple[str, Any, str]:
    for _ in range(_DEPTH):
        for inner, part in _parts(value):
            if (trouble := _trouble(part)) is not None:
                name, value, why = name + inner, part, trouble
                break
        else:
            break
    return name, value, why


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    else:
        for key, part in getattr(value, "__dict__", {}).items():
            if key == "_modules":
                yield from ((f".{name}", module) for name, module in part.items())
            else:
                yield f".{key}", part


def _trouble(value: Any) -> str | None:
    """Why a value can't be pickled; None if it can."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
