"""F45: a script for torchrun forms and destroys the process group itself, again and again; it works as with torchrun."""

from __future__ import annotations

from tests.failures.cells import Cells

MAIN = """
import argparse
def main():
    options = argparse.ArgumentParser(); options.add_argument("--lr", type=float, default=0.1)
    lr = options.parse_args().lr
    dist.init_process_group(backend="gloo")
    x = torch.full((2,), float(os.environ["LOCAL_RANK"])); dist.all_reduce(x)
    dist.destroy_process_group()
    return lr, x.tolist()
"""


def test_a_script_runs_twice(cells: Cells) -> None:
    cells.ok(MAIN)
    assert cells.ok("main()") == ((0.1, [1.0, 1.0]),) * 2
    assert cells.ok("main()") == ((0.1, [1.0, 1.0]),) * 2


def test_a_collective_after_the_end_of_the_group_says_what_to_leave_out(cells: Cells) -> None:
    text = cells.fails("dist.all_reduce(torch.ones(1))")
    assert "Default process group has not been initialized" in text
    assert (
        "dist.destroy_process_group() has run on this rank: leave it out, or call dist.init_process_group() again"
        in text
    )
    assert cells.ok("dist.init_process_group('gloo'); x = torch.ones(1); dist.all_reduce(x); x.item()") == (2.0, 2.0)


def test_functions_of_torch_have_the_group_that_was_formed_again(cells: Cells) -> None:
    code = "import torch.distributed.nn.functional as own; own.all_reduce(torch.ones(1)).item()"
    assert cells.ok(code) == (2.0, 2.0)
    cells.form()
    assert cells.ok(code) == (2.0, 2.0)
