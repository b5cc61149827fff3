"""The names of common magics of ipyparallel and nbdistributed; each tells the user which magic to use here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.notebook.magics.meshes import Meshes

__all__ = ["CompatMagics"]

_LONG = {"-t": "--targets", "-a": "--noblock", "-b": "--block", "-o": "--out"}  # %remote has no short options


class CompatMagics:
    """Registers magics under the peers' names unless these names are taken; loading the original magics replaces ours."""

    def __init__(self, shell: InteractiveShell, meshes: Meshes) -> None:
        self._shell = shell
        self._meshes = meshes
        self._ours: dict[tuple[str, str], Callable[..., None]] = {}

    def register(self) -> None:
        """Register the names that are not taken."""
        register: Any = self._shell.register_magic_function
        for kind, name, say in (
            ("cell", "px", self._px),
            ("line", "px", self._px_line),
            ("line", "autopx", self._autopx),
            ("cell", "rank", partial(self._rank, "rank")),
            ("cell", "ranks", partial(self._rank, "ranks")),
        ):
            if name not in self._shell.magics_manager.magics[kind]:
                register(say, magic_kind=kind, magic_name=name)
                self._ours[kind, name] = say

    def remove(self) -> None:
        """Unregister the names that are still ours."""
        for (kind, name), say in self._ours.items():
            if self._shell.magics_manager.magics[kind].get(name) is say:
                del self._shell.magics_manager.magics[kind][name]
        self._ours.clear()

    @property
    def _mesh(self) -> str:
        return next(reversed(self._meshes.names), "t")

    def _px(self, line: str, cell: str) -> None:
        """Tell the user which magic to use instead."""
        raise UsageError(
            f"%%px is an ipyparallel magic; use instead: {' '.join(['%%remote', self._mesh, *line.split()])}"
        )

    def _px_line(self, line: str) -> None:
        """Tell the user which magic to use instead."""
        words = [_LONG.get(word, word) if word.startswith("-") else word for word in line.split()]
        raise UsageError(f"%px is an ipyparallel magic; use instead: {' '.join(['%remote', self._mesh, *words])}")

    def _autopx(self, line: str) -> None:
        """Tell the user which magic to use instead."""
        raise UsageError(f"%autopx is an ipyparallel magic; use instead: %autoremote {self._mesh}, and %autoremote off")

    def _rank(self, magic: str, line: str, cell: str) -> None:
        """Tell the user which magic to use instead."""
        ranks = line.strip().strip("[]").replace(" ", "") or "0,1"
        raise UsageError(
            f"%%{magic} is an nbdistributed magic; use instead: %%remote {self._mesh} --targets {ranks}, "
            f"or %%remote {self._mesh}[0:2] for a range"
        )
