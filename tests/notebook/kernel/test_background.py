"""Cells in the background: the notebook stays usable, output goes to the cell that started them, and the tables stay live."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.notebook.kernel.conftest import START_S
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Cell, Notebook
    from tests.support.timing import Bar

pytestmark = pytest.mark.timeout(120)

GATE = "import os, time\nwhile not os.path.exists({path!r}): time.sleep(0.01)\n"


def gate(tmp_path: Any, name: str = "gate") -> tuple[str, Callable[[], None]]:
    """Give code that waits, and a function that lets it continue."""
    path = tmp_path / name
    return GATE.format(path=str(path)), path.touch


def state_of(notebook: Notebook, name: str) -> str:
    return str(notebook.value(f"{name}.state"))


def wait_for_state(notebook: Notebook, name: str, state: str) -> None:
    wait_until(lambda: state_of(notebook, name) == state, f"{name} to be {state}")


def updates(cell: Cell) -> list[str]:
    """The last updates of the cell's displays."""
    return [m["content"]["data"]["text/plain"] for m in cell.of_type("update_display_data")]


def test_the_notebook_stays_usable_and_output_goes_to_the_launching_cell(
    notebook: Notebook, tmp_path: Any, bar: Bar
) -> None:
    wait, go = gate(tmp_path)
    launch = notebook.ok(f"%%remote t --background --out h\nprint('begins')\n{wait}print('ends', rank)\nrank * 10")
    bar.check(launch.elapsed_s, 1, "the launch")
    local = notebook.ok("print('local'); 6 * 7")
    assert local.stdout == "local\n"
    wait_for_state(notebook, "h", "running")
    go()
    later = notebook.ok("values = h.result(); list(values.values())")
    assert later.plain == "[0, 10]"
    launch.wait_for(lambda cell: "ends 1" in cell.stdout and len(cell.shown) > 1)
    assert launch.lines() == {0: ["begins", "ends 0"], 1: ["begins", "ends 1"]}
    assert "[1] 10" in launch.plain
    assert "ends" not in local.text + later.text
    assert state_of(notebook, "h") == "done"
    assert notebook.value("h.done(), h.exception()") == (True, None)


def test_the_handle_shows_a_line_that_is_updated(notebook: Notebook, tmp_path: Any) -> None:
    wait, go = gate(tmp_path)
    launch = notebook.ok(f"%%remote t --background\n{wait}")
    assert "on t[0-1]: " in launch.plain
    go()
    cell = notebook.ok("_.result()")
    assert cell.plain == ""  # without --out, no values are shown
    launch.wait_for(lambda _: any(": done after" in text for text in [*updates(launch), *updates(cell)]))


def test_the_handle_can_be_awaited(notebook: Notebook) -> None:
    notebook.ok("%%remote t --background --out h\nrank + 1")
    assert notebook.ok("list((await h).values())").plain == "[1, 2]"


def test_cells_of_one_mesh_queue(notebook: Notebook, tmp_path: Any) -> None:
    wait, go = gate(tmp_path)
    notebook.ok(f"%%remote t --background --out first\n{wait}order = ['first']")
    notebook.ok("%%remote t --background --out second\norder.append('second')")
    notebook.ok("%%remote t[0] --background --out third\norder.append('third')")
    assert state_of(notebook, "second") == state_of(notebook, "third") == "queued"
    go()
    last = notebook.ok("%%remote t\norder")  # this cell queues, too
    assert last.plain.splitlines() == ["[0] ['first', 'second', 'third']", "[1] ['first', 'second']"]


def test_cells_on_different_ranks_run_at_the_same_time(notebook: Notebook, tmp_path: Any) -> None:
    wait, go = gate(tmp_path)
    notebook.ok(f"%%remote t[0] --background --out held\n{wait}'held'")
    assert notebook.ok("%%remote t[1]\n'free'").plain == "[1] 'free'"
    assert state_of(notebook, "held") == "running"
    go()
    assert notebook.ok("held.result().item()").plain == "'held'"


def test_several_meshes_run_at_the_same_time(notebook: Notebook, tmp_path: Any) -> None:
    notebook.ok("%mesh up u -n 1 --device cpu", 60)
    try:
        wait, go = gate(tmp_path)
        notebook.ok(f"%%remote t --background --out a\n{wait}'a'")
        notebook.ok("%%remote u --background --out b\n'b'")
        assert notebook.ok("list(b.result().values())").plain == "['b']"
        assert state_of(notebook, "a") == "running"
        go()
        assert notebook.ok("list(a.result().values())").plain == "['a', 'a']"
    finally:
        notebook.ok("%mesh down u")


def test_an_error_is_shown_in_the_launching_cell_and_raised_by_the_handle(notebook: Notebook) -> None:
    launch = notebook.ok("%%remote t --background --out h\nif rank == 1: 1 / 0")
    failed = notebook.run("h.result()")
    assert failed.ename == "RemoteError"
    launch.wait_for(lambda cell: cell.of_type("error"))
    assert "[1] ZeroDivisionError: division by zero" in launch.error
    assert "----> 2 if rank == 1: 1 / 0" in launch.error
    assert state_of(notebook, "h") == "failed"
    assert notebook.ok("type(h.exception()).__name__").plain == "'RemoteError'"


def test_cancel_interrupts_the_ranks_and_keeps_their_state(notebook: Notebook) -> None:
    notebook.ok("%%remote t\nn = 0")
    launch = notebook.ok("%%remote t --background --out h\nn += 1\nprint('loops', flush=True)\nwhile True: n += 1")
    queued = notebook.ok("%%remote t --background --out waits\nn = -1")
    launch.wait_for(lambda cell: len(cell.lines()) == 2)
    assert state_of(notebook, "h") == "running"
    notebook.ok("waits.cancel(); h.cancel()")
    wait_for_state(notebook, "h", "cancelled")
    wait_for_state(notebook, "waits", "cancelled")
    assert notebook.run("h.result()").ename == "RemoteInterrupt"
    launch.wait_for(lambda cell: cell.of_type("error"))
    assert "cancelled on [0-1]; their state is kept" in launch.error
    queued.wait_for(lambda cell: cell.of_type("error"))
    assert "it was not sent" in queued.error
    assert notebook.ok("%%remote t\nn > 0").plain == "[0-1] True"


def test_result_has_a_timeout_and_the_cell_continues(notebook: Notebook, tmp_path: Any) -> None:
    wait, go = gate(tmp_path)
    notebook.ok(f"%%remote t --background --out h\n{wait}")
    cell = notebook.run("h.result(0.05)")
    assert (cell.ename, "it continues to run" in cell.evalue) == ("TimeoutError", True)
    go()
    notebook.ok("h.result()")


def test_an_interrupt_of_the_wait_leaves_the_cell_alone(notebook: Notebook, tmp_path: Any) -> None:
    wait, go = gate(tmp_path)
    notebook.ok(f"%%remote t --background --out h\n{wait}'went on'")
    wait_for_state(notebook, "h", "running")
    waiting = notebook.send("print('waits', flush=True); h.result()").wait_for(lambda cell: cell.stdout)
    notebook.wait_blocked()
    notebook.interrupt()
    assert waiting.wait().ename == "KeyboardInterrupt"
    assert state_of(notebook, "h") == "running"
    go()
    assert notebook.ok("list(h.result().values())").plain == "['went on', 'went on']"


def test_a_cell_that_waits_for_its_turn_can_be_interrupted(notebook: Notebook, tmp_path: Any) -> None:
    wait, go = gate(tmp_path)
    notebook.ok(f"%%remote t --background --out h\n{wait}marker = 'untouched'")
    wait_for_state(notebook, "h", "running")
    code = "print('waits', flush=True); get_ipython().run_cell_magic('remote', 't', \"marker = 'overwritten'\")"
    waiting = notebook.send(code).wait_for(lambda cell: cell.stdout)
    notebook.wait_blocked()
    notebook.interrupt()
    assert waiting.wait().ename == "RemoteInterrupt"
    assert "it was not sent" in waiting.evalue
    go()
    notebook.ok("h.result()")
    assert notebook.ok("%%remote t\nmarker").plain == "[0-1] 'untouched'"


def test_a_timeout_stops_a_cell_in_the_background(notebook: Notebook) -> None:
    notebook.ok("%%remote t --background --timeout 0.3 --out h\nwhile True: pass")
    cell = notebook.run("h.result()")
    assert cell.ename == "RemoteInterrupt"
    assert "stopped after 0.3 s (--timeout)" in cell.evalue


def test_a_cell_ends_with_its_mesh(bare: Notebook) -> None:
    bare.up(1)
    bare.ok("%%remote t --background --out h\nwhile True: pass")
    wait_for_state(bare, "h", "running")
    bare.ok("%mesh down t")
    assert bare.run("h.result()").ename == "SupervisionError"


def test_late_output_goes_to_the_cell_that_started_it(notebook: Notebook, tmp_path: Any) -> None:
    wait, go = gate(tmp_path)
    started = notebook.ok(
        "%%remote t[0]\nimport threading\n"
        f"def later():\n    exec({wait!r})\n    print('from a thread')\n    print('no newline', end='', flush=True)\n"
        "threading.Thread(target=later).start()"
    )
    other = notebook.ok("print('another cell'); t['rank']")
    go()
    started.wait_for(lambda cell: "no newline" in cell.stdout)
    assert started.lines() == {0: ["from a thread", "no newline"]}
    assert other.stdout == "another cell\n"


def test_the_table_is_live_while_a_local_cell_runs(notebook: Notebook, tmp_path: Any) -> None:
    wait, go = gate(tmp_path)
    notebook.ok("%mesh show t")
    notebook.ok(f"%%remote t --background --out h\n{wait}")
    local = notebook.send("import time\nwhile not h.done(): time.sleep(0.01)")
    local.wait_for(lambda cell: sum("running" in text for text in updates(cell)) >= 2)
    go()
    local.wait()
    assert local.ok


def test_an_idle_mesh_draws_nothing(notebook: Notebook) -> None:
    notebook.ok("%mesh show t")
    notebook.ok("%%remote t\n1")
    quiet = notebook.ok("import time; time.sleep(1.5)")
    assert len(updates(quiet)) <= 1  # the last poll of the cell before


def test_the_kernel_stays_busy_for_the_whole_cell(notebook: Notebook, tmp_path: Any) -> None:
    wait, go = gate(tmp_path)
    cell = notebook.send(f"print('runs', flush=True)\n{wait}")
    cell.wait_for(lambda cell: cell.stdout)
    seen: list[tuple[str, str]] = []
    client = notebook.client
    message = client.session.msg("kernel_info_request", {})
    client.control_channel.send(message)
    assert client.control_channel.get_msg(timeout=START_S)["msg_type"] == "kernel_info_reply"
    go()
    while not cell.idle:
        status = client.iopub_channel.get_msg(timeout=START_S)
        if status["msg_type"] == "status":
            seen.append((status["parent_header"]["msg_id"], status["content"]["execution_state"]))
            cell.idle = seen[-1] == (cell.id, "idle")
    after_control = seen[seen.index((message["header"]["msg_id"], "idle")) + 1 :]
    assert after_control == [(cell.id, "busy"), (cell.id, "idle")]
    cell.wait()


def test_the_time_in_the_queue_is_not_counted(notebook: Notebook, tmp_path: Any) -> None:
    wait, go = gate(tmp_path)
    notebook.ok(f"%%remote t --background --out first\n{wait}")
    notebook.ok("%%remote t --background --out second\n1")

    def seconds(name: str, state: str) -> float:
        found = re.search(rf"{state} (\d+\.\d+) s", notebook.ok(f"print(repr({name}))").stdout)
        return float(found[1]) if found else 0.0

    wait_until(lambda: seconds("second", "queued for") >= 1, "a second in the queue")
    begin = time.monotonic()
    go()
    notebook.ok("second.result()")
    most_s = time.monotonic() - begin
    assert seconds("first", "done after") >= 1
    assert seconds("second", "done after") <= most_s + 0.1  # which is rounded
