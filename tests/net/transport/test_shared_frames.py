"""A rank learns from its parent, which may be ending, whether it may open the memory of other processes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_kernel.net.transport.shared_frames import may_look_at, may_look_at_parent

CHECKOUT = Path(__file__).parents[3]
EXIT = {"x86_64": 60, "aarch64": 93}

# The main thread of the helper ends before its process does: until then the process looks like one that is ending.
SCRIPT = """
import ctypes, os, sys, threading, time
from monarch_kernel.net.memory.processes import is_ending
from monarch_kernel.net.transport.shared_frames import may_look_at, may_look_at_parent
from tests.support.processes import drop_root

libc = ctypes.CDLL(None)
drop_root()
libc.prctl(4, 1)  # like after an exec, other processes of this user may open files
libc.prctl(36, 1)  # orphans become children of this process
r, w = os.pipe()
helper = os.fork()
if not helper:
    if not os.fork():
        helper = os.getppid()
        while not is_ending(helper):
            time.sleep(0.001)
        print(may_look_at(helper), flush=True)
        os.write(w, b"x")
        print(may_look_at_parent(), flush=True)
        os._exit(0)
    def end():
        os.read(r, 1)
        time.sleep(0.1)
        os._exit(0)
    threading.Thread(target=end).start()
    libc.syscall(EXIT, 0)
os.waitpid(helper, 0)
os.wait()
"""


def test_files_of_the_parent_of_this_process_may_be_opened() -> None:
    assert may_look_at_parent() == may_look_at(os.getppid())


@pytest.mark.skipif(platform.machine() not in EXIT, reason="the number of a system call is not known")
def test_a_parent_that_is_ending_is_not_mistaken_for_one_that_denies_access() -> None:
    code = SCRIPT.replace("EXIT", str(EXIT[platform.machine()]))
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True"], done.stderr
