"""F32: a rank receives what no rank sends, or sends under another tag; the line has the pair, both tags and both lines."""

from __future__ import annotations

from tests.failures.cells import Cells


def test_a_recv_without_a_send(cells: Cells) -> None:
    with cells.waits("x = torch.ones(3)\nif rank == 1:\n    dist.recv(x, 0)", 0) as told:
        assert "[1] waits for" in told
        assert f"in recv from [0] (shape 3), cell [{cells.number}], line 3" in told
        assert "[0]" in told.split(";", 1)[1]


def test_other_tags(cells: Cells) -> None:
    code = "x = torch.ones(2)\nif rank == 0:\n    dist.send(x, 1, tag=1)\nelse:\n    dist.recv(x, 0, tag=2)"
    with cells.waits(code, says=("recv from", "send to")) as told:
        assert f"recv from [0] with tag 2 (shape 2), cell [{cells.number}], line 5" in told
        assert f"send to [1] with tag 1 (shape 2), cell [{cells.number}], line 3" in told
