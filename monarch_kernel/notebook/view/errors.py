"""Formats errors of many ranks as text: one block per distinct error, with user frames shown and library frames folded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from monarch_kernel.base.steady_text import without_gloo_place
from monarch_kernel.base.text import one_line, plain, plural, printable
from monarch_kernel.errors import Failure, Frame, RanksError, causes_by_rank, format_ranks
from monarch_kernel.notebook.view.messages import condensed, narrow
from monarch_kernel.runtime.diagnostics.source_names import short_file
from monarch_kernel.runtime.diagnostics.torch_notes import OLD_GROUP

__all__ = ["error_block"]

_MAX_BLOCKS = 8
_MAX_LINES = 40  # in a block
_MAX_USER_FRAMES = 5
_MAX_VARIABLES = 8
_MAX_LAST_LINES = 10
_MAX_CAUSES = 9  # lines
_MAX_PLACES = 3  # at which released ranks waited
_MAX_WIDTH = 160
_MAX_HEADLINE = 1_000
_SHOWN_BY = "%tb Verbose shows them"
_CELL = re.compile(r"^(    )<((?:remote|notebook) cell \[\d+\])>(?=, line )")
_CONTEXT_LINES = 2  # of source, before and after the failing line


class _Paint:
    """Adds ANSI colours to text, or leaves it plain.

    What matters is bold, in the colour of other text: JupyterLab shows errors on a red ground, where its bold red and bold
    green are hard to read in dark themes.
    """

    def __init__(self, color: bool) -> None:
        self._color = color

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._color and text else text

    def error(self, text: str) -> str:
        return self._wrap("1", text)

    def place(self, text: str) -> str:
        return self._wrap("32", text)

    def mark(self, text: str) -> str:
        return self._wrap("1", text)

    def dim(self, text: str) -> str:
        return self._wrap("2", text)


def error_block(error: RanksError, *, color: bool, verbose: bool = False) -> list[str]:
    """Format an error of some ranks as the lines of a traceback, for ``_render_traceback_``.

    Args:
        error: the error, with a report of each rank.
        color: whether to use ANSI colours.
        verbose: show library frames, too, and do not shorten.

    Returns:
        Lines without newlines.
    """
    paint = _Paint(color)
    groups = error.groups(exact=verbose)
    blocks = [group for group in groups if group[0].kind != "released"]
    by_rank = {point.rank: report for point, report in error.reports.items()}
    released = [rank for failure, ranks in groups if failure.kind == "released" for rank in ranks]
    lines = f"{paint.error(type(error).__name__)}: {plain(error.what)}".split("\n")
    n_blocks = len(blocks) if verbose else _MAX_BLOCKS
    for failure, ranks in blocks[:n_blocks]:
        block = list(_block(error, failure, ranks, paint, verbose))
        lines.append("")
        lines += block if verbose else _shortened(block, paint)
    lines.append("")
    if hidden := blocks[n_blocks:]:
        label = format_ranks(rank for _, ranks in hidden for rank in ranks)
        errors = "1 more distinct error" if len(hidden) == 1 else f"{len(hidden):,} more distinct errors"
        lines.append(f"and {errors} on {label} ({_SHOWN_BY})")
    if released:
        lines.append(paint.dim(_released({rank: by_rank[rank] for rank in sorted(released)})))
    if finished := sorted(point.rank for point in error.results):
        theirs = "its result is" if len(finished) == 1 else "their results are"
        lines.append(f"{format_ranks(finished)} finished; {theirs} in sys.last_value.results")
    while lines and not lines[-1]:
        lines.pop()
    return [printable(line).replace("\n", " ") for line in lines]


def _block(error: RanksError, failure: Failure, ranks: Sequence[int], paint: _Paint, verbose: bool) -> Iterator[str]:
    """Yield the lines of one distinct error, with the ranks that raised it."""
    label = format_ranks(ranks)
    by_rank = {point.rank: report for point, report in error.reports.items()}
    reports = {rank: by_rank[rank] for rank in ranks}
    head, *rest = condensed(plain(_headline(failure)), whole=verbose)
    notes = failure.notes
    at = next((i for i, note in enumerate(notes) if OLD_GROUP in note), len(notes))
    if not verbose and failure.is_broken_connection and at < len(notes):
        of_torch = without_gloo_place(head.partition(": ")[2])  # a consequence of what the notes say
        head, rest = f"{failure.etype}: {' '.join(map(plain, notes[at : at + 2]))}", [f"torch: {of_torch}"]
        notes = (*notes[:at], *notes[at + 2 :])
    yield f"{paint.error(label)} {_colored_headline(_message_line(head, verbose), failure, paint)}"
    yield from (f"    {_message_line(line, verbose)}" for line in rest)
    if failure.added_notes:
        yield from (f"    {_message_line(line, verbose)}" for line in _added_notes(failure, verbose))
    if len({(each.message, each.added_notes) for each in reports.values()}) > 1:
        yield paint.dim(
            f"    texts differ in numbers such as times, ranks or pids: this is {format_ranks(ranks[:1])}'s ({_SHOWN_BY})"
        )
    if processes := _processes(reports):
        yield paint.dim(f"    {processes}")
    if pythons := {each.python for each in reports.values() if each.python}:
        yield paint.dim(f"    with {', '.join(sorted(pythons))}")  # this interpreter's packages are the importable ones
    if notes and len({each.notes for each in reports.values()}) > 1:
        yield f"    On {format_ranks(ranks[:1])}:"
    yield from (f"    {_narrow(plain(note), verbose)}" for note in notes)
    if failure.kind == "interrupted":
        yield from _interrupted(failure, paint)
    elif failure.frames:
        yield from _frames(failure, paint, verbose, _rank_of_variables(reports))
    elif failure.traceback:
        tail = [line for line in plain(failure.traceback).splitlines() if line.strip()]
        if len(tail) > 1:  # a single line would repeat the headline
            yield from (f"    {_narrow(line, verbose)}" for line in (tail if verbose else tail[-_MAX_LAST_LINES:]))
    yield from (f"    {_message_line(line, verbose)}" for line in _causes(reports, verbose))
    if failure.last_lines:
        last = failure.last_lines if verbose else failure.last_lines[-_MAX_LAST_LINES:]
        of_rank = f" of {format_ranks(ranks[:1])}" if len({each.last_lines for each in reports.values()}) > 1 else ""
        yield f"    Last output lines{of_rank}:" if len(last) > 1 else f"    Last output line{of_rank}:"
        yield from (f"    | {_narrow(plain(line), verbose)}" for line in last)
    if verbose and failure.traceback and failure.frames:
        yield "    Full traceback:"
        yield from (f"    {line}" for line in plain(failure.traceback).splitlines())


def _added_notes(failure: Failure, verbose: bool) -> list[str]:
    return condensed(plain("\n".join(failure.added_notes)), whole=verbose)


def _message_line(line: str, verbose: bool) -> str:
    """Bound a line of an error's text: its end often says what to do."""
    return line if verbose else narrow(line, _MAX_HEADLINE, keep_end=True)


def _headline(failure: Failure) -> str:
    if failure.kind == "interrupted" and not failure.message:
        return f"{failure.etype}: interrupted on request, its state is kept"
    message = failure.message.lstrip("\n")
    return f"{failure.etype}: {message}" if message else failure.etype


def _colored_headline(headline: str, failure: Failure, paint: _Paint) -> str:
    etype = failure.etype
    return paint.error(etype) + headline[len(etype) :] if headline.startswith(etype) else headline


def _processes(reports: Mapping[int, Failure]) -> str:
    """Format the hosts and process ids of ranks, ``on node1 (pids 17, 18)``; empty if no rank has a host."""
    by_host: dict[str, list[int]] = {}
    for report in reports.values():
        if report.host:
            by_host.setdefault(report.host, []).append(report.pid)
    hosts = []
    for host, all_pids in list(by_host.items())[:4]:
        pids = [pid for pid in all_pids if pid]
        shown = ", ".join(map(str, pids[:4])) + (", …" if len(pids) > 4 else "")
        hosts.append(f"{host} (pid{'s' if len(pids) > 1 else ''} {shown})" if pids else host)
    more = f", and {plural(len(by_host) - 4, 'more host')}" if len(by_host) > 4 else ""
    return f"on {', '.join(hosts)}{more}" if hosts else ""


def _interrupted(failure: Failure, paint: _Paint) -> Iterator[str]:
    """Yield one line, the place of the interrupt: the user caused it, so a traceback would not help."""
    if where := failure.user_frame:
        source = _source_line(where)
        yield f"    {paint.place(_place(where))}" + (f": {source}" if source else "")


def _released(reports: Mapping[int, Failure]) -> str:
    """Format ranks that only waited for others as one line, with the lines of the user's code at which they waited."""
    by_place: dict[str, list[int]] = {}
    for rank, report in reports.items():
        by_place.setdefault(_place(report.user_frame) if report.user_frame else "", []).append(rank)
    end = f"and {'was' if len(reports) == 1 else 'were'} released"
    if "" in by_place:
        where = f" {end}"
    elif len(by_place) == 1:
        where = f" at {next(iter(by_place))}, {end}"
    else:
        shown = [f"{format_ranks(ranks)} at {place}" for place, ranks in list(by_place.items())[:_MAX_PLACES]]
        where = f" {end}: {'; '.join(shown)}" + ("; …" if len(by_place) > _MAX_PLACES else "")
    return f"{format_ranks(reports)} waited for other ranks{where}"


def _rank_of_variables(reports: Mapping[int, Failure]) -> str:
    """Name the rank whose variables are shown, if ranks with the same error have different ones; empty otherwise."""
    kinds = {tuple(frame.variables for frame in each.frames) for each in reports.values()}
    return f", on {format_ranks(list(reports)[:1])}" if len(kinds) > 1 else ""


def _frames(failure: Failure, paint: _Paint, verbose: bool, on_rank: str) -> Iterator[str]:
    """Yield the user's frames with their source, and one line for each run of library frames."""
    frames = failure.frames
    of_user = [i for i, frame in enumerate(frames) if frame.user]
    # Without a user frame, the innermost frame is the most informative.
    innermost = of_user[-1] if of_user else len(frames) - 1
    if verbose:
        shown = set(range(len(frames)))
    elif len(of_user) > _MAX_USER_FRAMES:
        # For a deep recursion, show the entry and the end.
        shown = {*of_user[:2], *of_user[2 - _MAX_USER_FRAMES :]}
    else:
        shown = {*of_user, innermost}
    last_folded = max(set(range(len(frames))) - shown, default=-1)
    for is_shown, group in groupby(range(len(frames)), key=shown.__contains__):
        indices = list(group)
        if is_shown:
            for i in indices:
                if frames[i].left_out and (verbose or i - 1 in shown):
                    yield paint.dim(f"    … {frames[i].left_out:,} frames are not in the report …")
                yield from _frame(frames[i], paint, verbose)
                if i == innermost:
                    yield from _variables(frames[i], paint, verbose, on_rank)
        else:
            hint = f" ({_SHOWN_BY})" if indices[-1] == last_folded else ""
            # Frames that the report does not have are counted with those beside them that are not shown.
            around = [*indices, *range(indices[-1] + 1, min(indices[-1] + 2, len(frames)))]
            n_left_out = sum(frames[i].left_out for i in around)
            yield paint.dim(f"    {_folded_frames([frames[i] for i in indices], n_left_out)}{hint}")


def _frame(frame: Frame, paint: _Paint, whole: bool) -> Iterator[str]:
    yield f"    {paint.place(_place(frame))}"
    first = frame.first_line
    numbered = [(first + i, text) for i, text in enumerate(frame.source)]
    if not whole:
        numbered = [(n, text) for n, text in numbered if abs(n - frame.line) <= _CONTEXT_LINES]
    while numbered and not numbered[-1][1].strip():
        numbered.pop()
    width = max((len(str(n)) for n, _ in numbered), default=0)
    for n, text in numbered:
        text = _narrow(plain(text), whole)
        if n == frame.line:
            yield f"    {paint.mark(f'----> {n:>{width}}')} {text}".rstrip()
        else:
            yield f"          {paint.dim(f'{n:>{width}}')} {text}".rstrip()


def _variables(frame: Frame, paint: _Paint, whole: bool, on_rank: str) -> Iterator[str]:
    shown = frame.variables if whole else frame.variables[:_MAX_VARIABLES]
    if shown:
        yield paint.dim(f"    where{on_rank}")
    for name, description in shown:
        yield f"          {name}: {_narrow(plain(description).replace(chr(10), ' '), whole)}"
    if len(frame.variables) > len(shown):
        yield paint.dim(f"          … and {plural(len(frame.variables) - len(shown), 'more variable')}")


def _place(frame: Frame) -> str:
    """Format the position of a frame: ``remote cell [5], line 3`` or ``model.py, line 12, in forward``."""
    function = "" if frame.function in ("", "<module>") else f", in {one_line(frame.function)}"
    return f"{short_file(frame.file)}, line {frame.line}{function}"


def _folded_frames(frames: Sequence[Frame], n_left_out: int = 0) -> str:
    n_frames = len(frames) + n_left_out
    files = list(dict.fromkeys(short_file(frame.file) for frame in frames))
    names = ", ".join(files[:2]) + (", …" if len(files) > 2 else "")
    return f"… {n_frames:,} frame{'' if n_frames == 1 else 's'} in {names} …"


def _source_line(frame: Frame) -> str:
    index = frame.line - frame.first_line
    return _narrow(plain(frame.source[index]).strip()) if 0 <= index < len(frame.source) else ""


def _causes(reports: Mapping[int, Failure], verbose: bool) -> Iterator[str]:
    """Yield the exceptions that this error is chained to, nearest first, with their lines."""
    lines = [_in_cell(plain(line)) for line in causes_by_rank(reports, whole=verbose)]
    shown = lines if verbose else lines[:_MAX_CAUSES]
    yield from shown
    if n_more := sum(not line.startswith(" ") for line in lines[len(shown) :]):
        yield f"… and {n_more} more ({_SHOWN_BY})"


def _in_cell(line: str) -> str:
    """Name a cell without angle brackets, as in the frames above it."""
    return _CELL.sub(r"\1\2", line)


def _shortened(block: list[str], paint: _Paint) -> list[str]:
    """Bound the length of a block: keep its beginning and its end."""
    if len(block) <= _MAX_LINES:
        return block
    n_head = _MAX_LINES // 2
    n_tail = _MAX_LINES - n_head - 1
    n_cut = len(block) - n_head - n_tail
    return [*block[:n_head], paint.dim(f"    … {plural(n_cut, 'line')} left out here …"), *block[-n_tail:]]


def _narrow(line: str, whole: bool = False) -> str:
    return line if whole else narrow(line, _MAX_WIDTH)
