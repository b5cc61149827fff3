"""Restricts signal handlers of this package to the process that installed them: forks of the process replace them.

Theory of operation
===================

A process that the user's code forks, such as a worker of ``multiprocessing``, starts with a copy of all signal handlers. A
handler of a rank or of the kernel belongs to that rank or kernel: it raises, or ignores the signal, by the state of a process
that the child is not. An exception that it raises can also be lost, since Python swallows the exceptions of functions that
`os.register_at_fork` calls. A worker that loses SIGTERM runs on, and ``Pool.terminate`` waits for it forever.

So each handler is marked with its replacement in forks (`in_forks`), and a fork has three steps:

1. Before it, the forking thread blocks the signals that have such handlers. A signal that arrives from now on waits. (Without
   that, Python forgets in the child which signals it has noted, those of the child included.)
2. In the child each marked handler is replaced. The zygote imports this module first, so in children of ranks this step comes
   before the fork functions of torch and of this package.
3. Parent and child restore the signal mask that they had before. A signal that arrived meanwhile acts as in any other process.
   But until the fork functions that are registered before the first fork have run, SIGINT ends the child at once: Python would
   swallow the KeyboardInterrupt.

Handlers that the user's code has installed stay as they are.

An exception that a handler raises in the parent while Python calls the fork functions is lost, too. So a handler that raises
checks `Forking`, and sends its signal again.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.getsignal() makes enums of its results
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

__all__ = ["Forking", "in_forks"]

F = TypeVar("F", bound=Callable[..., object])

_replacements: dict[object, Callable[[Any], Any]] = {}
_blocked_before: dict[int, Iterable[int]] = {}  # by the ident of the forking thread
_raising: list[int] = []  # the signals that raise KeyboardInterrupt in a child, once its fork functions have run
_has_last = False  # whether `_let_raise` is registered


def in_forks(replacement: Callable[[Any], Any]) -> Callable[[F], F]:
    """Mark a method as a signal handler of one process, which its forks replace.

    Args:
        replacement: returns the handler for a fork, given the object that the method belongs to.
    """

    def mark(method: F) -> F:
        _replacements[method] = replacement
        return method

    return mark


def _replaced(handler: Any) -> Any:
    """Return the replacement of a handler in a fork; the handler itself if it is not marked."""
    while (replacement := _replacements.get(getattr(handler, "__func__", None))) is not None:
        handler = replacement(handler.__self__)
    return handler


def _ours() -> dict[int, Any]:
    """Return the signals whose handlers are marked, with the replacement of each."""
    handlers = {number: _signal.getsignal(number) for number in range(1, _signal.NSIG)}
    replaced = {number: _replaced(handler) for number, handler in handlers.items()}
    return {number: handler for number, handler in replaced.items() if handler is not handlers[number]}


class Forking:
    """Knows whether this process is forking; exists as long as the process.

    Attributes:
        is_now: whether Python is calling fork functions, except those that were registered later.
    """

    def __init__(self) -> None:
        self.is_now = False
        # Not Python functions: a signal handler may run at the start of one.
        begin, end = (functools.partial(setattr, self, "is_now", value) for value in (True, False))
        os.register_at_fork(before=begin, after_in_parent=end, after_in_child=end)


def _before() -> None:
    global _has_last
    if not _has_last:  # now, so that it follows the fork functions of all modules that are loaded
        _has_last = True
        os.register_at_fork(after_in_child=_let_raise)
    thread = threading.get_ident()
    # First, as a handler may raise while the signals are being blocked.
    _blocked_before[thread] = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    signal.pthread_sigmask(signal.SIG_BLOCK, _ours())


def _after_in_parent() -> None:
    blocked = _blocked_before.pop(threading.get_ident(), None)
    if blocked is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _after_in_child() -> None:
    _raising.clear()
    try:
        for number, handler in _ours().items():
            if (
                handler is signal.default_int_handler
            ):  # its exception would be lost here: use SIG_DFL until `_let_raise`
                _raising.append(number)
                handler = signal.SIG_DFL
            signal.signal(number, handler)
    finally:
        _after_in_parent()
        _blocked_before.clear()  # entries of threads that the child does not have


def _let_raise() -> None:
    while _raising:
        signal.signal(_raising.pop(), signal.default_int_handler)


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
