"""The frames of another thread are read at one moment."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

import pytest

from monarch_kernel.runtime.diagnostics.thread_frames import callers_of, frames_of, lines_of


def deep(depth: int, lock: threading.Lock) -> None:
    if depth:
        deep(depth - 1, lock)
    else:
        lock.acquire()  # four lines below the first one


@contextmanager
def waiting_at(depth: int) -> Iterator[int]:
    """A thread that waits for a lock below some calls; yields its identifier."""
    with (lock := threading.Lock()):
        thread = threading.Thread(target=deep, args=(depth, lock))
        thread.start()
        ident = thread.ident or 0
        while place(ident) != (deep.__code__, deep.__code__.co_firstlineno + 4):
            pass
        yield ident
    thread.join()


def place(thread: int) -> tuple[CodeType, int | None]:
    frame = sys._current_frames()[thread]
    return frame.f_code, frame.f_lineno


@pytest.mark.parametrize("depth", [0, 1, 20, 24, 25, 26, 30, 60, 90, 100, 200])
def test_all_frames_of_a_thread_are_read(depth: int) -> None:
    with waiting_at(depth) as thread:
        known = list(callers_of(sys._current_frames()[thread]))  # it stays where it is
        assert len(known) > depth
        assert frames_of(thread, 500) == known
        assert frames_of(thread, len(known)) == known
        assert frames_of(thread, len(known) - 1) == known[:-1]
        assert frames_of(thread, 2) == known[:2]
        assert frames_of(thread, 1) == known[:1]
        lines = [(frame.f_code, frame.f_lineno) for frame in known]
        assert list(lines_of(thread, lambda code: True)) == lines[:128]
        line = next(line for code, line in lines if code is deep.__code__)
        assert next(lines_of(thread, lambda code: code is deep.__code__)) == (deep.__code__, line)


def test_a_thread_that_has_ended_has_no_frames() -> None:
    with waiting_at(3) as thread:
        pass
    assert frames_of(thread, 500) == []
    assert list(lines_of(thread, lambda code: True)) == []


def test_what_is_read_of_a_thread_that_runs_are_frames() -> None:
    over = threading.Event()

    def call(depth: int) -> None:
        if depth:
            call(depth - 1)

    def run() -> None:
        while not over.is_set():
            call(40)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(2_000):
            frames = frames_of(thread.ident or 0, 500)
            assert frames
            assert all(type(each) is FrameType for each in frames)
    finally:
        over.set()
        thread.join()
