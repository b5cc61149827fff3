"""One rank, really brought up and down by the machinery that ``%mesh up`` uses; in a process of its own, which may be killed.

It says what it does, a line of JSON for each step, so that whoever started it can say where it stopped. The rank is on a CPU:
GPUs may be full with what another mesh does.
"""

from __future__ import annotations

import json
import signal
import time
from typing import Any

from monarch_kernel.actor.host_mesh import this_host
from monarch_kernel.runtime.controller.session import close_session
from monarch_kernel.runtime.host.processes import die_with_parent, rss_nbytes, start_ticks

__all__ = ["main"]

_UP_S = 50.0
_END_S = 5.0

_CELL = "import os, torch\n(os.getpid(), os.getppid(), float(torch.ones(1000, device=device).sum()))"


def main() -> None:
    """Bring a rank up, have it run a cell, and end it."""
    die_with_parent(signal.SIGKILL)  # whoever waits for us
    try:
        _say(result=_try())
    except Exception as error:  # at the border of the process: whoever started it tells it to the user
        _say(error=f"{type(error).__name__}: {error}")
    finally:
        close_session()


def _try() -> dict[str, Any]:
    begun = time.monotonic()
    _say(step="the host agent was being started")
    hosts = this_host()
    _say(step="a rank was coming up")
    mesh = hosts.spawn_procs({"gpus": 1}, name="doctor", device="cpu")
    mesh.initialized.get(_UP_S)
    up_s = time.monotonic() - begun
    _say(step="the rank ran a cell")
    rank, agent, total = mesh.run(_CELL).get(_UP_S).item(gpus=0)
    if total != 1000.0:
        raise ValueError(f"torch adds a thousand ones to {total}")
    rss = rss_nbytes(rank)
    _say(step="the rank and its agent were ending")
    begun = time.monotonic()
    close_session()
    deadline = begun + _END_S
    while (left := [pid for pid in (rank, agent) if start_ticks(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return {"up_s": up_s, "down_s": time.monotonic() - begun, "rss_nbytes": rss, "left": left}


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)
