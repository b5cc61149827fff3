"""Tests the extension in JupyterLab, with and without meshes."""

from __future__ import annotations

import re

import pytest

from tests.lab.conftest import OLDEST_TOO, SLEEPS, SLOW_MS, UP, Lab, Server
from tests.support.timing import Bar

pytest.importorskip("playwright")
from playwright.sync_api import Locator, expect

pytestmark = pytest.mark.slow

KILLING = (
    "%%remote t --out pids\nimport os\nos.getpid()",
    "import os, signal, time\nos.kill(pids.item(gpus=1), signal.SIGKILL)\ntime.sleep(300)",
)
expect.set_options(timeout=SLOW_MS)


def cards(lab: Lab, state: str = "") -> Locator:
    """Locate the ranks that the panel shows: all, or those in a state."""
    return lab.panel.locator(f".mk-card[data-state={state}]" if state else ".mk-card")


def with_mesh(lab: Lab, server: Server, *cells: str) -> Lab:
    """Open a notebook whose first cell brings up the mesh `t`; the panel shows its two ranks."""
    lab.load(server.write("a.ipynb", UP, *cells))
    lab.show_panel()
    lab.run(0)
    expect(cards(lab, "idle")).to_have_count(2)
    return lab


def kill_a_rank(lab: Lab) -> None:
    """Run cells 1 and 2, which kill a rank of `t` while the kernel runs a cell."""
    lab.run(1)
    lab.start(2)


def test_the_panel_says_what_it_waits_for_and_leaves_other_kernels_alone(lab: Lab, server: Server) -> None:
    lab.load()
    assert not lab.panel.is_visible()
    lab.show_panel()
    expect(lab.panel).to_contain_text("No open notebook uses the kernel Python (Monarch)")
    assert not lab.status.is_visible()
    assert lab.page.get_by_role("menuitem", name="Mesh", exact=True).is_visible()
    assert lab.violations("#monarch-mesh-panel") == []

    lab.open(server.write("other.ipynb", "1", kernel="plain"))
    lab.wait_idle()
    expect(lab.panel).to_contain_text("No open notebook uses the kernel Python (Monarch)")
    assert not lab.page.locator(".monarch-run-on").is_visible()


def test_the_panel_says_what_a_mesh_that_comes_up_waits_for(lab: Lab, server: Server) -> None:
    lab.load(server.write("a.ipynb", UP))
    lab.show_panel()
    expect(lab.panel).to_contain_text("No mesh")
    lab.page.evaluate(
        """() => {
            window.said = [];
            const panel = document.getElementById('monarch-mesh-panel');
            const note = () => window.said.push(panel.querySelector('.mk-empty:not([hidden])')?.textContent ?? '');
            const what = { subtree: true, childList: true, characterData: true, attributes: true };
            new MutationObserver(note).observe(panel, what);
        }"""
    )
    lab.run(0)
    expect(cards(lab, "idle")).to_have_count(2)
    said = list(dict.fromkeys(lab.page.evaluate("window.said")))
    assert said[0] in ("No mesh. Run %mesh up NAME -n 4 in a cell.", "t is coming up")
    assert "t is coming up" in said
    after = said[said.index("t is coming up") + 1 :]
    assert all(text == "" or text.startswith("t: waiting for ranks to start (") for text in after)


@OLDEST_TOO
def test_the_toolbar_never_says_that_there_is_no_mesh_before_it_knows(lab: Lab, server: Server) -> None:
    lab.load(server.write("a.ipynb", UP))
    ranks = lab.page.locator(".monarch-run-on").get_by_role("combobox")
    expect(ranks).to_have_attribute("placeholder", "no mesh")
    lab.run(0)
    expect(ranks).to_have_attribute("placeholder", "t")
    lab.save()
    lab.page.add_init_script("""
        window.placeholders = [];
        const note = () => document.querySelectorAll(".monarch-run-on input").forEach(
            (each) => window.placeholders.push(each.placeholder),
        );
        new MutationObserver(note).observe(document, { subtree: true, childList: true, attributes: true });
    """)
    lab.reload()
    expect(ranks).to_have_attribute("placeholder", "t")
    assert set(lab.page.evaluate("window.placeholders")) <= {"", "connecting", "t"}


@pytest.mark.timeout(300)
@OLDEST_TOO
def test_each_place_names_the_mesh_and_the_notebook_that_it_speaks_of(lab: Lab, server: Server) -> None:
    fails = "%%remote u[1]\n1 / 0"
    lab.load(server.write("a.ipynb", UP, UP.replace(" t ", " u "), fails))
    lab.show_panel()
    expect(lab.panel.locator(".monarch-panel-path")).to_have_text("a.ipynb")
    toolbar = lab.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .monarch-run-on")
    expect(toolbar.get_by_role("combobox")).to_have_attribute("placeholder", "no mesh")
    lab.run(0)
    expect(toolbar.get_by_role("combobox")).to_have_attribute("placeholder", "t")
    lab.run(1)
    expect(toolbar.get_by_role("combobox")).to_have_attribute("placeholder", "u")
    lab.run(2)
    expect(lab.status).to_have_text("▲ t: 2 ranks · u: 2 ranks, 1 failed")
    expect(lab.status).to_have_attribute("title", "Show the meshes of a.ipynb")
    expect(lab.panel.get_by_role("region", name="Mesh t").locator(".mk-count:visible")).to_have_text(["2 idle"])
    states = lab.panel.get_by_role("region", name="Mesh u").locator(".mk-count:visible")
    expect(states).to_have_text(["1 failed", "1 idle"])
    for i, name in enumerate("tu"):  # below each cell is its mesh, and no other
        expect(lab.cell(i).locator(".mk-name")).to_have_text([name])

    lab.open(server.write("b.ipynb", UP))
    chooser = lab.panel.get_by_role("combobox", name="Notebook")
    expect(chooser).to_have_value("b.ipynb")
    expect(lab.panel).to_contain_text("No mesh")
    lab.wait_idle()
    expect(toolbar.get_by_role("combobox")).to_have_attribute("placeholder", "no mesh")
    lab.run(0)
    expect(toolbar.get_by_role("combobox")).to_have_attribute("placeholder", "t")
    expect(lab.status).to_have_text("b.ipynb · t: 2 ranks")
    expect(lab.status).to_have_attribute("title", "Show the meshes of b.ipynb")
    expect(chooser).to_have_value("b.ipynb")
    expect(lab.panel.locator(".mk-name")).to_have_text(["t"])
    expect(cards(lab, "idle")).to_have_count(2)
    chooser.select_option("a.ipynb")
    expect(lab.panel.locator(".mk-name")).to_have_text(["t", "u"])
    expect(cards(lab, "idle")).to_have_count(3)
    expect(lab.status).to_have_text("b.ipynb · t: 2 ranks")  # of the notebook in front
    expect(toolbar.get_by_role("button", name="Run on mesh")).to_have_attribute("title", re.compile("the ranks of t "))
    lab.open("a.ipynb")
    expect(lab.status).to_have_text("▲ a.ipynb · t: 2 ranks · u: 2 ranks, 1 failed")
    expect(cards(lab)).to_have_count(4)
    expect(toolbar.get_by_role("button", name="Run on mesh")).to_have_attribute("title", re.compile("the ranks of u"))


def test_a_failing_rank_is_shown_while_the_others_run(lab: Lab, server: Server, bar: Bar) -> None:
    fails = "%%remote t\nimport time\nif rank == 1:\n    print('at', time.time())\n    1 / 0\ntime.sleep(300)"
    with_mesh(lab, server, fails)
    lab.page.evaluate(
        """() => {
            const look = () => {
                if (window.seen || !document.querySelector('#monarch-mesh-panel [data-state=failed]')) return;
                window.seen = Date.now() / 1000;
            };
            new MutationObserver(look).observe(document.getElementById('monarch-mesh-panel'),
                { subtree: true, childList: true, attributes: true });
        }"""
    )
    cell = lab.start(1)
    expect(cards(lab, "failed")).to_have_count(1)
    expect(cards(lab, "running")).to_have_count(1)
    expect(lab.status).to_have_text("▲ t: 2 ranks, 1 failed")
    output = cell.locator(".jp-OutputArea-output").get_by_text(re.compile(r"at \d")).first
    failed_at = float(re.search(r"at ([\d.]+)", output.inner_text())[1])  # type: ignore[index]
    bar.check(lab.page.evaluate("window.seen") - failed_at, 1.0, "the display of the failure")
    lab.panel.get_by_role("button", name="Interrupt", exact=True).first.click()
    expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]:"))


HANGS = """%%remote t --warn-after 1
import os, time, torch
if rank == 1:
    while not os.path.exists("go"):
        time.sleep(0.05)
torch.distributed.all_reduce(torch.ones(4))"""


@OLDEST_TOO
def test_the_ranks_of_a_hung_collective_are_named_until_it_ends(lab: Lab, server: Server) -> None:
    with_mesh(lab, server, HANGS)
    lab.start(1)
    expect(lab.status).to_have_text("t: 2 ranks, [0] waits for [1]")
    line = re.compile(
        r"^\[0\] waits for [\d.]+ s in all_reduce #\d+ \(shape 4\), cell \[2\], line 6; \[1\] has not started it"
    )
    for view in (lab.panel, lab.cell(0).locator(".mk-live")):
        expect(view.get_by_role("list", name="Waits")).to_have_text(line)
        expect(view.locator(".mk-card[data-rank='0'] .mk-stall")).to_have_text("waits for [1]")
        expect(view.locator(".mk-card[data-rank='1'] .mk-stall")).to_have_text("[0] waits for this rank")
    expect(lab.status).to_have_attribute("title", re.compile(r"^Show the meshes of a\.ipynb\nt: \[0\] waits for"))
    assert lab.prompt(1).inner_text() == "[*]:"
    (server.notebooks / "go").touch()
    expect(lab.status).to_have_text("t: 2 ranks")
    for view in (lab.panel, lab.cell(0).locator(".mk-live")):
        expect(view.get_by_text("waits for")).to_have_count(0)


@OLDEST_TOO
def test_buttons_and_palette_commands_reach_the_ranks_of_a_running_cell(lab: Lab, server: Server) -> None:
    with_mesh(lab, server, SLEEPS)
    cell = lab.start(1)
    expect(cards(lab, "running")).to_have_count(2)
    expect(cards(lab, "running").first).to_contain_text("cell [2]")
    expect(cell.locator(".jp-InputPrompt")).to_have_text("[*]:")
    lab.panel.get_by_role("button", name="Interrupt", exact=True).first.click()
    expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]:"))
    expect(cell.locator(".jp-OutputArea")).to_contain_text("interrupted by %mesh interrupt")
    expect(cards(lab, "running")).to_have_count(0)

    lab.start(1)
    expect(cards(lab, "running")).to_contain_text(["cell [3], line 3"] * 2)  # both have started it
    lab.command("monarch-kernel:stacks")
    dialog = lab.page.locator(".jp-Dialog")
    expect(dialog).to_contain_text("t: 2 ranks, 2 busy")
    dialog.get_by_role("button", name="Close").click()
    lab.command("monarch-kernel:interrupt")
    expect(cell.locator(".jp-InputPrompt")).to_have_text("[3]:")


@OLDEST_TOO
def test_a_death_is_notified_while_the_panel_is_hidden_and_a_button_heals_while_a_cell_runs(
    lab: Lab, server: Server
) -> None:
    lab.load(server.write("a.ipynb", UP, *KILLING))
    lab.run(0)
    expect(lab.status).to_have_text("t: 2 ranks")
    kill_a_rank(lab)
    notice = lab.page.locator(".Toastify__toast").filter(has_text="t: rank [1] died")
    expect(notice).to_be_visible()
    notice.get_by_role("button", name="Show").click()
    expect(cards(lab, "dead")).to_have_count(1)
    expect(lab.status).to_have_text("▲ t: 2 ranks, 1 dead")
    lab.panel.get_by_role("button", name="Heal", exact=True).click()
    expect(cards(lab, "idle")).to_have_count(2)
    expect(lab.cell(2).locator(".jp-InputPrompt")).to_have_text("[*]:")
    expect(lab.status).to_have_text("t: 2 ranks")


def test_notices_name_the_notebook_where_two_are_open(lab: Lab, server: Server) -> None:
    lab.load(server.write("b.ipynb", "1"))
    lab.run(0)
    lab.open(server.write("a.ipynb", UP, *KILLING))
    toolbar = lab.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .monarch-run-on")
    expect(toolbar).to_be_visible()  # the kernel of this notebook is there
    lab.run(0)
    expect(lab.status).to_have_text("a.ipynb · t: 2 ranks")
    kill_a_rank(lab)
    toasts = lab.page.locator(".Toastify__toast")
    expect(toasts.filter(has_text="t in a.ipynb: rank [1] died at")).to_be_visible()
    lab.command("monarch-kernel:heal")
    expect(toasts.filter(has_text="a.ipynb: t: ")).to_be_visible()
    lab.shot("notices")


def with_notice_of_a_death(lab: Lab, server: Server) -> Locator:
    """Open a notebook in which a rank dies; gives the notice, which says when."""
    lab.load(server.write("a.ipynb", UP, *KILLING))
    lab.run(0)
    expect(lab.status).to_have_text("t: 2 ranks")
    kill_a_rank(lab)
    notice = lab.page.locator(".Toastify__toast").filter(has_text="rank [1] died at")
    expect(notice).to_have_text(re.compile(r"died at \d+:\d\d:\d\d"))
    lab.shot("death")
    return notice


@OLDEST_TOO
def test_the_notice_of_a_death_goes_after_a_heal(lab: Lab, server: Server) -> None:
    notice = with_notice_of_a_death(lab, server)
    lab.command("monarch-kernel:heal")
    expect(notice).to_have_count(0)
    lab.shot("no death")


@OLDEST_TOO
def test_the_notice_of_a_death_goes_after_a_restart(lab: Lab, server: Server) -> None:
    notice = with_notice_of_a_death(lab, server)
    lab.show_panel()
    expect(cards(lab, "dead")).to_have_count(1)
    expect(notice).to_have_count(1)
    lab.command("kernelmenu:restart")
    lab.page.locator(".jp-Dialog").get_by_role("button", name="Confirm Kernel Restart").click()
    expect(notice).to_have_count(0)
    expect(cards(lab)).to_have_count(0)
    lab.wait_idle()
    lab.run(0)
    expect(cards(lab, "idle")).to_have_count(2)


def test_errors_and_stacks_have_their_time_and_are_grey_once_they_no_longer_hold(lab: Lab, server: Server) -> None:
    fails = "%%remote t\nif rank == 1:\n    raise ValueError('bad batch')"
    with_mesh(lab, server, fails, "import time; time.sleep(0.6)", SLEEPS, *KILLING[1:])
    lab.start(1)
    error = lab.panel.locator(".mk-error-row")
    expect(error.locator("time")).to_have_text(re.compile(r"^\d+:\d\d:\d\d"))
    lab.panel.get_by_role("button", name="Stacks").click()
    reply = lab.panel.locator(".mk-reply")
    expect(reply).to_contain_text("nothing runs on [0-1]")
    lab.run(2)  # what a rank does within half a second of the reply may be what the reply says
    lab.start(3)
    expect(error.locator("time")).to_have_text(re.compile(r"^earlier, \d+:\d\d:\d\d"))
    expect(reply.locator("time")).to_have_text(re.compile("out of date$"))
    lab.shot("past")
    assert lab.violations("#monarch-mesh-panel .mk-view") == []
    lab.panel.get_by_role("button", name="Interrupt", exact=True).first.click()
    expect(error).to_have_count(0)


def test_a_reloaded_page_shows_the_mesh_and_the_current_run(lab: Lab, server: Server, bar: Bar) -> None:
    with_mesh(lab, server, SLEEPS)
    widget = lab.cell(0).locator(".mk-live")
    lab.save()
    lab.reload()
    expect(widget.locator(".mk-card[data-state=idle]")).to_have_count(2)
    lab.start(1)
    expect(widget.locator(".mk-card[data-state=running]")).to_have_count(2)
    lab.show_panel()
    expect(cards(lab, "running")).to_have_count(2)
    lab.reload()
    lab.show_panel()
    with bar.below(15.0, "the display of the run"):
        expect(cards(lab, "running")).to_have_count(2)
    lab.panel.get_by_role("button", name="Interrupt", exact=True).first.click()
    expect(cards(lab, "idle")).to_have_count(2)


def test_a_restarted_kernel_is_connected_again(lab: Lab, server: Server) -> None:
    with_mesh(lab, server)
    lab.command("kernelmenu:restart")
    lab.page.locator(".jp-Dialog").get_by_role("button", name="Confirm Kernel Restart").click()
    expect(cards(lab)).to_have_count(0)
    lab.wait_idle()
    lab.run(0)
    expect(cards(lab, "idle")).to_have_count(2)


def test_two_tabs_of_a_browser_show_and_control_the_same_run(lab: Lab, server: Server) -> None:
    with_mesh(lab, server, SLEEPS)
    other = Lab(lab.page.context.new_page(), server).load("a.ipynb", workspace="other")
    other.show_panel()
    expect(cards(other, "idle")).to_have_count(2)
    cell = lab.start(1)
    for tab in (lab, other):
        tab.page.bring_to_front()
        expect(cards(tab, "running")).to_have_count(2)
    other.panel.get_by_role("button", name="Interrupt", exact=True).first.click()
    expect(cards(other, "idle")).to_have_count(2)
    lab.page.bring_to_front()
    expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]:"))
    expect(cards(lab, "idle")).to_have_count(2)
    assert other.errors == []


IS_ONE_ROW = """() => {
    const toolbar = document.querySelector(".jp-NotebookPanel-toolbar");
    const { bottom } = toolbar.getBoundingClientRect();
    return [...toolbar.children].every((each) => each.getBoundingClientRect().bottom <= bottom + 1);
}"""
"""Whether no item of the toolbar is below it, on the first cell."""


@OLDEST_TOO
def test_the_toolbar_writes_the_remote_line(lab: Lab, server: Server) -> None:
    lab.page.set_viewport_size({"width": 900, "height": 900})
    lab.load(server.write("a.ipynb", UP, "x = rank"))
    lab.page.locator(".monarch-run-on:not(.lm-mod-hidden)").wait_for(state="attached")  # in the toolbar or its popup
    lab.page.wait_for_function(IS_ONE_ROW)
    lab.page.set_viewport_size({"width": 1400, "height": 900})
    lab.run(0)
    lab.cell(1).locator(".cm-content").click()
    toggle = lab.page.get_by_role("button", name="Run on mesh")
    ranks = lab.page.get_by_label("Ranks that the cell runs on")
    width = toggle.bounding_box()["width"]  # type: ignore[index]
    toggle.click()
    code = lab.cell(1).locator(".cm-content")
    expect(code).to_have_text("%%remote tx = rank")  # on two lines
    expect(toggle).to_have_attribute("aria-pressed", "true")
    assert toggle.bounding_box()["width"] == width  # type: ignore[index]
    ranks.fill("t[0:1]")
    ranks.press("Enter")
    expect(code).to_have_text("%%remote t[0:1]x = rank")
    toggle.click()
    expect(code).to_have_text("x = rank")
    expect(toggle).to_have_attribute("aria-pressed", "false")


def test_the_toolbar_forgets_a_mesh_that_is_down(lab: Lab, server: Server) -> None:
    with_mesh(lab, server, "%%remote t\nrank", "%mesh up u -n 1 --device cpu", "%mesh down t", "x = rank")
    lab.cell(1).locator(".cm-content").click()
    ranks = lab.page.get_by_label("Ranks that the cell runs on")
    expect(ranks).to_have_value("t")
    lab.run(2)
    lab.run(3)
    lab.cell(4).locator(".cm-content").click()
    expect(ranks).to_have_value("")
    lab.page.get_by_role("button", name="Run on mesh").click()
    expect(lab.cell(4).locator(".cm-content")).to_have_text("%%remote ux = rank")


THEMES = ("JupyterLab Light", "JupyterLab Dark")
PLACES = ("#monarch-mesh-panel", ".monarch-run-on", "#jp-main-statusbar .monarch-status", ".jp-Cell .mk-live")


def test_each_place_is_accessible_in_any_theme(lab: Lab, server: Server) -> None:
    with_mesh(lab, server)
    for theme in THEMES:
        lab.use_theme(theme)
        assert {place: lab.violations(place) for place in PLACES} == {place: [] for place in PLACES}, theme
