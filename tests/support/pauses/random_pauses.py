"""Random pauses at the places where processes and threads meet.

These are calls of the standard library and of ZeroMQ: messages sent and received, threads and processes started, signals sent,
waits that end. Each is delayed with a small probability, as if the operating system ran another process there for that long.
The places need no knowledge of the product, so they stay right when it changes.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

__all__ = ["MEAN_S", "MOST_S", "PROBABILITY", "VARIABLE", "Pauses", "install"]

VARIABLE = "MONARCH_TEST_PAUSES"
"""Environment variable with the seed; where it is missing there is no pause."""

PROBABILITY = 0.015
"""Part of the calls that is delayed."""

MEAN_S = 0.02
"""Mean of a delay, in seconds; delays are distributed exponentially."""

MOST_S = 0.3
"""Longest delay, in seconds."""

BEFORE: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (os, ("kill", "killpg", "pidfd_open")),
    (signal, ("pidfd_send_signal",)),
    (socket.socket, ("send", "sendall", "sendmsg", "connect")),
)
"""Calls that are delayed before they act."""

AFTER: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (os, ("waitpid",)),
    (socket.socket, ("recv", "recv_into", "recvmsg", "accept")),
    (threading.Condition, ("wait",)),
    (subprocess.Popen, ("__init__",)),
)
"""Calls whose return is delayed."""


class Pauses:
    """Draws the delay of each call; the same seed gives the same delays."""

    def __init__(self, seed: str, sleep: Callable[[float], None] | None = None) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._sleep = sleep

    def __call__(self) -> None:
        """Pause, with a small probability."""
        if self._random.random() < PROBABILITY:
            (self._sleep or time.sleep)(min(self._random.expovariate(1 / MEAN_S), MOST_S))

    def diverge(self, number: int) -> None:
        """Draw other delays from now on than the process that this one was forked from."""
        self._random = random.Random(f"{self._seed} {number}")


def of_library(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Let the frames of a wrapper count as the standard library's: stacks that the product reports name the code around it."""
    plain: Any = wrapper
    plain.__code__ = plain.__code__.replace(co_filename=threading.__file__)
    return wrapper


def before(pause: Pauses, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call so that a pause may precede it."""

    @functools.wraps(call)
    @of_library
    def delayed(*args: Any, **options: Any) -> Any:
        pause()
        return call(*args, **options)

    return delayed


def after(pause: Pauses, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call so that a pause may follow it, unless it raises: a loop may ask a thousand times for what is not there."""

    @functools.wraps(call)
    @of_library
    def delayed(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        pause()
        return result

    return delayed


def starting(pause: Pauses, start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Wrap the start of a thread so that either side, the new thread or its creator, may be late."""

    @functools.wraps(start)
    @of_library
    def delayed(thread: threading.Thread) -> None:
        thread.run = before(pause, thread.run)  # type: ignore[method-assign]
        start(thread)
        pause()

    return delayed


class WithPauses(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ZeroMQ's module of sockets as usual, then wraps their calls; a process that does not use it never imports it."""

    NAME = "zmq.sugar.socket"

    def __init__(self, pause: Pauses) -> None:
        self._pause = pause
        self._loader: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Find the module by the other finders."""
        if name != self.NAME:
            return None
        with self._out_of_the_way():
            spec = importlib.util.find_spec(name)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> ModuleType | None:
        """Create it as its own loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute it, and wrap what it defines."""
        self._loader.exec_module(module)
        sockets: Any = module
        sockets.Socket.send = before(self._pause, sockets.Socket.send)
        sockets.Socket.recv = after(self._pause, sockets.Socket.recv)

    @contextmanager
    def _out_of_the_way(self) -> Iterator[None]:
        sys.meta_path.remove(self)
        try:
            yield
        finally:
            sys.meta_path.insert(0, self)


def install() -> None:
    """Make pauses in this process and in those that it forks, if the environment has a seed."""
    if not (seed := os.environ.get(VARIABLE)):
        return
    pause = Pauses(f"{seed} {os.getpid()}")
    for wrap, places in ((before, BEFORE), (after, AFTER)):
        for owner, names in places:
            for name in names:
                setattr(owner, name, wrap(pause, getattr(owner, name)))
    threading.Thread.start = starting(pause, threading.Thread.start)  # type: ignore[method-assign]

    def in_child() -> None:
        pause.diverge(os.getpid())
        pause()

    os.register_at_fork(after_in_parent=pause, after_in_child=in_child)
    sys.meta_path.insert(0, WithPauses(pause))
