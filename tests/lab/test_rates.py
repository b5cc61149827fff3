"""While a loop runs, the panel and the widget show its rates, with its collectives, and how late ranks are."""

from __future__ import annotations

import re

import pytest

from tests.lab.conftest import OLDEST_TOO, UP, Lab, Server

pytest.importorskip("playwright")
from playwright.sync_api import expect

pytestmark = pytest.mark.slow

LOOP = """%%remote t --background
import torch, torch.distributed as dist, time
x = torch.ones(250_000)
for step in live.loop():
    dist.all_reduce(x)
    time.sleep(0.01 + 0.02 * rank)
"""
RATE = re.compile(r"^[1-9][\d.]* (K|M|G)iB/s$")


@OLDEST_TOO
def test_a_rate_and_the_late_rank_show_while_a_loop_runs_an_all_reduce_a_step(lab: Lab, server: Server) -> None:
    lab.load(server.write("a.ipynb", UP, LOOP, "%mesh profile t --steps 6", "%mesh loop stop"))
    lab.run(0)
    panel = lab.show_panel()
    lab.run(1)
    for place in (panel, lab.cell(0)):
        headline = place.get_by_role("group", name="Throughput").locator(".mk-figure")
        expect(headline).to_have_text([RATE, RATE])
        expect(place.locator(".mk-traffic.mk-still, .mk-plot .mk-still")).to_have_count(0)
        card = place.locator(".mk-card").first.locator(".mk-figure")
        expect(card.nth(2)).to_have_text(RATE)
        expect(card.nth(3)).to_have_text(RATE)
        late = place.locator(".mk-card[data-rank='1'] .mk-where")
        expect(late).to_contain_text(re.compile(r"late\s[\d.]+\sms,\slast\sin\s[1-9]\d*\sof\s\d+"))
    lab.run(2)
    expect(lab.cell(2)).to_contain_text("6 steps of live.loop on 2 ranks")
    expect(lab.cell(2)).to_contain_text("waiting for others")
    expect(lab.cell(2)).to_contain_text("[1] is last in")
    lab.run(3)
    expect(lab.cell(3)).to_contain_text("the loop ends")
