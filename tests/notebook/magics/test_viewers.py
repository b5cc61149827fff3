"""Tests that viewers query ranks in the background, without waiting for answers."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import pytest

from monarch_kernel.actor import ProcMesh
from monarch_kernel.notebook.magics import viewers
from monarch_kernel.notebook.magics.viewers import _DoingNow
from tests.support.waiting import LONG_S, wait_until


def test_a_rank_that_does_not_answer_keeps_its_last_position(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = list(procs.run("import os, time; os.getpid()").get(LONG_S).values())
    running = procs.run("time.sleep(1000)")
    doing = _DoingNow()
    known = dict(
        wait_until(lambda: len(found := doing.poll(procs, procs.view())) == 2 and found, "the places of both ranks")
    )
    assert all("time.sleep" in place for place, _ in known.values())
    monkeypatch.setattr(viewers, "_DOING_EVERY_S", 0.0)
    os.kill(pids[0], signal.SIGSTOP)
    has_started, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        has_started.set()
        goes_on.wait(LONG_S)

    busy = threading.Thread(target=procs.runtime.submit, args=[hold])
    try:
        doing.poll(procs, procs.view())  # sends the query
        busy.start()
        assert has_started.wait(LONG_S)
        assert (
            doing.poll(procs, procs.view()) == known
        )  # the transport is busy, so the query can't even be cancelled yet
    finally:
        goes_on.set()
        os.kill(pids[0], signal.SIGCONT)
    busy.join()
    monkeypatch.setattr(viewers, "_DOING_EVERY_S", 1000.0)  # no further queries
    wait_until(lambda: doing.poll(procs, procs.view()) == known and doing._asked is None, "the end of the query")
    running.interrupt()
    assert running.exception(LONG_S) is not None


def test_a_rank_that_runs_something_else_is_no_longer_where_it_was(procs: ProcMesh) -> None:
    running = procs.run("import time; time.sleep(1000)")
    doing = _DoingNow()
    wait_until(lambda: len(doing.poll(procs, procs.view())) == 2, "the places of both ranks")
    view = procs.view()
    first, second = view.ranks
    assert list(doing.poll(procs, replace(view, ranks=(first._replace(activity="cell [9]"), second)))) == [1]
    assert list(doing.poll(procs, replace(view, ranks=(first, second._replace(restarts=1))))) == [0]
    running.interrupt()
    assert running.exception(LONG_S) is not None
