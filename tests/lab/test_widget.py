"""Tests the live view of a mesh in a cell's output, in JupyterLab."""

from __future__ import annotations

import json
import re

import pytest

from tests.lab.conftest import OLDEST_TOO, SLEEPS, SLOW_MS, UP, Lab, Server

pytest.importorskip("playwright")
from playwright.sync_api import Locator, expect

pytestmark = pytest.mark.slow

FAILS = "%%remote t\nimport time\nif rank == 1:\n    1 / 0\ntime.sleep(300)"
COUNTS = "import time\nfor second in range(300): time.sleep(1)"
PUSHES = (
    "import time, torch\nvalues = torch.ones(25_000_000)\n"  # 100 MB
    "until = time.monotonic() + 4\n"
    "while time.monotonic() < until:\n    t['x'] = values"
)
TRAINS = """%%remote t
import time
for step in live.loop(100_000):
    lr = live.knob("lr", 0.1, low=0.0, high=1.0)
    live.log(loss=1 / (step + 1))
    time.sleep(0.005)
lr"""
ENDED = re.compile(r"\[\d+\]:")
expect.set_options(timeout=SLOW_MS)


def widget(lab: Lab, i: int = 0) -> Locator:
    """Locate the view in the output of a cell."""
    return lab.cell(i).locator(".mk-live")


def cards(lab: Lab, state: str = "", i: int = 0) -> Locator:
    return widget(lab, i).locator(f".mk-card[data-state={state}]" if state else ".mk-card")


def with_mesh(lab: Lab, server: Server, *cells: str) -> None:
    """Open a notebook whose first cell brings up the mesh `t`."""
    lab.load(server.write("a.ipynb", UP, *cells))
    lab.run(0)
    expect(cards(lab, "idle")).to_have_count(2)


@OLDEST_TOO
def test_it_is_live_and_takes_commands_while_a_cell_runs(lab: Lab, server: Server) -> None:
    with_mesh(lab, server, FAILS, COUNTS)
    lab.start(1)
    expect(cards(lab, "failed")).to_have_count(1)
    expect(cards(lab, "running")).to_contain_text("cell [2], line 5")
    assert lab.prompt(1).inner_text() == "[*]:"
    widget(lab).get_by_role("button", name="Interrupt", exact=True).first.click()
    expect(lab.prompt(1)).to_have_text(ENDED)
    expect(cards(lab, "idle")).to_have_count(1)
    lab.start(2)  # plain Python, nothing of monarch_kernel
    traceback = widget(lab).get_by_role("button", name="Traceback").first
    traceback.click()
    expect(widget(lab)).to_contain_text("ZeroDivisionError: division by zero")
    assert lab.prompt(2).inner_text() == "[*]:"


@OLDEST_TOO
def test_a_loop_is_controlled_while_its_cell_runs(lab: Lab, server: Server) -> None:
    with_mesh(lab, server, TRAINS)
    cell = lab.start(1)
    loop = widget(lab).get_by_role("region", name="Loop in cell [2]")
    about = loop.locator(".mk-about")
    expect(about).to_contain_text(re.compile(r"running\s· step\s[\d,]+\sof\s100,000\s· [\w\s]+elapsed\s· [\w\s]+left"))
    expect(about).to_contain_text(re.compile(r"[\d.]+\sms\sa\sstep\s· [\d.,]+\ssteps/s"))
    expect(loop.get_by_role("img", name=re.compile(r"^loss from step 0 to"))).to_be_visible()
    loop.locator(".mk-curve-area").hover()
    expect(loop.locator(".mk-tip")).to_have_text(re.compile(r"^step [\d,]+: [\d.e-]+"))
    loop.get_by_role("button", name="Log scale").click()
    lab.page.mouse.move(0, 0)
    field = loop.get_by_label("Knob lr", exact=True)
    field.fill("0.25")
    field.press("Enter")
    expect(loop.locator(".mk-knob-note")).to_have_text(re.compile(r"from step [\d,]+"))
    slider = loop.get_by_role("slider")
    expect(slider).to_have_attribute("aria-valuetext", "0.25")  # the next frame has it, after the reply
    slider.focus()
    lab.page.keyboard.press("ArrowLeft")  # in the notebook this key would select another cell
    expect(field).to_have_value("0.249")
    loop.get_by_role("button", name="Pause").click()
    expect(about).to_contain_text("paused")
    expect(loop.get_by_text("Pause: all ranks pause before step")).to_be_visible()
    loop.get_by_role("button", name="Step").click()
    expect(loop.get_by_text("Step: 1 step more")).to_be_visible()
    assert lab.prompt(1).inner_text() == "[*]:"
    assert lab.violations(".mk-loop") == []
    loop.get_by_role("button", name="Stop").click()
    loop.get_by_role("button", name="End the loop?").click()
    expect(cell).to_contain_text("[0-1] 0.249")
    expect(about).to_contain_text("over · step")


def test_a_page_that_is_too_slow_for_the_widget_shows_the_table_and_says_so(lab: Lab, server: Server) -> None:
    slow = """() => {
        const original = URL.createObjectURL;
        URL.createObjectURL = (blob) => blob.type !== "text/javascript" ? original(blob) : original(new Blob([
            "await new Promise((done) => setTimeout(done, 3000));", blob], { type: "text/javascript" }));
    }"""
    lab.load(server.write("a.ipynb", UP))
    lab.page.evaluate(slow)
    lab.run(0)
    expect(lab.cell(0)).to_contain_text("The kernel has not answered yet. If this persists, run %mesh show")
    expect(lab.cell(0).locator(".mk-static table")).to_be_visible()
    lab.errors[:] = [error for error in lab.errors if "[anywidget] Failed to initialize model" not in error]


def test_throughput_rises_while_values_are_pushed_and_falls_afterwards(lab: Lab, server: Server) -> None:
    with_mesh(lab, server, PUSHES)
    lab.start(1)
    expect(cards(lab).first).to_contain_text(re.compile(r"\d (MiB|GiB)/s"))
    assert lab.prompt(1).inner_text() == "[*]:"
    expect(lab.prompt(1)).to_have_text(ENDED)
    expect(cards(lab).first).not_to_contain_text(re.compile(r"iB/s"))


def test_the_saved_table_is_hidden_while_the_mesh_is_live(lab: Lab, server: Server) -> None:
    with_mesh(lab, server, SLEEPS)
    table = lab.cell(0).locator(".mk-static table")
    expect(table).to_have_count(1)
    expect(table).not_to_be_visible()
    lab.save()
    saved = json.loads((server.notebooks / "a.ipynb").read_text())
    assert any("mk-static" in str(output.get("data")) for output in saved["cells"][0]["outputs"])
    server.end_kernels()
    lab.load("a.ipynb")
    expect(table).to_be_visible()
    expect(table.locator("tbody tr")).to_have_count(2)
    missed = lab.page.get_by_text("model not found")
    expect(missed).to_have_count(1)
    expect(missed).not_to_be_visible()


def test_its_time_advances_while_nothing_happens_and_it_ends_with_its_mesh(lab: Lab, server: Server) -> None:
    with_mesh(lab, server, "%mesh show", "%mesh down t")
    age = widget(lab).locator(".mk-age")
    expect(age).to_have_text(re.compile(r"up for \d"))
    before = age.inner_text()
    expect(age).not_to_have_text(before)
    expect(age).to_have_text(re.compile(r"up for \d"))
    lab.run(1)
    expect(cards(lab, "idle", i=1)).to_have_count(2)
    expect(cards(lab)).to_have_count(0)  # the view moves to the last request
    lab.run(2)
    expect(widget(lab, 1)).to_have_count(0)
    expect(lab.cell(0).locator(".mk-static table")).to_be_visible()
    expect(lab.cell(1).locator(".mk-static table")).to_be_visible()
    lab.save()
    assert "widget-view" not in (server.notebooks / "a.ipynb").read_text()


def test_a_saved_notebook_shows_curves_also_where_it_is_not_trusted(lab: Lab, server: Server) -> None:
    logs = "%%remote t\nfor step in live.loop(40):\n    live.log(loss=1 / (step + 1 + rank))"
    with_mesh(lab, server, logs, "%mesh down t")
    lab.run(1)
    lab.run(2)
    picture = lab.cell(0).get_by_role("img", name="loss from step 0 to 39")
    expect(picture).to_be_visible()
    expect(lab.cell(0)).to_contain_text("t was ended by %mesh down. The table shows its last state.")
    lab.save()
    server.end_kernels()
    copy = json.loads((server.notebooks / "a.ipynb").read_text())
    (server.notebooks / "copy.ipynb").write_text(json.dumps(copy).replace('"trusted": true', '"trusted": false'))
    lab.load("copy.ipynb")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.naturalWidth > 0")
    expect(lab.cell(0)).to_contain_text("2 stopped")
    expect(lab.cell(0)).to_contain_text("as of ")
    lab.shot("saved-not-trusted")


def test_a_plain_kernel_shows_it_too(lab: Lab, server: Server) -> None:
    lab.load(server.write("a.ipynb", f"%load_ext monarch_kernel\n{UP}", "%mesh down t", kernel="plain"))
    lab.run(0)
    expect(cards(lab, "idle")).to_have_count(2)
    lab.run(1)


SLIDERS = """%%remote t
import ipywidgets
slider = ipywidgets.IntSlider(value=3 + rank, description="rate")
slider.observe(lambda change: print("changed to", change["new"]), "value")
slider"""


@OLDEST_TOO
def test_sliders_that_ranks_make_move_and_call_their_observers(lab: Lab, server: Server) -> None:
    with_mesh(lab, server, SLIDERS, "%mesh down t")
    lab.run(1)
    handles = lab.cell(1).get_by_role("slider")
    expect(handles).to_have_count(2)
    expect(lab.cell(1).locator(".widget-readout")).to_have_text(["3", "4"])
    handles.nth(1).focus()
    handles.nth(1).press("ArrowRight")
    expect(lab.cell(1)).to_contain_text("[1] changed to 5")
    expect(lab.cell(1).locator(".widget-readout")).to_have_text(["3", "5"])
    lab.run(2)
    expect(lab.cell(1).locator(".noUi-target[disabled]")).to_have_count(2)


SEEN = """() => {
    window.seen = new Set();
    const isSeen = (each) => each && each.getClientRects().length > 0 && getComputedStyle(each).visibility === "visible";
    const look = () => {
        for (const each of document.querySelectorAll(".jp-Cell .mk-static")) if (isSeen(each)) window.seen.add("table");
        for (const each of document.querySelectorAll(".jp-Cell .mk-empty")) if (isSeen(each)) window.seen.add(each.textContent);
        window.looking = requestAnimationFrame(look);
    };
    look();
}"""
"""Notes what a page paints in place of a live view."""


def test_nothing_is_painted_in_place_of_a_live_view_that_comes(lab: Lab, server: Server) -> None:
    lab.load(server.write("a.ipynb", UP, UP.replace(" t ", " u "), "%mesh show u"))
    lab.page.evaluate(SEEN)
    for i in range(2):
        lab.run(i)
        expect(cards(lab, "idle", i=i)).to_have_count(2)
    assert lab.page.evaluate("[...window.seen]") == []
    lab.run(2)
    expect(cards(lab, "idle", i=2)).to_have_count(2)
    # The view of the second cell has moved, and leaves its table there.
    assert lab.page.evaluate("[...window.seen]") == ["table"]
    expect(lab.cell(2).locator(".mk-static table:visible")).to_have_count(0)


OUTSIDE = """() => [...document.querySelectorAll(".jp-Cell .mk-live *")].filter((each) => {
    const output = each.closest(".jp-OutputArea-output").getBoundingClientRect();
    const box = each.getBoundingClientRect();
    return each.getClientRects().length > 0 && !each.closest(".mk-hidden") && box.width > 0 && box.right > output.right + 1;
}).map((each) => `${each.className} ${each.textContent}`)"""


TOPS = "new Set([...document.querySelectorAll('.jp-Cell .mk-card')].map((each) => each.getBoundingClientRect().top))"


def test_two_columns_fit_at_a_zoom_of_125_percent_and_one_between_two_sidebars(lab: Lab, server: Server) -> None:
    with_mesh(lab, server)
    lab.page.set_viewport_size({"width": round(1400 / 1.25), "height": round(900 / 1.25)})
    lab.page.wait_for_function(f"{TOPS}.size === 1")
    lab.show_panel()
    expect(lab.page.locator("#jp-left-stack")).to_be_visible()
    right = "document.querySelector('.jp-Cell .mk-live').getBoundingClientRect().right"
    for width, zoom in ((1400, 1.25), (800, 1.0)):
        lab.page.set_viewport_size({"width": round(width / zoom), "height": round(900 / zoom)})
        lab.page.wait_for_function(f"{right} < {width / zoom} - 250")  # the panel is on that side
        assert lab.page.evaluate(OUTSIDE) == [], (width, zoom)
