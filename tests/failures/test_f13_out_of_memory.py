"""F13: memory runs out; the error says how much was asked for, held and free, and by which variables."""

from __future__ import annotations

import re

from tests.failures.cells import Cells


def test_sizes_and_the_largest_variables_are_named(cells: Cells) -> None:
    text = cells.fails("big = torch.zeros(4 << 20)\nhuge = torch.empty(1 << 60)")
    assert "you tried to allocate 4611686018427387904 bytes" in text
    assert "16 MiB big: Tensor[4194304] float32 cpu" in text
    assert "the process held" in text
    assert "free when this was reported" in text
    cells.ok("del big")


def test_a_limit_of_ulimit_is_named(cells: Cells) -> None:
    cells.ok("import resource\nlimits = resource.getrlimit(resource.RLIMIT_AS)")
    text = cells.fails("resource.setrlimit(resource.RLIMIT_AS, (64 << 30, limits[1]))\ntorch.empty(1 << 40)")
    cells.ok("resource.setrlimit(resource.RLIMIT_AS, limits)")
    assert re.search(r"the process has .* of the 64 GiB of addresses that ulimit -v lets it have", text)
