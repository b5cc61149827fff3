"""The program of each rank: runs the method of the notebook's Trainer on its own copy."""

from __future__ import annotations

import importlib
import linecache
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_kernel.integrations.lightning.predictions import batches_of
from monarch_kernel.integrations.lightning.sync_back import dump_trainer_state
from monarch_kernel.net.wire.codec import Frame, load
from monarch_kernel.net.wire.messages import Payload

__all__ = ["Outcome", "TrainerCall", "run_job"]


@dataclass(frozen=True)
class TrainerCall:
    """A call of a Trainer's method, as it is sent to the ranks.

    Attributes:
        method: the name of the method.
        trainer: the Trainer, without the mesh.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        state: global state of the calling process: Lightning's snapshot, and environment variables.
    """

    method: str
    trainer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: tuple[Any, dict[str, str]]


@dataclass(frozen=True)
class Outcome:
    """The reply of a rank.

    Attributes:
        result: the result of the call.
        batches: which samples each batch of predictions is for; None if the result is no predictions.
        weights: the weights of the module, from rank 0 after training; else None.
        news: the other state that changed, from rank 0 (see `sync_back`); empty from other ranks.
    """

    result: Any
    batches: list[list[list[int]]] | None = None
    weights: dict[str, Any] | None = None
    news: bytes = b""


def run_job(texts: Mapping[str, str], parts: Sequence[Frame]) -> Outcome:
    """Run a job that was packed in the notebook.

    Args:
        texts: file -> source text, for code whose file does not exist on this machine.
        parts: the job, pickled.

    Raises:
        BaseException: the exception of the Trainer.
    """
    for file, text in texts.items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    job: TrainerCall = load(Payload(b"", len(parts)), parts)
    trainer, strategy = job.trainer, job.trainer.strategy
    snapshot, variables = job.state
    snapshot.restore()
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    strategy.enter_rank(_environment(strategy.fabric))
    trainer._accelerator_connector.cluster_environment = strategy.cluster_environment
    _use_plain_bar(strategy, trainer)
    result = _call(strategy, trainer, getattr(trainer, job.method), job)
    is_first = strategy.is_global_zero
    is_fit = trainer.state.fn == "fit"
    weights = strategy.full_state() if is_fit else None  # a collective: each rank may have a shard
    batches = batches_of(trainer) if trainer.state.fn == "predict" and result is not None else None
    if batches is not None:
        result = trainer.predict_loop._predictions
    if not is_first:
        return Outcome(result if batches is not None else None, batches)
    return Outcome(result, batches, weights, dump_trainer_state(trainer, is_fit and strategy.can_send_optimizers()))


def _environment(fabric: str) -> Any:
    return importlib.import_module(f"{fabric}.plugins.environments").TorchElasticEnvironment()


def _use_plain_bar(strategy: Any, trainer: Any) -> None:
    """Replace Rich's progress bar, Lightning's default, which updates only in a terminal, by tqdm's."""
    progress = strategy.part("callbacks.progress")
    for i, callback in enumerate(trainer.callbacks):
        if isinstance(callback, progress.RichProgressBar):
            trainer.callbacks[i] = progress.TQDMProgressBar(refresh_rate=callback.refresh_rate, leave=callback._leave)


def _call(strategy: Any, trainer: Any, method: Callable[..., Any], job: TrainerCall) -> Any:
    """Call the method like Lightning does, but without Lightning's changes to a process that it assumes to own."""
    call = strategy.part("trainer.call")
    try:
        return method(*job.args, **job.kwargs)
    except strategy.part("utilities.exceptions")._TunerExitException:
        call._call_teardown_hook(trainer)
        trainer._teardown()
        trainer.state.status = strategy.part("trainer.states").TrainerStatus.FINISHED
        trainer.state.stage = None
    except BaseException as error:
        strategy.is_over = True
        try:
            call._interrupt(trainer, error)
            trainer._teardown()
        except Exception:  # of a callback's on_exception(); the user must see the first exception
            traceback.print_exc()
        raise
    return None
