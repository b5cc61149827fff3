"""The rank's part of run records: digests of batches, parameters and random generators.

While no record runs, a step costs one comparison. Digests of batches are made where a DataLoader returns them, of tensors on
the CPU; tensors on other devices are left out, because to read them is to wait for the work that is queued there.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from monarch_kernel.features.record.digests import digest_of, parameters_digest
from monarch_kernel.features.record.files import FileBook
from monarch_kernel.features.record.messages import EventNoted, Noted, NoteState, SetRecording, StateNoted, Step
from monarch_kernel.features.record.notes import on_event
from monarch_kernel.features.record.sources import files_of, fingerprint, text_of
from monarch_kernel.features.replicas.worker import modules_in
from monarch_kernel.features.watch.loader import on_batch
from monarch_kernel.net.wire.codec import Frame, pack
from monarch_kernel.runtime.rpc.handles import PROCESS
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["RankRecorder", "generator_states", "generators_digest", "restore_generators"]

_log = logging.getLogger(__name__)

_MOST_SHARE = 0.005
"""Hashes of the parameters take at most this share of the time; a loop with short steps hashes them less often."""


def generator_states() -> dict[str, bytes]:
    """Return the state of each global random generator of this process, by library.

    Those of Python and NumPy are JSON: a record may come from another person, so nothing in it is unpickled.
    """
    states = {"python": json.dumps(random.getstate()).encode()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        state = numpy.random.get_state()
        if isinstance(state, tuple):  # else the program has set a generator of another kind
            name, keys, *rest = state
            states["numpy"] = json.dumps([name, keys.tolist(), *rest]).encode()
    if torch is not None:
        states["torch"] = torch.get_rng_state().numpy().tobytes()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return states


def generators_digest() -> bytes:
    """Return a digest of the states of `generator_states`, in a sixth of the time."""
    version, internal, gauss = random.getstate()
    hashed = blake2b(f"{version} {gauss}".encode(), digest_size=8)
    hashed.update(array("Q", internal))
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        state = numpy.random.get_state()
        if isinstance(state, tuple):
            name, keys, *rest = state
            hashed.update(f"{name} {rest}".encode())
            hashed.update(keys.tobytes())
    if torch is not None:
        hashed.update(torch.get_rng_state().numpy())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            hashed.update(torch.cuda.get_rng_state().numpy())
    return hashed.digest()


def restore_generators(states: Mapping[str, bytes]) -> None:
    """Put the states of `generator_states` back."""
    if "python" in states:
        version, internal, gauss = json.loads(states["python"])
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in states:
        import numpy

        name, keys, *rest = json.loads(states["numpy"])
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "torch" in states or "cuda" in states:
        import torch

        if "torch" in states:
            torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8))


@register
class RankRecorder:
    """Notes what a record needs of the loops and cells of this rank.

    Attributes:
        is_on: whether a record runs.
    """

    def __init__(self, rank: Rank) -> None:
        self.is_on = False
        self._rank = rank
        self._every = 100
        self._files: FileBook | None = None
        self._sent: set[bytes] = set()  # digests of states
        self._sources: set[tuple[tuple[int, int], int]] = set()  # loop, data set
        self._lock = threading.Lock()
        self._new_sources: list[str] = []
        self._steps: dict[tuple[int, int], dict[int, dict[str, bytes]]] = {}
        self._strides: dict[tuple[int, int], int] = {}
        self._costs: dict[tuple[int, int], tuple[float, float]] = {}  # when the loop was first seen; seconds of hashing
        on_batch.append(self._on_batch)
        on_event.append(self._on_event)
        if PROCESS.loops is not None:
            PROCESS.loops.recorder = self
        rank.extend({SetRecording: self._set})
        rank.extend({NoteState: self._note_state}, on_main=True)

    # -- messages of the controller

    def _set(self, message: SetRecording, _: Sequence[Frame]) -> None:
        self._every = max(1, message.every)
        if message.is_on and not self.is_on:
            self._sent.clear()  # another record has none of them
            if self._files is not None:
                self._files.forget()
        self.is_on = message.is_on

    def _note_state(self, message: NoteState, _: Sequence[Frame]) -> None:
        try:
            states = generator_states()
            digests = {name: blake2b(state, digest_size=8).digest() for name, state in states.items()}
            new = {name: state for name, state in states.items() if digests[name] not in self._sent}
            self._sent.update(digests[name] for name in new)
            self._rank.driver.submit(pack(StateNoted(message.cell, digests, new, self._new_files())))
        except Exception:  # the record is not worth a failed cell
            _log.exception("the state of the random generators could not be noted")

    def _new_files(self) -> dict[str, str]:
        if self._files is None:
            self._files = FileBook()
        return self._files.news()

    # -- the loop, on its thread

    def before(self, key: tuple[int, int], step: int) -> None:
        """A step of a loop is about to start: hash parameters and generators, if it is time."""
        stride = self._strides.get(key, self._every)
        if step % stride == 0 and self.is_on:
            self._check(key, step)

    def report(self, key: tuple[int, int], step: int, *, is_last: bool) -> None:
        """Send what was noted of a loop; at its end with a last hash of the parameters."""
        if is_last:
            self._check(key, step)
            self._strides.pop(key, None)
            self._costs.pop(key, None)
        with self._lock:
            noted = self._steps.pop(key, {})
            sources, self._new_sources = self._new_sources, []
        try:
            files = self._new_files() if is_last else {}
        except Exception:
            files = {}
        if noted or sources or files:
            steps = tuple(Step(number, digests) for number, digests in sorted(noted.items()))
            self._rank.driver.submit(pack(Noted(*key, steps, tuple(sources), tuple(files.items()))))

    def _check(self, key: tuple[int, int], step: int) -> None:
        began = time.perf_counter()
        try:
            namespace, hidden = self._rank.namespace
            if modules := modules_in(namespace, hidden):
                self._note(key, step, "parameters", parameters_digest(modules))
            self._note(key, step, "generators", generators_digest())
        except Exception:  # the user's objects may do anything, and the loop goes on
            _log.exception("the parameters could not be hashed")
        now = time.perf_counter()
        since, spent = self._costs.get(key, (began, 0.0))
        spent += now - began
        self._costs[key] = since, spent
        if step and spent > _MOST_SHARE * (now - since) + 0.05:
            self._strides[key] = self._strides.get(key, self._every) * 2  # a multiple, so that two runs can be compared

    def _on_batch(self, iterator: Any, batch: Any) -> None:
        if not self.is_on or PROCESS.loops is None or (loop := PROCESS.loops.current) is None:
            return
        try:
            digest = digest_of(batch)
            dataset = getattr(iterator, "_dataset", None)
            if (loop.key, id(dataset)) not in self._sources:
                self._sources.add((loop.key, id(dataset)))
                self._note_source(loop.key, iterator, dataset)
        except Exception:
            _log.exception("a batch could not be hashed")
            return
        self._note(loop.key, max(0, loop.step), "batch", digest)

    def _note_source(self, key: tuple[int, int], iterator: Any, dataset: Any) -> None:
        """Note where batches come from; a thread reads the files, because that may take seconds."""
        with self._lock:
            self._new_sources.append(text_of(iterator))
        paths = files_of(dataset)
        if not paths:
            return

        def read() -> None:
            found = tuple(each for each in map(fingerprint, paths) if each is not None)
            if found and self.is_on:
                self._rank.driver.submit(pack(Noted(*key, (), data_files=found)))

        threading.Thread(target=read, name="monarch-record-files", daemon=True).start()

    def _on_event(self, kind: str, text: str) -> None:
        if not self.is_on:
            return
        loop = None if PROCESS.loops is None else PROCESS.loops.current
        where = (0, 0, -1) if loop is None else (*loop.key, loop.step)
        self._rank.driver.submit(pack(EventNoted(kind, text, *where)))

    def _note(self, key: tuple[int, int], step: int, kind: str, digest: bytes) -> None:
        with self._lock:
            digests = self._steps.setdefault(key, {}).setdefault(step, {})
            if kind == "batch" and kind in digests:  # several batches in one step
                digest = blake2b(digests[kind] + digest, digest_size=8).digest()
            digests[kind] = digest
