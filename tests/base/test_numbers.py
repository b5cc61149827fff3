"""Numbers of the command line that make no sense end the program with exit code 2 and one line that says what to write."""

from __future__ import annotations

import argparse

import pytest

from monarch_kernel import cli
from monarch_kernel.base import numbers


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "nan", "", "ten"])
def test_a_count_is_a_whole_number_of_1_or_more(text: str) -> None:
    assert numbers.count("12") == 12
    with pytest.raises(argparse.ArgumentTypeError, match="write a whole number of 1 or more, not"):
        numbers.count(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "", "soon"])
def test_a_time_is_above_0_and_finite(text: str) -> None:
    assert numbers.seconds("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match="write a number of seconds above 0"):
        numbers.seconds(text)


@pytest.mark.parametrize("step", ["0", "-1", "nan"])
def test_a_record_is_replayed_up_to_a_step_of_1_or_more(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["record", "replay", "run", "--until-step", step])
    assert ended.value.code == 2
    assert f"--until-step: write a whole number of 1 or more, not '{step}'" in capsys.readouterr().err
