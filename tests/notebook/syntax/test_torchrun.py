"""The arguments of ``%mesh torchrun``: what follows the script is for the script."""

from __future__ import annotations

import pytest

from monarch_kernel.notebook.syntax.arguments import Known
from monarch_kernel.notebook.syntax.lines import UsageProblem
from monarch_kernel.notebook.syntax.torchrun import ScriptOptions, parse_torchrun

KNOWN = Known(["t"])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py", ScriptOptions("train.py")),
        ("t train.py --lr 0.1 --raw", ScriptOptions("train.py", ("--lr", "0.1", "--raw"), "t")),
        ("--background t train.py", ScriptOptions("train.py", selector="t", background=True)),
        ("t --raw train.py 'two words'  # comment", ScriptOptions("train.py", ("two words",), "t", raw=True)),
        ("t -m pkg.train t", ScriptOptions("pkg.train", ("t",), "t", is_module=True)),
        ("train.py --color=#fff", ScriptOptions("train.py", ("--color=#fff",))),
        ("t.py x", ScriptOptions("t.py", ("x",))),
        ("t[0:2] train.py", ScriptOptions("train.py", selector="t[0:2]")),
    ],
)
def test_a_line_is_read(line: str, expected: ScriptOptions) -> None:
    assert parse_torchrun(line, KNOWN) == expected


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "%mesh torchrun: name a script, such as %mesh torchrun trainers train.py --epochs 2"),
        ("t -m", "%mesh torchrun: name a module, such as"),
        (
            "t --nproc-per-node=4 train.py",
            "%mesh torchrun: leave out --nproc-per-node=4: the ranks of the mesh are up already",
        ),
        ("--nproc_per_node 4 train.py", "%mesh torchrun: leave out --nproc_per_node"),
        ("t --backgroud train.py", "unknown option '--backgroud'; did you mean --background?; the options are"),
        ("t 'train.py", "%mesh torchrun: No closing quotation"),
    ],
)
def test_a_wrong_line_says_what_to_write(line: str, problem: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        parse_torchrun(line, KNOWN)
    assert problem in str(caught.value)
