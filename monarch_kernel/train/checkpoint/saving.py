"""Saves a checkpoint, either at once or in the background while training continues."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from monarch_kernel.base.text import format_nbytes, plural
from monarch_kernel.errors import CheckpointError, format_ranks
from monarch_kernel.features.record.notes import note_event
from monarch_kernel.train.checkpoint.atomic_directory import (
    VALUES,
    absolute,
    as_path,
    begin,
    finish,
    move,
    previous,
    values_of,
)
from monarch_kernel.train.checkpoint.checksums import CHECKSUMS, Part, checksum
from monarch_kernel.train.checkpoint.checksums import dumped as dumped_checksums
from monarch_kernel.train.checkpoint.dcp import Refused, files_of, group_here, write
from monarch_kernel.train.checkpoint.disk_errors import why
from monarch_kernel.train.checkpoint.hugging_face import (
    bytes_of,
    is_of_hugging_face,
    other_files,
    plan_files,
    write_about,
    write_file,
    write_index,
)
from monarch_kernel.train.checkpoint.replicas import (
    SAME_MODEL,
    Digests,
    Place,
    buffers_text,
    differing,
    of_tensors,
    of_values,
    refusal,
    summary,
)
from monarch_kernel.train.checkpoint.states import States, check_loadable, collect, dumped, flat
from monarch_kernel.train.run_on_all import run_on_all_ranks

__all__ = ["Saving", "refuse_unnamed", "save", "settle"]

T = TypeVar("T")

_SHOWN_AFTER_S = 1.0
_EVERY_S = 0.5
_ROOM = 1.05  # overhead of a file system
_FORMATS = ("monarch", "hf")
_SHOWN = 40


class Saving:
    """A checkpoint that is being saved in the background."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._is_reported = False
        self._is_cut = False

    def __repr__(self) -> str:
        state = "in progress" if not self.done() else "complete" if self._error is None else "failed"
        return f"<Saving {self.path}: {state}>"

    def done(self) -> bool:
        """Whether the save has ended."""
        return self._over.is_set()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete, and return its path.

        Raises:
            CheckpointError: it could not be written; a previous checkpoint is intact.
            TimeoutError: it was not complete within ``timeout`` seconds; the save continues.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"{self.path} is not complete after {timeout} s; the save continues")
        if self._error is not None:
            self._is_reported = True
            raise self._error
        return self.path

    def _end(self, error: BaseException | None, *, is_cut: bool = False) -> None:
        """End the save; ``is_cut``: the process group failed, not the work of a rank."""
        self._error = error
        self._is_cut = is_cut
        self._over.set()

    @property
    def _is_unreported(self) -> bool:
        return self._error is not None and not self._is_reported


class _Background:
    """The background save of this process, and its separate process group, because training runs collectives meanwhile."""

    def __init__(self) -> None:
        self.saving: Saving | None = None
        self.reported_buffers: set[str] = set()
        self._group: tuple[object, dist.ProcessGroup] | None = None
        atexit.register(self._wait)

    def settle(self, call: str) -> None:
        """Wait for the previous save, and raise its error on all ranks unless the program has already received it; collective.

        If it failed with a process group that no longer exists, prints once that it was abandoned.

        Args:
            call: text of the current call, which must be the same on all ranks.

        Raises:
            CheckpointError: the previous save failed, or the ranks make different calls.
        """
        group = group_here()

        def end() -> tuple[str, str, bool]:
            saving, self.saving = self.saving, None
            if saving is None:
                return call, "", False
            saving._over.wait()
            is_unreported = saving._is_unreported
            if is_unreported and not (saving._is_cut and self._is_formed_again()):
                saving.result()
            return call, str(saving.path) if is_unreported else "", saving._error is None

        ended = run_on_all_ranks(group, "the previous background checkpoint", end, CheckpointError)
        given_up = [(rank, path) for rank, (_, path, _) in enumerate(ended) if path]
        if given_up and not any(is_complete for _, _, is_complete in ended):
            first, path = given_up[0]
            if group is None or group.rank() == first:
                print(
                    f"the checkpoint {path} was abandoned when the process group was formed again; {previous(Path(path))}",
                    file=sys.stderr,
                    flush=True,
                )
        _check_same([call for call, _, _ in ended])

    def _is_formed_again(self) -> bool:
        """Whether the group of all ranks was formed again since the save started."""
        return self._group is not None and self._group[0] is not group_here()

    def _wait(self) -> None:
        """Wait for the save when the process exits, and print its error."""
        if self.saving is not None:
            self.saving._over.wait()
            if self.saving._is_unreported:
                print(f"{type(self.saving._error).__name__}: {self.saving._error}", file=sys.stderr, flush=True)

    def group(self) -> dist.ProcessGroup | None:
        """The group for background saves; collective at the first call after a group was formed."""
        default = group_here()
        if default is None:
            self._group = None
            return None
        if self._group is None or self._group[0] is not default:
            self._group = (default, dist.new_group(backend="gloo"))
        return self._group[1]


_background = _Background()
settle = _background.settle


def save(
    path: str | os.PathLike[str], *unnamed: Any, wait: bool = True, format: str = "monarch", **things: Any
) -> Saving | None:
    """Save a checkpoint. All ranks call this, with the same names.

    The checkpoint appears at ``path`` once it is complete; until then, and if the save fails, an existing checkpoint stays.

    Args:
        path: path of a directory that all ranks can reach.
        unnamed: refused, as each object needs a name.
        wait: False: copy tensors to host memory, and write them in the background while training continues.
        format: ``"hf"`` writes one model in the format of Hugging Face, for other programs: whole tensors in safetensors files,
            its configuration, and what else has ``save_pretrained``, such as a tokenizer. `load` does not read it.
        things: modules, optimizers, objects with ``state_dict()``, random number generators, and plain values. States and
            values that differ between ranks are saved for each rank. Tensors of modules and optimizers must be the same on all
            ranks, unless they are sharded; of buffers that differ, the values of rank 0 are saved.

    Returns:
        A handle, if ``wait`` is False.

    Raises:
        CheckpointError: this save, or the previous background save, failed on any rank. Or the ranks pass different paths or
            names, or have different tensors of a module or an optimizer.
        TypeError: there is nothing to save, an object has no name, or ``path`` is no path.
        ValueError: ``path`` is empty.
    """
    # First the ranks compare their calls: one that refused its own alone would leave the others in a collective.
    _background.settle(_call_text(path, wait, format, things, len(unnamed)))
    where = as_path(path, "save")
    refuse_unnamed("save", unnamed)
    if not isinstance(wait, bool):
        raise TypeError(f"checkpoint.save(wait=...) takes True or False, not a {type(wait).__name__}")
    if not things:
        raise TypeError("nothing to save: checkpoint.save(path, model=model, optimizer=optimizer, step=step)")
    if format not in _FORMATS:
        raise ValueError(f"checkpoint.save(format=...) takes one of {', '.join(map(repr, _FORMATS))}, not {format!r}")
    if format == "hf" and not wait:
        raise ValueError(
            "checkpoint.save(format='hf') gathers tensors, so it can't go on beside training: leave wait=False out"
        )
    group = group_here() if wait else _background.group()
    writers: list[_Writer] = []

    def begin_here() -> dict[Place, bytes]:
        if format == "hf":
            writers.append(_model_writer(where, things, group))
        else:
            writers.append(_Writer(where, collect(things), group, copies=not wait))
        return summary(writers[0].digests)

    summaries = run_on_all_ranks(group, f"save {where}", begin_here, CheckpointError)
    writer = writers[0]
    writer.divide_values(summaries)
    if wait:
        writer.write()
        return None
    saving = _background.saving = Saving(where)

    def go_on() -> None:
        try:
            writer.write()
        except BaseException as error:  # `Saving.result` raises it
            if writer.is_complete:  # another rank or the group has died, after the checkpoint was complete
                saving._end(None)
            else:
                saving._end(_as_checkpoint_error(where, error), is_cut=_is_of_group(error))
        else:
            saving._end(None)

    threading.Thread(target=go_on, name="monarch-checkpoint", daemon=True).start()
    return saving


def refuse_unnamed(function: str, unnamed: tuple[Any, ...]) -> None:
    """Refuse objects without a name, which the checkpoint needs.

    Raises:
        TypeError: there are some.
    """
    if unnamed:
        raise TypeError(
            f"checkpoint.{function}() takes each object under its name, not a bare {type(unnamed[0]).__name__}: "
            f"checkpoint.{function}(path, model=model, optimizer=optimizer)"
        )


def _call_text(path: Any, wait: object, format: object, things: Mapping[str, Any], n_unnamed: int) -> str:
    where = str(absolute(path)) if isinstance(path, (str, os.PathLike)) else path
    shown = repr(where) if where is None or isinstance(where, str) else f"a {type(where).__name__}"
    how = [] if wait is True else [f"wait={wait}" if isinstance(wait, bool) else f"wait=a {type(wait).__name__}"]
    how += [] if format == _FORMATS[0] else [f"format={str(format)[:_SHOWN]!r}"]
    given = [shown, *["..."] * n_unnamed, *how, *(f"{name}=..." for name in sorted(things))]
    return f"checkpoint.save({', '.join(given)})"


def _check_same(calls: list[str]) -> None:
    """Check that all ranks make the same call; otherwise parts of objects that only some of them name would be lost."""
    if len(different := dict.fromkeys(calls)) == 1:
        return
    listed = [f"{format_ranks(rank for rank, its in enumerate(calls) if its == call)} {call}" for call in different]
    raise CheckpointError(
        f"nothing was saved or loaded, because the ranks make different calls: {'; '.join(listed)}. Use the same path and "
        "names on all ranks"
    )


def _as_checkpoint_error(path: Path, error: BaseException) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    found = why(error)
    wrapped = CheckpointError(f"{path} was not saved: {found.text}; {previous(path)}. {found.remedy or 'Save again'}")
    wrapped.__cause__ = error
    return wrapped


def _is_of_group(error: BaseException) -> bool:
    """Whether the group failed, so that ranks could not exchange failures; else a failure is a `CheckpointError` on all."""
    if isinstance(error.__cause__, Refused):
        return not error.__cause__.is_known
    return not isinstance(error, CheckpointError)


class _Writer:
    """This rank's part of one save.

    Attributes:
        digests: digests of the plain values.
        by_rank: names of plain values that differ between ranks, once `divide_values` has found them.
        is_complete: whether the checkpoint is at its path; known on rank 0 only.
    """

    def __init__(self, path: Path, states: States, group: dist.ProcessGroup | None, *, copies: bool) -> None:
        self.path = path
        self.group = group
        self.is_complete = False
        self._rank = 0 if group is None else dist.get_rank(group)
        self.is_first = self._rank == 0
        self.kinds = states.kinds
        self.tensors = _copied(states.tensors) if copies else states.tensors
        check_loadable(states.values)  # on all ranks, so that all of them refuse a value
        self.values = states.values
        self.by_rank: list[str] = []
        self.digests = of_values(states.values) if group is not None else {}
        self._buffers = states.buffers
        self._replicas: Digests = {}
        self._shared = self._own = b""
        self._parts: dict[str, list[Part]] = {}  # of the files that this rank has written
        self.flat = flat(self.tensors)
        check_loadable({name: value for name, value in self.flat.items() if not isinstance(value, torch.Tensor)})
        self.nbytes = sum(_local_nbytes(value, self.is_first) for value in self.flat.values())

    def write(self) -> None:
        """Write the checkpoint; collective."""
        making = next(place for place in self._run_on_all_ranks(self._begin) if place is not None)
        try:
            by_rank = self._run_on_all_ranks(
                lambda: (socket.gethostname(), _free(making), self.nbytes, self._summary())
            )
            needed = [each[:3] for each in by_rank]
            self._check_replicas([each[3] for each in by_rank])
            self._run_on_all_ranks(lambda: _check_room(self.path, needed))
            with _Progress(self.path.name, making, sum(nbytes for _, _, nbytes in needed), self.is_first):
                self._run_on_all_ranks(lambda: self._write_values(making))
                self._write_tensors(making)
            parts = self._run_on_all_ranks(lambda: self._parts)
            self._run_on_all_ranks(lambda: self._finish(making, parts))
        except BaseException:
            if self.is_first:
                shutil.rmtree(making, ignore_errors=True)
            raise

    def divide_values(self, summaries: list[dict[Place, bytes]]) -> None:
        """Find the plain values that differ between ranks, and serialise all of them as they are now; collective.

        Args:
            summaries: summaries of the digests, by rank.
        """
        found = differing(self._run_on_all_ranks(lambda: self.digests)) if differing(summaries) else {}
        self.by_rank = sorted({name.partition(".")[0] for name, _ in found})
        self._own = dumped({name: self.values[name] for name in self.by_rank}) if self.by_rank else b""
        if self.is_first:
            self._shared = dumped({name: value for name, value in self.values.items() if name not in self.by_rank})
        self.nbytes += len(self._own)

    def _summary(self) -> dict[Place, bytes]:
        if self.group is not None:
            self._replicas = of_tensors(self.flat, self.group.size())
        return summary(self._replicas)

    def _check_replicas(self, summaries: list[dict[Place, bytes]]) -> None:
        """Check that ranks have the same values of tensors that are stored once; of buffers, rank 0 writes its own; collective.

        Buffers that differ are allowed: with `torch.nn.BatchNorm1d` each rank has statistics of the batches that it saw, and
        DistributedDataParallel replaces them by those of rank 0 before the next forward.

        Raises:
            CheckpointError: tensors differ; the message lists the names and the ranks.
        """
        if not differing(summaries):
            return
        by_rank = self._run_on_all_ranks(lambda: (self._replicas, self._buffers))
        found = differing([each for each, _ in by_rank])
        buffers = {name for name, _ in found} & set().union(*(names for _, names in by_rank))
        if others := {key: ranks for key, ranks in found.items() if key[0] not in buffers}:
            raise refusal(self.path, others, SAME_MODEL)
        if not self.is_first:
            for full in buffers:
                name, _, key = full.partition(".")
                self.tensors[name].pop(key, None)
        elif new := sorted(buffers - _background.reported_buffers):
            _background.reported_buffers.update(new)
            print(buffers_text(self.path, new), file=sys.stderr, flush=True)

    def _run_on_all_ranks(self, do: Callable[[], T]) -> list[T]:
        def checked() -> T:
            try:
                return do()
            except CheckpointError:
                raise
            except Exception as error:
                found = why(error)
                remedy = found.remedy or "Check that all ranks can write there, or use another path"
                raise CheckpointError(
                    f"{self.path} was not saved: {found.text}; {previous(self.path)}. {remedy}"
                ) from error

        return run_on_all_ranks(self.group, f"save {self.path}", checked, CheckpointError)

    def _begin(self) -> Path | None:
        if not self.is_first:
            return None
        return begin(self.path)

    def _write_values(self, making: Path) -> None:
        if self.is_first:
            self._write_file(making / VALUES, self._shared)
        if self.by_rank:
            self._write_file(making / values_of(self._rank), self._own)

    def _write_file(self, path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._parts[path.name] = [Part(0, len(content), checksum(content))]

    def _write_tensors(self, making: Path) -> None:
        try:
            self._parts |= write(self.tensors, making, self.group)
        except Refused as error:
            # The chain begins with the error of the rank; `Refused` and torch's collection of errors add nothing to it.
            raise CheckpointError(_what_failed(error, self.path, self.nbytes)) from (
                error.cause if error.is_known else error
            )

    def _finish(self, making: Path, parts: list[dict[str, list[Part]]]) -> None:
        if not self.is_first:
            return
        ranks = 1 if self.group is None else self.group.size()
        files = files_of(making) | ({values_of(rank) for rank in range(ranks)} if self.by_rank else set())
        if absent := sorted(name for name in files if not (making / name).is_file()):
            raise CheckpointError(
                f"{self.path}: rank 0 does not find {len(absent)} of {plural(len(files), 'file')}: the hosts have "
                f"different disks there; "
                "use a directory that all hosts share"
            )
        tensors = {
            name: (tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for name, value in self.flat.items()
            if isinstance(value, torch.Tensor)
        }
        sums = dumped_checksums(parts)
        self._write_file(making / CHECKSUMS, sums)
        contents = {"names": self.kinds, "by_rank": self.by_rank, "tensors": tensors, "ranks": ranks}
        finish(making, self.path, {**contents, "torch": torch.__version__, "checksums": checksum(sums)})
        self.is_complete = True
        note_event("checkpoint", f"{self.path}, checksum {checksum(sums)}")


class _ModelWriter(_Writer):
    """A save in the format of Hugging Face: rank 0 writes whole tensors, one after the other."""

    def __init__(
        self, path: Path, module: nn.Module, others: Mapping[str, Any], states: States, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(path, states, group, copies=False)
        self._module = module
        self._others = others
        (name,) = self.kinds
        self._model = {
            key.removeprefix(f"{name}."): value for key, value in self.flat.items() if isinstance(value, torch.Tensor)
        }
        self._files = plan_files(self._model)
        self.nbytes = sum(len(file.header) + file.nbytes for file in self._files) if self.is_first else 0

    def write(self) -> None:
        """Write the model; collective."""
        headers = b"".join(file.header for file in self._files)
        if (
            len({*self._run_on_all_ranks(lambda: checksum(headers))}) > 1
        ):  # they would gather different tensors, and hang
            raise CheckpointError(
                f"{self.path} was not saved: ranks have different parts of the model; all must have all of it"
            )
        super().write()

    def _begin(self) -> Path | None:
        if not self.is_first:
            return None
        others = other_files(self.path)
        if is_of_hugging_face(self.path) and others and not self._others:
            raise CheckpointError(
                f"{self.path} has files that a save would remove ({', '.join(others[:3])}): use another path, or give what "
                "wrote them, such as tokenizer=tokenizer"
            )
        return begin(self.path, replaces=is_of_hugging_face(self.path))

    def _write_values(self, making: Path) -> None:
        pass  # a model has none

    def _write_tensors(self, making: Path) -> None:
        self._run_on_all_ranks(lambda: self._write_model(making))

    def _write_model(self, making: Path) -> None:
        failure: Exception | None = None
        for file in self._files:
            tensors = map(self._whole, file.keys)
            try:
                if self.is_first and failure is None:
                    write_file(making, file, map(bytes_of, tensors))
            except Exception as error:  # raised below: the other ranks wait for this one to gather the rest with them
                failure = error
            for _ in tensors:
                pass
        if failure is not None:
            raise failure

    def _whole(self, key: str) -> torch.Tensor:
        value = self._model[key]
        return value.full_tensor() if isinstance(value, DTensor) else value

    def _finish(self, making: Path, parts: list[dict[str, list[Part]]]) -> None:
        if self.is_first:
            floating = (value.dtype for value in self._model.values() if value.is_floating_point())
            write_index(making, self._files)
            write_about(making, self._module, next(floating, torch.get_default_dtype()), self._others)
            move(making, self.path)


def _model_writer(path: Path, things: Mapping[str, Any], group: dist.ProcessGroup | None) -> _ModelWriter:
    modules = {name: thing for name, thing in things.items() if isinstance(thing, nn.Module)}
    others = {name: thing for name, thing in things.items() if name not in modules}
    unknown = [
        f"{name} (of type {type(thing).__name__})"
        for name, thing in others.items()
        if not callable(getattr(thing, "save_pretrained", None))
    ]
    if len(modules) != 1 or unknown:
        what = f"not {', '.join(unknown)}" if unknown else f"not {len(modules)} models"
        remedy = (
            "save the rest in a second checkpoint, without format" if modules else "pass the model itself, a module"
        )
        raise CheckpointError(
            f"format='hf' holds one model, and objects with save_pretrained() such as a tokenizer, {what}: {remedy}"
        )
    (module,) = modules.values()
    return _ModelWriter(path, module, others, collect(modules), group)


def _copied(tensors: Any) -> Any:
    """Copy tensors to host memory."""
    if isinstance(tensors, dict):
        return {key: _copied(value) for key, value in tensors.items()}
    if isinstance(tensors, (list, tuple)):
        return type(tensors)(_copied(value) for value in tensors)
    if isinstance(tensors, DTensor):  # from_local() would move it back to the device of its mesh
        return DTensor(tensors.to_local().detach().to("cpu", copy=True), tensors._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return tensors.detach().to("cpu", copy=True) if isinstance(tensors, torch.Tensor) else tensors


def _local_nbytes(value: Any, is_first: bool) -> int:
    """Bytes that a rank writes: its own shards, and replicas only if it is the first rank with them."""
    if isinstance(value, DTensor):
        place: list[int] = list(value.device_mesh.get_coordinate() or ())
        is_another = any(at and each.is_replicate() for at, each in zip(place, value.placements))
        return 0 if is_another else int(value.to_local().nbytes)
    return int(value.nbytes) if isinstance(value, torch.Tensor) and is_first else 0


def _free(folder: Path) -> tuple[int, int]:
    """The file system of a folder, and the number of free bytes there."""
    place = os.statvfs(folder)
    return os.stat(folder).st_dev, place.f_bavail * place.f_frsize


def _check_room(path: Path, needed: list[tuple[str, tuple[int, int], int]]) -> None:
    by_disk: dict[tuple[str, int], tuple[int, int]] = {}
    for host, (device, free), nbytes in needed:
        by_disk[host, device] = (free, by_disk.get((host, device), (0, 0))[1] + nbytes)
    for (host, _), (free, nbytes) in by_disk.items():
        if nbytes * _ROOM > free:
            raise CheckpointError(
                f"{path} was not saved: it takes {format_nbytes(nbytes)} on {host}, but {format_nbytes(free)} are free there; "
                f"{previous(path)}. Remove older checkpoints or other files, or save elsewhere"
            )


def _what_failed(error: Refused, path: Path, nbytes: int) -> str:
    """Describe a failed write, with the free space, because torch often reports a full disk as a file that can't be written."""
    found = why(error.cause)
    try:
        free = f", and {format_nbytes(_free(path.parent)[1])} are free in {path.parent}"
    except OSError:  # the folder is gone, or its disk fails
        free = ""
    return (
        f"{path} was not saved: on rank {error.rank} {found.text} (this rank writes {format_nbytes(nbytes)}{free}); "
        f"{previous(path)}{f'. {found.remedy}' if found.remedy else ''}"
    )


class _Progress:
    """Prints the progress of a long save, on one rank."""

    def __init__(self, name: str, making: Path, nbytes: int, is_shown: bool) -> None:
        self._name = name
        self._making = making
        self._nbytes = nbytes
        self._is_shown = is_shown
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> _Progress:
        if self._is_shown:
            self._thread = threading.Thread(target=self._show, name="monarch-checkpoint-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        began = time.monotonic()
        has_said = False
        pause_s = _SHOWN_AFTER_S
        while not self._over.wait(pause_s):
            pause_s, has_said = _EVERY_S, True
            self._say(f"saving {self._name}: {self._written()} of {format_nbytes(self._nbytes)}")
        if has_said:
            self._say(f"saved {format_nbytes(self._nbytes)} in {time.monotonic() - began:.1f} s\n")

    def _written(self) -> str:
        try:
            return format_nbytes(sum(file.stat().st_size for file in self._making.iterdir()))
        except OSError:  # the folder is being removed
            return "?"

    @staticmethod
    def _say(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
