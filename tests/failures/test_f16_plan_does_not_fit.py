"""F16: a parameter can't be split as planned; the error has its full name, its shape, the reason and what to write."""

from __future__ import annotations

import pytest
from torch import nn

from monarch_kernel.train.parallel import PlanError, plan_for


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 10, device="meta"), nn.ModuleDict({"out": nn.Linear(10, 6, device="meta")})["out"]
    )


def test_a_parameter_that_can_not_be_split_is_named() -> None:
    with pytest.raises(
        PlanError, match=r"0\.weight of shape \[10, 6\] can't be split colwise among 4 ranks: 10 is not a mul"
    ):
        plan_for(model(), {"tp": 4}, "tp", tensor={"0": "colwise"})


def test_a_name_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(PlanError, match=r"replicate: the model has no parameter '0\.wieght'; .*0\.weight"):
        plan_for(model(), {"dp": 4}, "fsdp", replicate=["0.wieght"])
