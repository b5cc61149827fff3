"""Signals to the process group of a rank spare a process of another user, which may be the last member of the group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]

OF_ANOTHER_USER = """
import signal, subprocess
from monarch_kernel.runtime.host.processes import group_is_alive, signal_rank
from tests.support.processes import drop_root

other = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
assert group_is_alive(other.pid)
drop_root()
print(other.pid, group_is_alive(other.pid), flush=True)
signal_rank(other.pid, signal.SIGTERM)
print("goes on", flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start the process of another user")
def test_a_group_of_another_user_is_not_signalled_and_raises_no_error() -> None:
    done = subprocess.run([sys.executable, "-c", OF_ANOTHER_USER], cwd=CHECKOUT, capture_output=True, text=True)
    pid, is_alive, *rest = done.stdout.split(maxsplit=2)
    os.kill(int(pid), signal.SIGKILL)
    assert (is_alive, rest) == ("False", ["goes on\n"]), done.stderr
