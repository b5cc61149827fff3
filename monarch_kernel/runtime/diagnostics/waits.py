"""Describes waits in collectives: which ranks wait since when, in which call and line, and what the missing ranks do instead.

A wait is one collective of one group, or one send or receive, that has not completed. All ranks that wait in it are one
`Stall`, which keeps its `Stall.key` until it ends, so that repeated looks at the ranks can be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from monarch_kernel.base.events import MeshView, WaitView
from monarch_kernel.base.text import format_seconds, one_line
from monarch_kernel.errors import Failure, format_ranks
from monarch_kernel.runtime.diagnostics.source_names import describe_line, short_cell
from monarch_kernel.runtime.diagnostics.stacks import Activity, Collective, Doing

__all__ = [
    "LEAST_WAIT_S",
    "NOT_ANSWERED",
    "Stall",
    "calls_text",
    "collective_text",
    "differs",
    "full_place",
    "no_answer",
    "place_of_thread",
    "stalls",
]

LEAST_WAIT_S = 0.9
"""The least age of a wait that the report of an interrupt describes, in seconds.

Less than 1: the line of a wait may have appeared when the call had lasted for 1 s, and the wait begins a moment later.
"""

NOT_ANSWERED = "not answered: what runs there is not known"
"""Of a live rank that has not reported what it does. It may be slow, stopped, or in native code that holds the GIL."""

_MAX_PLACES = 4
_NEW_GROUP = "new_group"
_SAME_SHAPES = ("all_reduce", "broadcast", "reduce")  # inputs of other collectives may differ between ranks
_VERBS = {
    "has": ("has", "have", "had"),
    "is": ("is", "are", "was"),
    "waits": ("waits", "wait", "waited"),
}
"""Verbs for one rank, for several, and in the past."""


@dataclass(frozen=True, slots=True)
class Stall:
    """One wait.

    Attributes:
        key: identifies the wait.
        call: the collective, such as ``all_reduce #17 (shape 4)``.
        ranks: the ranks that wait in it, sorted.
        age_s: how long the first of them has waited, in seconds.
        text: one line that describes it.
        missing: the ranks that they wait for, sorted.
        silent: those of the missing ranks that have not answered.
    """

    key: tuple[object, ...]
    call: str
    ranks: tuple[int, ...]
    age_s: float
    text: str
    missing: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()

    def as_view(self) -> WaitView:
        """Return what views of the mesh show."""
        return WaitView(self.text, self.ranks, self.missing)


@dataclass(slots=True)
class _Wait:
    """The calls of one wait, by rank; a rank can have several messages to and from another one."""

    calls: dict[int, Collective] = field(default_factory=dict)
    more: dict[int, list[Collective]] = field(default_factory=dict)

    def add(self, rank: int, call: Collective) -> None:
        """Add a call of a rank."""
        if self.calls.setdefault(rank, call) is not call:
            self.more.setdefault(rank, []).append(call)

    def choose(self) -> None:
        """Show of a rank that has several messages the one that may be meant for the first one: a receive for a send."""
        first = self.first
        for rank, others in self.more.items():
            call = self.calls[rank]
            if first.peer == rank and call is not first and call.operation == first.operation:
                self.calls[rank] = next((each for each in others if each.operation != first.operation), call)

    @property
    def first(self) -> Collective:
        return max(self.calls.values(), key=lambda each: each.age_s)

    @property
    def is_message(self) -> bool:
        """Whether it is a send or receive of one rank, whose peer has no call in it."""
        return self.first.peer is not None and len(self.calls) == 1


def stalls(
    view: MeshView | None,
    answers: Mapping[int, Doing | Failure],
    finished: Collection[int],
    min_age_s: float,
    *,
    what: str = "the cell",
    is_over: bool = False,
) -> list[Stall]:
    """Find the waits of a mesh that last, the oldest first.

    Args:
        view: the mesh; None where only the ranks of a call are known.
        answers: what its ranks do, from `ProcMesh.doing`.
        finished: the ranks that have finished the cell.
        min_age_s: the least age of a wait, in seconds.
        what: what these ranks have finished.
        is_over: whether to describe the waits in the past tense.
    """
    waits: dict[tuple[object, ...], _Wait] = {}
    for rank, answer in sorted(answers.items()):
        for call in answer.collectives if isinstance(answer, Doing) else ():
            waits.setdefault(_key(rank, call, answers), _Wait()).add(rank, call)
    describer = _Describer(view, answers, finished, what, is_over)
    together: dict[tuple[object, ...], list[tuple[tuple[object, ...], _Wait]]] = {}
    for key, wait in waits.items():
        wait.choose()
        if wait.first.age_s >= min_age_s:
            together.setdefault(describer.circumstances(wait) or key, []).append((key, wait))
    found = []
    for common, some in together.items():
        some.sort(key=lambda item: item[1].first.number)
        key, wait = some[0]
        if wait.is_message:
            found.append(describer.messages(common, [each for _, message in some for each in message.calls.items()]))
            continue
        calls = calls_text([each.first for _, each in some])
        age_s = max(each.first.age_s for _, each in some)
        ranks = tuple(sorted(wait.calls))
        missing = describer.missing(wait)
        found.append(Stall(key, calls, ranks, age_s, describer.text(wait, calls, age_s), *_absent(missing)))
    return sorted(found, key=lambda stall: -stall.age_s)


def calls_text(calls: Sequence[Collective]) -> str:
    """Format collectives that the same ranks have started at one line, such as those of DDP's backward pass."""
    first, *others = [collective_text(call, with_group=True) for call in calls]
    if not others:
        return first
    return f"{first} and {others[0]}" if len(others) == 1 else f"{first} and {len(others):,} more up to {others[-1]}"


def _key(rank: int, call: Collective, answers: Mapping[int, Doing | Failure]) -> tuple[object, ...]:
    """Identify a wait by its number in the group, or by the ranks of a message; two that wait for each other are one."""
    if call.number:
        return (call.group, call.members, call.number)
    if call.operation.startswith(_NEW_GROUP):  # whose numbers differ if its members have made other groups before
        return (call.group, call.members, _NEW_GROUP)
    if call.peer is None:
        return (call.group, call.members, call.operation)
    peer = answers.get(call.peer)
    if any(
        each.peer == rank and each.group == call.group for each in (peer.collectives if isinstance(peer, Doing) else ())
    ):
        return (call.group, *sorted((rank, call.peer)))
    return (call.group, call.operation, rank, call.peer)


@dataclass(frozen=True, slots=True)
class _Describer:
    """Describes waits of a mesh."""

    view: MeshView | None
    answers: Mapping[int, Doing | Failure]
    finished: Collection[int]
    what: str
    is_over: bool

    def circumstances(self, wait: _Wait) -> tuple[object, ...]:
        """Return what waits have in common that are one to the user: group, ranks, lines; empty if ranks call differently."""
        first = wait.first
        if wait.is_message:
            ((rank, call),) = wait.calls.items()
            return (call.group, call.members, call.operation, call.caller, call.shapes, self._place(rank, call))
        if not first.number or any(differs(call, first) for call in wait.calls.values()):
            return ()
        places = tuple((rank, call.thread, self._place(rank, call)) for rank, call in sorted(wait.calls.items()))
        missing = tuple((why, tuple(ranks)) for why, ranks in self.missing(wait).items())
        return (first.group, first.members, places, missing)

    def messages(self, key: tuple[object, ...], calls: Sequence[tuple[int, Collective]]) -> Stall:
        """Describe sends or receives that are alike but for the ranks, such as those of a ring or a pipeline, as one wait.

        Args:
            key: identifies the wait.
            calls: the calls, each with the rank that waits in it.
        """
        first = max((call for _, call in calls), key=lambda call: call.age_s)
        ranks = tuple(sorted({rank for rank, _ in calls}))
        if len(calls) == 1:
            wait = _Wait(dict(calls))
            what, missing = collective_text(first, with_group=True), self.missing(wait)
            text = self.text(wait, what, first.age_s)
        else:
            what, missing = collective_text(first, with_group=True, with_peer=False), self._missing_peers(calls)
            text = self._text_of_messages(calls, what, first, missing)
        return Stall(key, what, ranks, first.age_s, text, *_absent(missing))

    def _missing_peers(self, calls: Sequence[tuple[int, Collective]]) -> dict[tuple[str, str], list[int]]:
        """Describe the peers of messages that are elsewhere, as `missing` does."""
        waiting = {rank for rank, _ in calls}
        missing: dict[tuple[str, str], list[int]] = {}
        peers = {call.peer: call for _, call in calls if call.peer is not None and call.peer not in waiting}
        for peer, call in sorted(peers.items(), key=lambda item: item[0] or 0):
            missing.setdefault(self._instead(peer or 0, call), []).append(peer or 0)
        return missing

    def _text_of_messages(
        self,
        calls: Sequence[tuple[int, Collective]],
        what: str,
        first: Collective,
        missing: Mapping[tuple[str, str], Sequence[int]],
    ) -> str:
        ends: dict[str, list[int]] = {}
        for rank, call in sorted(calls, key=lambda item: item[0]):
            ends.setdefault(_peer_text(call), []).append(rank)
        pairs = [f"{format_ranks(ranks)} {end}" for end, ranks in list(ends.items())[:_MAX_PLACES]]
        more = f" and {len(ends) - _MAX_PLACES} more" if len(ends) > _MAX_PLACES else ""
        place = self._place(*calls[0])
        where = f"in {what}{place and f', {place}'}: {', '.join(pairs)}{more}"
        waiting = sorted({rank for rank, _ in calls})
        parts = [self._sentence(waiting, "waits", f"for {format_seconds(first.age_s)} {where}")]
        parts += self._missing_parts(missing)
        if circle := _circle({rank: call.peer for rank, call in calls}):
            parts.append(self._sentence(circle, "waits", "for each other in a circle"))
        return one_line("; ".join(parts))

    def _missing_parts(self, missing: Mapping[tuple[str, str], Sequence[int]]) -> list[str]:
        parts = [self._sentence(ranks, *why) for why, ranks in list(missing.items())[:_MAX_PLACES]]
        if hidden := list(missing.values())[_MAX_PLACES:]:
            parts.append(f"{format_ranks(rank for ranks in hidden for rank in ranks)} elsewhere")
        return parts

    def text(self, wait: _Wait, calls: str, age_s: float) -> str:
        """Describe a wait in one line.

        Args:
            wait: the wait, or the first of several in the same circumstances.
            calls: its collective, or those of all these waits.
            age_s: how long the first of them has lasted, in seconds.
        """
        first = wait.first
        places: dict[tuple[str, str], list[int]] = {}
        for rank, call in sorted(wait.calls.items(), key=lambda item: not _is_same(item[1], first)):
            same = _is_same(call, first)
            text = calls if same else collective_text(call)
            places.setdefault((text, self._place(rank, call)), []).append(rank)
        shown = list(places.items())[:_MAX_PLACES]
        (call_text, place), ranks = shown[0]
        where = f"in {call_text}{place and f', {place}'}"
        parts = [self._sentence(ranks, "waits", f"for {format_seconds(age_s)} {where}")]
        for (other, place), ranks in shown[1:]:
            call = wait.calls[ranks[0]]
            instead = (
                "" if {first.operation, call.operation} == {"send", "recv"} and first.tag == call.tag else " instead"
            )
            where = (
                f"in {other}{place and f', {place}'}{instead}"
                if other != call_text
                else f"at {place or 'another line'}"
            )
            parts.append(f"{format_ranks(ranks)} {where}")
        if hidden := list(places.values())[_MAX_PLACES:]:
            parts.append(f"{format_ranks(rank for ranks in hidden for rank in ranks)} at other lines")
        parts += self._missing_parts(self.missing(wait))
        if len(parts) == 1 and first.members and len(wait.calls) == len(first.members) and first.peer is None:
            parts.append("no rank sends" if _is_from_any(first) else "all ranks of the group have started it")
        return one_line("; ".join(parts))

    def _sentence(self, ranks: Sequence[int], verb: str, rest: str) -> str:
        return f"{format_ranks(ranks)} {_VERBS[verb][2 if self.is_over else len(ranks) > 1]} {rest}".rstrip()

    def missing(self, wait: _Wait) -> dict[tuple[str, str], list[int]]:
        """Describe the ranks that a wait needs and that are elsewhere, by what they do: a verb, and the rest."""
        first = wait.first
        missing: dict[tuple[str, str], list[int]] = {}
        members = first.members if first.peer is None else (first.peer,)
        for rank in members:
            if rank not in wait.calls and self._is_behind(rank, first):
                missing.setdefault(self._instead(rank, first), []).append(rank)
        return missing

    def _is_behind(self, rank: int, call: Collective) -> bool:
        """Whether a rank has not started a collective yet, or may not have."""
        answer = self.answers.get(rank)
        if not call.number or not isinstance(answer, Doing) or answer.unknown:
            return True
        return answer.reached.get(call.group, 0) < call.number

    def _instead(self, rank: int, call: Collective) -> tuple[str, str]:
        """Describe what a rank does that others wait for, and how many groups it has made if they wait in a new one."""
        verb, rest = self._does(rank, call)
        answer = self.answers.get(rank)
        is_made = call.operation.startswith(_NEW_GROUP) and _NEW_GROUP not in rest  # else both calls have their numbers
        if is_made and isinstance(answer, Doing) and answer.groups >= 0:
            rest += f" (groups made: {answer.groups})"
        return verb, rest

    def _does(self, rank: int, call: Collective) -> tuple[str, str]:
        state = "" if self.view is None else self.view.ranks[rank].state
        answer = self.answers.get(rank)
        if state in ("dead", "stopped"):
            return "is", "dead"
        if rank in self.finished:
            did = f"failed in {self.what}" if state == "failed" else f"finished {self.what}"
            return "has", f"{did}{self._after_steps(answer)}"
        if state == "starting":
            return "is", "not up"
        if self.view is None and answer is None:
            return "is", f"not in {self.what}"
        if no_answer(answer):
            return "has", NOT_ANSWERED
        if not isinstance(answer, Doing):
            return "has", "not started it"
        if answer.halted:
            return "is", answer.halted
        if answer.unknown:
            at = _busiest(answer)
            return (
                "is",
                f"at {full_place(at)}, and its collectives are not known" if at else "not known to have started it",
            )
        if answer.collectives:
            other = answer.collectives[0]
            place = self._place(rank, other)
            return "waits", f"in {collective_text(other, with_group=True)}{place and f', {place}'} instead"
        at = _busiest(answer)
        if at is None:
            return "has", f"not started it: no code of {self.what} runs there"
        return ("has", f"not started it: {full_place(at)}") if call.number else ("is", f"at {full_place(at)}")

    def _place(self, rank: int, call: Collective) -> str:
        """Name the line of the user's code that waits; empty if it is not known."""
        answer = self.answers.get(rank)
        return place_of_thread(answer, call.thread) if isinstance(answer, Doing) else ""

    def _after_steps(self, answer: Doing | Failure | None) -> str:
        """Say how far a rank has come in a loop in which others still are."""
        loops = answer.loops if isinstance(answer, Doing) else ()
        running = {
            each.request
            for other in self.answers.values()
            for each in (other.loops if isinstance(other, Doing) else ())
            if not each.is_over
        }
        ended = next((each for each in loops if each.is_over and each.request in running), None)
        if ended is not None:
            return f" after {ended.steps} step{'s' * (ended.steps != 1)}"
        turns = [
            each.turn
            for other in self.answers.values()
            for each in (other.activities if isinstance(other, Doing) else ())
        ]
        ends = answer.loop_ends if isinstance(answer, Doing) else {}
        name = next((name for turn in turns if (name := turn.partition(" = ")[0]) in ends), "")
        return f" with {name} = {ends[name]}" if name else ""


def _absent(missing: Mapping[tuple[str, str], Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that a wait needs and that are elsewhere, and those of them that have not answered."""
    silent = tuple(sorted(missing.get(("has", NOT_ANSWERED), ())))
    return tuple(sorted(rank for each in missing.values() for rank in each)), silent


def place_of_thread(answer: Doing, thread: int) -> str:
    """Name the line of the user's code that a thread runs, or another one if that has none; empty if it is not known."""
    of_thread = [each for each in answer.activities if each.thread == thread and each.user_frame is not None]
    some = of_thread or [each for each in answer.activities if each.user_frame is not None]
    if not some:
        return ""
    frame = some[-1].user_frame
    assert frame is not None
    actor = "" if some[-1].executor == "main" else f"{some[-1].executor}: "
    loop = next((each for each in answer.loops if each.request == some[-1].request and not each.is_over), None)
    step = f", in step {loop.steps - 1}" if loop is not None and loop.steps else ""  # as the loop counts, from 0
    return f"{actor}{short_cell(frame.file)}, line {frame.line}{step or _turn(some[-1])}"


def _is_same(call: Collective, other: Collective) -> bool:
    return not differs(call, other) and (call.peer, call.tag) == (other.peer, other.tag)


def _busiest(answer: Doing) -> Activity | None:
    """Return the activity to show: the cell's before those of actors."""
    activities = [each for each in answer.activities if each.user_frame is not None]
    return next((each for each in activities if each.executor == "main"), activities[0] if activities else None)


def full_place(activity: Activity) -> str:
    """Name the line of the user's code that an activity is at, with its code."""
    frame = activity.user_frame
    assert frame is not None
    actor = "" if activity.executor == "main" else f"{activity.executor}: "
    awaits = f"; it waits for {activity.awaits}" if activity.awaits else ""
    return f"{actor}{describe_line(frame)}{_turn(activity)}{awaits}"


def _turn(activity: Activity) -> str:
    return f", {activity.turn}" if activity.turn else ""


def no_answer(answer: Doing | Failure | None) -> bool:
    """Whether a live rank did not report what it does."""
    return answer is None or (isinstance(answer, Failure) and answer.etype == "CancelledError")


def differs(call: Collective, other: Collective) -> bool:
    """Whether two calls with the same number in a group can't complete each other."""
    return call.operation != other.operation or (call.operation in _SAME_SHAPES and call.shapes != other.shapes)


def collective_text(wait: Collective, *, with_group: bool = False, with_peer: bool = True) -> str:
    """Format a collective: ``all_reduce #17 (shape 16x8)``; ``recv from [1]``; ``all_gather_object: all_gather #3``."""
    number = f" #{wait.number}" if wait.number else ""
    if with_peer and (wait.peer is not None or _is_from_any(wait)):
        number = f" {_peer_text(wait)}"
    ranks = format_ranks(wait.members)
    label = (
        wait.group if wait.group.startswith(ranks) else f"{wait.group} {ranks}"
    )  # a group without a name has its ranks
    group = f" of group {label}" if with_group and wait.group else ""
    notes = ", ".join(filter(None, (wait.shapes and f"shape {wait.shapes}", wait.purpose)))
    caller = f"{wait.caller}: " if wait.caller else ""
    return f"{caller}{wait.operation}{number}{group}" + (f" ({notes})" if notes else "")


def _peer_text(message: Collective) -> str:
    """Format the peer of a send or receive: ``from [1] with tag 2``; ``from any rank``."""
    tag = f" with tag {message.tag}" if message.tag else ""
    peer = "any rank" if message.peer is None else format_ranks([message.peer])
    return f"{'to' if message.operation == 'send' else 'from'} {peer}{tag}"


def _is_from_any(call: Collective) -> bool:
    """Whether it is a receive that takes a message of any rank."""
    return call.operation == "recv" and call.peer is None


def _circle(peers: Mapping[int, int | None]) -> list[int]:
    """Return ranks of which each waits for the next one, and the last one for the first; empty if there are none."""
    for start in sorted(peers):
        path: list[int] = []
        at: int | None = start
        while at is not None and at in peers and at not in path:
            path.append(at)
            at = peers[at]
        if at in path:
            return sorted(path[path.index(at) :])
    return []
