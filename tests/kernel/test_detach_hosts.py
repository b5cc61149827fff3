"""A mesh on hosts of an engine outlives its kernel, and is taken up, used and ended by the next one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .conftest import START_S, Notebook
from .test_detach import kernel, kill, place

__all__ = ["kernel", "place"]  # fixtures


def test_the_next_kernel_has_the_hosts_and_what_is_on_them(place: Path, kernel: Callable[[], Notebook]) -> None:
    first = kernel()
    first.ok("%mesh up t --on local --hosts 2 -n 1 --device cpu --detach", START_S)
    first.ok("%%remote t\nstate = {'rank': rank}", START_S)
    kill(first)

    second = kernel()
    assert "Not in this kernel" in second.ok("%mesh").stdout
    second.ok("%mesh attach t")
    assert "{'rank': 1}" in second.ok("%%remote t\nprint(state)", START_S).stdout
    sums = second.ok(
        "%%remote t\nimport torch\nx = torch.ones(1); torch.distributed.all_reduce(x); print(x.item())", START_S
    )
    assert "2.0" in sums.stdout
    assert "ended" in second.ok("%mesh down t").stdout
    assert not (place / "t").exists()
    assert "is up already" not in second.ok("%mesh").stdout
