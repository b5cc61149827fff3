"""Lines about waits that last, for the views of a mesh."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["WaitLines"]


class WaitLines:
    """The lines of all meshes, by mesh and source; any thread may use it."""

    def __init__(self) -> None:
        self._lines: dict[tuple[tuple[int, ...], object], tuple[str, ...]] = {}

    def show(self, procs: Sequence[int], source: object, lines: Sequence[str]) -> None:
        """Show lines in views of a mesh, in place of earlier ones from the same source; none removes those.

        Args:
            procs: the processes of the mesh.
            source: what reports the waits, such as a cell.
            lines: the lines.
        """
        self._lines.pop((tuple(procs), source), None)
        if lines:
            self._lines[tuple(procs), source] = tuple(lines)

    def of(self, procs: Sequence[int]) -> tuple[str, ...]:
        """Return the lines of a mesh, those of the earliest source first."""
        if not self._lines:
            return ()
        return tuple(line for (mesh, _), lines in self._lines.copy().items() if mesh == tuple(procs) for line in lines)
