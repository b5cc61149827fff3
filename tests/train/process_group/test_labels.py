"""Users see what they know of a process group: its axis, its description or its ranks, not torch's number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from monarch_kernel.runtime.diagnostics.stacks import Collective
from monarch_kernel.runtime.diagnostics.waits import collective_text
from monarch_kernel.train.process_group.labels import label_of

Groups = Callable[..., None]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    """Sets the groups that torch has: its name of each -> ranks and description."""

    def have(**ranks: tuple[list[int], str]) -> None:
        names = {_Group(about): name for name, (_, about) in ranks.items()}
        members = {group: {rank: place for place, rank in enumerate(ranks[name][0])} for group, name in names.items()}
        world = SimpleNamespace(pg_names=names, pg_group_ranks=members)
        monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", SimpleNamespace(_world=world))

    return have


class _Group:
    def __init__(self, about: str) -> None:
        self.group_desc = about


def test_axes_and_descriptions_are_labels() -> None:
    assert label_of("0", "default_pg") == ""
    assert label_of("5", "mesh_tp") == "tp"
    assert label_of("7", "evaluation") == "evaluation"


def test_a_group_without_a_description_has_its_ranks_as_label(groups: Groups) -> None:
    groups(n1=([2, 0], "undefined"), n2=([0, 1, 2], "mesh_tp"), n3=([0, 1, 2], ""))
    assert label_of("n1", "undefined") == "[0,2]"
    assert label_of("n3", "") == "[0-2]"


def test_labels_tell_groups_of_the_same_ranks_apart(groups: Groups) -> None:
    groups(n1=([0, 1], "undefined"), n2=([0, 1], "undefined"))
    assert label_of("n1", "undefined") == "[0-1] (n1)"
    assert label_of("n2", "undefined") == "[0-1] (n2)"


def test_labels_are_short_and_exist_before_and_after_the_group(groups: Groups) -> None:
    groups(n1=(list(range(0, 1000, 2)), "undefined"))
    assert label_of("n1", "undefined") == "500 ranks (n1)"
    assert label_of("n2", "undefined", range(3)) == "[0-2]"
    assert label_of("n2", "undefined") == "n2"


def test_waits_name_the_ranks_once() -> None:
    call = Collective("all_reduce", 3, "[0-1]", (0, 1), "4")
    assert collective_text(call, with_group=True) == "all_reduce #3 of group [0-1] (shape 4)"
    tp = Collective("all_reduce", 3, "tp", (0, 1), "4")
    assert collective_text(tp, with_group=True) == "all_reduce #3 of group tp [0-1] (shape 4)"
