"""Copies the state of rank 0 back to the notebook's Trainer and its objects.

References to the Trainer, its module, its parameters, callbacks and loggers are pickled as names (`_known`), and resolve to the
notebook's objects: an optimizer from rank 0 refers to the parameters of the notebook's module. Each attribute of callbacks and
loggers is pickled separately. One that can't be pickled (an open file, a progress bar) keeps its value in the notebook.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

from monarch_kernel.base.text import plural
from monarch_kernel.net.wire.shared_classes import ByValuePickler

__all__ = ["dump_trainer_state", "load_trainer_state"]

_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_RESUMES = ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint")


def dump_trainer_state(trainer: Any, with_optimizers: bool) -> bytes:
    """Pickle the state of a Trainer, without the weights; rank 0 calls it."""
    logged = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics
    news: dict[str, Any] = {
        "state": trainer.state,
        "should_stop": trainer.should_stop,
        "loops": {name: getattr(trainer, name).state_dict() for name in _LOOPS},
        "limits": (trainer.fit_loop.min_epochs, trainer.fit_loop.max_epochs),
        "metrics": dict(zip(_METRICS, map(dict, logged), strict=True)),
    }
    known = _known(trainer)
    names = {id(each): name for name, each in known}
    news["attributes"] = {
        name: (type(each).__name__, dict(_attributes(each, names)))
        for name, each in known
        if name[0] in ("callbacks", "loggers")
    }
    if with_optimizers:
        news["optimizers"] = _try_pickle((trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs), names)
    data = _try_pickle(news, names)
    assert data is not None  # plain values and bytes
    return data


def load_trainer_state(trainer: Any, weights: dict[str, Any] | None, data: bytes) -> None:
    """Load the state that `dump_trainer_state` pickled on rank 0 into the notebook's Trainer and its objects."""
    if weights is not None:
        _take_weights(trainer, weights)
    known = dict(_known(trainer))
    news = _unpickle(data, known)
    trainer.state = news["state"]
    trainer.should_stop = news["should_stop"]
    trainer.fit_loop.min_epochs, trainer.fit_loop.max_epochs = news["limits"]
    for name, state in news["loops"].items():
        loop = getattr(trainer, name)
        loop.load_state_dict(state)
        _go_on(loop)
    for name, metrics in news["metrics"].items():
        setattr(trainer._logger_connector, name, metrics)
    for name, (kind, attributes) in news["attributes"].items():
        mine = vars(known[name])
        if type(known[name]).__name__ != kind:  # a progress bar of another class
            continue
        for key, pickled in attributes.items():
            try:
                mine[key] = _unpickle(pickled, known)
            except Exception:  # some objects can be pickled but not unpickled
                continue
    if news.get("optimizers") is not None:
        trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs = _unpickle(news["optimizers"], known)


def _take_weights(trainer: Any, weights: dict[str, Any]) -> None:
    missing = trainer.lightning_module.load_state_dict(weights, strict=False)
    if missing.unexpected_keys:
        few = ", ".join(missing.unexpected_keys[:3])
        warnings.warn(
            f"the notebook's module lacks {plural(len(missing.unexpected_keys), 'tensor')} of the trained module ({few} ...), "
            "whose layers configure_model() or setup() creates only on the ranks; load them from a checkpoint",
            stacklevel=2,
        )


def _go_on(loop: Any) -> None:
    """Make a loop continue where its copy ended, instead of resuming as from a checkpoint."""
    for name in _RESUMES:
        if name in vars(loop):
            setattr(loop, name, False)
    if "_combined_loader_states_to_load" in vars(loop):
        loop._combined_loader_states_to_load = []
    for each in vars(loop).values():
        if hasattr(each, "load_state_dict") and "trainer" in vars(each):
            _go_on(each)


# Names of objects that both the notebook and the rank have.

Name = tuple[Any, ...]


def _known(trainer: Any) -> list[tuple[Name, Any]]:
    module = trainer.lightning_module
    found: list[tuple[Name, Any]] = [
        (("trainer",), trainer),
        (("strategy",), trainer.strategy),
        (("module",), module),
    ]
    found += [(("parameter", name), each) for name, each in module.named_parameters()]
    found += [(("callbacks", i), each) for i, each in enumerate(trainer.callbacks)]
    found += [(("loggers", i), each) for i, each in enumerate(trainer.loggers)]
    return found


def _attributes(value: Any, names: dict[int, Name]) -> Iterator[tuple[str, bytes]]:
    state = value.__reduce_ex__(4)[2:3]
    for key, part in (state[0] if state and isinstance(state[0], dict) else vars(value)).items():
        pickled = _try_pickle(part, names)
        if pickled is not None:
            yield key, pickled


def _try_pickle(value: Any, names: dict[int, Name]) -> bytes | None:
    file = io.BytesIO()
    try:
        _Pickler(file, names).dump(value)
    except Exception:  # pickling runs code of the user's classes
        return None
    return file.getvalue()


class _Pickler(ByValuePickler):
    def __init__(self, file: io.BytesIO, names: dict[int, Name]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, value: Any) -> Name | None:
        return self._names.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        """Move tensors to the CPU: the notebook may not have their device."""
        import torch

        if type(value) is torch.Tensor and value.device.type != "cpu":
            here: Any = value.cpu()
            return here.__reduce_ex__(5)
        return super().reducer_override(value)


def _unpickle(data: bytes, known: dict[Name, Any]) -> Any:
    return _Unpickler(io.BytesIO(data), known).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: dict[Name, Any]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, name: Name) -> Any:
        return self._known[name]
