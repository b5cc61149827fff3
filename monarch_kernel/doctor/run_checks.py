"""Runs all checks in order. A check that hangs or fails becomes a finding, and the next check runs.

Each check runs on its own thread. The doctor abandons the thread at the deadline of the check, because a call to a file system
that does not answer can't be interrupted. Code that may hang for other reasons runs in a child process, which can be killed
(`children`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from monarch_kernel.doctor import connectivity, engines, jupyter, machine, sessions, software
from monarch_kernel.doctor.report import Finding, Sign

__all__ = ["CHECKS", "ITEM_WIDTH", "Check", "checks", "examine"]

_DEADLINE_S = 10.0
_MARGIN_S = 5.0  # beyond the timeout of a child, so that the check can report it

ITEM_WIDTH = 19
"""Width of the longest name of an item, in characters."""


class Check(NamedTuple):
    """One check.

    Attributes:
        item: what it checks; its findings may name it more exactly.
        look: the function that checks it.
        deadline_s: how long it may take, in seconds.
    """

    item: str
    look: Callable[[], Iterable[Finding]]
    deadline_s: float = _DEADLINE_S


CHECKS: Sequence[Check] = (
    Check("Python", software.python),
    Check(software.DISTRIBUTION, software.package),
    Check("required packages", software.packages),
    Check("torch", software.torch, software.TORCH_S + _MARGIN_S),
    Check("cores", machine.processors),
    Check("memory", machine.memory),
    Check("shared memory", machine.shared_memory),
    Check("process memory", connectivity.memory_access, connectivity.MEMORY_S + _MARGIN_S),
    Check("temporary files", machine.temporary_files),
    Check("open files", machine.descriptors),
    Check("processes", machine.tasks),
    Check("pidfd", connectivity.process_descriptors),
    Check("session sockets", connectivity.session_socket, 2 * _DEADLINE_S),
    Check("loopback", connectivity.loopback, 2 * _DEADLINE_S),
    Check("addresses", connectivity.addresses),
    Check("kernel in Jupyter", jupyter.kernels, jupyter.KERNEL_S),
    Check("panel in JupyterLab", jupyter.panel),
    Check("engines", engines.engines),
    Check("RDMA", engines.rdma),
    Check("leftovers", sessions.leftovers),
    Check("background work", sessions.background),
)
_RANK = Check("test rank", sessions.rank, sessions.RANK_S + _MARGIN_S)


def checks(*, quick: bool = False) -> Sequence[Check]:
    """Return all checks, in order.

    Args:
        quick: leave out the check that starts a rank, which takes seconds.
    """
    return CHECKS if quick else (*CHECKS, _RANK)


def examine(what: Iterable[Check]) -> Iterator[Finding]:
    """Run checks, and yield the findings of each as soon as it ends."""
    for check in what:
        yield from _found(check)


def _found(check: Check) -> Sequence[Finding]:
    found: list[Finding] = []
    errors: list[Exception] = []

    def look() -> None:
        try:
            found.extend(check.look())
        except Exception as error:  # the failure of one check must not prevent the others
            errors.append(error)

    thread = threading.Thread(target=look, name="monarch-doctor", daemon=True)
    thread.start()
    thread.join(check.deadline_s)
    if thread.is_alive():
        said = f"no answer within {check.deadline_s:g} s"
        return [
            Finding(
                check.item, Sign.PROBLEM, said, "check whether the file systems and the network of this machine respond"
            )
        ]
    for error in errors:
        said = f"the check failed: {type(error).__name__}: {error}"
        is_missing = isinstance(error, ImportError)
        remedy = "install or reinstall the missing module" if is_missing else "report it, with this list"
        return [*found, Finding(check.item, Sign.PROBLEM, said, remedy)]
    return found
