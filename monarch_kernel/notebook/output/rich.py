"""Merges rich displays of many ranks: equal ones once, different ones in one output with a switcher, with bounds.

Theory of operation
-------------------
A display has its place among the lines of its rank, so `RichFolder.feed` gives a key that is fed to the `OutputFolder`:
displays of several ranks with the same key (of the same kind, and each rank's n-th of that kind) come out together, and
`RichFolder.take` makes outputs from them.

- Equal on all ranks: a label, and the display as it is.
- Different: one piece of HTML, with a ``<details>`` per group of ranks, side by side where there is room. The first ones are
  open, and one click opens all others. This needs no JavaScript, works in the output of nbconvert, and passes the sanitizer of
  untrusted notebooks; images are data URIs.
- Different, and of kinds that can't be embedded in HTML (widgets, plotly): one after the other, each with its label.

A display with a ``display_id`` has a *slot*: the latest state of every rank. An update of one rank draws the slot again.

Outputs pass while there are tokens (number and bytes). Then they wait; when too many wait, only the last ones are kept, and
a note says how many were left out.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch_kernel.base.text import plural
from monarch_kernel.errors import format_ranks
from monarch_kernel.notebook.output.mime import Bundle, checked, embedded, nbytes, title
from monarch_kernel.notebook.output.rate_limit import FoldedItem

__all__ = ["OUR_METADATA", "Bundle", "Clear", "RichFolder", "RichOutput", "RichSlots", "compose"]

OUR_METADATA = "monarch_kernel"
"""Key in a display's metadata under which a rank's shell passes ``display_id``, ``update`` and ``clear_output``."""

MAX_GROUPS = 8  # groups of ranks shown one after the other if all differ
MAX_SWITCHED = 32  # in one output, where most of them are closed
MAX_OPEN = 4  # of these at once, before the user asks for all
MAX_NBYTES = 8 << 20  # in one output
MAX_TEXT = 1 << 20
BURST = 50
PER_S = 20.0
BURST_NBYTES = 16 << 20
NBYTES_PER_S = 4 << 20
UPDATE_EVERY_S = 0.2
LAST = 10
_MAX_SLOTS = 100
_MAX_LATE = 16
_MAX_GENERATED = 10_000
_GENERATED_ID = re.compile(r"[0-9a-f]{32}")
_SIMPLE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,100}")


@dataclass(frozen=True, slots=True)
class RichOutput:
    """An output to display; with a ``display_id`` it can be updated, or is itself an ``update``."""

    data: Bundle
    metadata: Bundle = field(default_factory=dict)
    display_id: str = ""
    update: bool = False


@dataclass(frozen=True, slots=True)
class Clear:
    """A request to clear the output of the cell; with ``wait`` only when the next output arrives."""

    wait: bool


@dataclass(slots=True)
class _Slot:
    """The displays under one display_id; ``labelled`` if a separate output names the ranks."""

    display_id: str
    labelled: bool = False
    bundles: dict[int, tuple[Bundle, Bundle]] = field(default_factory=dict)
    shown: set[str] = field(default_factory=set)
    at: float = float("-inf")
    origin: tuple[str, str] = ("", "")


class RichSlots:
    """The displays of a mesh that can be updated, including by later cells.

    Args:
        prefix: prefix of their ids in the notebook.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._slots: dict[str, _Slot] = {}
        self._generated: dict[int, dict[str, int]] = {}  # rank -> id -> its index among this rank's ids

    def name(self, rank: int, display_id: str) -> str:
        """Return the common name of a display: generated ids differ between ranks, so they are numbered.

        It has no spaces or line ends, which separate the parts of a key.
        """
        if not _GENERATED_ID.fullmatch(display_id):
            if _SIMPLE_ID.fullmatch(display_id):
                return display_id
            return f"={hashlib.sha256(display_id.encode('utf-8', 'replace')).hexdigest()[:32]}"
        known = self._generated.setdefault(rank, {})
        number = known.setdefault(display_id, next(reversed(known.values()), -1) + 1)
        if len(known) > _MAX_GENERATED:  # far more than there are slots
            del known[next(iter(known))]
        return f"#{number}"

    def slot(self, name: str) -> _Slot:
        """Return the slot of a display."""
        if name not in self._slots:
            for old in list(self._slots)[: len(self._slots) + 1 - _MAX_SLOTS]:
                del self._slots[old]
            self._slots[name] = _Slot(f"{self._prefix}-{name}")
        return self._slots[name]


@dataclass(slots=True)
class _Unit:
    """Outputs that are shown together or not at all."""

    outputs: Sequence[RichOutput | Clear] = ()
    slot: _Slot | None = None


class RichFolder:
    """Makes outputs from the displays of ranks, and bounds them.

    Args:
        ranks: the ranks that may display something.
        slots: the slots of the mesh.
        prefix: prefix of display ids, unique in the notebook.
    """

    def __init__(self, ranks: Sequence[int], slots: RichSlots, prefix: str) -> None:
        self._n_ranks = len(ranks)
        self._slots = slots
        self._prefix = prefix
        self._shows: dict[str, _Slot] = {}  # displays that late ranks may join
        self._given: dict[tuple[str, int], tuple[Bundle, Bundle]] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._n_shows = 0
        self._waiting: deque[_Unit] = deque()
        self._left_out = 0
        self._tokens = float(BURST)
        self._nbytes = float(BURST_NBYTES)
        self._refilled_at: float | None = None
        self._dirty: dict[str, _Slot] = {}
        self._shown_by: set[int] = set()

    @property
    def pending(self) -> bool:
        """Whether a later `release` has something to show."""
        return bool(self._waiting or self._dirty)

    def feed(self, rank: int, data: Bundle, metadata: Bundle) -> str:
        """Feed a display of a rank; returns its key for the `OutputFolder`."""
        data, theirs = checked(data, metadata)
        about = theirs.pop(OUR_METADATA, {})
        if not isinstance(about, Mapping):  # the user's code has passed a key with this name
            about = {}
        if "clear_output" in about:
            kind = f"clear {bool(about['clear_output'])}"
        elif about.get("display_id"):
            kind = f"{'update' if about.get('update') else 'new'} {self._slots.name(rank, str(about['display_id']))}"
        else:
            kind = f"show {','.join(sorted(data))}"
        n = self._counts[rank, kind] = self._counts.get((rank, kind), 0) + 1
        key = f"{kind}\n{n}"
        self._given[key, rank] = data, theirs
        return key

    def lines_shown(self, ranks: Iterable[int]) -> None:
        """Note that lines of these ranks were shown: a rank may clear only its own output."""
        self._shown_by.update(ranks)

    def take(self, item: FoldedItem, now: float) -> list[RichOutput | Clear]:
        """Make outputs from a folded item, and return those that may be shown now."""
        kind, _, what = item.key.partition("\n")[0].partition(" ")
        given = {rank: self._given.pop((item.key, rank)) for rank in item.ranks}
        if kind == "clear":
            if not self._shown_by <= set(item.ranks):
                return []  # it would clear output of other ranks
            self._shown_by.clear()
            self._waiting.clear()
            self._dirty.clear()
            self._waiting.append(_Unit([Clear(what == "True")]))
        elif kind == "show":
            self._shown_by.update(item.ranks)
            self._show(item.key, given)
        else:
            self._shown_by.update(item.ranks)
            slot = self._slots.slot(what)
            if kind == "new" and slot.origin != (self._prefix, item.key):
                slot.origin = self._prefix, item.key  # a new display with an earlier id is a separate output
                slot.shown.clear()
                slot.bundles.clear()
            slot.bundles.update(given)
            if slot.shown:
                self._dirty[what] = slot
            elif not any(unit.slot is slot for unit in self._waiting):
                self._wait(_Unit(slot=slot))
        return self.release(now)

    def _show(self, key: str, given: Mapping[int, tuple[Bundle, Bundle]]) -> None:
        """Show a display for the ranks that sent it in time; late ranks join it at its place."""
        slot = self._shows.get(key)
        if slot is None:
            self._n_shows += 1
            slot = _Slot(f"{self._prefix}-{self._n_shows}", labelled=True)
            self._wait(_Unit(slot=slot))
            for old in list(self._shows)[: len(self._shows) + 1 - _MAX_LATE]:
                del self._shows[old]
            self._shows[key] = slot
        elif slot.shown:
            self._dirty[slot.display_id] = slot
        slot.bundles.update(given)
        if len(slot.bundles) == self._n_ranks:
            del self._shows[key]

    def release(self, now: float, *, everything: bool = False) -> list[RichOutput | Clear]:
        """Return the outputs that may be shown now; with ``everything``, all that wait, within the size bound."""
        self._refill(now)
        shown: list[RichOutput | Clear] = []
        if everything:
            self._keep_last()
        while self._waiting and (everything or (self._tokens >= 1 and self._nbytes > 0)):
            unit = self._waiting.popleft()
            if self._left_out and not isinstance(next(iter(unit.outputs), None), Clear):
                shown.append(_note(self._left_out))
                self._left_out = 0
            outputs = unit.outputs or (self._draw(unit.slot, now) if unit.slot else ())
            self._tokens -= 1
            self._nbytes -= sum(map(_nbytes, outputs))
            shown += outputs
        for name, slot in list(self._dirty.items()):
            if everything or (now >= slot.at + UPDATE_EVERY_S and self._nbytes > 0):
                del self._dirty[name]
                drawn = self._draw(slot, now)
                self._nbytes -= sum(map(_nbytes, drawn))
                shown += drawn
        return shown

    def _keep_last(self) -> None:
        """Leave out the oldest of the outputs that wait, so that the others have the bounded size."""
        room, kept = BURST_NBYTES, deque[_Unit]()
        while self._waiting:
            unit = self._waiting.pop()
            is_clear = isinstance(next(iter(unit.outputs), None), Clear)
            room -= 0 if unit.slot is None else sum(map(nbytes, (data for _, data, _ in _groups(unit.slot.bundles))))
            if is_clear or room >= 0 or not kept:
                kept.appendleft(unit)
            else:
                self._left_out += 1
        self._waiting = kept

    def _draw(self, slot: _Slot, now: float) -> list[RichOutput]:
        """Draw the outputs of a slot: one, or one for each rank if they can't be combined."""
        slot.at = now
        drawn: list[RichOutput] = []
        parts = _labelled(slot.bundles) if slot.labelled else _unlabelled(slot.bundles)
        if slot.shown and slot.labelled and "-label" not in dict(parts) and f"{slot.display_id}-label" in slot.shown:
            parts.insert(0, ("-label", RichOutput({"text/plain": format_ranks(slot.bundles)})))
        for suffix, output in parts:
            id = f"{slot.display_id}{suffix}"
            drawn.append(RichOutput(output.data, output.metadata, id, id in slot.shown))
            slot.shown.add(id)
        return drawn

    def _wait(self, unit: _Unit) -> None:
        self._waiting.append(unit)
        if len(self._waiting) > 2 * LAST:
            while len(self._waiting) > LAST:
                self._waiting.popleft()
                self._left_out += 1

    def _refill(self, now: float) -> None:
        elapsed_s = 0.0 if self._refilled_at is None else max(0.0, now - self._refilled_at)
        self._refilled_at = now
        self._tokens = min(BURST, self._tokens + elapsed_s * PER_S)
        self._nbytes = min(BURST_NBYTES, self._nbytes + elapsed_s * NBYTES_PER_S)


def compose(given: Mapping[int, tuple[Bundle, Bundle]]) -> list[RichOutput]:
    """Make outputs from displays of ranks: equal ones once, different ones together if possible.

    Args:
        given: rank -> data and metadata, each by MIME type; empty data shows nothing.
    """
    return [output for _, output in _labelled({rank: checked(*each) for rank, each in given.items()})]


Parts = list[tuple[str, RichOutput]]
"""Outputs, each with the suffix of its id."""


def _labelled(given: Mapping[int, tuple[Bundle, Bundle]]) -> Parts:
    """Make outputs from displays of ranks, labelled with their ranks."""
    groups = _groups(given)
    if not groups:
        return []
    if all(set(data) <= {"text/plain"} for _, data, _ in groups):
        return [("", RichOutput({"text/plain": _plain_of_all(groups)}))]
    if len(groups) > 1 and (bundle := _switcher(groups)) is not None:
        return [("", RichOutput(bundle))]
    parts: Parts = []
    for i, (ranks, data, metadata) in enumerate(groups[:MAX_GROUPS]):
        suffix = f"-{ranks[0]}" if i else ""
        parts += [
            (f"{suffix}-label", RichOutput({"text/plain": format_ranks(ranks)})),
            (suffix, RichOutput(data, metadata)),
        ]
    if len(groups) > MAX_GROUPS:
        parts.append(("-more", RichOutput({"text/plain": _others(groups[MAX_GROUPS:])})))
    return parts


def _unlabelled(given: Mapping[int, tuple[Bundle, Bundle]]) -> Parts:
    """Make one replaceable output without a label, or one for each rank if they can't be combined."""
    groups = _groups(given)
    if groups and all(set(data) <= {"text/plain"} for _, data, _ in groups):
        return [("", RichOutput({"text/plain": _plain_of_all(groups)}))]
    if groups and (bundle := _switcher(groups)) is not None:
        return [("", RichOutput(bundle))]
    return [(f"-{rank}", RichOutput(data, metadata)) for rank, (data, metadata) in sorted(given.items()) if data]


Group = tuple[list[int], Bundle, Bundle]

_SIDE_BY_SIDE = "display:flex;flex-wrap:wrap;gap:0 2em;align-items:flex-start"


def _groups(given: Mapping[int, tuple[Bundle, Bundle]]) -> list[Group]:
    groups: list[Group] = []
    for rank, (data, metadata) in sorted(given.items()):
        if not data:
            continue
        for ranks, known, its_metadata in groups:
            if known == data and its_metadata == metadata:
                ranks.append(rank)
                break
        else:
            groups.append(([rank], data, metadata))
    return groups


def _plain_of_all(groups: Sequence[Group]) -> str:
    room = max(2_000, MAX_TEXT // len(groups))
    texts = []
    for ranks, data, _ in groups:
        label = format_ranks(ranks)
        indent = "\n" + " " * (len(label) + 1)
        text = str(data.get("text/plain", ""))
        if len(text) > room:
            text = f"{text[: room // 2]} … {plural(len(text) - room, 'character')} left out here … {text[-room // 2 :]}"
        texts.append(f"{label} " + indent.join(text.splitlines() or [""]))
    return "\n".join(texts)


def _switcher(groups: Sequence[Group]) -> dict[str, Any] | None:
    """Make one output for groups of ranks that differ; None if some can't be embedded in HTML."""
    parts: list[str] = []
    more: list[str] = []
    plain: list[str] = []
    room, rest = MAX_NBYTES, ""
    for i, (ranks, data, metadata) in enumerate(groups):
        body = embedded(data, metadata)
        if body is None:
            return None
        room -= len(body)
        if i and (i >= MAX_SWITCHED or room < 0):
            rest = _others(groups[i:])
            plain.append(rest)
            break
        label, name_of_data = format_ranks(ranks), title(data)
        plain.append(_plain_of_all(groups[i : i + 1]))
        if len(groups) == 1:
            parts.append(f"<div><b>{label}</b></div>{body}")
        else:
            summary = f"<summary><b>{label}</b> {html.escape(name_of_data)}".rstrip()
            (parts if i < MAX_OPEN else more).append(f"<details open>{summary}</summary>{body}</details>")
    if more:
        others = sorted(rank for ranks, _, _ in groups[MAX_OPEN : MAX_OPEN + len(more)] for rank in ranks)
        opener = f"<details><summary>show {'more' if rest else 'all'}: <b>{format_ranks(others)}</b></summary>"
        parts = [*_side_by_side(parts), opener, *_side_by_side(more)]
        parts.append("</details>")
    elif len(parts) > 1:
        parts = _side_by_side(parts)
    if rest:
        parts.append(f"<p>{html.escape(rest)}</p>")
    return {"text/html": "\n".join(parts), "text/plain": "\n".join(plain)}


def _side_by_side(parts: Sequence[str]) -> list[str]:
    return [f'<div style="{_SIDE_BY_SIDE}">', *parts, "</div>"]


def _others(groups: Sequence[Group]) -> str:
    ranks = sorted(rank for ranks, _, _ in groups for rank in ranks)
    return (
        f"… and {len(groups):,} more that differ, of ranks {format_ranks(ranks)}: run the cell on a slice to see them"
    )


def _note(n: int) -> RichOutput:
    return RichOutput({"text/plain": f"… {n:,} display{'s' * (n != 1)} left out here (shown: the first and the last)"})


def _nbytes(output: RichOutput | Clear) -> int:
    if isinstance(output, Clear):
        return 0
    return sum(map(nbytes, output.data.values()))
