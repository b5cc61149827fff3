"""Tab and Shift-Tab when the ranks of a mesh have different names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook

pytestmark = pytest.mark.timeout(120)

DEFINES = """%%remote
if rank == 3:
    import collections
    table = collections.OrderedDict(first=1)
    def last(steps): "On the last rank only."
number = rank
"""


@pytest.fixture(scope="module")
def uneven(four: Notebook) -> Notebook:
    """A notebook in which only the last rank has most of the names."""
    four.ok(DEFINES)
    four.wait_for_answers()
    return four


def described(notebook: Notebook, code: str) -> str:
    reply = notebook.ask(notebook.client.inspect(code, len(code), 0))
    return re.sub(r"\x1b\[\d+m", "", reply["data"].get("text/plain", ""))


@pytest.mark.parametrize("selector", ["", " t", " t[2:4]", " t[3]"])
def test_a_rank_with_the_name_answers(uneven: Notebook, selector: str) -> None:
    cell = f"%%remote{selector}\n"
    assert "move_to_end" in uneven.complete(f"{cell}table.")
    assert uneven.complete(f'{cell}table["') == ["first"]
    assert "steps=" in uneven.complete(f"{cell}last(")
    text = described(uneven, f"{cell}table")
    assert "OrderedDict" in text
    assert "Ranks: " in text
    assert "On the last rank only." in described(uneven, f"{cell}last(")


def test_a_busy_rank_with_the_name_answers(uneven: Notebook) -> None:
    uneven.ok("%%remote t[3] --background --out run\nimport time\nwhile True: time.sleep(0.01)")
    try:
        assert "move_to_end" in uneven.complete("%%remote\ntable.")
    finally:
        uneven.ok("run.cancel()")


def test_ranks_without_the_name_offer_nothing(uneven: Notebook) -> None:
    assert uneven.complete("%%remote t[0:3]\ntable.") == []
    assert described(uneven, "%%remote t[0:3]\ntable") == ""


def test_a_value_comes_from_one_rank(uneven: Notebook) -> None:
    assert "Ranks: [0-3]; the value is that of [0]\n" in described(uneven, "%%remote\nnumber")
    assert "Ranks: [2]\n" in described(uneven, "%%remote t[2]\nnumber")
