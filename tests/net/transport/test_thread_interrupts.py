"""Interrupts of threads that no signal reaches: they are raised in the user's code, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import pytest

from monarch_kernel.net.transport.thread_interrupts import USER_THREAD, ThreadShield, UserThread
from tests.support.waiting import LONG_S


class Runner:
    """A thread that does something for the user, and the outcome."""

    def __init__(self, work: Callable[[UserThread], object]) -> None:
        self.outcome: object = None
        self._ready = threading.Event()
        self._work = work
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(LONG_S)

    def _run(self) -> None:
        self.thread = UserThread()
        USER_THREAD.set(self.thread)
        self._ready.set()
        try:
            self.outcome = self._work(self.thread)
        except KeyboardInterrupt:
            self.outcome = "delivered"
        finally:
            self.thread.leave_user_code()

    def end(self) -> object:
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()
        return self.outcome


def spin_until(event: threading.Event) -> None:
    while not event.is_set():
        pass


def test_user_code_is_interrupted() -> None:
    inside = threading.Event()

    def work(thread: UserThread) -> None:
        thread.enter_user_code()
        inside.set()
        while True:
            pass

    runner = Runner(work)
    assert inside.wait(LONG_S)
    runner.thread.interrupt()
    assert runner.end() == "delivered"


def test_other_code_is_not_interrupted() -> None:
    go = threading.Event()

    def work(thread: UserThread) -> str:
        thread.enter_user_code()
        thread.leave_user_code()
        spin_until(go)
        return "whole"

    runner = Runner(work)
    for _ in range(10):
        runner.thread.interrupt()
    go.set()
    assert runner.end() == "whole"


def test_interrupts_that_are_held_back_are_counted() -> None:
    inside, go, noted = threading.Event(), threading.Event(), []

    def work(thread: UserThread) -> str:
        thread.enter_user_code()
        with thread.hold(lambda: noted.append(1)):
            inside.set()
            spin_until(go)
        return "whole"

    runner = Runner(work)
    assert inside.wait(LONG_S)
    for _ in range(3):
        runner.thread.interrupt()
    go.set()
    assert runner.end() == "whole"
    assert noted == [1, 1, 1]


def test_a_shield_lets_an_interrupt_through_where_it_is_exposed() -> None:
    inside, delivered = threading.Event(), threading.Event()

    def work(thread: UserThread) -> str:
        thread.enter_user_code()
        with ThreadShield(thread, delivered.set) as shield:
            inside.set()
            spin_until(delivered)  # nothing may be interrupted here
            with pytest.raises(KeyboardInterrupt):
                shield.expose()
        return "whole"

    runner = Runner(work)
    assert inside.wait(LONG_S)
    runner.thread.interrupt()
    assert runner.end() == "whole"


def test_a_shield_that_was_never_exposed_raises_at_its_end() -> None:
    inside, delivered = threading.Event(), threading.Event()

    def work(thread: UserThread) -> None:
        thread.enter_user_code()
        with ThreadShield(thread, delivered.set):
            inside.set()
            spin_until(delivered)

    runner = Runner(work)
    assert inside.wait(LONG_S)
    runner.thread.interrupt()
    assert runner.end() == "delivered"


def test_a_shield_raises_the_interrupt_in_place_of_an_error() -> None:
    inside, delivered = threading.Event(), threading.Event()

    def work(thread: UserThread) -> None:
        thread.enter_user_code()
        with ThreadShield(thread, delivered.set):
            inside.set()
            spin_until(delivered)
            raise ValueError("of a callback")

    runner = Runner(work)
    assert inside.wait(LONG_S)
    runner.thread.interrupt()
    assert runner.end() == "delivered"


def test_an_earlier_interrupt_applies_to_the_users_code() -> None:
    def work(thread: UserThread) -> None:
        thread.enter_user_code()
        thread.leave_user_code()
        thread.interrupt()  # like another thread
        thread.enter_user_code()

    assert Runner(work).end() == "delivered"


def test_an_interrupt_that_the_users_code_catches_is_raised_once() -> None:
    inside = threading.Event()

    def spin() -> None:
        inside.set()
        while True:
            pass

    def work(thread: UserThread) -> list[int]:
        noted: list[int] = []
        thread.enter_user_code()
        with pytest.raises(KeyboardInterrupt):
            spin()
        with thread.hold(lambda: noted.append(1)):
            pass
        thread.leave_user_code()
        thread.enter_user_code()
        return noted

    runner = Runner(work)
    assert inside.wait(LONG_S)
    runner.thread.interrupt()
    assert runner.end() == []


def test_a_coroutine_in_an_event_loop_is_cancelled() -> None:
    cancelled = threading.Event()

    def work(thread: UserThread) -> str:
        thread.cancel = cancelled.set
        spin_until(cancelled)
        return "cancelled"

    runner = Runner(work)
    deadline = time.monotonic() + LONG_S
    while not cancelled.is_set() and time.monotonic() < deadline:
        runner.thread.interrupt()
    assert runner.end() == "cancelled"


def test_a_late_interrupt_never_leaves_the_users_code() -> None:
    enough, hits = threading.Event(), []

    def work(thread: UserThread) -> str:
        while not enough.is_set():
            try:
                try:
                    thread.enter_user_code()
                    sum(range(100))
                finally:
                    thread.leave_user_code()
            except KeyboardInterrupt:
                hits.append(1)
                thread.leave_user_code()
            sum(range(100))  # not the user's code: an interrupt here would end the thread
        return "whole"

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        runner = Runner(work)
        deadline = time.monotonic() + LONG_S
        while len(hits) < 60 and runner.outcome is None and time.monotonic() < deadline:
            runner.thread.interrupt()
        enough.set()
        assert runner.end() == "whole"
    finally:
        sys.setswitchinterval(interval_s)
    assert len(hits) >= 60


def test_a_late_interrupt_leaves_no_trap_for_debuggers() -> None:
    """Until Python 3.12, an exception that was sent to a thread and taken back makes each trace function hang."""
    code = """
        import sys, threading
        from monarch_kernel.net.transport.thread_interrupts import UserThread

        thread, enough, hits = None, threading.Event(), 0

        def work():
            global hits, thread
            thread = UserThread()
            while not enough.is_set():
                try:
                    try:
                        thread.enter_user_code()
                        sum(range(100))
                    finally:
                        thread.leave_user_code()
                except KeyboardInterrupt:
                    hits += 1
                    thread.leave_user_code()

        sys.setswitchinterval(1e-5)
        threading.Thread(target=work).start()
        while hits < 60:
            if thread is not None:
                thread.interrupt()
        enough.set()
        sys.settrace(lambda *args: None)
        (lambda: None)()
        print("whole")
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=LONG_S)
    assert ran.stdout == "whole\n", ran.stderr
