"""What viewers show of ranks is asked for in the background, where nothing waits for an answer."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from monarch_kernel.actor import ProcMesh
from monarch_kernel.notebook.magics import viewers
from monarch_kernel.notebook.magics.viewers import _DoingNow
from tests.support.waiting import LONG_S, wait_until


def test_a_rank_that_does_not_answer_is_shown_where_it_was(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = list(procs.run("import os, time; os.getpid()").get(LONG_S).values())
    running = procs.run("time.sleep(1000)")
    doing = _DoingNow()
    known = dict(wait_until(lambda: len(found := doing.turn(procs)) == 2 and found, "the places of both ranks"))
    assert all("time.sleep" in place for place, _ in known.values())
    monkeypatch.setattr(viewers, "_DOING_EVERY_S", 0.0)
    os.kill(pids[0], signal.SIGSTOP)
    has_begun, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        has_begun.set()
        goes_on.wait(LONG_S)

    busy = threading.Thread(target=procs._runtime.submit, args=[hold])
    try:
        doing.turn(procs)  # asks
        busy.start()
        assert has_begun.wait(LONG_S)
        assert doing.turn(procs) == known  # the transport is busy: what was asked can't even be cancelled yet
    finally:
        goes_on.set()
        os.kill(pids[0], signal.SIGCONT)
    busy.join()
    monkeypatch.setattr(viewers, "_DOING_EVERY_S", 1000.0)  # it asks no more
    wait_until(lambda: doing.turn(procs) == known and doing._asked is None, "the end of what was asked")
    running.interrupt()
    assert running.exception(LONG_S) is not None
