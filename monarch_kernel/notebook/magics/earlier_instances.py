"""Says below a cell which variables of the notebook are instances of a class that a cell has defined again."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.runtime.diagnostics.earlier_classes import classes_named, instances_of, text_about

__all__ = ["EarlierInstances"]

_CLASS = re.compile(r"^[ \t]*class[ \t]+(\w+)", re.MULTILINE)


class EarlierInstances:
    """Follows the cells of a notebook that has meshes, between which and the notebook instances travel.

    Ranks say so of their variables (`runtime.worker.cell_shell`). In the notebook, an instance of an earlier class also arrives
    after the cell that has defined the class again: as a result of ranks, which have kept it.

    Args:
        shell: the shell of the notebook.
        meshes: the meshes of the notebook; while there are none, nothing is said.
    """

    def __init__(self, shell: InteractiveShell, meshes: Iterable[object]) -> None:
        self._shell = shell
        self._meshes = meshes
        self._before: list[dict[str, type]] = []  # of the running cell, and of cells that it runs
        self._earlier: list[weakref.ref[type]] = []
        self._told: dict[str, int] = {}  # how code refers to an instance -> its id

    def install(self) -> None:
        """Follow the cells from now on."""
        self._shell.events.register("pre_run_cell", self._note)
        self._shell.events.register("post_run_cell", self._tell)

    def remove(self) -> None:
        """Say nothing any longer."""
        self._shell.events.unregister("pre_run_cell", self._note)
        self._shell.events.unregister("post_run_cell", self._tell)

    @property
    def _has_meshes(self) -> bool:
        return any(True for _ in self._meshes)

    def _note(self, info: Any) -> None:
        """Note the classes that a cell may define again."""
        names = _CLASS.findall(str(info.raw_cell)) if self._has_meshes else ()
        self._before.append(classes_named(names, self._shell.user_ns))

    def _tell(self, result: object) -> None:
        namespace = self._shell.user_ns
        for name, kind in self._before.pop().items() if self._before else ():
            new = namespace.get(name)
            if new is not kind and issubclass(type(new), type):
                self._earlier.append(weakref.ref(kind))
        if not self._earlier or not self._has_meshes:
            return
        self._earlier = [ref for ref in self._earlier if ref() is not None]
        for name, found in instances_of([earlier for ref in self._earlier if (earlier := ref())], namespace).items():
            news = {text: id(each) for text, each in found.items() if self._told.get(text) != id(each)}
            if news:
                self._told.update(news)
                print(text_about([*news], name), file=sys.stderr)
