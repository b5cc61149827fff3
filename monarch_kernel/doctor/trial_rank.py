"""Starts and ends one rank with the code that ``%mesh up`` uses, in a separate process, which the doctor may kill.

It prints a line of JSON for each step, so that the doctor can report where it stopped. The rank runs on a CPU, because another
mesh may have filled the GPUs.
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
    """Start a rank, run a cell in it, and end it."""
    die_with_parent(signal.SIGKILL)  # when the doctor, which waits for this process, dies
    try:
        _say(result=_try())
    except Exception as error:  # the doctor, in the parent process, reports it to the user
        _say(error=f"{type(error).__name__}: {error}")
    finally:
        close_session()


def _try() -> dict[str, Any]:
    started = time.monotonic()
    _say(step="starting the host agent")
    hosts = this_host()
    _say(step="starting a rank")
    mesh = hosts.spawn_procs({"gpus": 1}, name="doctor", device="cpu")
    mesh.initialized.get(_UP_S)
    up_s = time.monotonic() - started
    _say(step="running a cell")
    rank, agent, total = mesh.run(_CELL).get(_UP_S).item(gpus=0)
    if total != 1000.0:
        raise ValueError(f"torch computes {total} as the sum of a thousand ones")
    rss = rss_nbytes(rank)
    _say(step="ending the rank and its agent")
    started = time.monotonic()
    close_session()
    deadline = started + _END_S
    while (left := [pid for pid in (rank, agent) if start_ticks(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return {"up_s": up_s, "down_s": time.monotonic() - started, "rss_nbytes": rss, "left": left}


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)
