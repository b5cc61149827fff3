"""Tests that notebooks that were closed leave no listeners and cause no errors."""

from __future__ import annotations

import pytest

from tests.lab.conftest import OLDEST_TOO, UP, Lab, Server

pytestmark = pytest.mark.slow

HUB = """() => {
    const bar = jupyterapp.shell.currentWidget.toolbar;
    window.hub = Array.from(bar.children()).find((each) => each.hasClass("monarch-run-on")).hub;
}"""
SLOTS = """() => {
    // A signal calls each of its slots with itself as the sender.
    const real = Function.prototype.call;
    const calls = (emit) => {
        let count = 0;
        Function.prototype.call = function (self, ...given) {
            if (given[0] === hub) count += 1;
            return Reflect.apply(this, self, given);
        };
        try { emit(); } finally { Function.prototype.call = real; }
        return count;
    };
    const said = { kind: "of a later version" };
    return {
        changed: calls(() => hub.changedSignal.emit()),
        linkChanged: calls(() => hub.linkSignal.emit(hub.front)),
        received: calls(() => hub.receivedSignal.emit({ entry: hub.front, said, before: null })),
    };
}"""
OF_A_CONTEXT = """() => {
    const { sessionContext } = jupyterapp.shell.currentWidget;
    const real = Function.prototype.call;
    let count = 0;
    Function.prototype.call = function (self, ...given) {
        if (given[0] === sessionContext) count += 1;
        return Reflect.apply(this, self, given);
    };
    try { sessionContext._statusChanged.emit("idle"); } finally { Function.prototype.call = real; }
    return count;
}"""


def connected(lab: Lab, count: int) -> None:
    """Wait until so many notebooks are connected to their kernels."""
    lab.page.wait_for_function("count => window.hub.entries.length === count", arg=count)


def first_notebook(lab: Lab, server: Server) -> None:
    """Open a saved notebook with a mesh, and keep the hub of the extension for the scripts."""
    lab.load(server.write("a.ipynb", UP))
    lab.show_panel()
    lab.run(0)
    lab.save()
    lab.page.evaluate(HUB)
    connected(lab, 1)


def close_second(lab: Lab) -> None:
    # What JupyterLab does when a tab is closed, without its question whether to save.
    lab.page.evaluate(
        "async () => { const at = jupyterapp.shell.currentWidget; await at.context.save(); at.dispose(); }"
    )
    lab.page.locator(".jp-NotebookPanel").nth(1).wait_for(state="detached")
    connected(lab, 1)


@OLDEST_TOO
def test_ten_closed_notebooks_leave_no_listeners(lab: Lab, server: Server) -> None:
    """Two of them start a kernel; the others are opened again, and find theirs."""
    first_notebook(lab, server)
    before = lab.page.evaluate(SLOTS)
    names = [server.write(f"b{i}.ipynb", f"x = {i}", "# text") for i in range(2)]
    for i in range(10):
        lab.open(names[i % 2])
        connected(lab, 2)
        close_second(lab)
    assert lab.page.evaluate(SLOTS) == before
    assert lab.errors == []


def test_a_closed_view_of_a_notebook_leaves_no_listeners(lab: Lab, server: Server) -> None:
    first_notebook(lab, server)
    before = lab.page.evaluate(OF_A_CONTEXT)
    for _ in range(3):
        lab.command("docmanager:clone")
        connected(lab, 2)
        close_second(lab)
    assert lab.page.evaluate(OF_A_CONTEXT) == before
    assert lab.errors == []
