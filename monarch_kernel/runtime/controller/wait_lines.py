"""The waits that last, for the views of meshes."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_kernel.base.events import WaitView

__all__ = ["WaitLines"]


class WaitLines:
    """The waits of all meshes, by mesh and source; any thread may use it."""

    def __init__(self) -> None:
        self._waits: dict[tuple[tuple[int, ...], object], tuple[WaitView, ...]] = {}

    def show(self, procs: Sequence[int], source: object, waits: Sequence[WaitView]) -> None:
        """Show waits in views of a mesh, in place of earlier ones from the same source; none removes those.

        Args:
            procs: the processes of the mesh.
            source: what reports the waits, such as a cell.
            waits: the waits.
        """
        self._waits.pop((tuple(procs), source), None)
        if waits:
            self._waits[tuple(procs), source] = tuple(waits)

    def of(self, procs: Sequence[int]) -> tuple[WaitView, ...]:
        """Return the waits of a mesh, those of the earliest source first."""
        if not self._waits:
            return ()
        return tuple(wait for (mesh, _), waits in self._waits.copy().items() if mesh == tuple(procs) for wait in waits)
