"""The functions of `live` refuse wrong arguments with the reason and what to write, also outside of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from monarch_kernel import live
from monarch_kernel.features.live.handle import MOST_STEPS
from monarch_kernel.features.live.knobs import fitting
from monarch_kernel.features.live.limits import name_problem
from monarch_kernel.features.live.worker import RankLoop
from monarch_kernel.net.wire.messages import Knob

LONG = "x" * 1_000
LOADER = torch.utils.data.DataLoader([1, 2, 3])  # type: ignore[arg-type]

REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("loop", ("10",), {}, "live.loop('10'): steps must be an integer or None, not a str"),
    ("loop", (1.5,), {}, "live.loop(1.5): steps must be an integer or None, not a float"),
    ("loop", (True,), {}, "live.loop(True): steps must be an integer or None, not a bool"),
    ("loop", (-1,), {}, "live.loop(-1): steps must be 0 or more"),
    ("loop", (10**400,), {}, "live.loop(an int of 1329 bits): more steps than a loop can count; use live.loop()"),
    ("loop", (LONG,), {}, "…): steps must be an integer or None"),
    (
        "loop",
        ([0] * 99,),
        {},
        "live.loop(a list): steps must be an integer or None, not a list; for one step per item, write",
    ),
    (
        "loop",
        (LOADER,),
        {},
        "live.loop(a DataLoader): steps must be an integer or None, not a DataLoader; for one step per",
    ),
    ("loop", (torch.ones(3),), {}, "steps must be an integer or None, not a Tensor"),
    ("loop", (5,), {"on_failure": None}, "live.loop(on_failure=None): pass 'raise' or 'recover'"),
    ("loop", (5,), {"on_failure": "restart"}, "live.loop(on_failure='restart'): pass 'raise' or 'recover'"),
    ("loop", (5,), {"on_nan": 3}, "live.loop(on_nan=3): pass 'stop', 'rollback', or a function of an alarm"),
    (
        "loop",
        (5,),
        {"on_spike": "halt"},
        "live.loop(on_spike='halt'): pass 'stop', 'rollback', 'skip', or a function of an alarm",
    ),
    ("loop", (5,), {"on_preempt": "save"}, "live.loop(on_preempt='save'): pass a function without arguments"),
    ("loop", (5,), {"steps_": 1}, "unexpected keyword argument 'steps_'"),
    ("knob", (None, 1), {}, "live.knob(None, ...): the name of a knob must be a string"),
    ("knob", ([0] * 999, 1), {}, "live.knob(a list, ...): the name of a knob must be a string"),
    ("knob", ("", 1), {}, "a knob needs a name"),
    ("knob", (" \t", 1), {}, r"live.knob: a name needs a visible character, and ' \t' has none"),
    ("knob", (LONG, 1), {}, "the name has 1,000 characters"),
    ("knob", ("k", LONG * 2), {}, "live.knob('k', ...): the text has 2,000 characters"),
    ("knob", ("k", [1]), {}, "live.knob('k') must be a number, string, bool or None, not a list"),
    ("knob", ("k", np.float32(1)), {}, "not a float32; write float(...) or int(...)"),
    ("knob", ("k", torch.ones(())), {}, "not a Tensor; write float(...) or int(...)"),
    ("knob", ("k", float("inf")), {}, "live.knob('k', inf): a knob must be finite; use None for no value"),
    ("knob", ("k", 10**40), {}, "live.knob('k', ...): the integer has 133 bits, but may have at most 63 and a sign"),
    ("knob", ("k", 1), {"low": "0"}, "live.knob('k'): a bound must be a number, not a str"),
    ("knob", ("k", 1), {"high": 10**400}, "live.knob('k'): the integer has 1329 bits"),
    ("knob", ("k", 1), {"low": 3, "high": 2}, "live.knob('k'): low=3 is more than high=2"),
    ("knob", ("k", None), {"low": 1}, "live.knob('k', None): only a number can have bounds"),
    ("knob", ("k",), {}, "live.knob('k') needs a default, the value until it is set: live.knob('k', 0.1)"),
    (
        "log",
        (torch.ones(()),),
        {},
        "live.log() takes each thing under its name, not a bare Tensor: live.log(loss=loss)",
    ),
    ("log", ({"loss": 1},), {}, "live.log() takes each thing under its name, not a bare dict: live.log(loss=loss)"),
    ("log", (), {"tokens": -1}, "live.log(tokens=-1): the count of this rank in this step must be 0 or more"),
    ("check", (torch.nn.Linear(1, 1),), {}, "not a bare Linear: live.check(model=model, every=500)"),
    ("check", (), {"every": "500"}, "live.check(every='500'): pass an integer"),
    ("check", (), {"every": None}, "live.check(every=None): pass an integer"),
    ("check", (), {"every": 0}, "live.check(every=0): at least 1"),
    ("check", (), {"every": [0] * 999}, "live.check(every=a list): pass an integer"),
    ("repeat", (3,), {}, "live.repeat(3): pass a function that runs forward and backward"),
    ("repeat", (print, torch.nn.Linear(1, 1)), {}, "not a bare Linear: live.repeat(backward, model=model)"),
    ("repeat", (print,), {"every": 0}, "live.repeat(every=0): at least 1"),
    ("repeat", (print,), {"every": 1.5}, "live.repeat(every=1.5): pass an integer"),
    ("repeat", (print,), {"model": 3}, "live.repeat(model=3): pass the modules whose gradients the function computes"),
    ("snapshot", (torch.nn.Linear(1, 1),), {}, "not a bare Linear: live.snapshot(model=model, optimizer=optimizer)"),
    ("snapshot", (), {"every": 0}, "live.snapshot(every=0): at least 1"),
    ("snapshot", (), {"keep": 1.5}, "live.snapshot(keep=1.5): pass an integer"),
    (
        "trajectory",
        ({"text": "p"}, "c"),
        {},
        "live.trajectory(prompt=a dict): pass a text, or token ids as a list of int",
    ),
    ("trajectory", ("p", [1.5]), {}, "live.trajectory(completion=a list): pass a text, or token ids as a list of int"),
    ("trajectory", ("p", torch.ones(2, 2)), {}, "live.trajectory(completion=a Tensor): pass a text, or token ids"),
    ("trajectory", ("p", b"c"), {}, "live.trajectory(completion=a bytes): pass a text, or token ids"),
    ("trajectory", ("p", "c", "1.0"), {}, "live.trajectory(reward=a str): pass a number, or a tensor with one element"),
    ("trajectory", ("p", "c", torch.ones(2)), {}, "live.trajectory(reward=a Tensor): pass a number"),
    ("trajectory", ("p", "c", 1.0, "v1"), {}, "live.trajectory(version=a str): pass an integer, such as the step"),
    ("trajectory", ("p", "c", 1.0, 10**40), {}, "the integer has 133 bits, but may have at most 63"),
    ("peak", (None,), {}, "live.peak(None): pass the device's operations per second"),
    ("peak", ([0] * 999,), {}, "live.peak(a list): pass the device's operations per second"),
]


@pytest.mark.parametrize(("function", "args", "given", "says"), REFUSED)
def test_a_wrong_argument_is_refused(function: str, args: tuple[Any, ...], given: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        getattr(live, function)(*args, **given)
    said = str(caught.value)
    assert says in said
    assert "\n" not in said
    assert len(said) < 250


@pytest.mark.parametrize("name", ["", " ", "\n\t"])
def test_a_name_without_a_visible_character_is_refused(name: str) -> None:
    assert name_problem(name, (), 10) == f"a name needs a visible character, and {name!r} has none"
    loop = RankLoop(1, 1, 10, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="live.log: a name needs a visible character"):
        loop.log({name: 1.0})


@pytest.mark.parametrize("steps", [3, np.int64(3), torch.tensor(3)])
def test_every_kind_of_integer_counts_steps(steps: Any) -> None:
    assert list(live.loop(steps)) == [0, 1, 2]


@pytest.mark.parametrize("value", [10**30, -(10**30)])
def test_an_integer_that_no_message_can_hold_is_no_value_of_a_knob(value: int) -> None:
    with pytest.raises(ValueError, match="knob 'n': the integer has 100 bits"):
        fitting(Knob("n", 1), value)


def test_a_step_is_bounded() -> None:
    assert MOST_STEPS < 1 << 62  # a horizon is a 64-bit number
