"""Prints output of ranks that no cell collects: of endpoints, and of code that a script runs."""

from __future__ import annotations

import sys

from monarch_kernel.base.events import OutputEvent
from monarch_kernel.base.text import printable
from monarch_kernel.errors import format_ranks
from monarch_kernel.runtime.controller.effects import RichEvent

__all__ = ["OutputPrinter"]


class OutputPrinter:
    """Collects output for a moment and prints it with the mesh and the ranks; ranks that wrote the same share a line."""

    def __init__(self) -> None:
        self._written: dict[tuple[str, int], list[OutputEvent]] = {}
        self._requests: set[int] = set()

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

    def flush(self) -> None:
        """Print the collected output."""
        if not self._written:
            return
        written, self._written = self._written, {}
        self._requests.clear()
        groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[int]] = {}
        for (mesh, rank), events in sorted(written.items()):
            pieces: list[tuple[str, str]] = []
            for event in events:
                text = event.text
                if event.dropped_lines:
                    text = f"… {event.dropped_lines:,} lines left out here\n{text}"
                if pieces and pieces[-1][0] == event.stream:
                    pieces[-1] = (event.stream, pieces[-1][1] + text)
                else:
                    pieces.append((event.stream, text))
            groups.setdefault((mesh, tuple(pieces)), []).append(rank)
        for (mesh, texts), ranks in groups.items():
            label = f"{mesh}{format_ranks(ranks)}"
            for stream, text in texts:
                target = sys.stderr if stream == "stderr" else sys.stdout
                target.write("".join(f"{label} {printable(line)}\n" for line in text.splitlines()))
                target.flush()
