"""What is known where a logged value went wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from monarch_kernel.features.watch.surroundings import (
    FirstModule,
    has_scaler,
    is_learning_rate,
    rates_text,
    rows_text,
    variables_of_caller,
)


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([8, 9, 10], "rows 8 to 10"),
        ([3, 17, 4], "rows 3, 17 and 4"),
        ([5], "row 5"),
        (7, "row 7"),
        ([9, 1, 8, 2, 7, 3, 6, 4], "rows 9, 1, 8, 2, 7, 3 and 2 more"),
        ([None, None], ""),
        ([("a", 1)], ""),
        ([], ""),
    ],
)
def test_rows_are_named(rows: object, text: str) -> None:
    assert rows_text(rows) == text


@pytest.mark.parametrize(
    ("name", "expected"), [("lr", True), ("train/lr", True), ("learning_rate", True), ("blur", False)]
)
def test_learning_rates_are_known_by_their_names(name: str, expected: bool) -> None:
    assert is_learning_rate(name) == expected


def test_a_scaler_of_gradients_is_known_by_its_class_if_it_is_enabled() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert has_scaler({"a": 3, "b": scaler})
    assert not has_scaler({"a": 3, "b": torch.amp.GradScaler("cpu", enabled=False), "c": torch.amp.GradScaler})


def test_the_text_has_each_rate_of_the_optimizers_once() -> None:
    weight = nn.Parameter(torch.ones(1))
    other = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.1}, {"params": [other], "lr": 1e-5}], lr=1.0)
    assert rates_text({"a": optimizer, "b": optimizer, "c": 3}) == "0.1 and 1e-05"
    assert rates_text({"c": 3}) == ""


def test_variables_of_a_method_have_the_attributes_of_its_object() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.net = nn.Linear(1, 1)

        def look(self) -> dict[str, object]:
            local = 5
            return {**variables_of_caller(), "unused": local}

    trainer = Trainer()
    found = trainer.look()
    assert found["self.net"] is trainer.net
    assert found["local"] == 5


def test_the_innermost_module_whose_output_is_not_finite_is_found() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Log(), nn.Linear(2, 2)))
    with torch.no_grad():
        for parameter in net[0].parameters():
            parameter.zero_()
    look = FirstModule({"net": net, "part": net[1]})
    net(torch.ones(1, 2))
    assert look.end() == "net.1.0 (Log)"
    net(torch.ones(1, 2))
    assert not net._forward_hooks


def test_the_text_says_that_parameters_are_not_finite() -> None:
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.bias.fill_(float("nan"))
    look = FirstModule({"net": net})
    net(torch.ones(1, 2))
    assert look.end() == "net (Linear), whose parameters are not finite"


def test_nothing_is_found_for_finite_outputs_and_for_bad_inputs() -> None:
    net = nn.Linear(2, 2)
    look = FirstModule({"net": net})
    net(torch.ones(1, 2))
    net(torch.full((1, 2), float("nan")))
    assert look.end() == ""
