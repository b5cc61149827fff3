"""Tests that the newest JupyterLab, with all its extensions, shows a new mesh in the panel, the status bar and the widget."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.conftest import SLOW_MS, UP, Lab, Server, missing, serving

pytest.importorskip("playwright")
from playwright.sync_api import expect

expect.set_options(timeout=SLOW_MS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a JupyterLab with all its extensions, as users have it."""
    if why := missing():
        pytest.skip(why)
    with serving(tmp_path_factory.mktemp("lab")) as server:
        yield server


def test_ranks_appear(lab: Lab, server: Server) -> None:
    lab.load(server.write("a.ipynb", UP))
    lab.show_panel()
    expect(lab.panel).to_contain_text("No mesh")
    lab.run(0)
    for place in (lab.panel, lab.cell(0).locator(".mk-live")):
        expect(place.locator(".mk-card")).to_have_count(2)
        expect(place.locator(".mk-card[data-state=idle]")).to_have_count(2)
    expect(lab.status).to_have_text("t: 2 ranks")
