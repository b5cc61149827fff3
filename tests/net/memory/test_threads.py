"""Threads for work that takes a moment."""

from __future__ import annotations

import threading

from monarch_kernel.net.memory.threads import IdleThreads
from tests.support.waiting import LONG_S


def test_work_is_done_in_order_by_threads_that_then_end() -> None:
    threads = IdleThreads("workers", 1)
    done: list[int] = []
    over = threading.Event()
    for i in range(5):
        threads.submit(lambda i=i: done.append(i))  # type: ignore[misc]
    threads.submit(over.set)
    assert over.wait(LONG_S)
    assert done == [0, 1, 2, 3, 4]
    threads.close(LONG_S)


def test_close_waits_for_the_work_in_progress_and_drops_the_rest() -> None:
    threads = IdleThreads("workers", 1)
    begins, may_end = threading.Event(), threading.Event()
    done: list[str] = []

    def first() -> None:
        begins.set()
        may_end.wait(LONG_S)
        done.append("first")

    threads.submit(first)
    threads.submit(lambda: done.append("second"))
    assert begins.wait(LONG_S)
    closing = threading.Thread(target=threads.close, args=(LONG_S,))
    closing.start()
    threads.close(0.0)
    assert done == []
    may_end.set()
    closing.join(LONG_S)
    assert not closing.is_alive()
    threads.submit(lambda: done.append("too late"))
    assert done == ["first"]
