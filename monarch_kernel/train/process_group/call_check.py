"""Refuses a collective that ranks call with different arguments, which gloo would complete with wrong values, or never.

Theory of operation
===================

gloo sends bytes without their meaning: float32 added to int32 gives wrong values, other sizes end a process, or wait forever.
So each rank publishes its call in memory that the ranks of a machine share, and compares it with the calls of the others
(`call_page`), before it exchanges data. This costs a few microseconds, waits for no rank and sends nothing. torch's own check
(``TORCH_DISTRIBUTED_DEBUG=DETAIL``) does two more collectives for each.

A rank that finds a difference waits a moment for the calls of the other ranks (`LATE_S`), so that the error names each kind of
call. Then it writes the text of the error into the page, raises it, and closes the connections of the group, because other
ranks may wait in the collective; their error has the same text. A rank that has already left the collective, as the root of a
broadcast may have, gets it at its next collective in the group. The group is formed again before the next cell.

Torch numbers the collectives of a group, in each of its backends. The number of gloo also counts messages between two ranks,
which are subtracted. Collectives that C++ starts (the reducer of DistributedDataParallel, compiled code) are not seen here;
only their number is known. If it differs by rank, calls can't be assigned to each other, and are not compared. The same holds
after a call that torch has refused on some ranks only.

Where collectives follow each other fast, each would take noticeably longer. So comparisons have a budget (`Budget`): the first
hundred after a pause are compared, and then one in ten to thirty.

Messages between two ranks (``send``, ``recv``) are compared in the same way by these two ranks (`MessagePlaces`), which count
them alike. Those to a rank that receives from any rank are not, and those in groups with NCCL, which ignores tags.

The check compares what ranks call, on the host, and so is independent of the backend. With NCCL the ranks that were first have
started the collective on their devices. They get the refusal at their next collective, or when theirs is aborted.

Ranks of one host have one directory of the session, and compare their calls in shared memory. In a group with ranks of several
hosts, each call is also compared with that of the first rank, through the store of the group (`call_board`), with a smaller
budget. Compared are groups whose backends are gloo and NCCL. ``MONARCH_CHECK_COLLECTIVES=0`` in the environment of the ranks
switches the check off.
"""

from __future__ import annotations

import inspect
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import wraps
from types import CodeType, FrameType
from typing import Any
from weakref import finalize, ref

from monarch_kernel.errors import CollectiveError
from monarch_kernel.train.process_group.call_board import CallBoard
from monarch_kernel.train.process_group.call_page import MAX_RANKS, CallPage, Message, Published
from monarch_kernel.train.process_group.call_reading import (
    FUNCTIONS,
    METHODS,
    Method,
    caller_of,
    check_memory,
    given_to_function,
    given_to_message,
    given_to_method,
    key_of,
    line_of,
)
from monarch_kernel.train.process_group.collective_calls import (
    Call,
    describe,
    difference,
    message_mismatch_text,
    mismatch_text,
)

__all__ = ["SWITCH", "Budget", "CallCheck"]

_log = logging.getLogger(__name__)

SWITCH = "MONARCH_CHECK_COLLECTIVES"
"""The variable of the environment that is ``0`` if collectives are not to be compared."""

_BACKENDS = {"gloo", "nccl"}
"""Backends that number their collectives when they are called."""

_MESSAGES = {"send": True, "recv": False}
"""Method for a message -> whether it sends."""

_UNNUMBERED = -1
"""What `CallCheck.start` returns for such a method; where torch does not number a group itself, less by its number."""

_MAX_CACHED = 4096
_PER_S = 400
"""Comparisons per second in a group. Each takes about 20 us where a collective has emptied the caches."""

_AT_ONCE = 100
"""Comparisons in a row, after a pause of `_AT_ONCE` / `_PER_S` seconds."""

_FAILED = 1 << 32
"""Ranks with other numbers of failed calls are not compared: they differ by this in the number that must agree."""

LATE_S = 0.5
"""How long a rank that refuses a collective waits for the calls of other ranks, so that the error names all of them."""

_POLL_S = 0.005

_EVERY = 32
"""Collectives of which one is always compared."""

_PER_S_OF_MESSAGES, _EVERY_MESSAGE = 100, 128
"""As above for messages, which take less time than collectives, and of which there are more."""

_PER_S_OF_HOSTS, _AT_ONCE_OF_HOSTS = 10, 40
"""Comparisons between hosts. Each takes up to a millisecond."""


class Budget:
    """Limits the comparisons to a share of the time: a number per second, and many at once after a pause.

    When they are used up, there are none until they have all come back, so that ranks in step compare the same calls.

    Attributes:
        resumes_at: no call is compared before this time, so that callers need not ask.
    """

    __slots__ = ("_at_once", "_last", "_left", "_per_s", "resumes_at")

    def __init__(self, per_s: float = _PER_S, at_once: int = _AT_ONCE) -> None:
        self.resumes_at = 0.0
        self._per_s = per_s
        self._at_once = at_once
        self._left = float(at_once)
        self._last = 0.0

    def spend(self, now: float) -> bool:
        """Whether to compare a call at this time, in seconds."""
        if now < self.resumes_at:
            return False
        left = min(self._at_once, self._left + (now - self._last) * self._per_s)
        self._last = now
        if left < 1:
            self._left = left
            self.resumes_at = now + (self._at_once - left) / self._per_s
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
        board: compares calls with those of other hosts; None if all ranks are on this host.
        devices: a device for each of its backends, where torch may not number the collectives of the group itself.

    Attributes:
        ignored: how many of torch's numbers are for calls that are not compared.
        seen: number of calls of which this check knows.
        failed: how many of these have failed before they took part.
        budget: says which of them it compares.
        budget_of_hosts: says which of them it compares with those of other hosts.
        budget_of_messages: says which messages it compares.
        is_summed: whether its number is the sum of those of its backends.
        messages: how many messages there were, by source, target and tag.
        is_raised: whether the code of this process has received the error of a refusal.
        end: is called when the group no longer exists.
    """

    def __init__(
        self,
        group: Any,
        page: CallPage,
        given: Sequence[int],
        label: str,
        board: CallBoard | None = None,
        devices: Sequence[Any] = (),
    ) -> None:
        self.of: Callable[[], Any] = ref(group)
        self.end: finalize[Any, Any] | None = None
        self.is_summed = bool(devices)
        self.page = page
        self.given = given
        self.members = given or range(page.size)
        self.label = label
        self.ignored = 0
        self.seen = 0
        self.failed = 0
        self.board = board
        self.budget = Budget()
        self.budget_of_hosts = Budget(_PER_S_OF_HOSTS, _AT_ONCE_OF_HOSTS)
        self.budget_of_messages = Budget(_PER_S_OF_MESSAGES)
        self.messages: dict[tuple[int, int, int], int] = {}
        self._devices = devices
        self.is_raised = False
        self.known: dict[Any, tuple[Published, CodeType | None]] = {}  # with the code, whose address is part of the key

    def number(self, group: Any) -> int:
        """How many collectives torch has counted in the group."""
        if not self.is_summed:
            return int(group._get_sequence_number_for_group())
        return sum(int(group._get_backend(each)._get_sequence_number_for_group()) for each in self._devices)


class CallCheck:
    """Compares the collectives of this process with those of the other ranks of the machine, once it is installed.

    Args:
        directory: the directory that the ranks of the machine share.
        label: returns the label of a group for users (`labels.label_of`).
        give_up: ends a group, given its ranks, and whether to end it on these, too.
        spans: whether ranks, given by their numbers, may be on several hosts.
    """

    def __init__(
        self,
        directory: str,
        label: Callable[[str, str, Sequence[int]], str],
        give_up: Callable[[Sequence[int], bool], None],
        spans: Callable[[Sequence[int]], bool],
    ) -> None:
        self._directory = directory
        self._label = label
        self._give_up = give_up
        self._spans = spans
        self._groups: dict[int, _Group] = {}  # by address; its weak reference tells whether it is still that group
        self._thread = threading.local()

    def install(self, dist: Any) -> None:
        """Wrap the functional collectives; `collective_counts` calls `start` for the methods of process groups."""
        from torch.distributed import _functional_collectives as functional

        for name, method in FUNCTIONS.items():
            new_name = name.replace("_into_tensor", "_single").replace("_tensor", "_single")
            is_old_name = new_name != name and hasattr(
                functional, new_name
            )  # warns at its caller's line, and calls the other
            if (original := getattr(functional, name, None)) is not None and not is_old_name:
                setattr(functional, name, self._checking_function(original, name, method, functional, dist))
        functional.wait_tensor = self._explaining(functional.wait_tensor)

    def add(self, group: Any, store: Any, members: Sequence[int], size: int) -> None:
        """Compare the collectives of a new group. All its ranks call this when they have formed it.

        Args:
            group: the group.
            store: a store with a prefix that only this group has.
            members: global rank of each rank of the group; all ranks if empty.
            size: number of ranks in the group.
        """
        if os.environ.get(SWITCH) == "0" or not 1 < size <= MAX_RANKS:
            return
        if self._group(group) is not None:  # torch has returned a group that there was
            return
        try:
            backends = _backends(group)
            if not set(backends.values()) <= _BACKENDS:
                return
            key = bytes(store.compare_set("monarch/calls", "", secrets.token_hex(8))).decode()
            page = CallPage(os.path.join(self._directory, f"calls-{key}"), group.rank(), size)
        except (OSError, RuntimeError, NotImplementedError) as error:  # the group itself may work
            _log.warning("collectives can't be compared between ranks: %s", error)
            return
        label = self._label(group.group_name, group.group_desc, members or range(size))
        board = CallBoard(store, group.rank()) if self._spans(members or range(size)) else None
        devices = () if group._get_backend_name() == "gloo" else tuple(backends)
        known = _Group(group, page, tuple(members), label, board, devices)
        if "nccl" in backends.values():
            page.messages.mark()
        self._groups[id(group)] = known
        known.end = finalize(group, self._drop, id(group), known)
        known.end.atexit = False

    def _drop(self, key: int, known: _Group) -> None:
        """Forget a group that no longer exists."""
        known.page.unlink()
        if self._groups.get(key) is known:
            del self._groups[key]

    def forget(self, existing: Container[Any]) -> None:
        """Forget the groups that no longer exist, and those that were destroyed: a model may keep one of these for long.

        Args:
            existing: the groups that torch has.
        """
        for key, known in list(self._groups.items()):
            group = known.of()
            if group is None or known.page.refusal or group not in existing:
                known.page.unlink()
                del self._groups[key]
                if known.end is not None:
                    known.end.detach()  # it holds the page

    def start(self, group: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], now: float) -> int:
        """Compare a call of a method of a process group, before it is made.

        Args:
            group: the group.
            name: the method.
            args: its arguments.
            kwargs: its arguments by name.
            now: a time in seconds.

        Returns:
            The number of the collective; 0 in a group that is not compared, and less for a method that not all ranks call,
            which `uncompared` and `failed` need.

        Raises:
            CollectiveError: a rank calls something else.
        """
        known = self._groups.get(id(group))
        if known is None or known.of() is not group:
            return 0
        is_sent = _MESSAGES.get(name)
        if is_sent is not None:
            self._start_message(known, is_sent, args, now)
        elif (method := METHODS.get(name)) is not None:
            return self._start(known, group, name, method, args, kwargs, now)
        else:
            self._thread.message = None
            if name == "recv_anysource":
                known.page.messages.mark()
        return _UNNUMBERED - known.number(group) if known.is_summed else _UNNUMBERED

    def uncompared(self, group: Any, number: int, counted: int) -> None:
        """Take the collectives that torch has counted since `start` for such that are not compared.

        Args:
            group: the group.
            number: what `start` has returned; below 0.
            counted: by how much the number of the group has grown since then.
        """
        known = self._groups.get(id(group))
        if known is not None and known.of() is group:
            known.ignored += known.number(group) + number - _UNNUMBERED if known.is_summed else counted

    def message_of_cpp(self, group: str) -> None:
        """Compare no messages of this rank in a group from now on, given torch's name: C++ code sends or receives some."""
        for known in list(self._groups.values()):
            if (of := known.of()) is not None and of.group_name == group:
                known.page.messages.mark()

    def failed(self, group: Any, number: int, error: BaseException, counted: int = 0) -> None:
        """Correct the numbers after a call that has raised; raises the refusal of a collective in its place.

        Args:
            group: the group.
            number: what `start` has returned.
            error: the error.
            counted: as in `uncompared`; only for a number below 0.

        Raises:
            CollectiveError: it has failed because of the refusal.
        """
        known = self._group(group)
        if known is not None and number < 0:
            self.uncompared(group, number, counted)
            self._retract_message(known)
        elif known is not None and number > 0:
            known.page.retract(number)
            if known.board is not None:
                known.board.retract(number)
            known.failed += 1
            known.ignored = known.number(group) - number  # it keeps its number
        self.explain(error)

    def withdraw(self) -> None:
        """Withdraw the calls of this rank: its groups are aborted, and what others call there is not a part of the same."""
        for known in list(self._groups.values()):
            known.page.withdraw()

    def explain(self, error: BaseException) -> None:
        """Raise the refusal of a collective in place of the error of a rank that has waited in it.

        Raises:
            CollectiveError: a rank has refused the collective.
        """
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError):
            return
        for known in list(self._groups.values()):
            if not known.is_raised and (
                text := known.page.refusal or (known.board is not None and known.board.refusal)
            ):
                raise self._refused(known, text) from None

    def _group(self, group: Any) -> _Group | None:
        known = self._groups.get(id(group))
        return known if known is not None and known.of() is group else None

    def _checking_function(
        self, original: Callable[..., Any], name: str, method: Method, functional: Any, dist: Any
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

    def _explaining(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def wait(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except RuntimeError as error:
                self.explain(error)
                raise

        return wait

    def _refused(self, known: _Group, text: str, *, tells: bool = False) -> CollectiveError:
        """Give up a group that can't be used any more; ``tells`` makes the ranks leave it that wait in it."""
        known.is_raised = True
        self._give_up(known.given, tells)
        return CollectiveError(text)

    def _start(
        self,
        known: _Group,
        group: Any,
        name: str,
        method: Method,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        now: float,
        signature: inspect.Signature | None = None,
    ) -> int:
        page = known.page
        if page.is_refused:
            raise self._refused(known, page.refusal)
        if signature is None:
            check_memory(method, args)
        number: int = known.number(group) - known.ignored + 1
        known.seen += 1
        is_compared = known.budget.spend(now) or not known.seen % _EVERY
        board = known.board if known.board is not None and known.budget_of_hosts.spend(now) else None
        if not is_compared and board is None:
            return number
        frame = caller_of(sys._getframe(2))

        def call() -> Call:
            if signature is None:
                given = given_to_method(method, args, kwargs)
            else:
                given = given_to_function(method, signature.bind(*args, **kwargs).arguments)
            return describe(method.operation, given, page.rank, page.size)

        try:
            found = _published(
                known, name, frame, (*map(key_of, args), *[(x, key_of(kwargs[x])) for x in kwargs]), call
            )
        except Exception:  # the collective itself checks what it is given
            _log.debug("the arguments of %s can't be compared", name, exc_info=True)
            return number
        uncompared = number - known.seen + known.failed * _FAILED
        if page.publish(number, uncompared, found) or found.call.is_uneven:  # equal calls may not fit
            self._compare(known, number, uncompared)
        if board is not None and (first := board.publish(number, uncompared, found)) is not None:
            calls = {**page.calls(number, uncompared), page.rank: (found.call, found.line), first[0]: first[1:]}
            self._compare_with(known, number, first[0], calls)
        return number

    def _start_message(self, known: _Group, is_sent: bool, args: Sequence[Any], now: float) -> None:
        """Count a message, and refuse it if the call of the other rank differs from the call of this rank."""
        page, messages = known.page, known.messages
        if page.is_refused:
            raise self._refused(known, page.refusal)
        if len(args) == 3:
            _, peer, tag = args
        elif len(args) == 2:
            peer, tag = args[1], 0
        else:
            self._thread.message = None
            return
        key = self._thread.message = (page.rank, peer, tag) if is_sent else (peer, page.rank, tag)
        number = messages[key] = messages.get(key, 0) + 1
        board, budget = known.board, known.budget_of_messages
        if board is None and now < budget.resumes_at and number % _EVERY_MESSAGE:  # most of many
            return
        source, target, _ = key
        members = known.members
        if board is not None and not self._spans((members[source], members[target])):
            board = None
        is_due = budget.spend(now) or not number % _EVERY_MESSAGE
        if not is_due if board is None else not known.budget_of_hosts.spend(now):
            return
        message = Message(source, target, tag, number)
        if not page.messages.compares(message):
            return
        frame = caller_of(sys._getframe(2))
        try:
            mine = _published(
                known,
                "message",
                frame,
                key_of(args[0]),
                lambda: describe("message", given_to_message(args[0]), 0, 1),
            )
        except Exception:  # torch itself checks what it is given
            _log.debug("the arguments of a message can't be compared", exc_info=True)
            return
        theirs = page.messages.publish(message, mine) if board is None else board.publish_message(message, mine)
        if theirs is None:
            return
        calls = (mine.call, mine.line), theirs
        if what := difference(mine.call, 0, theirs[0], 1):
            sent, received = calls if is_sent else calls[::-1]
            text = message_mismatch_text(sent, received, what, members[source], members[target], known.label, tag)
            raise self._refused(known, self._refuse(known, text), tells=True)

    def _retract_message(self, known: _Group) -> None:
        """Withdraw the last message of this thread, if its last call was one."""
        key: tuple[int, int, int] | None = getattr(self._thread, "message", None)
        if key is not None:
            self._thread.message = None
            message = Message(*key, known.messages[key])
            known.messages[key] -= 1
            known.page.messages.retract(message)
            if known.board is not None:
                known.board.retract(message)

    def _compare_with(self, known: _Group, number: int, first: int, calls: Mapping[int, tuple[Call, str]]) -> None:
        """Refuse a collective if the call of the first rank, which may be on another host, differs from this rank's."""
        mine = known.page.rank
        what = difference(calls[mine][0], mine, calls[first][0], first)
        if what:
            text = mismatch_text(calls, what, known.members, known.label, number)
            raise self._refused(known, self._refuse(known, text), tells=True)

    @staticmethod
    def _refuse(known: _Group, text: str) -> str:
        """Make the group unusable for all ranks; returns the text of the rank that was first."""
        return known.page.refuse(text if known.board is None else known.board.refuse(text))

    def _compare(self, known: _Group, number: int, uncompared: int) -> None:
        """Refuse a collective if the call of a rank differs from the call of this rank."""
        page = known.page
        calls = page.calls(number, uncompared)
        if page.rank not in calls:  # it did not fit
            return
        mine = calls[page.rank][0]
        differences = (difference(mine, page.rank, call, rank) for rank, (call, _) in calls.items())
        if what := next(filter(None, differences), ""):
            calls |= self._with_late_ones(page, number, uncompared)  # one may have been withdrawn meanwhile
            text = mismatch_text(calls, what, known.members, known.label, number)
            raise self._refused(known, self._refuse(known, text), tells=True)

    @staticmethod
    def _with_late_ones(page: CallPage, number: int, uncompared: int) -> dict[int, tuple[Call, str]]:
        """Return the calls of all ranks of this host; wait a moment for those that come a little later."""
        deadline = time.monotonic() + LATE_S
        calls = page.calls(number, uncompared)
        while len(calls) < page.size and not page.is_refused and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            calls = page.calls(number, uncompared)
        return calls


def _backends(group: Any) -> dict[Any, str]:
    """The backends of a group: for each of them one of its devices, and its name."""
    found: dict[Any, str] = {}
    seen: list[Any] = []
    for device in group._device_types:
        backend = group._get_backend(device)
        if not any(backend is each for each in seen):
            seen.append(backend)
            found[device] = str(backend.name())
    return found


def _published(known: _Group, name: str, frame: FrameType | None, given: Any, call: Callable[[], Call]) -> Published:
    """What this rank publishes for a call, which is made once for each kind of call and each line.

    Args:
        known: the group.
        name: the method.
        frame: the user's code that calls it.
        given: what of the arguments determines the description; hashable.
        call: describes the call.
    """
    code = None if frame is None else frame.f_code
    key = name, id(code), 0 if frame is None else frame.f_lasti, given
    found = known.known.get(key)
    if found is None:
        found = Published(call(), line_of(frame)), code
        if len(known.known) >= _MAX_CACHED:
            known.known.clear()
        known.known[key] = found
    return found[0]
