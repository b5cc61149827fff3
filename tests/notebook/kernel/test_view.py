"""The protocol between the kernel and pages that show meshes, while the kernel is busy."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from monarch_kernel.notebook.magics.viewers import TARGET
from tests.notebook.kernel.conftest import Cell, Notebook
from tests.notebook.kernel.pages import Page
from tests.support.timing import Bar


@pytest.fixture
def own(bare: Notebook) -> Notebook:
    """A notebook with a mesh ``t`` of two ranks that the test may kill."""
    bare.up(2)
    return bare


def busy(notebook: Notebook, seconds: float = 60) -> Cell:
    """Run a cell that keeps the main thread busy."""
    cell = notebook.send(f"import time\nfor _ in range({round(seconds * 100)}): time.sleep(0.01)")
    notebook.wait_blocked()
    return cell


def end(notebook: Notebook, cell: Cell) -> None:
    notebook.interrupt()
    cell.wait()
    assert cell.ename == "KeyboardInterrupt"


@pytest.mark.parametrize("channel", ["control", "shell"])
def test_a_panel_gets_a_frame_at_once_while_a_cell_runs(notebook: Notebook, channel: str) -> None:
    cell = busy(notebook)
    begin = time.time()
    page = Page(notebook, channel)
    page.wait(lambda: page.frames)
    assert page.frames[0]["version"] == 1
    mesh = page.mesh()
    assert mesh["axes"] == [["gpus", 2]]
    assert page.states() == ["idle", "idle"]
    assert [rank["pid"] for rank in mesh["ranks"]] != [0, 0]
    assert begin - 0.1 <= page.frames[0]["at"] <= time.time() + 0.1  # the time in a frame is rounded
    assert len(page.history["t"]) == 60
    assert not cell.reply
    end(notebook, cell)


def test_a_page_that_opens_twice_is_one_page(notebook: Notebook) -> None:
    page = Page(notebook)
    page.wait(lambda: page.frames)
    page._send("comm_open", comm_id=page.comm, target_name=TARGET, data={})
    page.wait(lambda: len(page.frames) == 2)
    assert notebook.value("len(get_ipython().kernel.viewers.by_comm)") >= 1
    before = len(page.frames)
    notebook.ok("%%remote t\n1/1")
    page.wait(lambda: len(page.frames) > before and page.states() == ["idle", "idle"])
    seqs = [frame["seq"] for frame in page.frames[before:]]
    assert len(seqs) == len(set(seqs))


def test_the_end_of_a_first_opening_does_not_close_the_second(notebook: Notebook) -> None:
    page = Page(notebook)
    page.wait(lambda: page.frames)
    closed: list[str] = []
    heard = notebook.on_message

    def hear(message: dict[str, Any]) -> None:
        if message["msg_type"] == "comm_close":
            closed.append(message["content"]["comm_id"])
        heard(message)

    notebook.on_message = hear
    page._send("comm_open", comm_id=page.comm, target_name=TARGET, data={})
    page.wait(lambda: len(page.frames) == 2)
    notebook.ok("import gc; gc.collect()")
    assert page.comm not in closed
    page.say(kind="hello")
    page.wait(lambda: len(page.frames) >= 3)


def test_frames_come_while_ranks_run_and_show_their_lines(notebook: Notebook) -> None:
    page = Page(notebook)
    begin = time.time()
    cell = notebook.send("%%remote t\nimport time\nprint('hello', rank)\nif rank:\n    time.sleep(600)")
    page.wait(lambda: page.states() == ["idle", "running"])
    page.wait(lambda: "line 5" in page.mesh()["ranks"][1].get("line", ""))
    rank = page.mesh()["ranks"][1]
    assert rank["activity"].startswith("cell [")
    page.wait(lambda: page.mesh()["ranks"][1].get("said") == "hello 1")
    assert begin - 0.1 <= rank["since"] <= time.time() + 0.1  # the time is rounded
    began = rank["since"]
    time.sleep(1.0)
    notebook.pump(0.1)
    assert page.mesh()["ranks"][1]["since"] == began
    reply = page.ask("interrupt", ranks=[1])
    assert reply["ok"], reply
    cell.wait()
    page.wait_states("idle", "idle")


def test_a_failure_is_reported_within_a_second_and_its_traceback_on_request(notebook: Notebook, bar: Bar) -> None:
    page = Page(notebook)
    page.wait(lambda: page.frames)
    notebook.run("%%remote t\nx = 5\nif rank == 1:\n    x / 0")
    with bar.below(1.0, "the news of the failure"):
        page.wait_states("idle", "failed")
    (error,) = page.mesh()["errors"]
    assert abs(error["at"] - time.time()) < 3600  # in seconds since 1970, as all times of frames
    assert (error["text"], error["ranks"], error["count"]) == ("ZeroDivisionError: division by zero", "[1]", 1)
    text = page.ask("traceback", ranks=[error["rank"]])["text"]
    assert text.startswith("t[1]: last failure\n")
    assert "x / 0" in text
    assert "\x1b" not in text
    notebook.ok("%%remote t\nNone")
    page.wait_states("idle", "idle")
    assert "no failure since" in page.ask("traceback")["text"]


def test_commands_run_while_a_cell_keeps_the_main_thread(own: Notebook) -> None:
    notebook, page = own, Page(own)
    cell = busy(notebook)
    assert "nothing runs" in page.ask("stacks")["text"]
    assert page.ask("logs", ranks=[0])["ok"]
    pid = page.mesh()["ranks"][1]["pid"]
    os.kill(pid, signal.SIGKILL)
    page.wait_states("idle", "dead")
    assert "SIGKILL" in page.mesh()["errors"][0]["text"]
    assert page.mesh()["errors"][0]["is_death"]
    reply = page.ask("heal")
    assert (reply["ok"], "[1] replaced" in reply["text"]) == (True, True), reply
    page.wait_states("idle", "idle")
    assert page.mesh()["ranks"][1]["restarts"] == 1
    assert not cell.reply
    end(notebook, cell)


def test_a_refused_command_gives_the_reason(notebook: Notebook) -> None:
    page = Page(notebook)
    for asked, why in (
        ({"command": "heal", "mesh": "none"}, "mesh 'none' is down"),
        ({"command": "restart", "ranks": [7]}, "t has no ranks [7]"),
        ({"command": "restart", "ranks": "all"}, "ranks must be a list of integers"),
        ({"command": "reboot"}, "unknown command"),
    ):
        reply = page.ask(**asked)
        assert not reply["ok"]
        assert why in reply["text"]


def test_a_hidden_page_gets_no_frames(notebook: Notebook) -> None:
    page = Page(notebook)
    page.wait(lambda: page.frames)
    page.say(kind="away")
    notebook.sync()  # the kernel has handled the message
    notebook.ok("%%remote t\nNone")
    before = len(page.frames)
    notebook.ok("%%remote t\nimport time; time.sleep(0.5)")
    notebook.pump(0.5)
    assert len(page.frames) == before
    page.say(kind="hello")
    page.wait(lambda: len(page.frames) > before)
    page.close()
    notebook.sync()
    notebook.ok("%%remote t\nNone")
    count = len(page.frames)
    notebook.ok("%%remote t\nimport time; time.sleep(0.5)")
    notebook.pump(0.5)
    assert len(page.frames) == count


def test_the_view_in_a_cell_exchanges_messages_while_another_runs(notebook: Notebook) -> None:
    shown = notebook.ok("%mesh show t")
    assert any("text/html" in data for data in shown.shown)  # this stays in a saved notebook
    (comm,) = shown.widgets
    cell = busy(notebook)
    page = Page(notebook, "shell", comm)
    page.wait(lambda: page.frames)
    assert page.states() == ["idle", "idle"]
    assert page.ask("stacks")["ok"]
    assert not cell.reply
    end(notebook, cell)
    (again,) = notebook.ok("%mesh show t").widgets  # the widget before is closed
    page.frames.clear()
    page.say(kind="hello")
    notebook.ok("%%remote t\nimport time; time.sleep(0.5)")
    assert not page.frames
    other = Page(notebook, "shell", again)
    other.wait(lambda: other.frames)


def test_meshes_come_and_go(notebook: Notebook) -> None:
    page = Page(notebook)
    page.wait(lambda: page.mesh())
    notebook.ok("%mesh up other -n 1 --device cpu")
    page.wait(lambda: page.mesh("other"))
    reply = page.ask("down", mesh="other")
    assert (reply["ok"], reply["text"]) == (True, "other: 1 rank ended")
    page.wait(lambda: not page.mesh("other"))
    assert notebook.value("'other' in globals()") is False


MALFORMED = (
    "x",
    None,
    5,
    [],
    {},
    {"kind": 5},
    {"kind": "command"},
    {"kind": "command", "command": "x" * 2_000_000, "mesh": "t"},
)


@pytest.mark.parametrize("channel", ["control", "shell"])
def test_malformed_messages_are_refused_and_do_no_harm(notebook: Notebook, channel: str) -> None:
    (widget,) = notebook.ok("%mesh show t").widgets
    page = Page(notebook, channel)
    page.wait(lambda: page.frames)
    for data in MALFORMED:
        page._send("comm_msg", comm_id=page.comm, data=data)
        page._send("comm_msg", comm_id=widget, data={"method": "custom", "content": data})
    page._send("comm_msg", comm_id=widget, data={"method": "custom"})
    page._send("comm_open", comm_id=5, target_name=TARGET, data={})
    page._send("comm_msg", comm_id=page.comm)
    assert page.ask("interrupt")["ok"]
    long = page.ask("interrupt", mesh="x" * 1_000_000)
    assert not long["ok"]
    assert len(long["text"]) < 300
    assert notebook.value("1 + 1") == 2


def test_pages_that_close_without_a_message_are_forgotten(notebook: Notebook) -> None:
    pages = [Page(notebook) for _ in range(40)]
    pages[-1].wait(lambda: pages[-1].frames)
    count = "len(get_ipython().kernel.viewers._panels)"
    pages[-1].wait(lambda: notebook.value(count) == 32)
    assert notebook.value("len(get_ipython().kernel.viewers._viewers)") <= 34
    assert pages[-1].ask("stacks")["ok"]


def test_a_repeated_view_leaves_nothing_of_the_first(notebook: Notebook) -> None:
    counts = "len(__import__('ipywidgets').widgets.widget._instances)"
    notebook.ok("%mesh show t")
    before = notebook.value(counts)
    for _ in range(3):
        notebook.ok("%mesh show t")
    assert notebook.value(counts) == before


def test_ranks_are_replaced_once_however_often_the_button_is_pressed(own: Notebook) -> None:
    own.ok("%%remote t --out pids\nimport os\nos.getpid()")
    page = Page(own)
    page.wait(lambda: page.mesh())
    os.kill(own.value("pids.item(gpus=1)"), signal.SIGKILL)
    page.wait_states("idle", "dead")
    for id in (1, 2):
        page.say(kind="command", id=id, command="heal", mesh="t")
    page.wait(lambda: len(page.replies) == 2)
    said = sorted(reply["text"] for reply in page.replies.values())
    assert len([text for text in said if "t: [1] replaced in" in text]) == 1
    assert len([text for text in said if "already being replaced" in text or "no rank is dead" in text]) == 1
    page.wait_states("idle", "idle")
    assert "group" not in own.ok("%%remote t\nimport torch.distributed as dist; dist.barrier()").text
