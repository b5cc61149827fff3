"""Prints output of ranks that no cell collects: of endpoints, and of code that a script runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from monarch_kernel.base.events import OutputEvent
from monarch_kernel.base.text import logs_command, plural, printable
from monarch_kernel.errors import format_ranks
from monarch_kernel.runtime.controller.effects import RichEvent

__all__ = ["LINE_WAITS", "OutputPrinter"]

LINE_WAITS = 5
"""How many flushes without new text of a stream an incomplete line waits for its end: output arrives in pieces of any size."""

Stream = Literal["stdout", "stderr"]


@dataclass(slots=True)
class _Incomplete:
    """The start of a line."""

    text: str
    request: int
    flushes: int = 0


class OutputPrinter:
    """Collects output for a moment and prints it with the mesh and the ranks; ranks that wrote the same share a line."""

    def __init__(self) -> None:
        self._written: dict[tuple[str, int], list[OutputEvent]] = {}
        self._incomplete: dict[tuple[str, int], dict[Stream, _Incomplete]] = {}
        self._requests: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """Whether all output was printed."""
        return not self._requests

    def holds(self, request: int) -> bool:
        """Whether some output of a request is not printed yet."""
        return request in self._requests

    def take(self, event: OutputEvent | RichEvent) -> None:
        """Take output of a rank; only the text of a display is kept."""
        if isinstance(event, RichEvent):
            text = str(event.data.get("text/plain", ""))
            if not text:
                return
            event = OutputEvent(event.request, event.rank, "stdout", f"{text}\n", mesh=event.mesh)
        self._written.setdefault((event.mesh, event.rank), []).append(event)
        self._requests.add(event.request)

    def flush(self, ended: int | None = None, *, everything: bool = False) -> None:
        """Print the collected lines.

        Args:
            ended: The request that ends: its incomplete lines are printed, too.
            everything: Whether all incomplete lines are printed, too; otherwise those that have waited long enough.
        """
        if not self._written and not self._incomplete:
            return
        written, self._written = self._written, {}
        groups: dict[tuple[str, tuple[tuple[Stream, str], ...]], list[int]] = {}
        for mesh, rank in sorted({*written, *self._incomplete}):
            rests = self._incomplete.setdefault((mesh, rank), {})
            for rest in rests.values():
                rest.flushes += 1
            pieces = _pieces(written.get((mesh, rank), ()), rests)
            for stream, rest in list(rests.items()):
                if everything or rest.request == ended or rest.flushes >= LINE_WAITS:
                    pieces.append((stream, rest.text))
                    del rests[stream]
            if not rests:
                del self._incomplete[mesh, rank]
            if pieces:
                groups.setdefault((mesh, tuple(pieces)), []).append(rank)
        self._requests = {rest.request for rests in self._incomplete.values() for rest in rests.values()}
        for (mesh, texts), ranks in groups.items():
            label = f"{mesh}{format_ranks(ranks)}"
            for stream, text in texts:
                target = sys.stderr if stream == "stderr" else sys.stdout
                target.write("".join([f"{label} {printable(line)}\n" for line in text.splitlines()]))
                target.flush()


def _pieces(events: list[OutputEvent] | tuple[()], rests: dict[Stream, _Incomplete]) -> list[tuple[Stream, str]]:
    """Return the complete lines of a rank as pieces, each of one stream; ``rests`` has the starts of incomplete lines."""
    texts: list[tuple[Stream, list[str]]] = []
    for event in events:
        rest = rests.pop(event.stream, None)
        start = rest.text if rest is not None else ""
        if event.dropped_lines:
            start += "\n" if start else ""
            more = logs_command(f"%mesh logs {event.mesh}", event.dropped_lines)
            start += f"… {plural(event.dropped_lines, 'line')} left out here; more: {more}\n"
        text = start + event.text
        end = _end_of_lines(text)
        if end < len(text):
            rests[event.stream] = _Incomplete(text[end:], event.request)
            text = text[:end]
        if not text:
            continue
        if texts and texts[-1][0] == event.stream:
            texts[-1][1].append(text)
        else:
            texts.append((event.stream, [text]))
    return [(stream, "".join(parts)) for stream, parts in texts]


def _end_of_lines(text: str) -> int:
    """Return the end of the last complete line; a carriage return at the end may be the first half of a line end."""
    return max(text.rfind("\n"), text.rfind("\r", 0, max(0, len(text) - 1))) + 1
