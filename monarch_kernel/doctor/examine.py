"""All that is looked at, one after the other; what hangs or fails is told, and the others go on.

Each check runs on a thread of its own, which is left to itself when its time is over: a file system that does not answer can't
be interrupted. What may hang otherwise runs in a child, which is killed (`children`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from monarch_kernel.doctor import connectivity, engines, jupyter, machine, sessions, software
from monarch_kernel.doctor.report import Finding, Sign

__all__ = ["CHECKS", "ITEM_WIDTH", "Check", "checks", "examine"]

_DEADLINE_S = 10.0
_MARGIN_S = 5.0  # so that a check that waits for a child can say what became of it

ITEM_WIDTH = 19
"""Of the longest of the usual items, in characters."""


class Check(NamedTuple):
    """One check.

    Attributes:
        item: what is looked at; findings may be more exact.
        look: does it.
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
    Check("memory of others", connectivity.memory_road, connectivity.MEMORY_S + _MARGIN_S),
    Check("temporary files", machine.temporary_files),
    Check("open files", machine.descriptors),
    Check("processes", machine.tasks),
    Check("pidfd", connectivity.process_descriptors),
    Check("session's sockets", connectivity.session_socket, 2 * _DEADLINE_S),
    Check("loopback", connectivity.loopback, 2 * _DEADLINE_S),
    Check("addresses", connectivity.addresses),
    Check("kernel in Jupyter", jupyter.kernels, jupyter.KERNEL_S),
    Check("panel in JupyterLab", jupyter.panel),
    Check("engines", engines.engines),
    Check("RDMA", engines.rdma),
    Check("leftovers", sessions.leftovers),
)
_RANK = Check("a rank", sessions.rank, sessions.RANK_S + _MARGIN_S)


def checks(*, quick: bool = False) -> Sequence[Check]:
    """All checks, in their order.

    Args:
        quick: leave out that of a rank, which takes seconds.
    """
    return CHECKS if quick else (*CHECKS, _RANK)


def examine(what: Iterable[Check]) -> Iterator[Finding]:
    """Make checks, and give what each finds as soon as it has found it."""
    for check in what:
        yield from _found(check)


def _found(check: Check) -> Sequence[Finding]:
    found: list[Finding] = []
    errors: list[Exception] = []

    def look() -> None:
        try:
            found.extend(check.look())
        except Exception as error:  # of one check, which must not keep the others from being made
            errors.append(error)

    thread = threading.Thread(target=look, name="monarch-doctor", daemon=True)
    thread.start()
    thread.join(check.deadline_s)
    if thread.is_alive():
        said = f"no answer within {check.deadline_s:g} s"
        return [
            Finding(check.item, Sign.PROBLEM, said, "see whether file systems and the network of this machine answer")
        ]
    for error in errors:
        said = f"it could not be looked at: {type(error).__name__}: {error}"
        is_missing = isinstance(error, ImportError)
        remedy = "install what can't be imported, again if it is there" if is_missing else "report it, with this list"
        return [*found, Finding(check.item, Sign.PROBLEM, said, remedy)]
    return found
