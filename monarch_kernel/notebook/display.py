"""Putting things into the notebook: output lines, rich results, tables that are updated in place."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import publish_display_data

from monarch_kernel.errors import format_ranks
from monarch_kernel.events import MeshView
from monarch_kernel.output.folding import FoldedLine, render
from monarch_kernel.ui.text import mesh_html, mesh_text

__all__ = ["LiveView", "RichFolder", "show_bundles", "write_lines"]

Bundle = Mapping[str, Any]

OUR_METADATA = "monarch_kernel"
"""Key of a display's metadata under which a rank's shell hands on ``display_id`` and ``update``."""


def write_lines(lines: Iterable[FoldedLine]) -> None:
    """Write folded lines to the cell's stdout and stderr."""
    for stream, text in render(lines):
        target = sys.stderr if stream == "stderr" else sys.stdout
        target.write(text)
        target.flush()


def show_bundles(bundles: Sequence[tuple[int, Bundle]], metadata: Bundle | None = None) -> None:
    """Show what ranks gave, equal ones once, each with its ranks.

    Args:
        bundles: (rank, MIME type -> data).
        metadata: as for Jupyter's ``display_data``.
    """
    groups: list[tuple[list[int], Bundle]] = []
    for rank, bundle in bundles:
        if bundle:
            for ranks, known in groups:
                if known == bundle:
                    ranks.append(rank)
                    break
            else:
                groups.append(([rank], bundle))
    plain: list[str] = []
    for ranks, bundle in groups:
        label = format_ranks(ranks)
        text = str(bundle.get("text/plain", ""))
        if set(bundle) <= {"text/plain"} and not metadata:
            indent = "\n" + " " * (len(label) + 1)
            plain.append(f"{label} " + indent.join(text.splitlines() or [""]))
            continue
        _publish_plain(plain)
        theirs = dict(metadata or {})
        about = theirs.pop(OUR_METADATA, {})
        display_id, update = about.get("display_id"), bool(about.get("update"))
        transient = {"display_id": f"{display_id}-{label}"} if display_id else {}
        if not update:
            publish_display_data({"text/plain": label})
        publish_display_data(dict(bundle), theirs, transient=transient, update=update)
    _publish_plain(plain)


def _publish_plain(lines: list[str]) -> None:
    if lines:
        publish_display_data({"text/plain": "\n".join(lines)})
        lines.clear()


class RichFolder:
    """Holds what ranks display until all of them have displayed their i-th thing, or the wait is over."""

    def __init__(self, ranks: Sequence[int], window_s: float = 0.1) -> None:
        self._ranks = len(ranks)
        self._window_s = window_s
        self._counts: dict[int, int] = {}
        self._rows: list[tuple[float, list[tuple[int, Bundle]], Bundle]] = []
        self._first = 0

    def feed(self, rank: int, data: Bundle, metadata: Bundle, now: float) -> None:
        """Take something that a rank displayed."""
        index = max(self._counts.get(rank, 0), self._first)
        self._counts[rank] = index + 1
        while len(self._rows) <= index - self._first:
            self._rows.append((now, [], metadata))
        self._rows[index - self._first][1].append((rank, data))

    def show(self, now: float, *, everything: bool = False) -> None:
        """Show what is complete or has waited long enough."""
        while self._rows:
            since, row, metadata = self._rows[0]
            if not (everything or len(row) >= self._ranks or now - since > self._window_s):
                return
            del self._rows[0]
            self._first += 1
            show_bundles(sorted(row, key=lambda item: item[0]), metadata)


class LiveView:
    """A table of a mesh's ranks in a cell's output, updated in place at most `EVERY_S`.

    A terminal, which can't update what it has printed, shows it once.
    """

    EVERY_S = 0.2

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._last: tuple[str, str] | None = None
        self._has_table = False
        self._at = 0.0
        self._is_live = getattr(get_ipython(), "kernel", None) is not None

    @property
    def is_new(self) -> bool:
        """Whether nothing has been shown in it yet."""
        return self._last is None

    def show(self, view: MeshView) -> None:
        """Show it for the first time."""
        self._publish(view, update=False)

    def update(self, view: MeshView, now: float, *, force: bool = False) -> None:
        """Bring it up to date, if it has changed and the last time is long enough ago."""
        if force or now >= self._at + self.EVERY_S:
            self._at = now
            self._publish(view, update=True)

    def say(self, text: str, *, first: bool = False) -> None:
        """Show a line of text in its place."""
        if self._last != (text, text) and (first or self._is_live):
            self._last = (text, text)
            publish_display_data({"text/plain": text}, transient={"display_id": self._id}, update=not first)

    def _publish(self, view: MeshView, update: bool) -> None:
        if update and self._has_table and not self._is_live:
            return
        update = update and not self.is_new
        self._has_table = True
        faces = (mesh_text(view), mesh_html(view))
        if faces != self._last or not update:
            self._last = faces
            data = {"text/plain": faces[0], "text/html": faces[1]}
            publish_display_data(data, transient={"display_id": self._id}, update=update)
