"""The launcher: runs methods of the notebook's Trainer on the ranks of a mesh."""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import os
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.errors import PayloadError
from monarch_kernel.integrations.lightning.predictions import in_order
from monarch_kernel.integrations.lightning.program import TrainerCall, run_job
from monarch_kernel.integrations.lightning.registry import find_notebook
from monarch_kernel.integrations.lightning.sync_back import load_trainer_state
from monarch_kernel.net.wire.codec import Frame, dump, trace
from monarch_kernel.net.wire.unpicklable import find_culprit
from monarch_kernel.notebook.cells.cell import CellQueue, RemoteCell, run_in_foreground
from monarch_kernel.notebook.cells.display import Sink
from monarch_kernel.notebook.cells.held_interrupts import HeldInterrupts
from monarch_kernel.notebook.cells.output import CellOutput
from monarch_kernel.train.process_group.worker import GroupStore

__all__ = ["LaunchFailed", "MeshLauncher"]


class LaunchFailed(BaseException):
    """Ranks failed or were interrupted.

    When a launcher raises KeyboardInterrupt, Lightning ends the program, and it reports any exception to callbacks, which the
    ranks have done already. So the launcher raises this exception, which only Lightning's last handler catches and passes to
    `OnMesh.on_exception`, which raises the original exception for the user.
    """

    def __init__(self, error: BaseException, trainer: Any) -> None:
        super().__init__(str(error))
        self._error = error
        self._trainer = trainer
        self._callbacks = trainer.callbacks
        trainer.callbacks = []

    def raise_own(self) -> NoReturn:
        """Leave the Trainer in the interrupted state, and raise the exception of the ranks."""
        trainer = self._trainer
        trainer.callbacks = self._callbacks
        trainer._teardown()
        trainer.state.stage = None
        raise self._error from None


class MeshLauncher:
    """Runs methods of a Trainer on all ranks of a mesh; implements Lightning's interface of a launcher.

    Args:
        strategy: the strategy that uses this launcher.
        mesh: a whole mesh.
    """

    is_interactive_compatible = True

    def __init__(self, strategy: Any, mesh: ProcMesh) -> None:
        self._strategy = strategy
        self._mesh = mesh
        self._script: _Script | None = None

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run a method of the Trainer on all ranks, and load the resulting state into the notebook's objects.

        Raises:
            LaunchFailed: the method failed on ranks, was interrupted, or something that must be sent can't be pickled.
        """
        if trainer is None:
            raise TypeError("MonarchStrategy runs methods of a Trainer, but this call has no Trainer")
        job = TrainerCall(function.__name__, trainer, args, kwargs, self._globals())
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
            # The traceback of an error holds this frame. CPython 3.11 crashes when its garbage collector finds memory views in
            # a cycle with the object that exports them, so this frame must not keep any.
            parts.clear()
        outcomes = values.values()
        load_trainer_state(trainer, outcomes[0].weights, outcomes[0].news)
        if outcomes[0].batches is None:
            return outcomes[0].result
        return in_order([(each.result, each.batches) for each in outcomes])

    def kill(self, signum: int) -> None:
        """Do nothing: ranks end with their mesh, not with the notebook's Trainer."""

    def _globals(self) -> Any:
        """Return the global state to copy to the ranks: seeds, the state of random generators, flags of torch."""
        module = importlib.import_module(f"{self._strategy.package}.strategies.launchers.multiprocessing")
        seeds = {name: os.environ[name] for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS") if name in os.environ}
        return module._GlobalStateSnapshot.capture(), seeds


class _Script:
    """Runs cells for a script, one at a time, and prints their output."""

    def __init__(self, mesh: ProcMesh) -> None:
        self._lane = CellQueue(mesh, GroupStore().form)

    def call(self, function: Callable[[], Any]) -> ValueMesh[Any]:
        cell_queue = self._lane
        output = CellOutput(cell_queue.mesh, Sink(None), cell_queue.slots, raw=False)
        with HeldInterrupts() as interrupts:
            cell = RemoteCell(cell_queue, cell_queue.mesh, function, number=0, want_value=True, output=output)
            results = run_in_foreground(cell, interrupts)
        return ValueMesh(results.extent, [result.value for result in results.values()])


# Packing a job.


def _packed(job: TrainerCall, function: Callable[..., Any]) -> tuple[dict[str, str], list[Any]]:
    """Pickle a job once for all ranks, with the source of the notebook cells that define its code.

    Raises:
        PayloadError: something in it can't be pickled.
    """
    try:
        payload, frames = dump(job, "the Trainer", roots={})
    except PayloadError as error:
        if isinstance(error.__cause__, MemoryError):
            raise
        raise PayloadError(_culprit_text(job, function, error)) from None
    parts: tuple[Frame, ...] = (payload.data, *frames) if payload.data else frames
    code = bytes(parts[0])  # the other parts are tensors
    texts = {
        file: "".join(linecache.getlines(file))
        for file in list(linecache.cache)
        if file.encode() in code and not os.path.exists(file)
    }
    return texts, [pickle.PickleBuffer(part) for part in parts]


def _culprit_text(job: TrainerCall, function: Callable[..., Any], error: PayloadError) -> str:
    """Name the part of a job that can't be pickled."""
    roots = dict(inspect.signature(function).bind(*job.args, **job.kwargs).arguments)
    roots["trainer.strategy"] = job.trainer.strategy
    roots |= {f"trainer.callbacks[{i}]": each for i, each in enumerate(job.trainer.callbacks)}
    roots |= {f"trainer.loggers[{i}]": each for i, each in enumerate(job.trainer.loggers)}
    culprit = find_culprit(roots, trace)
    if culprit is None:
        return f"the Trainer can't be sent to the ranks: {error}"
    return (
        f"{culprit.path} (a {type(culprit.value).__name__}) can't be sent to the ranks: {type(culprit.error).__name__}: "
        f"{culprit.error}. Create it on the ranks, for example in setup() or configure_model(), or leave it out in "
        "__getstate__()"
    )
