"""F25: actors wait for one another in a circle; each call fails at once, and the error names the circle."""

from __future__ import annotations

import re

import pytest

from monarch_kernel.actor import Actor, ActorError, endpoint
from tests.failures.cells import Cells
from tests.support.waiting import LONG_S


class Ping(Actor):
    @endpoint
    def link(self, other: Actor) -> None:
        self.other = other

    @endpoint
    def hit(self, n: int) -> int:
        return n if n == 0 else int(self.other.hit.call_one(n - 1).get()) + 1  # type: ignore[attr-defined]


@pytest.mark.usefixtures("by_value")
def test_the_circle_is_named(cells: Cells) -> None:
    p, q = cells.mesh.slice(gpus=0).spawn("p", Ping), cells.mesh.slice(gpus=1).spawn("q", Ping)
    p.link.call_one(q).get(LONG_S)
    q.link.call_one(p).get(LONG_S)
    assert p.hit.call_one(1).get(LONG_S) == 1
    with pytest.raises(ActorError) as caught:
        p.hit.call_one(3).get(LONG_S)
    # Either actor may be the first to find the circle.
    in_p, in_q = r"p\.hit on t\[0\]( \(behind p\.hit\))?", r"q\.hit on t\[1\]( \(behind q\.hit\))?"
    assert re.search(rf"{in_p} -> {in_q} -> {in_p}|{in_q} -> {in_p} -> {in_q}", str(caught.value))
