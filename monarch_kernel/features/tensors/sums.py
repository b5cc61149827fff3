"""The last sum of a sharded tensor whose addends are on several ranks, for the operations that need it once more."""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from monarch_kernel.features.tensors.parts import local_part

__all__ = ["SUMS", "Sums"]


class Sums:
    """Keeps the last sum that torch's rules have made for an operation, while ranks do the same operations.

    An optimizer uses a gradient several times, one after the other. If it has addends on several ranks, each use would add them
    up by a collective.

    All ranks must agree whether they still have a sum, else one of them waits for a collective that others do not do. So a sum
    is kept only as long as ranks do nothing but operations, in batches that follow each other. A cell, a call or a function of
    the program may change parts, and differently on each rank. Operations say what they write to (`note_write`), those on plain
    tensors, too, as such a tensor may have the memory of a part (``x.local()``). The versions of torch say less: a view of a
    part has another one, and an actor may change that of a part earlier on one rank than on another.

    There is one sum at most, so that the memory for it is that of one tensor.
    """

    def __init__(self) -> None:
        self._thread = 0  # that does a batch
        self._redistribute: Callable[..., Any] | None = None
        self._addends: weakref.ref[Any] | None = None
        self._key: Any = None  # how the addends are placed, and how the sum is
        self._sum: Any = None

    def install(self) -> None:
        """Let torch's rules use this; call it on all ranks after the same operation."""
        if self._redistribute is None:
            dispatch: Any = importlib.import_module("torch.distributed.tensor._dispatch")
            self._redistribute, dispatch.redistribute_local_tensor = dispatch.redistribute_local_tensor, self._once

    @contextmanager
    def kept(self, follows: bool) -> Iterator[None]:
        """Context in which this thread does a batch of operations; ``follows`` as for `RunOps`."""
        if not follows:
            self.forget()
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = 0

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which no sum is kept or taken: a function of the program runs, or a result may have its memory."""
        thread, self._thread = self._thread, 0
        try:
            yield
        finally:
            self._thread = thread

    def forget(self) -> None:
        """Forget the sum."""
        self._addends = self._sum = None

    def note_write(self, tensor: Any) -> None:
        """Forget the sum if a tensor that was written to has the memory of its addends."""
        addends = None if self._addends is None else self._addends()
        if addends is not None and _memory(addends) == _memory(local_part(tensor)):
            self.forget()

    def noting(self, op: Callable[..., Any], written: Callable[..., Iterable[Any]]) -> Callable[..., Any]:
        """Make a function that does an operation on plain tensors, and notes its writes to those that ``written`` returns."""

        def do(*args: Any, **kwargs: Any) -> Any:
            try:
                return op(*args, **kwargs)
            finally:  # it may have written to a part before it failed, on this rank only
                if self._addends is not None:
                    for each in written(args, kwargs):
                        self.note_write(each)

        return do

    def _once(self, part: Any, there: Any, wanted: Any, **options: Any) -> Any:
        """Place a part in another way: torch's ``redistribute_local_tensor``."""
        assert self._redistribute is not None
        is_kept = (
            self._thread == threading.get_ident()
            and any(each.is_partial() for each in there.placements)
            and not options
        )
        if not is_kept:
            return self._redistribute(part, there, wanted, **options)
        key = there.placements, wanted.placements
        if self._addends is not None and self._addends() is part and self._key == key:
            return self._sum
        self.forget()
        made = self._redistribute(part, there, wanted)
        if made is not part:
            self._addends, self._key, self._sum = weakref.ref(part, self._dropped), key, made
        return made

    def _dropped(self, addends: weakref.ref[Any]) -> None:
        if addends is self._addends:
            self.forget()


def _memory(part: Any) -> int:
    """What identifies the memory of a part, also where it has no elements; 0 if it is no such memory, as of a sparse tensor."""
    try:
        return int(part.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


SUMS = Sums()
