"""Loads a checkpoint into existing objects, with any number of ranks and any sharding."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata

from monarch_kernel.errors import CheckpointError, format_ranks
from monarch_kernel.features.record.notes import note_event
from monarch_kernel.train.checkpoint.atomic_directory import VALUES, Contents, as_path, describe, values_of
from monarch_kernel.train.checkpoint.checksums import Checksums, damaged
from monarch_kernel.train.checkpoint.dcp import Refused, group_here, read
from monarch_kernel.train.checkpoint.disk_errors import why
from monarch_kernel.train.checkpoint.resizing import ON_RESIZE, Loaded, Resize
from monarch_kernel.train.checkpoint.sampler import misfit
from monarch_kernel.train.checkpoint.saving import refuse_unnamed, settle
from monarch_kernel.train.checkpoint.states import States, check_fits, collect, put_back
from monarch_kernel.train.checkpoint.unpickling import INDEX, load_index, load_objects
from monarch_kernel.train.generators import stateful
from monarch_kernel.train.run_on_all import run_on_all_ranks

__all__ = ["load", "verify"]


@dataclass(frozen=True)
class _Found:
    """What a rank has read of a checkpoint before it changes anything.

    Attributes:
        contents: a description of the checkpoint.
        states: the states of the objects to load.
        index: the locations of tensors.
        values: the plain values.
        resize: a change of the number of ranks, if any.
        by_rank: the values of each rank that saved, if the number of ranks has changed.
        stay: names of objects that get no state.
    """

    contents: Contents
    states: States
    index: Metadata
    values: dict[str, Any]
    resize: Resize | None
    by_rank: list[Mapping[str, Any]]
    stay: list[str]


def load(
    path: str | os.PathLike[str] | None, *unnamed: Any, on_resize: str = "refuse", **things: Any
) -> dict[str, Any]:
    """Load a checkpoint. All ranks call this, with the same names.

    The number of ranks and the sharding of the model may differ from those of the save.

    Args:
        path: path of the checkpoint.
        unnamed: refused, as each object needs a name.
        on_resize: what to do with the state of other objects that differs by rank, if the number of ranks has changed.
            Positions of a `Sampler` are divided among the new ranks. Other state is refused, or, with ``reseed``, generators
            get new seeds, and other objects stay as the program has created them.
        things: modules, optimizers, random number generators, and objects with ``load_state_dict()``, which get the state saved
            under these names. Each rank gets its own state.

    Returns:
        The plain values that were saved, by name.

    Raises:
        CheckpointError: there is no checkpoint, it does not fit, it is damaged, or its index or values would run code; then
            nothing has changed. Or it can't be read; then the state of the objects is undefined. Or an object refuses its
            state on any rank; the message says which objects have been loaded by then.
        TypeError: an object has no name, or ``path`` is no path.
        ValueError: ``on_resize`` is something else, or ``path`` is empty.
    """
    # First the ranks compare their calls: one that refused its own alone would leave the others in a collective.
    settle("checkpoint.load(...)")
    group = group_here()
    found: list[_Found] = []

    def look() -> list[str]:
        if on_resize not in ON_RESIZE:
            raise ValueError(f"checkpoint.load(on_resize={on_resize!r}): use 'refuse' or 'reseed'")
        if path is None:
            raise CheckpointError("there is no checkpoint to load: checkpoint.latest(folder) returned None")
        refuse_unnamed("load", unnamed)
        as_path(path, "load")
        found.append(_look(path, things, group, on_resize))
        return list(things)

    names = run_on_all_ranks(group, f"load {path}", look, CheckpointError)
    if any(set(each) != set(things) for each in names):
        listed = "\n".join(f"  rank {rank}: {', '.join(each) or 'none'}" for rank, each in enumerate(names))
        raise CheckpointError(f"load {path}: all ranks must give the same names; nothing has changed\n{listed}")
    things = {name: things[name] for name in names[0]}  # one order on all ranks
    its = found[0]
    contents, states = its.contents, its.states
    try:
        if states.tensors:
            read(states.tensors, contents.path, its.index, group)
    except Refused as error:
        raise CheckpointError(
            f"{contents.path} can't be read: on rank {error.rank} {why(error.cause).text}; the state of the loaded objects is "
            "undefined now: load another checkpoint"
        ) from (error.cause if error.is_known else error)
    _apply(things, its, group)
    if group is None or group.rank() == 0:
        note_event("loaded", f"{contents.path}, checksum {contents.checksums or 'none'}: {', '.join(things)}")
    plain = {name: value for name, value in its.values.items() if contents.names.get(name) == "value"}
    return Loaded(plain, contents, 1 if group is None else group.size())


def _look(
    path: str | os.PathLike[str], things: Mapping[str, Any], group: ProcessGroup | None, on_resize: str
) -> _Found:
    """Read everything but tensors, and check that it fits."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    contents = describe(path)
    for name, thing in things.items():
        if not hasattr(stateful(thing), "load_state_dict"):
            raise CheckpointError(
                f"{name} is a {type(thing).__name__}, without load_state_dict(); load() returns values"
            )
    states = collect(things, loads=True)
    check_fits(states, contents)
    sums = Checksums(contents.path, contents.checksums)
    index = load_index(contents.path, sums.content(INDEX))
    values = _values(sums, VALUES, contents)
    resize: Resize | None = None
    by_rank: list[Mapping[str, Any]] = []
    stay: list[str] = []
    others = {name: thing for name, thing in things.items() if states.kinds[name] == "state"}
    if ranks == contents.ranks:
        values |= _values(sums, values_of(rank), contents) if contents.by_rank else {}
        states.values = {name: _state_of(name, values, contents) for name in others}
    else:
        resize = Resize(contents, rank, ranks, on_resize)
        if contents.by_rank & others.keys():
            by_rank = [_values(sums, values_of(each), contents) for each in range(contents.ranks)]
        for name in others:
            for each in by_rank if name in contents.by_rank else [values]:
                _state_of(name, each, contents)
        states.values, stay = resize.states(others, values, by_rank)
    _check_states(others, states, contents)
    if wrong := sums.damaged_tensors(index, states.tensors, rank, ranks):
        raise damaged(contents.path, wrong)
    return _Found(contents, states, index, values, resize, by_rank, stay)


def _check_states(others: Mapping[str, Any], states: States, contents: Contents) -> None:
    """Check that samplers and loaders accept their states."""
    whys = {name: misfit(thing, states.values[name]) for name, thing in others.items() if name in states.values}
    if wrong := {name: why for name, why in whys.items() if why}:
        listed = "\n".join(f"  {name}: {why}" for name, why in wrong.items())
        raise CheckpointError(
            f"the checkpoint {contents.path} does not fit {', '.join(wrong)}; nothing has changed\n{listed}"
        )


def _apply(things: Mapping[str, Any], its: _Found, group: ProcessGroup | None) -> None:
    """Give the objects their states. The ranks agree after each object, so that no rank goes on alone into a collective."""
    states, resize = its.states, its.resize
    # The tensors of modules and optimizers have been read in place by now.
    names = sorted((name for name in things if name not in its.stay), key=lambda name: states.kinds[name] == "state")
    steps: dict[str, Callable[[], None]] = {name: partial(put_back, name, things[name], states) for name in names}
    if resize is not None:
        for name in its.stay:
            steps[name] = partial(resize.reseed, name, stateful(things[name]), its.by_rank)
    for at, (name, step) in enumerate(steps.items()):
        failure: Exception | None = None

        def attempt(step: Callable[[], None] = step) -> str | None:
            nonlocal failure
            try:
                step()
            except Exception as error:  # code of the user
                failure = error
                return f"{type(error).__name__}: {error}"
            return None

        outcomes = run_on_all_ranks(group, f"load {name} of {its.contents.path}", attempt, CheckpointError)
        failed = {rank: text for rank, text in enumerate(outcomes) if text is not None}
        if failed:
            order = list(steps)
            tensors = [other for other in order[at + 1 :] if states.kinds[other] != "state"]
            rest = [other for other in order[at + 1 :] if other not in tensors]
            raise CheckpointError(
                f"{its.contents.path} was loaded only in part: {name}, a {type(things[name]).__name__}, refused its state "
                f"{'' if group is None else f'on {format_ranks(failed)} '}({next(iter(failed.values()))}); "
                f"{_progress(order[:at], [name, *tensors], rest)}. Create the objects again before you load again"
            ) from failure
    if resize is not None and its.stay and resize.rank == 0:
        print(resize.said({name: stateful(things[name]) for name in its.stay}), file=sys.stderr, flush=True)


def _progress(loaded: Sequence[str], partly: Sequence[str], rest: Sequence[str]) -> str:
    """Say which objects have changed."""
    parts = []
    for names, suffix in ((loaded, " been loaded"), (partly, " not, or only in part"), (rest, " not")):
        if names:
            parts.append(f"{_and(names)} {'has' if len(names) == 1 else 'have'}{suffix}")
    return "; ".join(parts)


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def verify(path: str | os.PathLike[str]) -> Contents:
    """Verify all files of a checkpoint, in a single process without ranks.

    Returns:
        The contents of the checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged; the message lists the files, the ranks that wrote them, and
            the tensors. Or an earlier version wrote it, without checksums.
    """
    contents = describe(path)
    sums = Checksums(contents.path, contents.checksums)
    if not contents.checksums:
        raise CheckpointError(
            f"{contents.path} was written by an earlier version of monarch_kernel, which stored no checksums: it can be "
            "loaded, but not verified; save it again"
        )
    names = [INDEX, VALUES, *(values_of(rank) for rank in range(contents.ranks) if contents.by_rank)]
    files = {name: sums.intact(name) for name in names}
    lines = [sums.line(name) for name, content in files.items() if content is None]
    if (index := files[INDEX]) is not None:
        lines += sums.damaged_tensors(load_index(contents.path, index), contents.names)
    if lines:
        raise damaged(contents.path, lines)
    return contents


def _values(sums: Checksums, name: str, contents: Contents) -> dict[str, Any]:
    """Read a file with values."""
    plain = {key for key, kind in contents.names.items() if kind in ("state", "value")}
    content = sums.content(name, plain - contents.by_rank if name == VALUES else contents.by_rank)
    values = load_objects(io.BytesIO(content), contents.path / name)
    if not isinstance(values, dict):
        raise CheckpointError(f"{contents.path / name} was not read: it contains a {type(values).__name__}, not values")
    return values


def _state_of(name: str, values: Mapping[str, Any], contents: Contents) -> Any:
    """Find the state of an object among the values of a rank."""
    if name not in values:
        raise CheckpointError(
            f"{contents.path} lists the state of {name}, and does not have it; load another checkpoint"
        )
    return values[name]
