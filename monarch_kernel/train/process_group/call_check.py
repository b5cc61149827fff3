"""Refuses a collective that ranks call with different arguments, which gloo would complete with wrong values, or never.

Theory of operation
===================

gloo sends bytes without their meaning: float32 added to int32 gives wrong values, other sizes end a process, or wait forever.
So each rank publishes its call in memory that the ranks of a machine share, and compares it with the calls of the others
(`call_page`), before it exchanges data. This costs a few microseconds, waits for no rank and sends nothing. torch's own check
(``TORCH_DISTRIBUTED_DEBUG=DETAIL``) does two more collectives for each.

A rank that finds a difference writes the text of the error into the page, raises it, and closes the connections of the group,
because other ranks may wait in the collective; their error has the same text. A rank that has already left the collective, as
the root of a broadcast may have, gets it at its next collective in the group. The group is formed again before the next cell.

Torch numbers the collectives of a group. Its number also counts messages between two ranks, which are subtracted. Collectives
that C++ starts (the reducer of DistributedDataParallel, compiled code) are not seen here; only their number is known. If it
differs by rank, calls can't be assigned to each other, and are not compared. The same holds after a call that torch has refused
on some ranks only.

Where collectives follow each other fast, each would take noticeably longer. So comparisons have a budget (`Budget`): the first
hundred after a pause are compared, and then one in ten to thirty.

Compared are the ranks that have one directory of the session, which are those of one host, in groups whose only backend is
gloo. ``MONARCH_CHECK_COLLECTIVES=0`` in the environment of the ranks switches the check off.
"""

from __future__ import annotations

import inspect
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import ref

from monarch_kernel.errors import CollectiveError
from monarch_kernel.runtime.diagnostics.failures import is_machinery, is_user
from monarch_kernel.runtime.diagnostics.source_names import short_cell
from monarch_kernel.train.process_group.call_page import MAX_RANKS, CallPage, Published
from monarch_kernel.train.process_group.calls import Arguments, Tensor, describe, difference, mismatch_text

__all__ = ["SWITCH", "Budget", "CallCheck"]

_log = logging.getLogger(__name__)

SWITCH = "MONARCH_CHECK_COLLECTIVES"
"""The variable of the environment that is ``0`` if collectives are not to be compared."""

_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_MAX_CACHED = 4096
_PER_S = 400
"""Comparisons per second in a group. Each takes about 20 us where a collective has emptied the caches."""

_AT_ONCE = 100
"""Comparisons in a row, after a pause of `_AT_ONCE` / `_PER_S` seconds."""

_FAILED = 1 << 32
"""Ranks with other numbers of failed calls are not compared: they differ by this in the number that must agree."""

_EVERY = 32
"""Collectives of which one is always compared."""


class _Method(NamedTuple):
    """A method, and which positional arguments are its tensors and numbers of rows; -1 if it has none."""

    operation: str
    outputs: int = -1
    inputs: int = -1
    received: int = -1
    sent: int = -1


_METHODS = {
    "allreduce": _Method("all_reduce", inputs=0),
    "allreduce_coalesced": _Method("all_reduce", inputs=0),
    "broadcast": _Method("broadcast", inputs=0),
    "reduce": _Method("reduce", inputs=0),
    "allgather": _Method("all_gather", 0, 1),
    "_allgather_base": _Method("all_gather", 0, 1),
    "all_gather_single": _Method("all_gather", 0, 1),
    "all_gather_single_coalesced": _Method("all_gather", 0, 1),
    "allgather_coalesced": _Method("all_gather", -1, 1),
    "allgather_into_tensor_coalesced": _Method("all_gather", 0, 1),
    "gather": _Method("gather", 0, 1),
    "scatter": _Method("scatter", 0, 1),
    "reduce_scatter": _Method("reduce_scatter", 0, 1),
    "_reduce_scatter_base": _Method("reduce_scatter", 0, 1),
    "reduce_scatter_single": _Method("reduce_scatter", 0, 1),
    "reduce_scatter_single_coalesced": _Method("reduce_scatter", 0, 1),
    "reduce_scatter_tensor_coalesced": _Method("reduce_scatter", 0, 1),
    "alltoall": _Method("all_to_all", 0, 1),
    "alltoall_base": _Method("all_to_all", 0, 1, 2, 3),
    "all_to_all_single": _Method("all_to_all", 0, 1, 2, 3),
    "barrier": _Method("barrier"),
}
"""Collectives among the methods of a process group."""

_FUNCTIONS = {
    "broadcast": _Method("broadcast", inputs=0),
    "all_reduce": _Method("all_reduce", inputs=0),
    "all_gather_single": _Method("all_gather", inputs=0),
    "all_gather_single_autograd": _Method("all_gather", inputs=0),
    "all_gather_tensor": _Method("all_gather", inputs=0),
    "all_gather_tensor_autograd": _Method("all_gather", inputs=0),
    "reduce_scatter_single": _Method("reduce_scatter", inputs=0),
    "reduce_scatter_single_autograd": _Method("reduce_scatter", inputs=0),
    "reduce_scatter_tensor": _Method("reduce_scatter", inputs=0),
    "reduce_scatter_tensor_autograd": _Method("reduce_scatter", inputs=0),
    "all_reduce_coalesced": _Method("all_reduce", inputs=0),
    "all_gather_single_coalesced": _Method("all_gather", inputs=0),
    "all_gather_into_tensor_coalesced": _Method("all_gather", inputs=0),
    "reduce_scatter_single_coalesced": _Method("reduce_scatter", inputs=0),
    "reduce_scatter_tensor_coalesced": _Method("reduce_scatter", inputs=0),
    "all_to_all_single": _Method("all_to_all", -1, 0, 1, 2),
    "all_to_all_single_autograd": _Method("all_to_all", -1, 0, 1, 2),
}
"""Functional collectives, which call C++ without the methods above. Some call others of them."""


class Budget:
    """Limits the comparisons to a share of the time: one per `_PER_S`, and many at once after a pause.

    When they are used up, there are none until they have all come back, so that ranks in step compare the same calls.
    """

    def __init__(self) -> None:
        self._left = float(_AT_ONCE)
        self._last = 0.0
        self._is_used_up = False

    def spend(self, now: float) -> bool:
        """Whether to compare a call at this time, in seconds."""
        left = min(_AT_ONCE, self._left + (now - self._last) * _PER_S)
        self._last = now
        if self._is_used_up:
            self._is_used_up = left < _AT_ONCE
        elif left < 1:
            self._is_used_up = True
        if self._is_used_up:
            self._left = left
            return False
        self._left = left - 1
        return True


class _Group:
    """What this process knows of a group.

    Args:
        group: the group.
        page: its page.
        given: the ranks with which it was made; none for all.
        label: its label for users.

    Attributes:
        ignored: how many of torch's numbers are for calls that are not compared.
        seen: number of calls of which this check knows.
        failed: how many of these have failed before they took part.
        budget: says which of them it compares.
        is_raised: whether the code of this process has received the error of a refusal.
    """

    def __init__(self, group: Any, page: CallPage, given: Sequence[int], label: str) -> None:
        self.of: Callable[[], Any] = ref(group)
        self.page = page
        self.given = given
        self.members = given or range(page.size)
        self.label = label
        self.ignored = 0
        self.seen = 0
        self.failed = 0
        self.budget = Budget()
        self.is_raised = False
        self.known: dict[Any, tuple[Published, CodeType | None]] = {}  # with the code, whose address is part of the key


class CallCheck:
    """Compares the collectives of this process with those of the other ranks of the machine, once it is installed.

    Args:
        directory: the directory that the ranks of the machine share.
        label: returns the label of a group for users, given torch's name and description of it.
        give_up: closes the connections of a group, given the ranks of the group.
    """

    def __init__(
        self, directory: str, label: Callable[[str, str], str], give_up: Callable[[Sequence[int]], None]
    ) -> None:
        self._directory = directory
        self._label = label
        self._give_up = give_up
        self._groups: dict[int, _Group] = {}  # by address; its weak reference tells whether it is still that group
        self._thread = threading.local()

    def install(self, dist: Any) -> None:
        """Wrap the functional collectives; `collective_counts` calls `start` for the methods of process groups."""
        from torch.distributed import _functional_collectives as functional

        for name, method in _FUNCTIONS.items():
            if (original := getattr(functional, name, None)) is not None:
                setattr(functional, name, self._checking_function(original, name, method, functional, dist))
        dist.ProcessGroup.monitored_barrier = self._uncounted(dist.ProcessGroup.monitored_barrier)
        functional.wait_tensor = self._explaining(functional.wait_tensor)

    def add(self, group: Any, store: Any, members: Sequence[int], size: int) -> None:
        """Compare the collectives of a new group. All its ranks call this when they have formed it.

        Args:
            group: the group.
            store: a store with a prefix that only this group has.
            members: global rank of each rank of the group; all ranks if empty.
            size: number of ranks in the group.
        """
        if os.environ.get(SWITCH) == "0" or not 1 < size <= MAX_RANKS or group._get_backend_name() != "gloo":
            return
        if self._group(group) is not None:  # torch has returned a group that there was
            return
        try:
            key = bytes(store.compare_set("monarch/calls", "", secrets.token_hex(8))).decode()
            page = CallPage(os.path.join(self._directory, f"calls-{key}"), group.rank(), size)
        except (OSError, RuntimeError, NotImplementedError) as error:  # the group itself may work
            _log.warning("collectives can't be compared between ranks: %s", error)
            return
        label = self._label(group.group_name, group.group_desc)
        self._groups[id(group)] = _Group(group, page, tuple(members), label)

    def forget(self) -> None:
        """Forget the groups that no longer exist."""
        for key, known in list(self._groups.items()):
            if known.of() is None or known.page.refusal:
                known.page.unlink()
                del self._groups[key]

    def start(self, group: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], now: float) -> int:
        """Compare a call of a method of a process group, before it is made.

        Args:
            group: the group.
            name: the method.
            args: its arguments.
            kwargs: its arguments by name.
            now: a time in seconds.

        Returns:
            The number of the collective; 0 in a group that is not compared, and less for a method that not all ranks call.

        Raises:
            CollectiveError: a rank calls something else.
        """
        known = self._groups.get(id(group))
        if known is None or known.of() is not group:
            return 0
        method = _METHODS.get(name)
        if method is None:
            return -1 - int(group._get_sequence_number_for_group())
        return self._start(known, group, name, method, args, kwargs, now)

    def uncompared(self, group: Any, number: int) -> None:
        """Take the collectives that torch has counted since `start` for such that are not compared."""
        known = self._group(group)
        if known is not None:
            known.ignored += int(group._get_sequence_number_for_group()) + number + 1

    def failed(self, group: Any, number: int, error: BaseException) -> None:
        """Correct the numbers after a call that has raised; raises the refusal of a collective in its place.

        Raises:
            CollectiveError: it has failed because of the refusal.
        """
        known = self._group(group)
        if known is not None and number < 0:
            self.uncompared(group, number)
        elif known is not None and number > 0:
            known.page.retract(number)
            known.failed += 1
            known.ignored = int(group._get_sequence_number_for_group()) - number  # it keeps its number
        self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Raise the refusal of a collective in place of the error of a rank that has waited in it.

        Raises:
            CollectiveError: a rank has refused the collective.
        """
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError):
            return
        for known in list(self._groups.values()):
            if not known.is_raised and (text := known.page.refusal):
                raise self._refused(known, text) from None

    def _group(self, group: Any) -> _Group | None:
        known = self._groups.get(id(group))
        return known if known is not None and known.of() is group else None

    def _checking_function(
        self, original: Callable[..., Any], name: str, method: _Method, functional: Any, dist: Any
    ) -> Callable[..., Any]:
        import torch

        is_compiling = torch.compiler.is_compiling
        signature = inspect.signature(original)
        thread = self._thread

        def group_of(args: Sequence[Any], kwargs: dict[str, Any]) -> _Group | None:
            given = signature.bind(*args, **kwargs).arguments
            group = functional._resolve_group(given["group"], given.get("tag", ""))
            if isinstance(group, str):
                group = dist.distributed_c10d._resolve_process_group(group)
            return self._group(group)

        @wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or getattr(thread, "is_inside", False):
                return original(*args, **kwargs)
            try:
                known = group_of(args, kwargs)
            except Exception:  # the original finds the same problem
                known = None
            if known is None:
                return original(*args, **kwargs)
            group = known.of()
            number = self._start(known, group, name, method, args, kwargs, time.perf_counter(), signature)
            thread.is_inside = True
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                self.failed(group, number, error)
                raise
            finally:
                thread.is_inside = False

        return collective

    def _uncounted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            number = self.start(group, "", args, kwargs, 0.0)
            try:
                return original(group, *args, **kwargs)
            except RuntimeError as error:
                self.explain(error)
                raise
            finally:
                if number:
                    self.uncompared(group, number)

        return method

    def _explaining(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def wait(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except RuntimeError as error:
                self.explain(error)
                raise

        return wait

    def _refused(self, known: _Group, text: str) -> CollectiveError:
        known.is_raised = True
        self._give_up(known.given)
        return CollectiveError(text)

    def _start(
        self,
        known: _Group,
        group: Any,
        name: str,
        method: _Method,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        now: float,
        signature: inspect.Signature | None = None,
    ) -> int:
        page = known.page
        if page.is_refused:
            raise self._refused(known, page.refusal)
        number: int = group._get_sequence_number_for_group() - known.ignored + 1
        known.seen += 1
        if not known.budget.spend(now) and known.seen % _EVERY:
            return number
        frame = _caller(sys._getframe(2))
        try:
            key: Any = (
                name,
                0 if frame is None else id(frame.f_code),
                0 if frame is None else frame.f_lasti,
                *map(_key, args),
                *[(each, _key(kwargs[each])) for each in kwargs],
            )
            found = known.known.get(key)
            if found is None:
                if signature is None:
                    given = _given_to_method(method, args, kwargs)
                else:
                    given = _given_to_function(method, signature.bind(*args, **kwargs).arguments)
                call = describe(method.operation, given, page.rank, page.size)
                found = Published(call, _line(frame)), None if frame is None else frame.f_code
                if len(known.known) >= _MAX_CACHED:
                    known.known.clear()
                known.known[key] = found
        except Exception:  # the collective itself checks what it is given
            _log.debug("the arguments of %s can't be compared", name, exc_info=True)
            return number
        uncompared = number - known.seen + known.failed * _FAILED
        if page.publish(number, uncompared, found[0]):
            self._compare(known, number, uncompared)
        return number

    def _compare(self, known: _Group, number: int, uncompared: int) -> None:
        """Refuse a collective if the call of a rank differs from the call of this rank."""
        page = known.page
        calls = page.calls(number, uncompared)
        if page.rank not in calls:  # it did not fit
            return
        mine = calls[page.rank][0]
        differences = (difference(mine, page.rank, call, rank) for rank, (call, _) in calls.items())
        if what := next(filter(None, differences), ""):
            text = mismatch_text(calls, what, known.members, known.label, number)
            raise self._refused(known, page.refuse(text))


def _key(value: Any) -> Any:
    """What of an argument determines the description of a call; hashable."""
    kind = type(value)
    if kind is list or kind is tuple:
        return tuple(map(_key, value))
    if kind is int or kind is str:
        return value
    read = _reader(kind)  # type: ignore[arg-type]
    return None if read is None else read(value)


@cache
def _reader(kind: type) -> Callable[[Any], Any] | None:
    """Reads what matters of a tensor, of a reduction, or of the options of a collective; None for other types."""
    import torch

    if issubclass(kind, torch.Tensor):
        return attrgetter("dtype", "shape")
    if kind.__name__ == "ReduceOp":
        return attrgetter("op")
    names = [name for name in ("reduceOp.op", "rootRank") if hasattr(kind, name.partition(".")[0])]
    return attrgetter(*names) if names else None


def _given_to_method(method: _Method, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a method of ProcessGroup, whose overloads have options, or their values one by one."""
    op, root = "", -1
    for each in (*args, *kwargs.values()):
        if type(each) is int and method.operation in _ROOTED:
            root = each
        elif hasattr(each, "rootRank"):
            root = int(each.rootRank)
        if method.operation in _REDUCING:
            op = _reduction(each) or op
    outputs = _tensors(args[method.outputs]) if method.outputs >= 0 else ()
    inputs = _tensors(args[method.inputs]) if method.inputs >= 0 else ()
    received, sent = (tuple(args[at]) if 0 <= at < len(args) else () for at in (method.received, method.sent))
    return Arguments(inputs, outputs, op, root, sent, received)


def _given_to_function(method: _Method, given: Mapping[str, Any]) -> Arguments:
    """The arguments of a functional collective, by name."""
    first = next(iter(given.values()))
    op = str(given.get("reduceOp", "")).lower()
    rows = [tuple(given.get(name) or ()) for name in ("input_split_sizes", "output_split_sizes")]
    return Arguments(_tensors(first), (), op, int(given.get("src", -1)), *rows)


def _reduction(value: Any) -> str:
    """The name of a reduction, or of that in options; empty for other values."""
    value = getattr(value, "reduceOp", value)
    value = getattr(value, "op", value)
    return str(value.name).lower() if type(value).__name__ == "RedOpType" else ""


def _tensors(value: Any) -> tuple[Tensor, ...]:
    """The tensors in nested lists."""
    if isinstance(value, (list, tuple)):
        return tuple(tensor for each in value for tensor in _tensors(each))
    return (Tensor(str(value.dtype).removeprefix("torch."), tuple(map(int, value.shape))),)


_is_user: dict[str, bool] = {}


def _caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own code; None if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        found = _is_user.get(file)
        if found is None:
            found = _is_user[file] = is_user(frame) and not is_machinery(file)
        if found:
            return frame
        frame = frame.f_back
    return None


def _line(frame: FrameType | None) -> str:
    return "" if frame is None else f"{short_cell(frame.f_code.co_filename)}, line {frame.f_lineno}"
