"""Counts are written with their noun in the singular or plural."""

from __future__ import annotations

import re

import pytest

from monarch_kernel.base.mesh import Extent
from monarch_kernel.base.text import plural, were
from monarch_kernel.notebook.syntax.lines import UsageProblem
from monarch_kernel.notebook.syntax.up_arguments import parse_up


@pytest.mark.parametrize(("count", "text"), [(0, "0 hosts"), (1, "1 host"), (2, "2 hosts"), (1024, "1,024 hosts")])
def test_a_noun_agrees_with_its_count(count: int, text: str) -> None:
    assert plural(count, "host") == text
    assert plural(count, "process", "processes").endswith("process" if count == 1 else "processes")
    assert were(count) == ("was" if count == 1 else "were")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("u --gpus 1", "1 GPU was asked for, this machine has 0"),
        ("u -n 1 --device cuda", "1 GPU was asked for, this machine has 0"),
        ("u --gpus 2", "2 GPUs were asked for, this machine has 0"),
        ("u -n 2 --axes dp=1", "makes 1 rank, but 2 were asked for"),
        ("u -n 1 --axes dp=2", "makes 2 ranks, but 1 was asked for"),
    ],
)
def test_a_refused_mesh_of_one_rank_is_singular(line: str, says: str) -> None:
    with pytest.raises(UsageProblem, match=re.escape(says)):
        parse_up(line, 0)


def test_axes_without_sizes_are_singular() -> None:
    with pytest.raises(ValueError, match="1 axis was given with 2 sizes"):
        Extent(["a"], [1, 2])
