"""Describes what ranks do now: equal stacks once, with the place in the user's code and the ranks a collective waits for.

The text answers why something does not end. It therefore names the ranks that are missing from a collective next to the ranks
that wait in it, and distinguishes ranks that wait in different collectives of one group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from monarch_kernel.base.events import MeshView, RankView
from monarch_kernel.base.text import format_seconds, one_line, plain, plural
from monarch_kernel.errors import Failure, format_ranks
from monarch_kernel.runtime.diagnostics.source_names import describe_line, short_cell
from monarch_kernel.runtime.diagnostics.stacks import Activity, Collective, Doing
from monarch_kernel.runtime.diagnostics.waits import calls_text, collective_text, differs, no_answer

__all__ = ["doing_lines", "stacks_text", "works"]

_MAX_BLOCKS = 12
_MAX_USER_FRAMES = 4

Answers = Mapping[int, "Doing | Failure"]


def stacks_text(view: MeshView, answers: Answers, ranks: Collection[int] | None = None) -> str:
    """Describe what the ranks of a mesh do now.

    Args:
        view: the mesh.
        answers: the answers of all its ranks, from `ProcMesh.doing`.
        ranks: the ranks to describe; all by default.
    """
    chosen = [rank.rank for rank in view.ranks if ranks is None or rank.rank in ranks]
    busy = [
        rank for rank in chosen if view.ranks[rank].state == "running" or works(view.ranks[rank], answers.get(rank))
    ]
    if not busy and not any(_collectives(answers, rank) for rank in chosen):
        states = sorted({view.ranks[rank].state for rank in chosen} - {"idle", "failed"})
        if not states:
            return f"{view.name}: nothing runs on {format_ranks(chosen)}"
    count = f"{len(chosen)} rank{'s' * (len(chosen) != 1)}"
    return "\n".join([f"{view.name}: {count}, {len(busy)} busy", *doing_lines(view, answers, chosen)])


def doing_lines(view: MeshView, answers: Answers, ranks: Sequence[int]) -> list[str]:
    """Describe what some ranks of a mesh do: one block per distinct activity, with its ranks."""
    blocks: dict[object, tuple[list[int], list[str], list[Collective]]] = {}
    for rank in ranks:
        for lines, waits in _blocks(view.ranks[rank], answers.get(rank)):
            lines = [one_line(line) for line in lines]
            key = (tuple(lines), tuple(replace(each, age_s=0.0, thread=0) for each in waits))
            known = blocks.setdefault(key, ([], lines, []))
            known[0].append(rank)
            known[2].extend(waits)
    found: list[str] = []
    shown = list(blocks.values())
    for block_ranks, lines, waits in shown[:_MAX_BLOCKS]:
        found += [f"{format_ranks(block_ranks)} {lines[0]}", *(f"    {line}" for line in lines[1:])]
        found += [f"    {one_line(line)}" for line in _lines_of_waits(waits, view, answers)]
    if hidden := shown[_MAX_BLOCKS:]:
        others = format_ranks(rank for block_ranks, _, _ in hidden for rank in block_ranks)
        found.append(f"and {plural(len(hidden), 'more place')}, on {others}")
    return found


def works(rank: RankView, answer: Doing | Failure | None) -> bool:
    """Whether a rank runs user code, for any caller."""
    return bool(_activities(rank, answer))


def _blocks(rank: RankView, answer: Doing | Failure | None) -> Iterator[tuple[list[str], list[Collective]]]:
    """Yield each activity of a rank: its lines, and the collectives it waits in."""
    if rank.state in ("dead", "stopped"):
        yield [f"{rank.state}: {rank.last_error}" if rank.last_error else rank.state], []
    elif rank.state == "starting":
        yield ["its process is not up yet"], []
    elif no_answer(answer):
        what = f", while {rank.activity} runs there: its line" if rank.activity else ": what runs there"
        yield [f"no answer{what} is not known"], []
    elif isinstance(answer, Doing) and answer.halted:
        what = f", while it runs {rank.activity}" if rank.activity else ""
        yield [f"is {answer.halted}{what}"], []
    elif isinstance(answer, Failure):
        yield [plain(answer.headline())], []
    else:
        assert answer is not None
        activities = _activities(rank, answer)
        if not activities:
            idle = [f"between two steps of {rank.activity}" if rank.state == "running" else "idle"]
            yield [*idle, *_not_known(answer)], []
        left = list(answer.collectives)
        for i, activity in enumerate(activities):
            # The thread that starts a collective may differ from the thread that waits for it, as in the backward pass.
            last = i == len(activities) - 1
            mine = [each for each in left if last or each.thread == activity.thread]
            left = [each for each in left if each not in mine]
            yield [*_activity_lines(activity, rank, waits=bool(mine)), *(_not_known(answer) if last else ())], mine


def _not_known(answer: Doing) -> Iterator[str]:
    """Say why the collectives of a rank are unknown, if they are."""
    if answer.unknown:
        yield f"its collectives are not known: {plain(answer.unknown)}"


def _activity_lines(activity: Activity, rank: RankView, *, waits: bool) -> list[str]:
    frames = [frame for frame in activity.frames if frame.user]
    if not frames:
        what = (rank.activity if activity.executor == "main" else activity.executor) or "runs its own code"
        return [f"{what}: its place is not known: {plain(activity.unknown)}" if activity.unknown else what]
    lines = [describe_line(frames[-1])]
    if activity.executor != "main":
        lines[0] = f"{activity.executor}: {lines[0]}"
    if activity.awaits:
        lines.append(f"waits for {plain(activity.awaits)}")
    inner = activity.frames[-1]
    if activity.call and not inner.user and not waits:
        lines.append(f"in {activity.call} ({short_cell(inner.file)}, line {inner.line})")
    for frame in reversed(frames[:-1][-_MAX_USER_FRAMES:]):
        lines.append(f"called from {describe_line(frame)}")
    return lines


def _lines_of_waits(waits: Sequence[Collective], view: MeshView, answers: Answers) -> Iterator[str]:
    """Describe the collectives that ranks wait in; those of one group that wait for the same ranks are described together."""
    together: dict[object, list[Collective]] = {}
    for wait in {_identity(each): each for each in sorted(waits, key=lambda each: each.age_s)}.values():
        missing = tuple(_missing_lines(wait, view, answers))
        key = (wait.group, wait.members, missing) if wait.number else _identity(wait)
        together.setdefault(key, []).append(wait)
    for some in together.values():
        some.sort(key=lambda each: each.number)
        yield f"waits in {calls_text(some)} for {format_seconds(max(each.age_s for each in some))}"
        yield from _missing_lines(some[0], view, answers)


def _missing_lines(wait: Collective, view: MeshView, answers: Answers) -> Iterator[str]:
    """Describe the ranks that a collective waits for."""
    if not wait.number:  # its calls on other ranks can't be matched with it
        return
    missing: dict[str, list[int]] = {}
    others: dict[str, list[int]] = {}
    for rank in wait.members:
        answer = answers.get(rank)
        if not isinstance(answer, Doing):
            if rank < len(view.ranks) and view.ranks[rank].state in ("dead", "stopped"):
                missing.setdefault("dead", []).append(rank)
            continue
        same = [each for each in answer.collectives if (each.group, each.number) == (wait.group, wait.number)]
        if answer.unknown:
            missing.setdefault("not known", []).append(rank)
        elif not same and answer.reached.get(wait.group, 0) < wait.number:
            missing.setdefault("not started", []).append(rank)
        for each in same:
            if differs(each, wait):
                others.setdefault(collective_text(each), []).append(rank)
    if missing.get("not started"):
        late = missing["not started"]
        yield f"{format_ranks(late)} {'has' if len(late) == 1 else 'have'} not started it"
    if missing.get("not known"):
        yield f"whether {format_ranks(missing['not known'])} started it is not known"
    if missing.get("dead"):
        yield f"{format_ranks(missing['dead'])} cannot start it: dead"
    for what, where in others.items():
        yield f"{format_ranks(where)} {'waits' if len(where) == 1 else 'wait'} in {what} instead"


def _activities(rank: RankView, answer: Doing | Failure | None) -> list[Activity]:
    """List the activities of a rank, including work for other callers than the controller, such as another rank.

    A thread that the controller waits for counts wherever it is; any other thread counts only while it runs user code.
    """
    if not isinstance(answer, Doing):
        return []
    return [each for each in answer.activities if rank.state == "running" or each.user_frame is not None]


def _collectives(answers: Answers, rank: int) -> tuple[Collective, ...]:
    answer = answers.get(rank)
    return answer.collectives if isinstance(answer, Doing) else ()


def _identity(wait: Collective) -> tuple[object, ...]:
    return (wait.operation, wait.number, wait.group, wait.shapes, wait.peer)
