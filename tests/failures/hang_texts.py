"""Compares what the product says about a hang with what is true: right, incomplete or wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.failures.hangs import At, Finished, Hang, Stalled, Waits

__all__ = ["Verdict", "judge", "ranks_of"]

_RANKS = r"(?P<ranks>\[[\d,-]+\])"
_PLACE = r"(?:(?:actor|thread) [\w<>]+: )?(?:notebook )?cell \[\d+\], line (?P<line>\d+)(?:, \w+ = \d+)?"
_PAIRS = r"(?:: \[\d[\d,-]*\] (?:from|to) \[.*)?"
_HEAD = re.compile(
    rf"{_RANKS} wait(?:s|ed)? for (?P<age>[\d.]+ \w+) in (?P<call>.*?)(?:, {_PLACE})?(?:, in step \d+)?{_PAIRS}"
)
_CIRCLE = re.compile(rf"{_RANKS} wait(?:ed)? for each other in a circle")
_IN = re.compile(rf"{_RANKS} (?:wait(?:s|ed)? )?in (?P<call>.*?)(?:, {_PLACE})?(?: instead)?")
_AT_SAME = re.compile(rf"{_RANKS} at {_PLACE}")
_NOT_STARTED = re.compile(rf"{_RANKS} (?:has|have|had) not started it: {_PLACE}(?:, in [\w.]+)?(?:: .*)?")
_IS_AT = re.compile(rf"{_RANKS} (?:is|are|was|were) at {_PLACE}(?:, in [\w.]+)?(?:: .*)?")
_FINISHED = re.compile(rf"{_RANKS} (?:has|have|had) finished (?:the cell|the call)(?: (?:after|with) .*)?")
_NO_CODE = re.compile(rf"{_RANKS} (?:has|have|had) not started it: no code of the cell (?:runs|ran) there")
_ALL = ("all ranks of the group have started it", "no rank sends")


@dataclass
class Verdict:
    """What a text is worth.

    Attributes:
        wrong: statements that are false.
        lacks: what it does not say.
    """

    wrong: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)


@dataclass
class _Line:
    """A description of one wait.

    Attributes:
        text: the line.
        call: the call that it is about.
        waiting: the ranks that it says wait in this call.
        others: the ranks of which it says something else.
    """

    text: str
    call: str
    waiting: set[int] = field(default_factory=set)
    others: set[int] = field(default_factory=set)


def judge(hang: Hang, text: str) -> Verdict:
    """Compare the lines of a text that describe waits with the truth about a hang."""
    verdict = Verdict()
    found = [_read(line.strip(), hang, verdict) for line in text.splitlines() if _HEAD.match(line.strip())]
    for stall in hang.stalls:
        about = [line for line in found if _name(line.call) in stall.operations and line.waiting & set(stall.waiting)]
        if not about:
            verdict.lacks.append(f"no line about {stall.operations[0]} of {list(stall.waiting)}")
        else:
            verdict.lacks += _lacks(stall, about)
    return verdict


def _lacks(stall: Stalled, about: Sequence[_Line]) -> list[str]:
    """What lines about a wait do not say."""
    lacks = []
    said = set().union(*(line.waiting for line in about))
    if not set(stall.waiting) <= said:
        lacks.append(f"{sorted(set(stall.waiting) - said)} wait, too")
    others = set().union(*(line.others for line in about))
    if not set(stall.missing) <= others:
        lacks.append(f"where {sorted(set(stall.missing) - others)} are")
    text = "\n".join(line.text for line in about)
    lacks += [f"{word!r}" for word in stall.words if word not in text]
    groups = {tuple(ranks_of(each)) for each in re.findall(r"of group (?:[^\s\[]+ )?(\[[\d,-]+\])", text)}
    if stall.group and stall.group not in groups:
        lacks.append(f"the group {list(stall.group)}")
    return lacks


def _read(text: str, hang: Hang, verdict: Verdict) -> _Line:
    first, *rest = text.split("; ")
    head = _HEAD.fullmatch(first)
    if head is None:
        verdict.lacks.append(f"not understood: {first}")
        return _Line(text, "")
    line = _Line(text, head["call"])
    for rank in ranks_of(head["ranks"]):
        line.waiting.add(rank)
        _check(hang, rank, Waits((_name(head["call"]),), int(head["line"] or 0)), first, verdict)
    for part in (each.partition(" (groups made: ")[0] for each in rest):
        if part in _ALL:
            if any(stall.missing for stall in hang.stalls if _name(line.call) in stall.operations):
                verdict.wrong.append(part)
        elif (found := _CIRCLE.fullmatch(part)) is not None:
            line.others.update(ranks_of(found["ranks"]))
        elif (found := _AT_SAME.fullmatch(part)) is not None:
            for rank in ranks_of(found["ranks"]):
                line.waiting.add(rank)
                _check(hang, rank, Waits((_name(line.call),), int(found["line"])), part, verdict)
        elif (found := _IN.fullmatch(part)) is not None:
            for rank in ranks_of(found["ranks"]):
                (line.waiting if hang.kind == "tags" else line.others).add(rank)
                _check(hang, rank, Waits((_name(found["call"]),), int(found["line"] or 0)), part, verdict)
        elif (found := _NOT_STARTED.fullmatch(part) or _IS_AT.fullmatch(part)) is not None:
            for rank in ranks_of(found["ranks"]):
                line.others.add(rank)
                _check(hang, rank, At(int(found["line"])), part, verdict)
        elif (found := _FINISHED.fullmatch(part) or _NO_CODE.fullmatch(part)) is not None:
            for rank in ranks_of(found["ranks"]):
                line.others.add(rank)
                _check(hang, rank, Finished(), part, verdict)
        else:
            verdict.lacks.append(f"not understood: {part}")
    return line


def _check(hang: Hang, rank: int, said: Waits | At | Finished, text: str, verdict: Verdict) -> None:
    truth = hang.truth[rank]
    if isinstance(said, Waits) and isinstance(truth, Waits):
        fits = said.operations[0] in truth.operations and said.line in (0, truth.line)
        if fits and not said.line:
            verdict.lacks.append(f"the line of {rank}")
    else:
        fits = said == truth
    if not fits:
        verdict.wrong.append(f"{text!r}, but rank {rank} is {truth}")


def _name(call: str) -> str:
    """``all_reduce`` of ``all_reduce #3 of group tp [0-1] (shape 4)``."""
    found = re.match(r"[\w.]+", call)
    name = found[0].rpartition(".")[2] if found else ""
    return name.removesuffix("_tensor")


def ranks_of(label: str) -> list[int]:
    """Parse ``[0-3,6]``."""
    spans = [span.partition("-") for span in label[1:-1].split(",")]
    return [rank for first, _, last in spans for rank in range(int(first), int(last or first) + 1)]
