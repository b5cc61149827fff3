"""F27: ranks print a flood; what is shown is bounded, the rest is counted, and the ranks and the program go on."""

from __future__ import annotations

import pytest

from monarch_kernel.notebook.output.folding import OutputFolder
from tests.failures.cells import Cells
from tests.support.waiting import LONG_S


def test_the_first_and_the_last_lines_are_shown_and_the_rest_counted() -> None:
    folder = OutputFolder(range(2))
    folder.feed(1, "stdout", "".join(f"line {i}\n" for i in range(200_000)), now=0.0)
    lines = [*folder.drain(0.06), *folder.finish(0.06)]
    texts = [line.text for line in lines]
    assert texts[0] == "line 0"
    assert texts[-1] == "line 199999"
    assert len(texts) == 201
    (note,) = [line.text for line in lines if line.note]
    assert note.startswith("… 199,800 lines left out here (rank 1: 199,800;")


@pytest.mark.slow
def test_the_other_rank_answers_meanwhile(cells: Cells) -> None:
    flood = cells.mesh.run_cell("if rank == 1:\n    for i in range(200_000): print('x' * 80)\n'end'", want_value=True)
    assert cells.mesh.slice(gpus=0).run("rank").get(LONG_S).item() == 0
    assert [result.value for result in flood.get(LONG_S).values()] == ["end", "end"]
