"""Functions of the program that ranks call on their parts of distributed tensors, as operations.

A function is an entry like any other (`worker.Entry`), whose record has only tensors. The other arguments are part of its
definition.

*Results.* The tensors among the results are new distributed tensors, without their history. If the program knows their
layouts, a result is checked and, if its strides are others, copied. Otherwise they become contiguous, and the rank keeps the
structure around them until the program asks for it.
"""

from __future__ import annotations

import importlib
import linecache
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any

from monarch_kernel.base.text import plural
from monarch_kernel.features.tensors.messages import DefineCall
from monarch_kernel.features.tensors.parts import is_sharded
from monarch_kernel.features.tensors.records import Poison, Slot, TensorLayout
from monarch_kernel.features.tensors.rules import keep_memory
from monarch_kernel.features.tensors.sums import SUMS
from monarch_kernel.net.wire.codec import Frame, load
from monarch_kernel.net.wire.messages import Payload

__all__ = [
    "MAX_RESULTS",
    "CallEntry",
    "Namespace",
    "Structured",
    "flat_results",
    "learned",
    "load_function",
    "with_slots",
]

MAX_RESULTS = 64
"""Number of ids for the result of a call with unknown layouts."""

_LOG = logging.getLogger("torch._subclasses.fake_tensor")

Namespace = Callable[[], dict[str, Any]]
"""Returns the variables of the cells of the rank."""


class Structured(list[Any]):
    """The tensors of a result.

    Attributes:
        structure: The result, with a `Slot` in place of each tensor.
    """

    structure: Any


def learned(function: Callable[..., Any]) -> Callable[..., Structured]:
    """Wrap an operation whose results the program asks about."""

    def run(*args: Any, **kwargs: Any) -> Structured:
        was_disabled, _LOG.disabled = _LOG.disabled, True  # torch logs 30 lines for each error, which is raised, too
        try:
            result = function(*args, **kwargs)
        except RuntimeError as error:
            text, found, _ = str(error).partition("\n\nSharding propagation failed")
            if not found:
                raise
            raise type(error)(text) from None
        finally:
            _LOG.disabled = was_disabled
        structure, tensors = with_slots(result)
        made = Structured(tensors)
        made.structure = structure
        return made

    return run


class CallEntry:
    """A call of a function that records refer to.

    Args:
        message: its definition.
        frames: of the message.
        function: the function.
        calling: makes the context in which it runs.
    """

    takes_only_tensors = True
    n_ints = n_floats = 0

    def __init__(
        self,
        message: DefineCall,
        frames: Sequence[Frame],
        function: Callable[..., Any],
        calling: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._calling = calling
        self.n_tensors = message.n_tensors
        self.returns: list[bool] | None = None if message.n_results < 0 else [True] * message.n_results
        self.changed: list[int] = []
        self._layouts = None if message.layouts is None else [TensorLayout(*each) for each in message.layouts]
        self._function = function
        self._args, self._kwargs = load(message.payload, frames)
        self._name = message.name

    def function(self, *tensors: Any) -> Any:
        """Call the function with these tensors."""
        import torch

        SUMS.forget()  # before an argument can fail: ranks must agree
        if any(isinstance(each, Poison) for each in tensors):
            raise LookupError("an argument is lost")
        args, kwargs = _with_tensors((self._args, self._kwargs), tensors)
        try:
            with SUMS.off(), self._calling(), torch.enable_grad():
                result = self._function(*args, **kwargs)
        except KeyboardInterrupt as error:
            raise RuntimeError(f"{self._name} was interrupted") from error
        except SystemExit as error:
            raise RuntimeError(f"{self._name} has called sys.exit()") from error
        if self.returns is None:
            return with_slots(result, keeps_tensors=True)[0]
        structure, found = with_slots(result)
        if self._layouts is None:
            made = Structured(_contiguous(each) for each in found)
            made.structure = structure
            if len(made) > len(self.returns):
                raise ValueError(
                    f"{self._name} has returned {plural(len(made), 'tensor')}; more than {len(self.returns)} need "
                    "propagate=function"
                )
            return made
        return self._checked(found)

    def call(self, values: Sequence[Any]) -> Any:
        """Call the function; it has only tensors."""
        return self.function(*values)

    def _checked(self, found: Sequence[Any]) -> list[Any]:
        """Return the tensors of a result as the program expects them.

        Raises:
            ValueError: They have other shapes or dtypes.
        """
        assert self._layouts is not None
        here = [(tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in found]
        expected = [(tuple(each.shape), each.dtype) for each in self._layouts]
        if here != expected:
            raise ValueError(
                f"{self._name} has returned tensors {here}, but its propagate=, or its first call, said {expected}"
            )
        return [_laid_out(each, layout) for each, layout in zip(found, self._layouts)]


def _laid_out(tensor: Any, layout: TensorLayout) -> Any:
    import torch

    if is_sharded(tensor) or (tensor.stride() == tuple(layout.stride) and tensor.storage_offset() == layout.offset):
        return tensor
    made = torch.empty_strided(layout.shape, layout.stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _contiguous(tensor: Any) -> Any:
    return (
        tensor
        if is_sharded(tensor) or (tensor.is_contiguous() and not tensor.storage_offset())
        else tensor.contiguous().clone()
    )


def with_slots(value: Any, *, keeps_tensors: bool = False) -> tuple[Any, list[Any]]:
    """Return a nested value with a `Slot` in place of each tensor, and the tensors without their history.

    Args:
        value: Dicts, lists and tuples are searched.
        keeps_tensors: Whether the tensors stay in the value.
    """
    import torch
    from torch.utils import _pytree as pytree

    tensors: list[Any] = []

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        part = keep_memory(leaf.detach(), leaf)
        tensors.append(part if is_sharded(part) else part.resolve_conj().resolve_neg())
        return tensors[-1] if keeps_tensors else Slot(len(tensors) - 1)

    return pytree.tree_map(replace, value), tensors


def flat_results(result: Any) -> Iterator[Any]:
    """Yield the parts of the result of an operation, which may be lists."""
    if isinstance(result, (tuple, list)) and type(result) is not Poison:
        for part in result:
            yield from flat_results(part)
    else:
        yield result


def _with_tensors(value: Any, tensors: Sequence[Any]) -> Any:
    from torch.utils import _pytree as pytree

    return pytree.tree_map(lambda leaf: tensors[leaf.index] if type(leaf) is Slot else leaf, value)


def load_function(payload: Payload, frames: Sequence[Frame], namespace: Namespace) -> Callable[..., Any]:
    """Load a function of the program. Names that are not defined there are variables of the rank.

    Raises:
        ImportError: It is a name such as ``package.function``, and can't be imported.
    """
    function, sources = load(payload, frames)
    for file, text in sources.items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    if isinstance(function, str):
        module, _, name = function.rpartition(".")
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return found
    if not isinstance(function, FunctionType) or function.__globals__.get("__name__") != "__main__":
        return function  # type: ignore[no-any-return]
    theirs = function.__globals__
    missing = [name for name in set(_names_in(function.__code__)) if name not in theirs]

    def call(*args: Any, **kwargs: Any) -> Any:
        here = namespace()
        theirs.update((name, here[name]) for name in missing if name in here)
        return function(*args, **kwargs)

    return call if missing else function


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
