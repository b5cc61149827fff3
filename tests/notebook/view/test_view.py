"""Tests the view in a real browser: its drawing of frames, its commands, keyboard, screen readers and speed.

The page has no kernel behind it: the test acts as the kernel.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from monarch_kernel.base.events import MeshView, RankState, RankView, WaitView
from monarch_kernel.notebook.view.frames import CARDS, COMMANDS, STATES, ViewState, mesh_frame, pack_states, to_json
from tests.notebook.view.pages import AT, STATIC, ViewPage, all_in, browser, drawn, losing_a_host, training, why_not
from tests.support.timing import Bar

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a browser")

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).resolve().parents[3]
AXE = Path(os.environ.get("AXE_PATH") or ROOT / "labextension" / "node_modules" / "axe-core" / "axe.min.js")
TSC = Path(os.environ.get("TSC_PATH") or ROOT / "labextension" / "node_modules" / "typescript" / "bin" / "tsc")
BUDGET_MS = 35.0
"""Browser time that one update may take."""


@pytest.fixture(scope="module")
def found() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def opened(found: Browser) -> ViewPage:
    return ViewPage(found)


@pytest.fixture
def view(opened: ViewPage) -> Iterator[ViewPage]:
    """A newly mounted view; the console must have no error when the test ends."""
    opened.theme("light")
    opened.start()
    yield opened
    errors, opened.errors = opened.errors, []
    assert errors == []


def golden(name: str) -> dict[str, Any]:
    frame: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return frame


def button(view: ViewPage, name: str, *, exact: bool = True) -> Any:
    return view.page.get_by_role("button", name=name, exact=exact)


def card(view: ViewPage, rank: int) -> Any:
    return view.page.locator(f".mk-card[data-rank='{rank}']")


# --- Drawing -----------------------------------------------------------------------------------------------------------


def test_cards_show_the_golden_frame(view: ViewPage) -> None:
    view.frame(golden("small"))
    mesh = view.page.get_by_role("region", name="Mesh trainers")
    assert mesh.locator(".mk-about").inner_text() == "4 ranks · axis gpus · local · up for 1 min 40 s"
    assert mesh.locator(".mk-counts").inner_text().split("\n") == ["1 dead", "1 failed", "1 starting", "1 running"]
    cards = [each.inner_text().split("\n") for each in mesh.locator(".mk-card").all()]
    assert [each[:2] for each in cards] == [
        ["rank 0", "running"], ["rank 1", "failed"], ["rank 2", "dead"], ["rank 3", "starting"]
    ]  # fmt: skip
    assert " | ".join(cards[0]) == (
        "rank 0 | running | 12 s | ··· | cell [5], line 3 | waits in all_reduce | step 120 loss 2.31 | "
        "gpu mem | 61 / 80 GiB | gpu | 97 % | in | 477 MiB/s | out | 977 KiB/s | "
        "box · cuda:0 · pid\u00a04100 · 2.0\u00a0GiB · cpu\u00a098\u00a0%"
    )
    assert "memory | 1.0 GiB | cpu | –" in " | ".join(cards[1])
    times = view.page.evaluate(f"[65, 30].map((ago) => new Date(({AT} - ago) * 1000).toLocaleTimeString())")
    assert f"{times[0]}: ZeroDivisionError: division by zero" in cards[1]
    assert f"{times[1]}: RankDied: killed by SIGKILL, likely out of memory" in cards[2]
    assert mesh.locator(".mk-errors time").all_inner_texts() == times
    assert "restarted once" in cards[2][-1]
    other = view.page.get_by_role("region", name="Mesh generators")
    assert "host node1 is lost" in other.locator(".mk-notes").inner_text()
    assert "hosts 1, gpus 0" in other.locator(".mk-card").nth(2).inner_text()


@pytest.mark.slow
def test_each_state_has_a_distinct_tile_and_its_word(view: ViewPage) -> None:
    ranks = tuple(RankView(i, (("gpus", i),), state) for i, state in enumerate(STATES))
    view.frame(ViewState(AT, (mesh_frame(MeshView("m", (("gpus", 6),), ranks), AT),)))
    shapes = set()
    for rank, state in enumerate(STATES):
        assert card(view, rank).locator(".mk-state").inner_text() == state
        tile = card(view, rank).locator(".mk-tile")
        drawn_as = "[...node.children].map((path) => path.getAttribute('d')).join()"
        style = "getComputedStyle(node.firstChild)"
        shapes.add(tile.evaluate(f"node => [{drawn_as}, {style}.fill === 'none', {style}.strokeDasharray].join('|')"))
    assert len(shapes) == len(STATES)


@pytest.mark.slow
def test_the_heat_map_shows_the_golden_frame(view: ViewPage) -> None:
    frame = golden("large")
    view.frame(frame)
    cell = view.page.get_by_role("gridcell")
    cell.focus()
    states = [STATES[i % 6] for i in range(99)]
    said = cell.evaluate("""cell => Array.from({ length: 99 }, () => {
        const said = cell.getAttribute("aria-label");
        cell.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
        return said;
    })""")
    assert said == [f"rank {i}, dp {i // 9}, tp {i % 9}, {states[i]}" for i in range(99)]
    rows = view.page.locator(".mk-table tbody tr").all()
    assert [row.inner_text().split()[:2] for row in rows] == [["94", "dead"], ["88", "dead"], ["82", "dead"]]


@pytest.mark.slow
def test_a_heat_map_that_was_hidden_is_drawn_when_it_is_shown(view: ViewPage) -> None:
    view.page.evaluate("document.getElementById('root').style.display = 'none'")
    for dead in ((), (7,)):
        view.frame(ViewState(AT, (drawn(training(256, dead=dead)),)))
    view.page.evaluate("document.getElementById('root').style.display = ''")
    view.page.wait_for_function("document.querySelector('.mk-canvas').width > 300")
    view.page.get_by_role("gridcell").focus()
    view.page.keyboard.press("n")
    assert "rank 7," in (view.page.get_by_role("gridcell").get_attribute("aria-label") or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "width", "columns"),
    [
        ((("gpus", 1024),), 900, 32),
        ((("gpus", 1000),), 900, 40),
        ((("gpus", 997),), 900, 32),
        ((("dp", 11), ("tp", 9)), 900, 18),
        ((("hosts", 128), ("gpus", 8)), 900, 32),
        ((("hosts", 3), ("gpus", 40)), 340, 10),
        ((("a", 100), ("b", 100)), 900, 100),
        ((("x", 2), ("dp", 1), ("y", 50), ("tp", 1)), 900, 10),
    ],
)
def test_rows_of_the_heat_map_align_with_axes(
    view: ViewPage, axes: tuple[tuple[str, int], ...], width: int, columns: int
) -> None:
    count = math.prod(size for _, size in axes)
    ranks = tuple(RankView(i, (), "idle") for i in range(count))
    view.resize(width)
    view.frame(ViewState(AT, (mesh_frame(MeshView("m", axes, ranks), AT),)))
    assert view.page.get_by_role("grid").get_attribute("aria-colcount") == str(columns)
    assert view.page.evaluate("document.documentElement.scrollWidth") <= width
    view.resize(900)


@pytest.mark.slow
def test_tiles_of_the_heat_map_are_drawn_where_the_cursor_finds_them(view: ViewPage) -> None:
    """When one rank changes its state, only its tile changes on the canvas."""
    states = ["idle"] * 1024
    frame = to_json(ViewState(AT, (drawn(all_in(1024, "idle")),)))
    view.frame(frame)
    pixels = "node.getContext('2d').getImageData(0, 0, node.width, node.height).data"
    canvas = view.page.locator(".mk-canvas")
    canvas.evaluate(f"node => {{ window.before = new Uint32Array({pixels}.buffer); }}")
    states[77] = "dead"
    frame["meshes"][0] |= {"states": pack_states(states), "counts": {"dead": 1, "idle": 1023}}  # type: ignore[arg-type]
    view.frame(frame)
    differs = "(each, i) => (each === window.before[i] ? [] : [i])"
    changed = canvas.evaluate(f"node => [...new Uint32Array({pixels}.buffer)].flatMap({differs})")
    width = canvas.evaluate("node => node.width")
    assert changed
    view.page.get_by_role("gridcell").focus()
    view.page.keyboard.press("n")
    box, place = canvas.bounding_box(), view.page.locator(".mk-cursor").bounding_box()
    for pixel in changed:
        x, y = box["x"] + pixel % width, box["y"] + pixel // width
        assert place["x"] <= x < place["x"] + place["width"]
        assert place["y"] <= y < place["y"] + place["height"]
    view.page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    assert view.page.locator(".mk-inspector .mk-rank").inner_text() == "rank 77"


@pytest.mark.slow
def test_running_time_advances_without_a_frame(view: ViewPage) -> None:
    view.frame(golden("small"))
    view.page.evaluate("window.clock += 30")
    view.page.wait_for_function("document.querySelector('.mk-time').textContent === '42 s'")
    assert "up for 2 min 10 s" in view.page.locator(".mk-about").first.inner_text()


@pytest.mark.slow
def test_throughput_falls_to_zero_without_frames(view: ViewPage) -> None:
    view.receive({"kind": "history", "meshes": {"trainers": [[1 << 30, 0]] * 60}})
    view.frame(golden("small"))
    traffic = view.page.get_by_role("group", name="Throughput").first
    assert "477 MiB/s" in traffic.inner_text()
    assert "at most 1.0 GiB/s" in text_of(traffic)
    view.page.evaluate("window.clock += 5")
    view.page.wait_for_function("document.querySelector('.mk-rates .mk-figure').textContent === '0 B/s'")
    area = traffic.locator(".mk-chart .mk-in").get_attribute("d")
    assert area.endswith("58 98L59 98")  # the curve ends at zero
    view.page.evaluate("window.clock += 70")
    view.page.wait_for_function("document.querySelector('.mk-peak').textContent === 'none in the last 60\u00a0s'")
    view.page.evaluate("window.clock += 600")  # as if the page had been hidden
    view.receive({"kind": "history", "meshes": {"trainers": [[2 << 30, 0]] * 60}})
    assert "at most 2.0 GiB/s" in text_of(traffic)


@pytest.mark.slow
def test_text_with_html_in_it_is_shown_as_text(view: ViewPage) -> None:
    evil = "<img src=x onerror=alert(1)><b>bold</b>"
    rank = RankView(0, (("gpus", 0),), "failed", last_error=evil, last_line=evil, host=evil, device=evil)
    view.frame(ViewState(AT, (mesh_frame(MeshView(evil, (("gpus", 1),), (rank,), evil), AT),)))
    button(view, f"Traceback of {evil}").click()
    view.reply(f"\x1b[31m{evil}\x1b[0m")
    button(view, "Stacks").click()
    view.reply(f"{evil}\n{evil}", ok=False)
    assert view.page.locator("#root :is(img, b)").count() == 0
    assert view.page.locator(".mk-error-row pre").inner_text() == evil
    assert view.page.locator(".mk-name").inner_text() == evil


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "frame", "text"),
    [
        ({}, None, "Waiting for the kernel …"),
        ({}, ViewState(AT), "No mesh. Run %mesh up NAME -n 4 in a cell."),
        ({"mesh": "other"}, ViewState(AT, (drawn(training(2)),)), "The mesh other is not up."),
        ({}, ViewState(AT, (drawn(training(2)),), version=2), "Reload the page."),
    ],
)
def test_pages_without_a_mesh_say_so(
    view: ViewPage, options: dict[str, Any], frame: ViewState | None, text: str
) -> None:
    view.start(**options)
    if frame is not None:
        view.frame(frame)
    view.page.locator("#root").get_by_text(text).wait_for()
    assert view.page.get_by_role("region", name="Mesh").count() == 0


@pytest.mark.slow
def test_only_the_requested_mesh_is_shown(view: ViewPage) -> None:
    view.start(mesh="evaluators")
    view.frame(ViewState(AT, (drawn(training(2)), drawn(losing_a_host()))))
    assert view.page.locator(".mk-name").all_inner_texts() == ["evaluators"]


@pytest.mark.slow
def test_the_last_frame_is_marked_as_outdated_until_the_kernel_sends_one(view: ViewPage) -> None:
    view.start(frame=golden("small"))
    assert "Waiting for the kernel. Last update at" in view.page.locator(".mk-banner").inner_text()
    assert button(view, "Interrupt").first.is_disabled()
    view.frame(golden("small"))
    assert view.page.locator(".mk-banner").is_hidden()
    assert button(view, "Interrupt").first.is_enabled()


@pytest.mark.slow
def test_a_disconnected_view_says_so_and_disables_commands(view: ViewPage) -> None:
    view.frame(ViewState(AT, (drawn(training(4, dead=(3,))),)))
    button(view, "Stacks").click()
    last = to_json(ViewState(AT + 1, (drawn(training(4, dead=(2, 3))),)))
    both = "frame => ['frame', 'closed'].forEach((kind) => window.view.receive({ ...frame, kind }))"
    view.page.evaluate(both, last)
    view.settle()
    assert view.page.locator(".mk-counts").inner_text().split("\n")[0] == "2 dead"
    assert "Disconnected from the kernel." in view.page.locator(".mk-banner").inner_text()
    assert "the kernel did not answer" in view.page.locator(".mk-replies").first.inner_text()
    for name in ("Interrupt", "Heal", "Restart", "Down"):
        assert button(view, name).is_disabled()
    button(view, "Interrupt").click(force=True)
    assert [each["command"] for each in view.commands()] == ["stacks"]
    view.receive({"kind": "opened"})
    assert view.sent()[-1] == {"kind": "hello"}
    view.frame(ViewState(AT, (drawn(training(4, dead=(3,))),)))
    assert view.page.locator(".mk-banner").is_hidden()
    assert button(view, "Heal").is_enabled()


@pytest.mark.slow
def test_the_widget_of_a_cell_draws_the_mesh_of_its_model(view: ViewPage) -> None:
    script = """async () => {
        window.view.dispose();
        const { default: widget } = await import("/view.js");
        const model = {
            values: { mesh: "generators" }, heard: new Map(), sent: [],
            get: (name) => model.values[name],
            send: (message) => model.sent.push(message),
            on: (event, call) => model.heard.set(event, call),
            off: (event) => model.heard.delete(event),
        };
        window.model = model;
        window.view = { receive: (message) => model.heard.get("msg:custom")(message) };
        window.view.dispose = widget.render({ model, el: document.getElementById("root") });
    }"""
    view.page.evaluate(script)
    view.page.get_by_text("Waiting for the kernel").wait_for()
    view.frame(golden("small"))
    assert view.page.locator(".mk-name").all_inner_texts() == ["generators"]
    button(view, "Heal").click()
    sent = view.page.evaluate("window.model.sent")
    assert [each.get("command", each["kind"]) for each in sent] == ["hello", "heal"]
    view.page.evaluate(
        "void (window.model.send = () => { throw new Error('Cannot send'); })"
    )  # as while a kernel restarts
    button(view, "Stacks").click()
    assert "Disconnected" in view.page.locator(".mk-banner").inner_text()
    assert "the kernel did not answer" in view.page.locator(".mk-reply").first.inner_text()
    view.page.evaluate("window.model.heard.get('comm_live_update')()")
    assert "Disconnected" in view.page.locator(".mk-banner").inner_text()
    view.page.evaluate("window.view.dispose()")
    assert view.page.evaluate("[window.model.heard.size, document.getElementById('root').children.length]") == [0, 0]


# --- Updates -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_updates_keep_the_focus_and_an_open_traceback(view: ViewPage) -> None:
    first = ViewState(AT, (drawn(training(4, failed=(2,))),))
    view.frame(first)
    client_for_unpickling = button(view, "Traceback of torch", exact=False)
    client_for_unpickling.click()
    view.reply("line 1\nline 2")
    for focused, dead in (
        (client_for_unpickling, (3,)),
        (client_for_unpickling, (0, 3)),
        (button(view, "Actions for rank 1"), (3,)),
    ):
        focused.focus()
        view.page.evaluate("window.kept = [document.activeElement, document.querySelector('.mk-error-row pre')]")
        view.frame(ViewState(AT + 1, (drawn(training(4, failed=(2,), dead=dead)),), 2))
        assert view.page.evaluate("window.kept[0] === document.activeElement && window.kept[1].isConnected")
    assert client_for_unpickling.get_attribute("aria-expanded") == "true"
    assert view.page.locator(".mk-error-row pre:visible").inner_text() == "line 1\nline 2"
    assert card(view, 3).locator(".mk-state").inner_text() == "dead"


def failing(*, state: RankState = "failed", failed_s: float = 5.0, restarts: int = 0) -> MeshView:
    """Make a mesh of two ranks; the second one has failed, and may be in another state by now."""
    known = {"host": "box", "pid": 7, "restarts": restarts}
    error = {"last_error": "ValueError: no", "failed_s": failed_s}
    more = {"activity": "cell [6]", "running_s": 1.0} if state == "running" else {}
    ranks = (RankView(0, (("gpus", 0),), "idle", **known), RankView(1, (("gpus", 1),), state, **known, **error, **more))
    return MeshView("t", (("gpus", 2),), ranks, age_s=100.0)


def at(seconds: float, view: MeshView) -> ViewState:
    return ViewState(AT + seconds, (mesh_frame(view, AT + seconds),))


@pytest.mark.slow
def test_an_error_is_grey_while_its_rank_runs_something_else(view: ViewPage) -> None:
    view.frame(at(0, failing()))
    row = view.page.locator(".mk-error-row")
    text = row.locator(".mk-error-text")
    color = "node => getComputedStyle(node).color"
    red = [card(view, 1).locator(".mk-error").evaluate(color), text.evaluate(color)]
    button(view, "Traceback of ValueError", exact=False).click()
    view.reply("line 1\nline 2")
    view.frame(at(2, failing(state="running", failed_s=7.0)))
    when = view.page.evaluate(f"new Date(({AT} - 5) * 1000).toLocaleTimeString()")
    assert row.locator("time").inner_text() == f"earlier, {when}"
    assert card(view, 1).locator(".mk-error").inner_text() == f"earlier, {when}: ValueError: no"
    grey = [card(view, 1).locator(".mk-error").evaluate(color), text.evaluate(color)]
    assert all(now != before for now, before in zip(grey, red, strict=True))
    assert row.locator("pre").inner_text() == "line 1\nline 2"
    view.frame(at(4, failing(failed_s=1.0)))  # it has failed in the same way again
    assert row.locator("pre:visible").count() == 0
    assert "earlier" not in row.inner_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("later", "after_s"),
    [({"line": "cell [5], line 12: step()"}, 5), ({"waits": ""}, 5), ({"activity": "cell [6]"}, 1)],
    ids=["at another line", "the wait is over", "in another cell soon after"],
)
def test_stacks_are_out_of_date_once_a_rank_has_gone_on(view: ViewPage, later: dict[str, str], after_s: int) -> None:
    def frame(seconds: float, **more: str) -> dict[str, Any]:
        found = with_loop()
        (rank,) = found["meshes"][0]["ranks"]
        rank |= {"state": "running", "line": "cell [5], line 9: dist.all_reduce(x)", "waits": "all_reduce", **more}
        return {**found, "at": AT + seconds}

    view.frame(frame(0))
    button(view, "Stacks").click()
    view.reply("t: 1 rank, 1 busy\n[0] waits in all_reduce #7")
    reply = view.page.locator(".mk-reply")
    for seconds in range(0, after_s, 2):  # it still waits
        view.page.evaluate(f"window.clock = {AT + seconds}")
        view.frame(frame(seconds))
        assert "out of date" not in reply.inner_text()
    view.page.evaluate(f"window.clock = {AT + after_s}")
    view.frame(frame(after_s, **later))
    assert "out of date" in reply.inner_text()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stays"), [("Stacks", False), ("Logs", True)])
def test_replies_that_no_longer_hold_are_grey_and_say_so(view: ViewPage, name: str, stays: bool) -> None:
    view.frame(at(0, failing()))
    if name == "Logs":
        button(view, "Actions for rank 1").click()
        button(view, "Logs").last.click()
    else:
        button(view, "Stacks").click()
    view.reply("[0-1] 2 busy\n    all_reduce")
    reply = view.page.locator(".mk-reply")
    for seconds in (1, 2):  # equal states, later
        view.page.evaluate(f"window.clock = {AT + seconds}")
        view.frame(at(seconds, failing(failed_s=5.0 + seconds)))
        assert "out of date" not in reply.inner_text()
    view.page.evaluate(f"window.clock = {AT + 3}")
    view.frame(at(3, failing(state="running", failed_s=8.0)))
    assert ("out of date" in reply.inner_text()) is not stays
    view.frame(at(4, failing(state="starting", restarts=1)))
    assert "out of date" in reply.locator("time").inner_text()
    assert "mk-past" in str(reply.get_attribute("class"))


@pytest.mark.slow
def test_the_answer_about_a_loop_has_its_time_and_goes_when_it_no_longer_holds(view: ViewPage) -> None:
    frame = golden("loops")
    loop = frame["meshes"][0]["loops"][-1]
    view.frame({**frame, "meshes": [{**frame["meshes"][0], "loops": [{**loop, "state": "running"}]}]})
    button(view, "Pause").click()
    view.reply("all ranks pause before step 47")
    answer = view.page.locator(".mk-loop > .mk-hint")
    when = view.page.evaluate(f"new Date({AT} * 1000).toLocaleTimeString()")
    said = f"Pause: all ranks pause before step 47 ({when})"
    for state, expected in (("paused", said), ("running", "")):
        view.frame({**frame, "meshes": [{**frame["meshes"][0], "loops": [{**loop, "state": state}]}]})
        assert answer.inner_text() == expected


@pytest.mark.slow
def test_an_equal_frame_changes_nothing_on_the_page(view: ViewPage) -> None:
    for frame in (golden("small"), golden("large")):
        view.frame(frame)
        view.page.evaluate("""() => {
            window.written = 0;
            window.watch = new MutationObserver((changes) => { window.written += changes.length; });
            window.watch.observe(document.getElementById("root"),
                { subtree: true, childList: true, attributes: true, characterData: true });
        }""")
        view.frame({**frame, "seq": 99})
        assert view.page.evaluate("window.watch.takeRecords().length + window.written") == 0
        view.page.evaluate("window.watch.disconnect()")


@pytest.mark.slow
def test_the_ranks_of_a_hung_collective_are_named_until_it_ends(view: ViewPage) -> None:
    frame = golden("waits")
    view.frame({**frame, "meshes": [{**frame["meshes"][0], "waits": []}]})
    view.frame(frame)
    first, second = (wait["text"] for wait in frame["meshes"][0]["waits"])
    waits = view.page.get_by_role("list", name="Waits")
    assert [each.inner_text() for each in waits.get_by_role("listitem").all()] == [first, second]
    assert view.page.locator("[aria-live]").inner_text() == f"trainers: {first}"
    stalls = [card(view, rank).locator(".mk-stall") for rank in range(3)]
    brief = "waits for [1]"  # the collective of rank 0 is on its card; that of rank 2 is not known yet
    assert [each.inner_text() for each in stalls] == [brief, f"[0,2] wait for this rank · {second}", first]
    assert stalls[0].get_attribute("title") == first
    assert card(view, 0).locator(".mk-waits").inner_text() == "waits in all_reduce"
    del frame["meshes"][0]["waits"]
    view.frame(frame)
    assert not waits.is_visible()
    assert view.page.locator("[aria-live]").inner_text() == "trainers: the waits have ended"
    assert not any(each.is_visible() for each in stalls)
    assert card(view, 0).locator(".mk-waits").inner_text() == "waits in all_reduce"


@pytest.mark.slow
def test_distributed_tensors_are_listed_by_the_lines_that_made_them(view: ViewPage) -> None:
    frame = golden("tensors")
    view.frame(frame)
    block = view.page.locator(".mk-tensors-block")
    summary = block.locator("summary")
    assert text_of(summary) == "Distributed tensors 215 with 7.2 GiB a rank · 12 operations outstanding"
    assert not block.locator("li").first.is_visible()
    summary.click()
    lines = [text_of(each) for each in block.locator("li").all()]
    assert lines[0] == "6.1 GiB in 148 tensors: cell [7], line 3: model = trainers.distribute(GPT(config), plan)"
    assert lines[1] == "1.1 GiB in 60 tensors on [0-1]: cell [9], line 5, in step: loss.backward()"
    assert lines[2] == "4.0 KiB in 1 tensor: an earlier line"
    assert (len(lines), block.locator("p").inner_text()) == (8, "and 1 other line")
    tensors = frame["meshes"][0]["tensors"]
    del tensors["outstanding"], tensors["more"]
    view.frame(frame)
    assert text_of(summary) == "Distributed tensors 215 with 7.2 GiB a rank"
    assert block.locator("li").first.is_visible()  # as the user has left it
    del frame["meshes"][0]["tensors"]
    view.frame(frame)
    assert not block.is_visible()


@pytest.mark.slow
def test_the_card_of_a_rank_that_waits_for_a_call_has_the_whole_line(view: ViewPage) -> None:
    text = "[0-1] wait for 12 s for source.next of generators[0], [2]; [2] is at actor source: cell [5], line 20"
    waits = (WaitView(text, (0, 1), (2,)),)  # ranks of other meshes are only in the text
    view.frame(ViewState(AT, (drawn(dataclasses.replace(all_in(4, "running"), waits=waits)),)))
    stalls = [card(view, rank).locator(".mk-stall").inner_text() for rank in range(3)]
    assert stalls == [text, text, "[0-1] wait for this rank"]


@pytest.mark.slow
def test_the_card_of_a_rank_that_is_itself_missing_has_the_whole_line(view: ViewPage) -> None:
    frame = golden("waits")
    frame["meshes"][0]["waits"] = [{"text": "[0-1] wait for 12 s in recv", "ranks": "[0-1]", "missing": "[0-1]"}]
    view.frame(frame)
    assert card(view, 0).locator(".mk-stall").inner_text() == "[0-1] wait for 12 s in recv"


@pytest.mark.slow
def test_the_ranks_of_a_hung_collective_are_named_in_a_large_mesh(view: ViewPage) -> None:
    mesh = training(64)
    text = "[0-62] wait for 12 s in all_reduce #7; [63] does not answer"
    waits = (WaitView(text, tuple(range(63)), (63,)),)
    view.frame(ViewState(AT, (drawn(dataclasses.replace(mesh, waits=waits)),)))
    assert view.page.get_by_role("list", name="Waits").inner_text() == text
    inspector = view.page.get_by_role("group", name="One rank")
    assert text in inspector.inner_text()
    view.page.get_by_role("gridcell").press("Control+End")
    assert "[0-62] wait for this rank" in inspector.inner_text()


@pytest.mark.slow
def test_meshes_and_ranks_that_are_gone_are_removed(view: ViewPage) -> None:
    view.frame(ViewState(AT, (drawn(training(4)), drawn(losing_a_host()))))
    view.frame(ViewState(AT, (drawn(training(2)),)))
    assert view.page.locator(".mk-name").all_inner_texts() == ["trainers"]
    assert view.page.locator(".mk-card").count() == 2
    view.frame(ViewState(AT, (drawn(training(256)),)))
    assert view.page.locator(".mk-card").count() == 0
    view.page.evaluate("window.view.dispose()")
    assert view.page.locator("#root > *").count() == 0


# --- Loops -------------------------------------------------------------------------------------------------------------


def the_loop(view: ViewPage) -> Any:
    return view.page.get_by_role("region", name="Loop in cell [5]")


def with_loop(state: str = "running", **more: object) -> dict[str, Any]:
    """Return the golden frame with only one loop, changed as given."""
    frame = golden("loops")
    (mesh,) = frame["meshes"]
    mesh["loops"] = [{**mesh["loops"][1], "state": state, **more}]
    return frame


def turned(frame: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    """Return the frame with a knob at another value."""
    (loop,) = frame["meshes"][0]["loops"]
    loop["knobs"] = [{**knob, "value": value} if knob["name"] == name else knob for knob in loop["knobs"]]
    return frame


def text_of(found: Locator) -> str:
    """The text on the page, without what keeps figures and their units in one line."""
    return found.inner_text().replace("\u00a0", " ")


@pytest.mark.slow
def test_a_loop_shows_the_golden_frame(view: ViewPage) -> None:
    view.frame(golden("loops"))
    loop = the_loop(view)
    speed = "12.3 ms a step · 81 steps/s · 1,034 samples/s · 264,800 tokens/s · 413 TFLOP/s · MFU 41.8 %"
    about = f"running · step 1,234 of 10,000 · 15 s elapsed · 1 min 48 s left\n{speed}"
    assert text_of(loop.locator(".mk-about")) == about
    assert loop.get_by_role("progressbar").get_attribute("aria-valuenow") == "12"
    assert loop.locator(".mk-curve-head").all_inner_texts() == ["loss\n2.303", "gradient norm\nnot a number"]
    knobs = ("lr", "batch", "schedule", "clip")
    assert [loop.get_by_label(f"Knob {name}", exact=True).input_value() for name in knobs] == [
        "0.0003",
        "64",
        "cosine",
        "",
    ]
    assert loop.get_by_label("Knob augment").is_checked()
    assert loop.get_by_role("slider").count() == 1
    over = view.page.get_by_role("region", name="Loop in a call")
    assert text_of(over.locator(".mk-about")) == "over · step 7 · 30 s elapsed"
    assert over.get_by_role("button").count() == over.get_by_role("progressbar").count() == 0
    view.frame(with_loop(loader="loader 31 % of a step, 64 % on [2]"))
    assert text_of(loop.locator(".mk-speed")) == f"{speed} · loader 31 % of a step, 64 % on [2]"
    assert over.count() == 0


@pytest.mark.slow
def test_curves_are_drawn_whenever_they_arrive(view: ViewPage) -> None:
    points: list[list[Any]] = [[0, 10, 20, 30], [4.0, None, 2.0, 3.0], [], [], []]
    curves = {"kind": "curves", "mesh": "trainers", "loops": [{"request": 41, "number": 1, "curves": {"loss": points}}]}
    view.receive(curves)  # before there is a frame
    view.frame(with_loop())
    chart = the_loop(view).get_by_role("img")
    assert chart.get_attribute("aria-label") == "loss from step 0 to 30: first 4, last 3, minimum 2, maximum 4"
    line, band = chart.locator(".mk-in"), chart.locator(".mk-band")
    assert line.get_attribute("d") == "M0.0 3.0M200.0 97.0L300.0 50.0"
    points[0].append(40)
    points[1].append(1.0)
    view.receive(curves)
    assert line.get_attribute("d") == "M0.0 3.0M150.0 65.7L225.0 34.3L300.0 97.0"
    assert band.get_attribute("d") == ""
    assert the_loop(view).locator(".mk-span").first.inner_text().split() == ["step", "0", "40"]
    curves["loops"] = [{"request": 41, "number": 1, "curves": {"loss": [[7], [2.5], [], [], []]}}]
    view.receive(curves)
    assert line.get_attribute("d") == "M0.0 50.0h300"


@pytest.mark.slow
def test_a_curve_has_a_band_from_minimum_to_maximum_and_names_their_ranks(view: ViewPage) -> None:
    view.frame(with_loop())
    points = [[0, 10, 20], [4.0, None, 2.0], [3.0, None, 1.0], [5.0, None, 3.0], [[3, 1.0], [0, 3.0]]]
    curves = {"kind": "curves", "mesh": "trainers", "loops": [{"request": 41, "number": 1, "curves": {"loss": points}}]}
    view.receive(curves)
    loop = the_loop(view)
    assert loop.locator(".mk-band").first.get_attribute("d") == "M0.0 3.0L0.0 50.0ZM300.0 50.0L300.0 97.0Z"
    assert loop.locator(".mk-ends").all_inner_texts()[0] == "1 rank 3 to 3 rank 0"
    points[4] = [[2, None]]
    view.receive(curves)
    assert loop.locator(".mk-ends").all_inner_texts()[0] == "not a number rank 2"
    points[4] = []
    view.receive(curves)
    assert not loop.locator(".mk-ends").first.is_visible()


def samples(*numbers: int, count: int = 0) -> dict[str, Any]:
    """Make a message with a sample for each number, the newest first."""
    rows = [[number % 4, number, number / 8, f"prompt {number}", f"answer {number}\nline 2"] for number in numbers]
    return {"kind": "trajectories", "mesh": "trainers", "count": count or len(rows), "samples": rows}


def test_trajectories_are_shown_as_text_with_the_newest_first(view: ViewPage) -> None:
    message = samples(9, 8, count=1_234)
    message["samples"] += [[0, None, None, "<img src=x onerror=alert(1)>", "<b>bold</b>"], [1, 0, "nan", "", ""]]
    view.receive(message)  # before there is a frame
    view.frame(golden("small"))
    shown = view.page.get_by_role("list", name="Trajectories of trainers")
    assert [each.inner_text().split("\n") for each in shown.locator(".mk-sample-head").all()] == [
        ["rank 1 · version 9", "reward 1.125"],
        ["rank 0 · version 8", "reward 1"],
        ["rank 0"],
        ["rank 1 · version 0", "reward nan"],
    ]
    assert shown.locator(".mk-completion").first.inner_text() == "answer 9\nline 2"
    assert shown.locator(".mk-prompt").nth(2).inner_text() == "<img src=x onerror=alert(1)>"
    assert shown.locator("img, b").count() == 0
    assert (
        view.page.locator(".mk-trajectories summary").first.inner_text() == "Trajectories the last 4 of 1,234 samples"
    )
    others = view.page.get_by_role("region", name="Mesh generators")
    assert not others.locator(".mk-trajectories").is_visible()


@pytest.mark.slow
def test_trajectories_stay_while_the_user_has_scrolled_to_read_them(view: ViewPage) -> None:
    view.frame(golden("small"))
    view.receive(samples(*range(20, 0, -1)))
    shown = view.page.get_by_role("list", name="Trajectories of trainers")
    held = view.page.get_by_role("region", name="Mesh trainers").get_by_text("Newer samples are above")
    assert not held.is_visible()
    shown.evaluate("node => { node.scrollTop = 100; }")
    view.receive(samples(*range(21, 1, -1), count=21))
    assert shown.locator(".mk-prompt").first.inner_text() == "prompt 20"
    assert held.is_visible()
    assert "of 21 samples" in view.page.locator(".mk-trajectories summary").first.inner_text()
    shown.evaluate("node => { node.scrollTop = 0; }")
    shown.locator(".mk-prompt").first.filter(has_text="prompt 21").wait_for()
    assert not held.is_visible()


@pytest.mark.slow
def test_the_speeds_of_links_are_below_the_name_of_the_mesh(view: ViewPage) -> None:
    frame = golden("loops")
    frame["meshes"][0]["links"] = "eth0 12 GiB/s, PCIe 5 x16 59 GiB/s"
    view.frame(frame)
    about = view.page.locator(".mk-heading .mk-about").first.inner_text()
    assert " · links: eth0 12 GiB/s, PCIe 5 x16 59 GiB/s" in about


def losses(scale: float = 1.0, steps: int = 11) -> list[list[Any]]:
    """Points of a curve from 100 to 0.01, with ranks 1 and 3 as its ends."""
    means = [scale * 100 * 10 ** (-4 * i / (steps - 1)) for i in range(steps)]
    return [
        [10 * i for i in range(steps)],
        means,
        [each * 0.9 for each in means],
        [each * 1.1 for each in means],
        [[1, means[-1] * 0.9], [3, means[-1] * 1.1]],
        [1] * steps,
        [3] * steps,
    ]


def with_curves(view: ViewPage) -> Locator:
    view.frame(with_loop())
    earlier = [{"where": f"cell [{cell}]", "curves": {"loss": losses(scale)}} for cell, scale in ((2, 4.0), (3, 2.0))]
    loops = [{"request": 41, "number": 1, "curves": {"loss": losses(), "gradient norm": losses(0.1)}}]
    view.receive({"kind": "curves", "mesh": "trainers", "loops": loops, "earlier": earlier})
    return the_loop(view)


def areas(loop: Locator) -> Locator:
    return loop.locator(".mk-curve-area")


def point_at(view: ViewPage, part: float) -> None:
    """Move the mouse to a place in the first chart, given as a part of its width."""
    box = areas(the_loop(view)).first.bounding_box()
    assert box is not None
    view.page.mouse.move(box["x"] + part * box["width"], box["y"] + box["height"] / 2)


@pytest.mark.slow
def test_a_curve_shows_the_values_and_ranks_of_the_step_under_the_pointer(view: ViewPage) -> None:
    loop = with_curves(view)
    tip = loop.locator(".mk-tip").first
    assert not tip.is_visible()
    point_at(view, 0.5)
    assert tip.inner_text() == "step 50: 1 (0.9 rank 1 to 1.1 rank 3)"
    view.receive(
        {"kind": "curves", "mesh": "trainers", "loops": [{"request": 41, "number": 1, "curves": {"loss": losses(3)}}]}
    )
    assert tip.inner_text() == "step 50: 3 (2.7 rank 1 to 3.3 rank 3)"
    steps, *_, ends, least_ranks, most_ranks = losses()
    same = [
        steps,
        [0.1, 0.1 + 2e-17] * 5 + [0.1],
        [0.1 - 2e-17] * 11,
        [0.1 + 2e-17] * 11,
        ends,
        least_ranks,
        most_ranks,
    ]
    view.receive(
        {"kind": "curves", "mesh": "trainers", "loops": [{"request": 41, "number": 1, "curves": {"loss": same}}]}
    )
    assert tip.inner_text() == "step 50: 0.1"
    scale, area = loop.locator(".mk-scale").first, areas(loop).first
    assert scale.inner_text().strip() == "0.1"
    label, chart = scale.locator("span").first.bounding_box(), area.bounding_box()
    assert label is not None
    assert chart is not None
    assert abs(label["y"] + label["height"] / 2 - chart["y"] - chart["height"] / 2) <= 2  # beside the line
    view.page.mouse.move(0, 0)
    assert not tip.is_visible()
    areas(loop).first.focus()
    for key, step in (("ArrowLeft", 100), ("ArrowLeft", 90), ("Home", 0), ("ArrowRight", 10)):
        view.page.keyboard.press(key)
        assert tip.inner_text().startswith(f"step {step}: ")
    assert "loss, step 10: " in view.page.locator("[aria-live]").inner_text()
    view.page.keyboard.press("Escape")
    assert not tip.is_visible()


@pytest.mark.slow
def test_curves_have_a_logarithmic_scale_and_a_moving_average(view: ViewPage) -> None:
    loop = with_curves(view)
    line, band, raw = (loop.locator(f".mk-{each}").first for each in ("in", "band", "raw"))
    heights = "each => each.getAttribute('d').slice(1).split('L').map(place => Number(place.split(' ')[1]))"
    assert line.evaluate(heights)[5] > 90
    scale = loop.get_by_role("button", name="Log scale")
    scale.click()
    assert scale.get_attribute("aria-pressed") == "true"
    logarithmic = line.evaluate(heights)
    falls = [below - above for above, below in itertools.pairwise(logarithmic)]
    assert max(falls) - min(falls) < 0.3  # a straight line
    assert band.get_attribute("d")
    loop.get_by_role("combobox", name="Smoothing of the curves").select_option("0.9")
    assert line.evaluate(heights)[10] < logarithmic[10] - 20
    assert raw.evaluate(heights)[0] == pytest.approx(line.evaluate(heights)[0])
    assert band.get_attribute("d") == ""
    scale.click()
    zeros = [[0, 1], [0.0, -1.0], [], [], []]
    view.receive(
        {"kind": "curves", "mesh": "trainers", "loops": [{"request": 41, "number": 1, "curves": {"loss": zeros}}]}
    )
    scale.click()
    assert (
        loop.get_by_role("img").first.get_attribute("aria-label").startswith("loss from step 0 to 1: first 0, last -1")
    )
    assert view.errors == []


@pytest.mark.slow
def test_a_part_of_the_steps_can_be_chosen_in_all_curves(view: ViewPage) -> None:
    loop = with_curves(view)
    charts = loop.get_by_role("img")
    everything = loop.get_by_role("button", name="All steps")
    assert not everything.is_visible()
    point_at(view, 0.28)
    view.page.mouse.down()
    point_at(view, 0.62)
    assert float(loop.locator(".mk-chosen").first.get_attribute("width") or 0) == pytest.approx(102, abs=2)
    view.page.mouse.up()
    for chart in charts.all():
        assert " from step 30 to 60: " in (chart.get_attribute("aria-label") or "")
    everything.click()
    assert " from step 0 to 100: " in (charts.first.get_attribute("aria-label") or "")
    areas(loop).first.focus()
    view.page.keyboard.press("Home")
    view.page.keyboard.press("+")
    assert " from step 0 to 20: " in (charts.nth(1).get_attribute("aria-label") or "")
    view.page.keyboard.press("-")
    view.page.keyboard.press("Escape")
    assert not everything.is_visible()
    point_at(view, 0.5)
    view.page.mouse.down()
    point_at(view, 0.505)
    view.page.mouse.up()  # too short for a choice
    assert not everything.is_visible()


@pytest.mark.slow
def test_curves_of_earlier_loops_are_drawn_with_those_of_this_one(view: ViewPage) -> None:
    loop = with_curves(view)
    assert loop.locator(".mk-earlier").count() == 0
    loop.get_by_role("button", name="Earlier loops").click()
    assert loop.locator(".mk-curve").first.locator(".mk-earlier").count() == 2
    assert loop.locator(".mk-curve").nth(1).locator(".mk-earlier").count() == 0  # they did not log it
    assert loop.locator(".mk-scale").first.inner_text().split() == ["400", "0.009"]
    point_at(view, 0.0)
    assert loop.locator(".mk-tip").first.inner_text().split("\n")[1:] == ["cell [2]: 400", "cell [3]: 200"]
    loops = [{"request": 41, "number": 1, "curves": {"loss": losses()}}]
    view.receive(
        {"kind": "curves", "mesh": "trainers", "loops": loops}
    )  # without the earlier ones, which are as before
    assert loop.locator(".mk-earlier").count() == 2
    view.receive({"kind": "curves", "mesh": "trainers", "loops": loops, "earlier": []})
    assert loop.locator(".mk-earlier").count() == 0
    assert not loop.get_by_role("button", name="Earlier loops").is_visible()


@pytest.mark.slow
def test_curves_are_saved_as_csv(view: ViewPage) -> None:
    loop = with_curves(view)
    curves = {'loss, "all"': [[0, 5], [2.0, None], [], [], []], "norm": losses(steps=2), "=1+1": losses(steps=2)}
    view.receive({"kind": "curves", "mesh": "trainers", "loops": [{"request": 41, "number": 1, "curves": curves}]})
    with view.page.expect_download() as download:
        loop.get_by_role("button", name="CSV").click()
    assert download.value.suggested_filename == "trainers-loop-41-1.csv"
    rows = list(csv.reader(io.StringIO(download.value.path().read_text(), newline="")))
    assert rows[0] == ["name", "step", "mean", "min", "min_rank", "max", "max_rank"]
    assert ['loss, "all"', "0", "2", "2", "", "2", ""] in rows
    assert ['loss, "all"', "5", "", "", "", "", ""] in rows
    assert ["norm", "0", "100", "90", "1", "110.00000000000001", "3"] in rows
    names = {row[0] for row in rows[1:]}
    assert names >= {'loss, "all"', "norm", "'=1+1"}
    assert "=1+1" not in names  # no formula for a spreadsheet


@pytest.mark.slow
def test_buttons_control_the_loop(view: ViewPage) -> None:
    view.frame(with_loop())
    loop = the_loop(view)
    loop.get_by_role("button", name="Pause").click()
    view.reply("all ranks pause before step 1,300")
    assert loop.get_by_text("Pause: all ranks pause before step 1,300").is_visible()
    view.frame(with_loop("pausing"))
    assert loop.locator(".mk-loop-state").inner_text() == "pausing"
    assert loop.get_by_role("button", name="Resume").is_visible()
    view.frame(with_loop("paused"))
    loop.get_by_role("button", name="Step").click()
    loop.get_by_role("button", name="Resume").click()
    loop.get_by_role("button", name="Stop").click()
    assert [each["command"] for each in view.commands()] == ["pause", "step", "resume"]
    loop.get_by_role("button", name="End the loop?").click()
    commands = view.commands()
    assert [each["command"] for each in commands] == ["pause", "step", "resume", "stop"]
    assert all((each["mesh"], each["loop"]) == ("trainers", [41, 1]) for each in commands)
    view.receive({"kind": "closed"})
    assert loop.get_by_role("button", name="Step").is_disabled()
    assert loop.get_by_label("Knob batch").is_disabled()


@pytest.mark.slow
def test_a_mesh_that_comes_up_says_what_it_waits_for_until_it_is_there(view: ViewPage) -> None:
    empty = view.page.locator(".mk-empty")
    view.frame(ViewState(AT, coming="t: waiting for ranks to start (1 of 4 are up, 3.0 s)"))
    assert empty.inner_text() == "t: waiting for ranks to start (1 of 4 are up, 3.0 s)"
    view.frame(ViewState(AT))
    assert empty.inner_text() == "No mesh. Run %mesh up NAME -n 4 in a cell."
    view.frame(ViewState(AT, (drawn(all_in(2, "idle")),), coming="u is coming up"))
    assert not empty.is_visible()


@pytest.mark.slow
def test_a_loop_that_was_stopped_takes_no_more_commands(view: ViewPage) -> None:
    view.frame(with_loop())
    loop = the_loop(view)
    loop.get_by_role("button", name="Pause").click()
    view.reply("all ranks pause before step 1,300")
    view.frame(with_loop("stopping"))
    assert loop.locator(".mk-loop-state").inner_text() == "stopping"
    assert loop.get_by_text("all ranks pause").count() == 0
    for name in ("Pause", "Step", "Stop"):
        assert loop.get_by_role("button", name=name).is_disabled()
    assert loop.get_by_label("Knob batch").is_disabled()


@pytest.mark.slow
def test_waits_come_before_loops_and_errors_before_loops_that_are_over(view: ViewPage) -> None:
    def order() -> list[str]:
        found: list[str] = view.page.evaluate(
            """() => {
                const kinds = { waits: ".mk-stalls", loops: ".mk-loops", errors: ":has(> .mk-errors)" };
                const nameOf = (each) => Object.keys(kinds).find((kind) => each.matches(kinds[kind]));
                return [...document.querySelector(".mk-mesh").children].filter((each) => each.offsetHeight).map(nameOf)
                    .filter(Boolean);
            }"""
        )
        return found

    failed = golden("small")["meshes"][0]["errors"]
    for state, expected in (
        ("running", ["waits", "loops", "errors"]),
        ("over", ["waits", "errors", "loops"]),
    ):
        frame = with_loop(state)
        (mesh,) = frame["meshes"]
        mesh |= {"errors": failed, "waits": [{"text": "[0] waits for [1]", "ranks": "[0]", "missing": "[1]"}]}
        mesh["loops"] = mesh["loops"][:1]
        view.frame(frame)
        assert order() == expected


@pytest.mark.slow
def test_knobs_have_controls_of_their_type(view: ViewPage) -> None:
    view.frame(with_loop())
    loop = the_loop(view)
    for name, text in (("lr", "1e-4"), ("batch", "128"), ("schedule", "linear"), ("clip", "x")):
        loop.get_by_label(f"Knob {name}", exact=True).fill(text)
        view.page.keyboard.press("Enter")
    loop.get_by_label("Knob augment").click()
    sent = [(each["command"], each["knob"], each["value"]) for each in view.commands()]
    expected = [("lr", 0.0001), ("batch", 128), ("schedule", "linear"), ("clip", "x"), ("augment", False)]
    assert sent == [("set", *each) for each in expected]
    view.reply("augment is False from step 1,240 on")
    assert loop.get_by_text("from step 1,240", exact=True).is_visible()
    loop.get_by_label("Knob batch").focus()
    view.page.keyboard.press("Enter")  # already sent
    loop.get_by_label("Knob batch").fill("64")  # its value in the last frame
    view.page.keyboard.press("Enter")
    loop.get_by_label("Knob batch").fill("")
    view.page.keyboard.press("Enter")
    assert len(view.commands()) == len(expected)
    assert loop.get_by_text("is a number. In force:").is_visible()


@pytest.mark.slow
def test_a_knob_that_is_refused_says_why(view: ViewPage) -> None:
    view.resize(900)
    view.frame(with_loop())
    field = the_loop(view).get_by_label("Knob lr", exact=True)
    field.fill("2")
    field.press("Enter")
    view.reply("knob 'lr' is at least 1e-06 and at most 0.01, not 2", ok=False)
    note = the_loop(view).locator(".mk-refused-knob .mk-knob-note")
    assert field.input_value() == "0.0003"  # although it has the focus
    assert note.inner_text() == ("2 was refused: knob 'lr' is at least 1e-06 and at most 0.01, not 2. In force: 0.0003")
    tops = (
        the_loop(view)
        .locator(".mk-knob-name")
        .evaluate_all("names => names.map((each) => each.getBoundingClientRect().top)")
    )
    assert abs(tops[1] - tops[0]) < 6, "knobs of one row are beside each other"
    assert note.evaluate("node => getComputedStyle(node).color") == field.evaluate(
        "node => getComputedStyle(node).color"
    )
    view.frame(turned(with_loop(), "lr", 0.005))
    assert note.inner_text().endswith("In force: 0.005")
    field.fill("0.001")
    field.press("Enter")
    view.reply("lr is 0.001 from step 7 on")
    assert the_loop(view).locator(".mk-refused-knob").count() == 0


@pytest.mark.slow
def test_a_long_text_that_is_refused_is_cut_in_the_reason(view: ViewPage) -> None:
    view.frame(turned(with_loop(), "schedule", "o" * 900))
    field = the_loop(view).get_by_label("Knob schedule", exact=True)
    field.fill("x" * 1_200)
    field.press("Enter")
    view.reply("knob 'schedule': the text has 1,200 characters, but may have at most 1,000", ok=False)
    note = the_loop(view).locator(".mk-refused-knob .mk-knob-note").inner_text()
    assert note.startswith("x" * 40 + "… was refused: knob 'schedule': the text has 1,200 characters")
    assert note.endswith("In force: " + "o" * 40 + "…")


@pytest.mark.slow
def test_the_slider_of_a_learning_rate_is_logarithmic(view: ViewPage) -> None:
    view.frame(with_loop())
    slider = the_loop(view).get_by_role("slider")
    assert slider.input_value() == "619"  # log10(0.0003 / 1e-6) is 61.9 % of log10(1e-2 / 1e-6)
    slider.fill("500")
    assert view.commands()[-1]["value"] == 0.0001
    slider.press("Home")
    assert view.commands()[-1]["value"] == 1e-6
    view.frame(turned(with_loop(), "lr", 0.01))
    assert slider.input_value() == "1000"
    assert slider.get_attribute("aria-valuetext") == "0.01"


@pytest.mark.slow
def test_frames_do_not_overwrite_a_field_with_focus(view: ViewPage) -> None:
    view.frame(with_loop())
    field = the_loop(view).get_by_label("Knob lr", exact=True)
    field.click()
    field.fill("0.00")
    view.frame(turned(with_loop(), "lr", 0.005))
    assert field.input_value() == "0.00"
    assert the_loop(view).get_by_label("Knob batch").input_value() == "64"
    field.press("Escape")
    assert field.input_value() == "0.005"


# --- Commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_buttons_send_commands(view: ViewPage) -> None:
    view.frame(ViewState(AT, (drawn(training(4, failed=(2,), dead=(3,))),)))
    button(view, "Interrupt").first.click()
    button(view, "Stacks").click()
    button(view, "Heal").click()
    for name, question in (("Restart", "Restart all?"), ("Down", "Take it down?")):
        button(view, name).click()
        button(view, question).click()
    button(view, "Traceback of torch", exact=False).click()
    button(view, "Actions for rank 2").click()
    for name in ("Interrupt", "Logs"):
        card(view, 2).get_by_role("button", name=name, exact=True).click()
    commands = view.commands()
    assert len({each.pop("id") for each in commands}) == len(commands)
    of_mesh = {"kind": "command", "mesh": "trainers"}
    assert commands == [
        *({**of_mesh, "command": name} for name in ("interrupt", "stacks", "heal", "restart", "down")),
        *({**of_mesh, "command": name, "ranks": [2]} for name in ("traceback", "interrupt", "logs")),
    ]
    assert {each["command"] for each in commands} == set(COMMANDS)


@pytest.mark.slow
def test_restart_asks_for_confirmation_and_ignores_double_clicks(view: ViewPage) -> None:
    view.frame(ViewState(AT, (drawn(training(4)),)))
    button(view, "Restart").dblclick()
    assert view.commands() == []
    assert "Restart all? Press again to confirm." in view.page.locator("[aria-live]").inner_text()
    view.page.keyboard.press("Escape")
    assert button(view, "Restart").count() == 1
    button(view, "Down").click()
    button(view, "Stacks").focus()
    assert button(view, "Down").count() == 1
    assert view.commands() == []


@pytest.mark.slow
def test_heal_is_enabled_only_with_dead_ranks(view: ViewPage) -> None:
    view.frame(ViewState(AT, (drawn(training(4, failed=(1,))),)))
    assert button(view, "Heal").is_disabled()
    view.frame(ViewState(AT, (drawn(training(4, dead=(1,))),)))
    assert button(view, "Heal").is_enabled()
    button(view, "Heal").click()
    assert button(view, "Heal").is_disabled()  # until the reply
    view.reply("t: [1] replaced in 0.5 s" + ", and so on" * 20)
    assert button(view, "Heal").is_enabled()
    assert view.page.locator(".mk-reply-word").inner_text().endswith("and so on")


@pytest.mark.slow
def test_a_stopped_mesh_has_no_commands_for_its_ranks_and_says_why(view: ViewPage) -> None:
    view.frame(ViewState(AT, (drawn(all_in(4, "idle")),)))
    assert view.page.locator(".mk-age").inner_text() == "up for 3 s"
    view.frame(ViewState(AT, (drawn(all_in(4, "stopped")),)))
    assert view.page.locator(".mk-age").inner_text() == "stopped"
    button(view, "Actions for rank 1").click()
    for part in (view.page.locator(".mk-mesh > .mk-head"), card(view, 1)):
        assert part.get_by_role("button", name="Interrupt").is_disabled()
    assert card(view, 1).get_by_role("button", name="Interrupt").get_attribute("title") == "rank 1 was stopped"
    for name in ("Stacks", "Heal", "Restart", "Logs"):
        assert button(view, name).first.is_disabled()
    assert button(view, "Restart").get_attribute("title") == "All ranks were stopped; %mesh up brings up another mesh"
    assert button(view, "Down").is_enabled()
    view.frame(ViewState(AT, (drawn(training(4, dead=(1,))),)))
    assert card(view, 1).get_by_role("button", name="Logs").is_enabled()
    assert card(view, 1).get_by_role("button", name="Interrupt").is_disabled()
    assert button(view, "Restart").is_enabled()
    assert button(view, "Restart").get_attribute("title") == ""


@pytest.mark.slow
def test_replies_are_announced_and_can_be_dismissed(view: ViewPage) -> None:
    view.frame(ViewState(AT, (drawn(training(4)),)))
    button(view, "Stacks").click()
    view.reply("\x1b[1m[0-3]\x1b[0m cell [12], line 7\nwaits")
    assert view.page.locator("[aria-live=polite]").inner_text() == "trainers: Stacks: [0-3] cell [12], line 7"
    assert view.page.locator(".mk-reply pre").inner_text() == "[0-3] cell [12], line 7\nwaits"
    button(view, "Interrupt").first.click()
    view.reply("rank 2 is stuck in native code", ok=False)
    button(view, "Abort").click()
    button(view, "Abort its process groups?").click()
    assert view.commands()[-1]["abort"] is True
    while view.page.locator(".mk-reply").count():
        button(view, "Dismiss", exact=False).first.click()
    assert view.page.evaluate("document.activeElement.textContent") == "Stacks"  # it asked for the last one


@pytest.mark.slow
@pytest.mark.parametrize("width", [240, 900])
def test_the_reply_of_a_rank_opens_below_its_card_with_focus_until_escape(view: ViewPage, width: int) -> None:
    view.resize(width)
    view.frame(ViewState(AT, (drawn(training(8)),)))
    button(view, "Actions for rank 5").click()
    logs = card(view, 5).get_by_role("button", name="Logs")
    logs.click()
    view.reply("step 1\nstep 2")
    reply = view.page.locator(".mk-reply")
    here, below = card(view, 5).bounding_box(), reply.bounding_box()
    assert 0 <= below["y"] - (here["y"] + here["height"]) < 40
    assert reply.evaluate("node => node.contains(document.activeElement)")
    assert re.search(r"\d:\d\d", reply.locator("time").inner_text())
    view.page.keyboard.press("Escape")
    assert reply.count() == 0
    assert logs.evaluate("node => node === document.activeElement")
    assert view.page.evaluate("document.documentElement.scrollWidth") <= width
    view.resize(900)


@pytest.mark.slow
def test_lines_have_contrast_in_a_theme_of_high_contrast(view: ViewPage) -> None:
    view.theme("contrast")
    view.frame(with_loop())
    for selector in (".mk-card", ".mk-button", ".mk-loop", ".mk-field"):
        colour = view.page.locator(selector).first.evaluate("node => getComputedStyle(node).borderTopColor")
        assert colour in ("rgb(255, 255, 255)", "rgb(49, 155, 242)"), selector


CONTRAST_OF_THE_BAR = """bar => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const paint = (...layers) => {
        for (const colour of layers) {
            canvas.fillStyle = colour;
            canvas.fillRect(0, 0, 1, 1);
        }
        const linear = [...canvas.getImageData(0, 0, 1, 1).data].map((each) => (each / 255) ** 2.2);
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05;
    };
    const colour = (node) => getComputedStyle(node).backgroundColor;
    const paper = colour(bar.closest(".mk-view"));
    const [track, done] = [paint(paper, colour(bar)), paint(paper, colour(bar), colour(bar.firstElementChild))];
    return Math.max(track, done) / Math.min(track, done);
}"""


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark", "contrast"])
@pytest.mark.parametrize("media", [{}, {"contrast": "more"}, {"forced_colors": "active"}])
def test_what_is_done_of_a_loop_differs_from_what_is_left(view: ViewPage, theme: str, media: dict[str, Any]) -> None:
    view.theme(theme)
    view.page.emulate_media(**media)
    view.frame(with_loop())
    assert the_loop(view).locator(".mk-bar").evaluate(CONTRAST_OF_THE_BAR) >= 3  # as WCAG 1.4.11 asks for
    view.page.emulate_media(contrast="no-preference", forced_colors="none")


@pytest.mark.slow
def test_forced_colors_reach_the_lines_of_charts(view: ViewPage) -> None:
    view.theme("contrast")  # white lines, but the system's background is white, too
    view.page.emulate_media(forced_colors="active")
    view.frame(with_loop())
    assert view.page.locator(".mk-out").first.evaluate("node => getComputedStyle(node).stroke") == "rgb(0, 0, 0)"
    view.page.emulate_media(forced_colors="none")


@pytest.mark.slow
def test_the_page_reports_its_presence(view: ViewPage) -> None:
    keep = """() => {
        const real = window.setInterval;
        window.setInterval = (call, ms) => { if (ms === 5000) window.fiveSeconds = call; return real(call, ms); };
        window.start({});
        window.setInterval = real;
    }"""
    view.page.evaluate(keep)
    assert view.sent() == [{"kind": "hello"}]
    hide = """hidden => {
        Object.defineProperty(document, "hidden", { configurable: true, value: hidden });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    view.page.evaluate(hide, True)
    view.page.evaluate("window.fiveSeconds()")
    view.page.evaluate(hide, False)
    assert [each["kind"] for each in view.sent()] == ["hello", "away", "hello"]
    view.page.evaluate("window.fiveSeconds()")
    assert view.sent()[3:] == [{"kind": "alive"}]


# --- Keyboard and screen reader ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_keyboard_moves_the_cursor_of_the_heat_map(view: ViewPage) -> None:
    view.frame(ViewState(AT, (drawn(training(1024, failed=(100,), dead=(900,))),)))
    cell = view.page.get_by_role("gridcell")
    cell.focus()
    columns = int(view.page.get_by_role("grid").get_attribute("aria-colcount") or 0)
    ranks = []
    for key in ("ArrowUp", "ArrowRight", "ArrowDown", "End", "Home", "n", "n", "p", "Control+End", "ArrowRight"):
        view.page.keyboard.press(key)
        ranks.append(int(re.findall(r"rank (\d+)", cell.get_attribute("aria-label") or "")[0]))
    assert ranks == [0, 1, columns + 1, 2 * columns - 1, columns, 100, 900, 100, 1023, 1023]
    assert "rank 1023, dp 15, pp 7, tp 7, " in view.page.locator("[aria-live]").inner_text()
    assert "dp 15, pp 7, tp 7" in view.page.locator(".mk-inspector").inner_text()
    view.page.keyboard.press("n")
    button(view, "Traceback of rank 100").click()
    assert view.commands()[-1]["ranks"] == [100]


@pytest.mark.slow
def test_failing_ranks_are_announced_to_screen_readers(view: ViewPage) -> None:
    view.frame(ViewState(AT, (drawn(training(4)),)))
    assert view.page.locator("[aria-live]").inner_text() == ""
    view.frame(ViewState(AT, (drawn(training(4, failed=(1,), dead=(2, 3))),)))
    assert view.page.locator("[aria-live]").inner_text() == "trainers: 2 dead, 1 failed"
    view.frame(ViewState(AT, (drawn(training(4, dead=(2,))),)))
    assert view.page.locator("[aria-live]").inner_text() == "trainers: 2 dead, 1 failed", "fewer are no news"
    view.frame(ViewState(AT, (drawn(training(4)),)))
    assert view.page.locator("[aria-live]").inner_text() == "trainers: no rank is dead or failed any more"


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(view: ViewPage, theme: str) -> None:
    if not AXE.exists():
        pytest.skip(f"axe-core is not at {AXE}; AXE_PATH may name it")
    view.theme(theme)
    view.page.evaluate(AXE.read_text())
    meshes = (training(4, failed=(2,), dead=(3,)), training(256, failed=(9,), name="many"))
    view.frame(ViewState(AT, tuple(drawn(each) for each in meshes)))
    view.page.get_by_role("region", name="Mesh trainers").get_by_role("button", name="Stacks").click()
    view.reply("one\ntwo")
    button(view, "Traceback of torch", exact=False).first.click()
    view.reply("one\ntwo")
    button(view, "Actions for rank 2").first.click()
    judged = _violations(view)
    view.frame(ViewState(AT, (drawn(losing_a_host()),)))
    view.receive({"kind": "closed"})
    _violations(view)
    view.start()
    view.frame(golden("loops"))
    curves = [
        {
            "request": 41,
            "number": 1,
            "curves": {"loss": [[0, 1], [2.0, 1.0], [1.5, 0.9], [2.5, 1.1], [[0, 0.9], [1, 1.1]]]},
        }
    ]
    view.receive({"kind": "curves", "mesh": "trainers", "loops": curves})
    view.receive(samples(2, 1))
    assert _violations(view) > 20
    assert judged > 60  # axe skips elements that it can't judge


def _violations(view: ViewPage) -> int:
    """Assert that axe finds no violation; return the number of elements whose contrast it judged."""
    found = view.page.evaluate("axe.run('#root', {})")
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []
    return sum(len(each["nodes"]) for each in found["passes"] if each["id"] == "color-contrast")


# --- Speed -------------------------------------------------------------------------------------------------------------


def changing(count: int) -> list[ViewState]:
    """Make two seconds of frames, five a second, that change all ranks: the states in a large mesh, else other fields."""
    return [ViewState(AT + step / 5, (mesh_frame(_changed(count, step), AT),), step) for step in range(10)]


def _changed(count: int, step: int) -> MeshView:
    def rank(i: int) -> RankView:
        state = "running" if count <= CARDS else STATES[(i * 7 + step) % 6]
        more: dict[str, Any] = {"last_line": f"step {step}", "last_error": "" if count <= CARDS else "RuntimeError: no"}
        rates = {"in_bytes_per_s": 1e6 * (step + i), "out_bytes_per_s": 1e5 * (step + i)}
        return RankView(
            i, (), state, "cell [5]", i / 3, rss_nbytes=9_000_000 * (step + i), cpu_percent=step, **more, **rates
        )

    return MeshView("many", (("dp", count // 8), ("tp", 8)), tuple(rank(i) for i in range(count)))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "budget_ms"), [(1024, BUDGET_MS), (32, 2 * BUDGET_MS)])
def test_ranks_that_all_change_take_little_time(view: ViewPage, count: int, budget_ms: float, bar: Bar) -> None:
    """Send five updates a second; Chromium reports the processor time of the page's main thread."""
    frames = [to_json(frame) for frame in changing(count)]
    view.frame(frames[0])
    view.page.evaluate("frames => { window.frames = frames; }", frames)
    session = view.page.context.new_cdp_session(view.page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy_ms() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return 1000 * next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")

    script = """() => new Promise((done) => {
        const timer = setInterval(() => {
            const frame = window.frames.shift();
            if (!frame) { clearInterval(timer); done(); return; }
            window.clock = frame.at;
            window.view.receive({ kind: "frame", ...frame });
        }, 200);
    })"""
    before = busy_ms()
    view.page.evaluate(script)
    per_update = (busy_ms() - before) / len(frames)
    session.detach()
    print(f"\n{count} ranks: {per_update:.1f} ms of browser time an update")
    bar.check(per_update / 1000, budget_ms / 1000, "an update")


# --- Types -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_module_and_the_golden_frames_match_the_declared_types(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not TSC.exists():
        pytest.skip(f"node is not installed, or TypeScript is not at {TSC}; TSC_PATH may name it")
    frames = ",\n".join((GOLDEN / f"{name}.json").read_text() for name in ("empty", "small", "large"))
    source = f'import type {{ Frame }} from "{STATIC}/view.js";\nexport const frames: Frame[] = [{frames}];\n'
    (tmp_path / "golden.ts").write_text(source)
    options = "--noEmit --skipLibCheck --checkJs --strict --target ES2022 --module esnext --moduleResolution bundler"
    options += " --lib ES2022,DOM,DOM.Iterable"
    command = [node, str(TSC), *options.split(), str(STATIC / "view.js"), "golden.ts"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 16])
def test_the_unfilled_part_of_a_progress_bar_is_kept(view: ViewPage, count: int) -> None:
    bar = "epoch 2:  25%|██        | 5/20"
    mesh = all_in(count, "idle")
    said = tuple(each._replace(last_line=bar) for each in mesh.ranks)
    view.frame(ViewState(AT, (drawn(dataclasses.replace(mesh, ranks=said)),)))
    assert card(view, 1).locator(".mk-said").inner_text() == bar
