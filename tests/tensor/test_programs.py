"""Random programs of operations, views, writes, failures and frees give what they give on plain tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.tensor import TensorError, inspect
from monarch_kernel.tensor.on_mesh import activated
from tests.tensor.in_process import InProcess

SHAPE = (2, 3)

Op = Callable[[Any, Any, float], Any]
NEW: dict[str, Op] = {
    "add": lambda a, b, n: a + b * n,
    "where": lambda a, b, n: torch.where(a > n, a, b),
    "row": lambda a, b, n: a[1].expand(2, 3),
    "transposed": lambda a, b, n: (a.t() @ b)[:2],
    "max": lambda a, b, n: a.max(dim=0, keepdim=True).values.expand(2, 3),
    "cat": lambda a, b, n: torch.cat([a, b])[1:3],
    "view": lambda a, b, n: a.view(6).view(2, 3),
    "alias": lambda a, b, n: a[:],
}
IN_PLACE: dict[str, Op] = {
    "add_": lambda a, b, n: a.add_(b, alpha=n),
    "column": lambda a, b, n: a[:, 0].mul_(n),
    "copy": lambda a, b, n: a.copy_(b),
    "fill": lambda a, b, n: a.fill_(n),
    "clamp": lambda a, b, n: a.clamp_(-abs(n), abs(n)),
}

number = st.integers(-3, 3).map(float)
place = st.integers(0, 3)
step = st.one_of(
    st.tuples(st.sampled_from(sorted(NEW)), place, place, place, number),
    st.tuples(st.sampled_from(sorted(IN_PLACE)), place, place, place, number),
    st.tuples(st.sampled_from(["fail", "fetch", "delete", "send"]), place, place, place, number),
)


@given(st.lists(step, max_size=25))
def test_a_program_gives_what_it_gives_on_plain_tensors(steps: list[tuple[str, int, int, int, float]]) -> None:
    session = InProcess(1, is_held=True)
    plain: list[Any] = [torch.arange(6.0).view(2, 3) + i for i in range(4)]
    with activated(session.device):
        mine: list[Any] = [torch.arange(6.0).view(2, 3) + i for i in range(4)]
    for name, a, b, c, n in steps:
        if name in NEW:
            result = NEW[name](plain[a], plain[b], n)
            mine[c] = NEW[name](mine[a], mine[b], n)
            # An expanded tensor can't be written to, and torch says so on plain tensors only.
            plain[c], mine[c] = (result, mine[c]) if 0 not in result.stride() else (result.clone(), mine[c].clone())
        elif name in IN_PLACE:
            if plain[a] is not plain[b]:
                IN_PLACE[name](plain[a], plain[b], n)
                IN_PLACE[name](mine[a], mine[b], n)
        elif name == "fail":
            assert_failed(torch.linalg.inv(mine[c].new_zeros(2, 2)) @ mine[a])
        elif name == "fetch":
            assert torch.equal(inspect(mine[a]), plain[a])
        elif name == "delete":
            plain[c], mine[c] = plain[a], mine[a]
        else:
            session.go()
    for here, there in zip(plain, mine):
        assert torch.equal(inspect(there), here)
    del mine, there
    gc.collect()
    session.stream.free_dropped()
    session.go()
    assert session.interpreters[0].memory().tensors == 0


def assert_failed(tensor: Any) -> None:
    try:
        inspect(tensor)
    except TensorError as error:
        assert "torch.linalg.inv failed on rank [0]" in str(error)
    else:
        raise AssertionError("it has a value")
