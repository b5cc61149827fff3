"""Cells on real ranks, and what the notebook shows of their errors and waits; without a kernel, to be light."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.errors import RanksError
from monarch_kernel.features.live.controller import LoopControl
from monarch_kernel.notebook.cells.loop_watch import LoopWatch
from monarch_kernel.notebook.view.errors import error_block
from monarch_kernel.runtime.diagnostics.waits import stalls
from monarch_kernel.train.process_group.worker import GroupStore
from tests.support.waiting import LONG_S, wait_until

__all__ = ["Cells", "shown"]

PRELUDE = "import os, sys, time, torch, torch.distributed as dist"


def shown(error: RanksError) -> str:
    """The text of an error below the cell."""
    return "\n".join(error_block(error, color=False))


class Cells:
    """A mesh ``t`` of CPU ranks that runs cells [1], [2], ... with a process group.

    Attributes:
        mesh: the ranks.
        number: the number of the last cell.
        shown: the lines in the view when `watched` had its line.
    """

    def __init__(self, n: int) -> None:
        self._store = GroupStore()
        self.number = 0
        self.shown: tuple[str, ...] = ()
        self.mesh: ProcMesh = this_host().spawn_procs({"gpus": n}, name="t", device="cpu")
        self.form()
        self.ok(PRELUDE)

    def form(self) -> None:
        """Form the process group, as the notebook does before a cell if the group is broken."""
        self._store.form(self.mesh).get(LONG_S)

    def ok(self, code: str) -> tuple[Any, ...]:
        """Run a cell; gives the value of each rank."""
        self.number += 1
        results = self.mesh.run_cell(code, cell=self.number, want_value=True).get(LONG_S)
        return tuple(result.value for result in results.values())

    def fails(self, code: str) -> str:
        """Run a cell that fails; gives what the notebook shows."""
        self.number += 1
        with pytest.raises(RanksError) as caught:
            self.mesh.run_cell(code, cell=self.number).get(LONG_S)
        return shown(caught.value)

    @contextmanager
    def waits(self, code: str, *finished: int, says: tuple[str, ...] = ()) -> Iterator[str]:
        """Run a cell that hangs until its end is forced; gives the lines that the cell shows after a while.

        Args:
            code: the cell.
            finished: the ranks that end while the others wait.
            says: texts in these lines, which are only complete when all ranks have started to wait.
        """
        self.number += 1
        future = self.mesh.run_cell(code, cell=self.number)
        try:
            yield wait_until(lambda: self._told(finished, says), f"a line about the wait, with {says}")
        finally:
            self.mesh.interrupt(abort=True)
            with contextlib.suppress(RanksError, KeyboardInterrupt):
                future.get(LONG_S)
            self.form()

    def watched(self, code: str, says: str) -> list[str]:
        """Run a cell with a live loop, and stop the loop when the watch has said something; gives what it has said.

        Args:
            code: the cell.
            says: text in what the watch is expected to say; if the loop ends before, there is no such line.
        """
        self.number += 1
        lines: list[str] = []
        future = self.mesh.run_cell(code, cell=self.number)
        control = LoopControl(self.mesh.runtime)
        watch = LoopWatch(
            self.mesh, self.mesh.ranks, lambda: control.trouble(future.id), lines.append, time.monotonic()
        )
        while not future.wait(0.05) and not any(says in line for line in lines):
            watch.poll(time.monotonic())
        if not future.done():
            self.shown = tuple(wait.text for wait in self.mesh.view().waits)
            self.mesh.loop.stop()
        future.get(LONG_S)
        watch.end(time.monotonic())
        return lines

    def _told(self, finished: tuple[int, ...], says: tuple[str, ...]) -> str:
        answers = self.mesh.doing().get(LONG_S)
        view = self.mesh.view()
        if any(view.ranks[rank].state != "idle" for rank in finished):
            return ""
        told = "\n".join(stall.text for stall in stalls(view, answers, finished, 0.2))
        return told if all(text in told for text in says) else ""

    def close(self) -> None:
        """End the ranks."""
        self.mesh.stop(grace_s=0).get(LONG_S)
        self._store.close()
