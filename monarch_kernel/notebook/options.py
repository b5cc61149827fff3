"""The magics' command lines: what may be written, and one-line errors that say what is allowed."""

from __future__ import annotations

import argparse
import functools
import keyword
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

__all__ = [
    "COMMANDS",
    "RemoteOptions",
    "UpOptions",
    "UsageProblem",
    "option_names",
    "parse_remote",
    "parse_up",
    "tokens",
]

COMMANDS = {
    "up": "bring a mesh up",
    "show": "show the live view of a mesh, or of all",
    "down": "end a mesh, or all of them",
    "interrupt": "interrupt what a mesh runs",
}


class UsageProblem(ValueError):
    """A magic was misused; the text is one line which says what to write."""


@dataclass(frozen=True)
class UpOptions:
    """``%mesh up``.

    Attributes:
        name: of the mesh.
        axes: axis -> number of ranks along it.
        gpus: whether each rank was asked to have a GPU (``--gpus``).
        device: ``auto``, ``cpu`` or ``cuda``.
        env: added to the environment of the ranks.
    """

    name: str
    axes: dict[str, int]
    gpus: bool
    device: str
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RemoteOptions:
    """``%%remote``.

    Attributes:
        selector: expression that gives a mesh; empty for the one last brought up.
        out: variable that takes the values of the last expression; empty for none.
        raw: whether to show every line of every rank for itself.
        timeout_s: after which the cell is interrupted; None for never.
        background: whether the notebook goes on meanwhile.
    """

    selector: str = ""
    out: str = ""
    raw: bool = False
    timeout_s: float | None = None
    background: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageProblem(f"{self.prog}: {message}")


def _up_parser() -> _Parser:
    parser = _Parser("%mesh up", add_help=False, allow_abbrev=False)
    parser.add_argument("name", nargs="?", default="mesh")
    parser.add_argument("-n")
    parser.add_argument("--gpus")
    parser.add_argument("--axes")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--on", choices=["local"], default="local")
    parser.add_argument("--env", action="append", default=[])
    return parser


@functools.cache
def _remote_parser() -> _Parser:
    parser = _Parser("%%remote", add_help=False, allow_abbrev=False)
    parser.add_argument("selector", nargs="?", default="")
    parser.add_argument("--out", default="")
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--timeout")
    return parser


def option_names(magic: str) -> list[str]:
    """The options of ``up`` or ``remote``, for completion and for errors."""
    parser = _up_parser() if magic == "up" else _remote_parser()
    return sorted(name for action in parser._actions for name in action.option_strings)


def tokens(line: str) -> list[str]:
    """Split a line at white space that is neither quoted nor inside brackets: ``t[0, 1:3] --out x`` has three tokens.

    Raises:
        UsageProblem: a quotation is not closed.
    """
    found: list[str] = []
    depth = 0
    try:
        words = re.findall(r"\s+|[^\s]+", line)
        for word in words:
            if word.isspace():
                if depth > 0 and found:
                    found[-1] += word
                continue
            if depth > 0 and found:
                found[-1] += word
            else:
                found.append(word)
            depth += sum(word.count(c) for c in "([{") - sum(word.count(c) for c in ")]}")
        if any('"' in token or "'" in token for token in found if token.startswith(("--", '"', "'"))):
            return shlex.split(line)
    except ValueError as error:
        raise UsageProblem(f"{line.strip()!r}: {error}") from None
    return found


def _parse(parser: _Parser, line: str, magic: str) -> argparse.Namespace:
    known, unknown = parser.parse_known_args(tokens(line))
    if unknown:
        what = "option" if unknown[0].startswith("-") else "argument"
        raise UsageProblem(
            f"{parser.prog}: unknown {what} {unknown[0]!r}; the options are {', '.join(option_names(magic))}"
        )
    return known


def _count(text: str, option: str) -> int:
    try:
        count = int(text)
    except ValueError:
        raise UsageProblem(f"%mesh up: {option} takes a whole number, such as 4, not {text!r}") from None
    if count < 1:
        raise UsageProblem(f"%mesh up: {option} must be at least 1, not {count}")
    return count


def _name(text: str, what: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise UsageProblem(f"{what} must be a Python variable name, not {text!r}, such as trainers")
    return text


def _axes(text: str) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals:
            raise UsageProblem(f"%mesh up: --axes takes NAME=SIZE,..., such as --axes dp=2,tp=4; {part!r} is not that")
        name = _name(name.strip(), "%mesh up: an axis")
        if name in axes:
            raise UsageProblem(f"%mesh up: axis {name!r} is named twice in --axes {text}")
        axes[name] = _count(size.strip(), f"the size of axis {name}")
    return axes


def parse_up(line: str, gpus_here: int) -> UpOptions:
    """Read what follows ``%mesh up``.

    Args:
        line: the rest of the line.
        gpus_here: GPUs of this machine.

    Raises:
        UsageProblem: it can't be; the text says why and what to write.
    """
    known = _parse(_up_parser(), line, "up")
    count = None if known.n is None else _count(known.n, "-n")
    gpus = None if known.gpus is None else _count(known.gpus, "--gpus")
    name = _name(known.name, "%mesh up: the name of a mesh")
    if count is not None and gpus is not None:
        raise UsageProblem("%mesh up: give -n N (ranks) or --gpus N (ranks with a GPU each), not both")
    if gpus is not None and known.device == "cpu":
        raise UsageProblem("%mesh up: --gpus asks for GPUs and --device cpu for none; use -n with --device cpu")
    wants_gpus = gpus is not None or known.device == "cuda"
    axes = _axes(known.axes) if known.axes else {}
    size = count or gpus
    if axes:
        total = 1
        for axis in axes.values():
            total *= axis
        if size is not None and size != total:
            raise UsageProblem(f"%mesh up: --axes {known.axes} makes {total} ranks, but {size} were asked for")
        size = total
    elif size is None:
        if known.device == "cpu" or not gpus_here:
            raise UsageProblem("%mesh up: say how many ranks: -n N (this machine has no GPU to count)")
        size = gpus_here
    if wants_gpus and size > gpus_here:
        raise UsageProblem(
            f"%mesh up: {size} GPUs were asked for, this machine has {gpus_here}; ask for fewer, "
            f"or for ranks without a GPU: -n {size} --device cpu"
        )
    device = known.device
    if device == "auto" and not wants_gpus and gpus_here and size > gpus_here:
        raise UsageProblem(
            f"%mesh up: {size} ranks can't have a GPU each, this machine has {gpus_here}; add --device cpu"
        )
    env = {}
    for pair in known.env:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageProblem(f"%mesh up: --env takes NAME=VALUE, not {pair!r}")
        env[key] = value
    return UpOptions(name, axes or {"gpus": size}, wants_gpus, "cuda" if wants_gpus else device, env)


def parse_remote(line: str) -> RemoteOptions:
    """Read what follows ``%%remote``.

    Raises:
        UsageProblem: it can't be; the text says why and what to write.
    """
    known = _parse(_remote_parser(), line, "remote")
    if known.out:
        _name(known.out, "%%remote: --out")
    timeout_s = None
    if known.timeout is not None:
        try:
            timeout_s = float(known.timeout)
        except ValueError:
            raise UsageProblem(f"%%remote: --timeout takes seconds, not {known.timeout!r}") from None
        if not timeout_s > 0:
            raise UsageProblem(f"%%remote: --timeout must be more than 0 seconds, not {known.timeout}")
    return RemoteOptions(known.selector, known.out, known.raw, timeout_s, known.background)


def one_name(rest: Sequence[str], command: str, known: Sequence[str], *, optional: bool) -> str:
    """The one mesh that a command names; empty if it may be left out and is.

    Raises:
        UsageProblem: it is unknown, missing, or one of several.
    """
    have = ", ".join(known) or "none"
    if not known and not (optional and not rest):
        raise UsageProblem(f"%mesh {command}: no mesh is up; bring one up with: %mesh up NAME -n 4")
    if not rest:
        if optional:
            return ""
        raise UsageProblem(f"%mesh {command}: name a mesh ({have})")
    if len(rest) > 1:
        raise UsageProblem(f"%mesh {command}: name one mesh, not {' '.join(rest)!r}")
    if rest[0] not in known:
        raise UsageProblem(f"%mesh {command}: there is no mesh {rest[0]!r}; there is: {have}")
    return rest[0]
