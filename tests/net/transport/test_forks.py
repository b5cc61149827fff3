"""Signal handlers of this package act in the process that installed them, and in none of its forks."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from tests.support.waiting import LONG_S

BEGINS = """
import os, signal, sys, threading

def interrupt():
    os.kill(os.getpid(), signal.SIGTERM)

if "early" in sys.argv:
    os.register_at_fork(after_in_child=interrupt)

from monarch_kernel.net.transport.driver import _Shield
from monarch_kernel.net.transport.forks import in_forks

class Ours:
    @in_forks(lambda ours: signal.SIG_DFL)
    def handle(self, number, frame):
        raise SystemExit("of the parent")

if "late" in sys.argv:
    os.register_at_fork(after_in_child=interrupt)

def code_of_fork(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def code_of(script: str, *arguments: str) -> int:
    """Return the exit code of a script's fork; each test has its own script, as fork functions can't be unregistered."""
    script = BEGINS + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("order", ["early", "late"])
@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_signal_while_functions_for_forks_run_ends_the_child(order: str, thread: str) -> None:
    """This holds for functions registered before and after ours; Python swallows what they raise."""
    script = """
        signal.signal(signal.SIGTERM, Ours().handle)
        if "main" in sys.argv:
            print(code_of_fork(lambda: None))
        else:
            thread = threading.Thread(target=lambda: print(code_of_fork(lambda: None)))
            thread.start()
            thread.join()
    """
    assert code_of(script, order, thread) == -signal.SIGTERM


INTERRUPTED = """
    class Raises:
        @in_forks(lambda ours: signal.default_int_handler)
        def handle(self, number, frame):
            raise SystemExit("of the parent")

    signal.signal(signal.SIGINT, Raises().handle)
    at_once = sys.argv[-1] == "at once"
    os.register_at_fork(after_in_child=lambda: at_once and os.kill(os.getpid(), signal.SIGINT))

    def wait():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                pass
        except KeyboardInterrupt:
            os._exit(7)

    print(code_of_fork(wait))
"""


@pytest.mark.parametrize(("when", "code"), [("at once", -signal.SIGINT), ("later", 7)])
def test_an_interrupt_of_a_child_is_not_lost_in_functions_for_forks(when: str, code: int) -> None:
    """Python would swallow the KeyboardInterrupt that it raises there; later it is raised as usual."""
    assert code_of(INTERRUPTED, when) == code


def test_a_handler_of_the_user_is_kept() -> None:
    script = """
        def handle(number, frame):
            os._exit(7)
        signal.signal(signal.SIGTERM, handle)
        print(code_of_fork(lambda: signal.raise_signal(signal.SIGTERM)))
    """
    assert code_of(script) == 7


def test_a_handler_that_a_wait_shields_is_replaced() -> None:
    """A thread may fork while the main thread waits."""
    script = """
        signal.signal(signal.SIGINT, Ours().handle)
        with _Shield(), _Shield():
            thread = threading.Thread(
                target=lambda: print(code_of_fork(lambda: os._exit(signal.getsignal(signal.SIGINT) == signal.SIG_DFL)))
            )
            thread.start()
            thread.join()
    """
    assert code_of(script) == 1


def test_parent_and_child_restore_their_signal_masks() -> None:
    script = """
        signal.signal(signal.SIGTERM, Ours().handle)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        blocked = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [])
        code = code_of_fork(lambda: os._exit(blocked() == {signal.SIGUSR1}))
        assert blocked() == {signal.SIGUSR1}
        print(code)
    """
    assert code_of(script) == 1
