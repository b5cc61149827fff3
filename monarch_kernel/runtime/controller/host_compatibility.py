"""Checks whether a host that joins can work with the controller: software versions, and its clock. Pure.

Values travel as pickles of Python and tensors of torch, and the messages between processes change with the version of
monarch_kernel. So the controller refuses a host with another minor version of Python or torch, or another version of
monarch_kernel, before anything runs there. Smaller differences cause a warning. Different builds of one version
(``2.9.0+cpu``, ``2.9.0+cu128``) count as the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from monarch_kernel.net.wire.messages import Software

__all__ = [
    "MAX_SKEW_S",
    "Clock",
    "Comparison",
    "Difference",
    "clock_warning",
    "compare",
    "differences",
    "refusal",
    "software_table",
]

MAX_SKEW_S = 1.0
_PYTHON = "Python"
_OURS = "monarch_kernel"
_TITLES = ("host", "executable")


@dataclass(frozen=True)
class Difference:
    """A difference between the versions of a host and of the controller.

    Attributes:
        what: ``Python``, or a package.
        here: The version of the controller; empty if it is not installed.
        there: The same for the host.
        matters: Whether the two can't work together.
    """

    what: str
    here: str
    there: str
    matters: bool

    def __str__(self) -> str:
        return f"{self.what} is {_shown(self.there)} there and {_shown(self.here)} here"


@dataclass(frozen=True)
class Clock:
    """A host's clock.

    Attributes:
        offset_s: By how much it is ahead of the controller's, in seconds.
        error_s: The possible error of this, from the time that the messages took.
    """

    offset_s: float
    error_s: float

    @classmethod
    def read(cls, sent_s: float, at_s: float, received_s: float) -> Clock:
        """Compare clocks.

        Args:
            sent_s: When the request was sent, by the controller's clock.
            at_s: When the host answered, by its clock.
            received_s: When the answer arrived, by the controller's clock.
        """
        return cls(at_s - (sent_s + received_s) / 2, max(0.0, received_s - sent_s) / 2)


@dataclass(frozen=True)
class Comparison:
    """The differences between hosts and the controller.

    Attributes:
        table: A table of versions, if some hosts were refused; else empty.
        warnings: Warnings of smaller differences, and of clocks.
    """

    table: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def compare(here: Software, hosts: Sequence[tuple[str, Software, Clock | None]]) -> Comparison:
    """Compare hosts, each with its name, with the controller."""
    by_difference: dict[Difference, list[str]] = {}
    for name, there, _ in hosts:
        for difference in differences(here, there):
            by_difference.setdefault(difference, []).append(name)
    warnings = [
        f"{each.what} is {_shown(each.there)} on {_listed(names)} and {_shown(each.here)} here"
        for each, names in by_difference.items()
        if not each.matters
    ]
    warnings += filter(None, (clock_warning(name, clock) for name, _, clock in hosts if clock is not None))
    is_refused = any(difference.matters for difference in by_difference)
    table = software_table(here, [(name, there) for name, there, _ in hosts]) if is_refused else []
    return Comparison(tuple(table), tuple(warnings))


def differences(here: Software, there: Software) -> list[Difference]:
    """List the versions that differ, those that matter first."""
    ours, theirs = _versions(here), _versions(there)
    found = []
    for what in [*ours, *(what for what in theirs if what not in ours)]:
        one, other = ours.get(what, ""), theirs.get(what, "")
        if _release(one) != _release(other):
            found.append(Difference(what, one, other, _matters(what, one, other)))
    return sorted(found, key=lambda difference: not difference.matters)


def refusal(here: Software, there: Software) -> str:
    """Say why a host can't work with the controller, in one line; empty if it can."""
    why = [str(difference) for difference in differences(here, there) if difference.matters]
    return f"{'; '.join(why)} ({there.executable} there, {here.executable} here)" if why else ""


def software_table(here: Software, hosts: Iterable[tuple[str, Software]]) -> list[str]:
    """Make a row for the controller and one for all hosts that run the same, with the versions that differ anywhere.

    Args:
        here: The controller's versions.
        hosts: The name of each host, and its versions.
    """
    by_software: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for name, there in hosts:
        by_software.setdefault((there.executable, tuple(_versions(there).items())), []).append(name)
    rows = [("this kernel", here.executable, _versions(here))]
    rows += [(_listed(names), executable, dict(versions)) for (executable, versions), names in by_software.items()]
    packages = [what for what in rows[0][2] if len({_release(row[2].get(what, "")) for row in rows}) > 1]
    table = [(*_TITLES, *packages)]
    table += [(name, python, *(_shown(versions.get(what, "")) for what in packages)) for name, python, versions in rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]


def clock_warning(name: str, clock: Clock) -> str:
    """Warn of a clock that is certainly off; empty if it may be right."""
    if abs(clock.offset_s) - clock.error_s <= MAX_SKEW_S:
        return ""
    which = "ahead of" if clock.offset_s > 0 else "behind"
    return f"the clock of {name} is {abs(clock.offset_s):.1f} s {which} this machine's"


def _versions(software: Software) -> dict[str, str]:
    return {_PYTHON: software.python, **software.packages}


def _matters(what: str, one: str, other: str) -> bool:
    if what == _OURS or not one or not other:
        return True
    parts = 2 if what in (_PYTHON, "torch") else 1
    return _release(one)[:parts] != _release(other)[:parts]


def _release(version: str) -> tuple[str, ...]:
    """The numbers of a version, without the build."""
    return tuple(version.partition("+")[0].split(".")) if version else ()


def _shown(version: str) -> str:
    return version or "not installed"


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{', '.join(names[:3])} and {len(names) - 3} more"
