"""A detached mesh on hosts of an engine: the next kernel attaches, uses and ends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebook.kernel.conftest import START_S, Notebook
from tests.notebook.kernel.test_detach import kernel, kill, place
from tests.support.waiting import wait_until

__all__ = ["kernel", "place"]  # fixtures


@pytest.mark.slow
def test_the_next_kernel_has_the_hosts_and_their_ranks(place: Path, kernel: Callable[[], Notebook]) -> None:
    first = kernel()
    first.ok("%mesh up t --on local --hosts 2 -n 1 --device cpu --detach", START_S)
    first.ok("%%remote t\nstate = {'rank': rank}", START_S)
    kill(first)

    second = kernel()
    assert "Meshes outside this kernel" in second.ok("%mesh").stdout
    second.ok("%mesh attach t")
    assert "{'rank': 1}" in second.ok("%%remote t\nprint(state)", START_S).stdout
    sums = second.ok(
        "%%remote t\nimport torch\nx = torch.ones(1); torch.distributed.all_reduce(x); print(x.item())", START_S
    )
    assert "2.0" in sums.stdout

    agents = second.value("t.run('__import__(\"os\").getppid()').get().values()")
    os.kill(agents[1], signal.SIGKILL)
    wait_until(lambda: second.value("list(t.deaths())") == [1], "the news of the death")
    healed = second.ok("%mesh heal t", START_S).stdout
    assert "t: [1] replaced in" in healed
    assert "on another host of this machine" in healed
    assert second.ok("%%remote t\nlist(globals().get('state', {}))").plain.splitlines() == ["[0] ['rank']", "[1] []"]
    assert "ended" in second.ok("%mesh down t").stdout
    assert not (place / "t").exists()
    assert "is already up" not in second.ok("%mesh").stdout
