"""Tests that viewers query ranks in the background, without waiting for answers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.actor import ProcMesh
from monarch_kernel.notebook.magics import viewers
from monarch_kernel.notebook.magics.viewers import Viewers, _DoingNow
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


def test_a_page_gets_trajectories_once_and_again_when_there_are_new_ones(
    procs: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "_CURVES_EVERY_S", 0.0)
    shown = Viewers(lambda: [procs], lambda command: "")
    sent: list[dict[str, Any]] = []
    viewer = shown.connect(sent.append, procs.name)
    other = shown.connect(lambda message: pytest.fail(f"another mesh: {message}") if "count" in message else None, "x")

    def counts() -> list[int]:
        return [message["count"] for message in sent if message["kind"] == "trajectories"]

    viewer.handle({"kind": "hello"})
    other.handle({"kind": "hello"})
    assert counts() == []
    for number in (1, 2):
        procs[0:1].run(f"live.trajectory('p', 'c{number}', 0.5, {number})").get(LONG_S)
        wait_until(lambda n=number: procs.view().trajectory_count == n, "the sample")  # type: ignore[misc]
        for _ in range(2):
            shown.publish(force=True)
        assert counts() == list(range(1, number + 1))
    assert sent[-1]["samples"] == [[0, 2, 0.5, "p", "c2"], [0, 1, 0.5, "p", "c1"]]
    viewer.handle({"kind": "hello"})
    assert counts() == [1, 2, 2]


def test_a_panel_says_what_a_mesh_that_comes_up_waits_for_and_a_widget_of_another_one_does_not() -> None:
    shown = Viewers(list, lambda command: "")
    sent: dict[str, list[str]] = {"": [], "x": []}
    for mesh, said in sent.items():
        viewer = shown.connect(
            lambda message, said=said: said.append(message.get("coming", "")) if message["kind"] == "frame" else None,
            mesh,
        )
        viewer.handle({"kind": "hello"})
    shown.show_coming("t is coming up")
    shown.show_coming("")
    assert sent == {"": ["", "t is coming up", ""], "x": [""]}


def test_a_mesh_comes_up_without_a_widget_where_a_file_beside_the_notebook_hides_its_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = SimpleNamespace(comm_manager=object())
    monkeypatch.setattr(viewers, "get_ipython", lambda: SimpleNamespace(kernel=kernel))
    monkeypatch.setitem(sys.modules, "ipywidgets", ModuleType("ipywidgets"))
    for loaded in [
        name for name in sys.modules if name.startswith(("anywidget", "monarch_kernel.notebook.view.widget"))
    ]:
        monkeypatch.delitem(sys.modules, loaded)
    assert Viewers(list, lambda command: "").widget("t") is None
    assert "has no attribute 'DOMWidget'" in caplog.text
