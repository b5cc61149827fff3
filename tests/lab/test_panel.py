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


def test_the_panel_without_a_notebook_says_what_it_waits_for(lab: Lab) -> None:
    lab.load()
    assert not lab.panel.is_visible()
    lab.show_panel()
    expect(lab.panel).to_contain_text("No open notebook uses the kernel Python (Monarch)")
    assert not lab.status.is_visible()
    assert lab.page.get_by_role("menuitem", name="Mesh", exact=True).is_visible()
    assert lab.violations("#monarch-mesh-panel") == []


def test_other_kernels_are_left_alone(lab: Lab, server: Server) -> None:
    lab.load(server.write("other.ipynb", "1", kernel="plain"))
    lab.show_panel()
    expect(lab.panel).to_contain_text("No open notebook uses the kernel Python (Monarch)")
    assert not lab.page.locator(".monarch-run-on").is_visible()


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


@OLDEST_TOO
def test_a_button_interrupts_the_running_cell(lab: Lab, server: Server) -> None:
    with_mesh(lab, server, SLEEPS)
    cell = lab.start(1)
    expect(cards(lab, "running")).to_have_count(2)
    expect(cards(lab, "running").first).to_contain_text("cell [2]")
    expect(cell.locator(".jp-InputPrompt")).to_have_text("[*]:")
    lab.panel.get_by_role("button", name="Interrupt", exact=True).first.click()
    expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]:"))
    expect(cell.locator(".jp-OutputArea")).to_contain_text("interrupted by %mesh interrupt")
    expect(cards(lab, "running")).to_have_count(0)


def test_a_button_heals_while_a_cell_runs(lab: Lab, server: Server) -> None:
    with_mesh(lab, server, *KILLING)
    kill_a_rank(lab)
    expect(cards(lab, "dead")).to_have_count(1)
    expect(lab.status).to_have_text("▲ t: 2 ranks, 1 dead")
    lab.panel.get_by_role("button", name="Heal", exact=True).click()
    expect(cards(lab, "idle")).to_have_count(2)
    expect(lab.cell(2).locator(".jp-InputPrompt")).to_have_text("[*]:")
    expect(lab.status).to_have_text("t: 2 ranks")


@OLDEST_TOO
def test_a_death_is_notified_while_the_panel_is_hidden(lab: Lab, server: Server) -> None:
    lab.load(server.write("a.ipynb", UP, *KILLING))
    lab.run(0)
    expect(lab.status).to_have_text("t: 2 ranks")
    kill_a_rank(lab)
    notice = lab.page.locator(".Toastify__toast").filter(has_text="rank [1] died")
    expect(notice).to_be_visible()
    notice.get_by_role("button", name="Show").click()
    expect(cards(lab, "dead")).to_have_count(1)


def test_a_reloaded_page_shows_the_current_run(lab: Lab, server: Server, bar: Bar) -> None:
    with_mesh(lab, server, SLEEPS)
    lab.start(1)
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


def test_each_notebook_has_its_own_meshes(lab: Lab, server: Server) -> None:
    server.write("b.ipynb", "%mesh up other -n 1 --device cpu")
    with_mesh(lab, server)
    lab.open("b.ipynb")
    chooser = lab.panel.get_by_label("Notebook")
    expect(chooser).to_have_value("b.ipynb")
    expect(lab.panel).to_contain_text("No mesh")
    lab.wait_idle()
    lab.run(0)
    expect(cards(lab, "idle")).to_have_count(1)
    expect(lab.status).to_have_text("other: 1 rank")
    chooser.select_option("a.ipynb")
    expect(cards(lab, "idle")).to_have_count(2)
    expect(lab.status).to_have_text("other: 1 rank")
    lab.open("a.ipynb")
    expect(lab.status).to_have_text("t: 2 ranks")
    expect(cards(lab)).to_have_count(2)


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


def test_palette_commands_run(lab: Lab, server: Server) -> None:
    with_mesh(lab, server, SLEEPS)
    cell = lab.start(1)
    expect(cards(lab, "running")).to_contain_text(["cell [2], line 3"] * 2)  # both have started it
    lab.command("monarch-kernel:stacks")
    dialog = lab.page.locator(".jp-Dialog")
    expect(dialog).to_contain_text("t: 2 ranks, 2 busy")
    dialog.get_by_role("button", name="Close").click()
    lab.command("monarch-kernel:interrupt")
    expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]:"))


@OLDEST_TOO
def test_the_toolbar_writes_the_remote_line(lab: Lab, server: Server) -> None:
    with_mesh(lab, server, "x = rank")
    lab.cell(1).locator(".cm-content").click()
    toggle = lab.page.get_by_role("button", name="Run on mesh")
    ranks = lab.page.get_by_label("Ranks that the cell runs on")
    toggle.click()
    code = lab.cell(1).locator(".cm-content")
    expect(code).to_have_text("%%remote tx = rank")  # on two lines
    expect(toggle).to_have_attribute("aria-pressed", "true")
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


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_it_is_accessible_in_any_theme(lab: Lab, server: Server, theme: str) -> None:
    with_mesh(lab, server)
    lab.use_theme(theme)
    assert lab.violations("#monarch-mesh-panel") == []
    assert lab.violations(".monarch-run-on") == []
    assert lab.violations("#jp-main-statusbar .monarch-status") == []
