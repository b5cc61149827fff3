"""The record that is being written: starts and ends it, says how it is, and removes secrets from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from monarch_kernel.errors import RecordError
from monarch_kernel.features.record.controller import RecordControl
from monarch_kernel.features.record.recorder import Recorder
from monarch_kernel.runtime.controller.session import current_session
from monarch_kernel.train.record.mirroring import Mirror

__all__ = ["folders", "mirror", "redact", "start", "status", "stop"]

_recorders: list[Recorder] = []

NONE = "no record runs; %mesh record FOLDER starts one"


def start(folder: str | os.PathLike[str], *, every: int = 100) -> Recorder:
    """Record what runs from now on, on all meshes of this program, into a folder.

    A notebook calls it with ``%mesh record FOLDER``, which also records its cells.

    Args:
        folder: a new folder, or one without a record.
        every: the number of steps of a loop between two hashes of the parameters.

    Raises:
        RecordError: a record runs already, the folder holds one, or it can't be written to.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise RecordError(f"every={every!r}: pass a number of steps of 1 or more")
    control = RecordControl(current_session().runtime)
    if control.recorder is not None:
        raise RecordError(f"a record runs already, in {control.recorder.folder}; end it with %mesh record close")
    recorder = Recorder(os.fspath(folder), every=every)
    control.start(recorder)
    _recorders.append(recorder)
    return recorder


def folders() -> dict[Path, bool]:
    """Return the folders of the records of this process, and whether each is being written."""
    return {each.folder: not each.is_closed and not each.problem for each in _recorders}


def stop() -> str:
    """End the record, and return what it holds, as text; empty if none runs."""
    recorder = RecordControl(current_session().runtime).stop()
    while _mirrors:
        _mirrors.pop().close()
    return "" if recorder is None else recorder.text()


def status() -> str:
    """Return what has been recorded, and what can't be replayed, as text."""
    recorder = RecordControl(current_session().runtime).recorder
    if recorder is None:
        return NONE
    recorder.flush()
    return recorder.text()


_mirrors: list[Mirror] = []


def mirror(to: str, **options: Any) -> Mirror:
    """Send what the record that runs holds, and what it gets until it ends, to an experiment tracker.

    One run of the tracker holds all ranks: the mean of each metric, its least and greatest value where ranks differ, and knobs.
    Steps that run again after a recovery or a rollback are sent again.

    Args:
        to: ``wandb``, ``mlflow`` or ``trackio``, which must be installed where the notebook runs.
        options: for the tracker: of ``wandb.init`` or ``trackio.init``; or ``tracking_uri`` and ``experiment`` for MLflow.

    Raises:
        RecordError: no record runs, or the tracker is unknown, not installed, or refuses the options.
    """
    recorder = RecordControl(current_session().runtime).recorder
    if recorder is None:
        raise RecordError(f"{NONE}. A record that has ended: record.open(FOLDER).send({to!r}, ...)")
    recorder.flush()
    _mirrors.append(Mirror(recorder.folder, to, options))
    return _mirrors[-1]


def redact(pattern: str) -> None:
    """Remove what matches a regular expression from the record that runs, now and from now on.

    `Record.redact` does it in a record that has ended.

    Raises:
        RecordError: no record runs, or the pattern is not valid.
    """
    recorder = RecordControl(current_session().runtime).recorder
    if recorder is None:
        raise RecordError(f"{NONE}. In a record that has ended: record.open(FOLDER).redact(pattern)")
    recorder.redact(pattern)
