"""The magics' command lines: what may be written, and one-line errors that say what is allowed."""

from __future__ import annotations

import argparse
import functools
import keyword
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, get_args

from monarch_kernel.launch.engines import ENGINES, Engine, Option
from monarch_kernel.supervise.policy import Restart

__all__ = [
    "COMMANDS",
    "LogsOptions",
    "RemoteOptions",
    "UpOptions",
    "UsageProblem",
    "engine_of",
    "option_names",
    "parse_logs",
    "parse_remote",
    "parse_up",
    "parser_of",
    "repeatable",
    "split_options",
    "tokens",
]

COMMANDS = {
    "up": "bring a mesh up",
    "show": "show the live view of a mesh, or of all",
    "down": "end a mesh, or all of them",
    "attach": "take up a mesh that outlived its kernel",
    "interrupt": "interrupt what it runs, keep its state; --abort: abort process groups, too",
    "heal": "start new processes in place of dead ranks; the others keep their state",
    "restart": "end ranks, and start new processes in their places",
    "sync": "send edited modules to its ranks, and load anew what is imported there",
    "stacks": "say what every rank does now",
    "debug": "look at a rank in pdb, where it failed or stopped",
    "logs": "show what ranks have written, also what was left out",
    "help": "what a command takes",
}

_GROUPS = "equal lines of several ranks are shown once here, with their ranks; --raw shows each rank's own"
# Options of ipyparallel's %%px that have no meaning here, and what there is instead.
_PEERS = {
    "--group-outputs": _GROUPS,
    "--progress-after": "the table of the mesh shows what its ranks do",
    "--signal-on-interrupt": "Kernel > Interrupt raises KeyboardInterrupt on the ranks",
    "-e": _GROUPS,
    "--engine": _GROUPS,
    "--verbose": "a cell that runs is seen in the table of its mesh",
}


_LIST = ", ".join(ENGINES)


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
        detach: whether the mesh outlives the kernel.
        restart: what is replaced when a rank dies: nothing (``never``), that ``rank``, or the ``mesh``.
        max_restarts: how often that is done.
        engine: who provides the hosts (``--on``).
        hosts: how many; 0 for this machine itself, without an axis of its own.
        host_names: what they are called, for engines that do not choose them.
        python: interpreter of the hosts; empty for that of the notebook.
        wait_s: how long they may take to come, in seconds; None for as long as is usual.
        lost_after_s: how long a host may be silent, in seconds, before it is given up.
        dry_run: whether to say only what would be asked for.
        of_engine: fields of the engine's own options -> values.
    """

    name: str
    axes: dict[str, int]
    gpus: bool
    device: str
    env: dict[str, str] = field(default_factory=dict)
    detach: bool = False
    restart: Restart = "never"
    max_restarts: int = 3
    engine: str = "local"
    hosts: int = 0
    host_names: tuple[str, ...] = ()
    python: str = ""
    wait_s: float | None = None
    lost_after_s: float = 1.0
    dry_run: bool = False
    of_engine: dict[str, Any] = field(default_factory=dict)

    @property
    def per_host(self) -> int:
        """How many ranks each host has."""
        return math.prod(self.axes.values()) // max(1, self.hosts)


@dataclass(frozen=True)
class RemoteOptions:
    """``%%remote``.

    Attributes:
        selector: expression that gives a mesh; empty for the one last brought up.
        out: variable that takes the values of the last expression; empty for none.
        raw: whether to show every line of every rank for itself.
        timeout_s: after which the cell is interrupted; None for never.
        background: whether the cell returns at once, while the ranks go on.
        targets: which ranks of the selected mesh, such as ``0,2``, ``1-3``, ``0:4:2``; empty for all.
        stream: whether output is shown while the cell runs, or only at its end.
        local: whether the kernel runs the cell, too.
    """

    selector: str = ""
    out: str = ""
    raw: bool = False
    timeout_s: float | None = None
    background: bool = False
    targets: str = ""
    stream: bool = True
    local: bool = False


@dataclass(frozen=True)
class LogsOptions:
    """``%mesh logs``.

    Attributes:
        selector: expression that gives a mesh; empty for the one last brought up.
        lines: of each rank, at most.
        stderr: whether to show only that stream.
        raw: whether to show every line of every rank for itself.
    """

    selector: str
    lines: int = 200
    stderr: bool = False
    raw: bool = False


class _Parser(argparse.ArgumentParser):
    """The one place that knows what a magic takes: parsing, help, completion and errors read it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageProblem(f"{self.prog}: {message}")


def _up_parser(magic: str, engine: str = "") -> _Parser:
    parser = _Parser(magic)
    add = parser.add_argument
    add("name", nargs="?", default="mesh", metavar="NAME", help="becomes a variable, the mesh (default: mesh)")
    add("-n", metavar="N", help="bring up N ranks (processes) on this machine, or on each host")
    add("--gpus", metavar="N", help="ranks with a GPU each")
    add("--axes", metavar="A=N,B=M", help="name the axes of all ranks, such as dp=2,tp=4; else gpus, or hosts and gpus")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto", help="auto (default): GPUs where there are enough")
    add("--on", choices=list(ENGINES), default="local", metavar="ENGINE", help=f"who provides hosts: {_LIST}")
    add("--hosts", metavar="N|NAMES", help="how many; with --on ssh which: a,b,c, or a file that has one a line")
    add("--python", metavar="PATH", help="interpreter of the hosts (default: the path of this one)")
    add("--wait", metavar="S", help="give all back if they are not up in S seconds")
    add("--lost-after", metavar="S", help="a host that is silent so long is lost (default: 1)")
    add("--dry-run", action="store_true", help="say what the engine would be asked for, and ask for nothing")
    add("--env", action="append", default=[], metavar="K=V", help="add to the ranks' environment; may be repeated")
    add("--restart", choices=get_args(Restart), default="never", help="what is replaced when a rank dies")
    add(
        "--max-restarts",
        default="3",
        metavar="N",
        help="how often, within 5 minutes, before it is given up (default: 3)",
    )
    add("--detach", action="store_true", help="the mesh outlives the kernel, until %mesh down")
    for option in ENGINES[engine].options if engine else ():
        if not option.metavar:
            add(*option.flags, dest=_dest(option), action="store_true", help=option.help)
        elif option.repeated:
            add(
                *option.flags, dest=_dest(option), action="append", default=[], metavar=option.metavar, help=option.help
            )
        else:
            add(*option.flags, dest=_dest(option), metavar=option.metavar, help=option.help)
    return parser


def _dest(option: Option) -> str:
    return f"of_engine.{option.field}"


def engine_of(words: Sequence[str]) -> str:
    """The engine that a line of ``%mesh up`` names; empty if it names none, or one that there is not."""
    for i, word in enumerate(words):
        flag, equals, name = word.partition("=")
        if flag == "--on":
            name = name if equals else "".join(words[i + 1 : i + 2])
            return name if name in ENGINES else ""
    return ""


def _remote_parser(magic: str) -> _Parser:
    parser = _Parser(magic)
    add = parser.add_argument
    add(
        "selector",
        nargs="?",
        default="",
        metavar="SELECTOR",
        help="t, t[0], t[0:4], t.slice(dp=0); left out, the mesh last brought up",
    )
    add("--mesh", metavar="NAME", help="the same as SELECTOR")
    add(
        "-t",
        "--targets",
        "--ranks",
        default="",
        metavar="RANKS",
        help="only these ranks, as output numbers them: 0,2 or 1-3 or 0:4:2 or all",
    )
    add("-o", "--out", default="", metavar="NAME", help="NAME becomes a ValueMesh of every rank's last expression")
    add("--raw", action="store_true", help="show each rank's lines for themselves, equal ones too")
    add("--timeout", metavar="S", help="interrupt the ranks after S seconds")
    # That is for cells: elsewhere it is read, to be refused in words of its own, but not offered.
    of_local = "run the cell here, too, when the ranks have run it" if magic == "%%remote" else argparse.SUPPRESS
    add("--local", action="store_true", help=of_local)
    add("-a", "--background", "--noblock", action="store_true", help="return at once; the ranks go on")
    add("-b", "--block", action="store_true", help="wait for the ranks (default)")
    add("--stream", action="store_true", help="show output while the cell runs (default)")
    add("--no-stream", action="store_true", help="show output when the cell has ended")
    return parser


def _logs_parser(magic: str) -> _Parser:
    parser = _Parser(magic)
    add = parser.add_argument
    add("selector", nargs="?", default="", metavar="SELECTOR", help="a mesh or a slice of one: t, t[0], t[0:4]")
    add("--lines", default="200", metavar="N", help="the last N of each rank (default: 200)")
    add("--stderr", action="store_true", help="only what was written there")
    add("--raw", action="store_true", help="show each rank's lines for themselves, equal ones too")
    return parser


_PARSERS: dict[str, Callable[[str], _Parser]] = {
    "%mesh up": _up_parser,
    "%mesh logs": _logs_parser,
    "%%remote": _remote_parser,
    "%autoremote": _remote_parser,
    "%remote": _remote_parser,
}


@functools.cache
def parser_of(magic: str, engine: str = "") -> _Parser | None:
    """What knows the arguments of ``%mesh COMMAND`` or ``%%remote``; None for a command without options.

    Args:
        magic: which one.
        engine: whose options ``%mesh up`` takes, too.
    """
    if engine:
        return _up_parser(magic, engine)
    make = _PARSERS.get(magic)
    return make(magic) if make else None


def option_names(magic: str, *, aliases: bool = False, engine: str = "") -> list[str]:
    """The options of ``%mesh COMMAND`` or of ``%%remote``: one spelling of each, for errors, or all, for completion."""
    parser = parser_of(magic, engine)
    names: list[str] = []
    for action in parser._actions if parser else ():
        if action.help == argparse.SUPPRESS:
            continue
        spellings = sorted(action.option_strings, key=lambda name: not name.startswith("--"))
        names += spellings if aliases else spellings[:1]
    return sorted(names)


def repeatable(magic: str, engine: str = "") -> set[str]:
    """The options that may be given several times."""
    parser = parser_of(magic, engine)
    actions = parser._actions if parser else ()
    return {name for action in actions if isinstance(action.default, list) for name in action.option_strings}


def tokens(line: str) -> list[str]:
    """Split a line at white space that is neither quoted nor inside brackets: ``t[0, 1:3] --out x`` has three tokens.

    A comment ends the line.

    Raises:
        UsageProblem: a quotation is not closed.
    """
    found: list[str] = []
    depth = 0
    line = _without_comment(line)
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


def split_options(line: str, magic: str) -> tuple[str, str]:
    """Split a line into the options with which it begins and the expression that follows.

    Only the long spellings: ``-t`` is the negative of ``t``.
    """
    parser = parser_of(magic)
    takes_value = {n: a.nargs is None for a in (parser._actions if parser else ()) for n in a.option_strings}
    end = 0
    while option := _LONG_OPTION.match(line, end):
        if option["name"] not in takes_value:
            break
        end = option.end()
        if takes_value[option["name"]] and not option["value"]:
            word = _WORD.match(line, end)
            end = word.end() if word else end
    return line[:end].strip(), line[end:].strip()


_LONG_OPTION = re.compile(r"\s*(?P<name>--[a-z-]+)(?P<value>=\S*)?(?=\s|$)")
_WORD = re.compile(r"\s*\S*")


def _without_comment(line: str) -> str:
    quote = ""
    for i, sign in enumerate(line):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "#" and (i == 0 or line[i - 1].isspace()):
            return line[:i]
    return line


def _parse(line: str, magic: str) -> argparse.Namespace:
    words = tokens(line)
    engine = engine_of(words) if magic == "%mesh up" else ""
    parser = parser_of(magic, engine)
    assert parser is not None
    for word in words:
        if magic != "%mesh up" and (instead := _PEERS.get(word.partition("=")[0])):
            raise UsageProblem(f"{magic}: there is no {word.partition('=')[0]}: {instead}")
    known, unknown = parser.parse_known_args(words)
    if unknown:
        what = "option" if unknown[0].startswith("-") else "argument"
        flag = unknown[0].partition("=")[0]
        owners = [one.name for one in ENGINES.values() if any(flag in option.flags for option in one.options)]
        if magic == "%mesh up" and owners:
            raise UsageProblem(_foreign(flag, owners, engine))
        names = ", ".join(option_names(magic, engine=engine))
        raise UsageProblem(f"{magic}: unknown {what} {unknown[0]!r}; the options are {names}")
    return known


def _foreign(flag: str, owners: Sequence[str], engine: str) -> str:
    """What is said of an option that only other engines have."""
    whose = f"{flag} is an option of --on {' and --on '.join(owners)}"
    if not engine:
        return f"%mesh up: {whose}; say --on ENGINE, too"
    own = ", ".join(option.flags[0] for option in ENGINES[engine].options)
    return f"%mesh up: {whose}; " + (f"those of --on {engine} are {own}" if own else f"--on {engine} has none")


def _count(text: str, option: str) -> int:
    try:
        count = int(text)
    except ValueError:
        raise UsageProblem(f"%mesh up: {option} takes a whole number, such as 4, not {text!r}") from None
    if count < 1:
        raise UsageProblem(f"%mesh up: {option} must be at least 1, not {count}")
    return count


def _name(text: str, what: str, example: str = "trainers") -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise UsageProblem(f"{what} must be a Python variable name, not {text!r}, such as {example}")
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


def _seconds(text: str, option: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise UsageProblem(f"%mesh up: {option} takes seconds, not {text!r}") from None
    if not 0.0 < seconds < math.inf:
        raise UsageProblem(f"%mesh up: {option} must be more than 0 seconds, not {text}")
    return seconds


def _host_names(text: str, origin: str) -> tuple[str, ...]:
    """The hosts of a list, or of a file, which may have comments, and ``slots=N`` as MPI and DeepSpeed have it."""
    lines = [line.partition("#")[0] for line in text.splitlines()]
    words = [word for line in lines for word in re.split(r"[\s,]+", line) if word]
    names = [word for word in words if not re.fullmatch(r"(max_)?slots=\d+", word)]
    for name in names:
        if name.startswith("-"):  # it would be read as an option by whoever is given it
            raise UsageProblem(f"%mesh up: {name!r} in {origin} is no host")
        if names.count(name) > 1:
            raise UsageProblem(f"%mesh up: host {name!r} stands twice in {origin}")
    if not names:
        raise UsageProblem(f"%mesh up: there is no host in {origin}")
    return tuple(names)


def _hosts(text: str, engine: Engine, read: Callable[[str], str | None]) -> tuple[int, tuple[str, ...]]:
    """How many hosts are asked for, and what they are called."""
    if "hosts" not in engine.takes:
        if not text.isdecimal():
            raise UsageProblem(
                f"%mesh up: --on {engine.name} takes a number of hosts, such as --hosts 4, and chooses them; not {text!r}"
            )
        return _count(text, "--hosts"), ()
    if text.isdecimal():
        raise UsageProblem(
            f"%mesh up: --on {engine.name} takes the names of the hosts, such as --hosts a,b,c, or a file; not {text!r}"
        )
    listed = None if "," in text else read(text)
    if listed is None and "/" in text:
        raise UsageProblem(f"%mesh up: --hosts {text}: there is no such file")
    names = _host_names(text if listed is None else listed, "--hosts" if listed is None else text)
    return len(names), names


def _of_engine(known: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """What was given of the options of an engine."""
    given: dict[str, Any] = {}
    for option in engine.options:
        text = getattr(known, _dest(option), None)
        if text in (None, False, []):
            continue
        try:
            if not option.metavar:
                given[option.field] = True
            elif option.repeated:
                given[option.field] = tuple(option.parse(one) for one in text)
            else:
                given[option.field] = option.parse(text)
        except ValueError as error:
            raise UsageProblem(f"%mesh up: {option.flags[0]} {error}, not {text!r}") from None
    return given


_ONLY_WITH_HOSTS = ("python", "wait", "lost_after", "dry_run")


def _parse_up_hosts(known: argparse.Namespace, read: Callable[[str], str | None]) -> UpOptions:
    """Read what asks for hosts; how many GPUs they have is not known here."""
    engine = ENGINES[known.on]
    if known.hosts is None:
        example = "a,b,c" if "hosts" in engine.takes else "4"
        raise UsageProblem(f"%mesh up: say which hosts --on {engine.name} shall give: --hosts {example}")
    hosts, names = _hosts(known.hosts, engine, read)
    of_engine = _of_engine(known, engine)
    if known.detach:
        _check_detach(engine, of_engine)
    count = None if known.n is None else _count(known.n, "-n")
    gpus = None if known.gpus is None else _count(known.gpus, "--gpus")
    per_host = count or gpus
    axes = _axes(known.axes) if known.axes else {}
    if axes:
        total = math.prod(axes.values())
        if per_host is None and total % hosts:
            raise UsageProblem(
                f"%mesh up: --axes {known.axes} makes {total} ranks, which {hosts} hosts can't share evenly"
            )
        if per_host is not None and total != hosts * per_host:
            raise UsageProblem(
                f"%mesh up: --axes {known.axes} makes {total} ranks, but {hosts} hosts with {per_host} each have "
                f"{hosts * per_host}"
            )
    elif per_host is None:
        raise UsageProblem("%mesh up: say how many ranks each host shall have: -n N, or --gpus N with a GPU each")
    else:
        axes = {"hosts": hosts, "gpus": per_host}
    return UpOptions(
        known.name,
        axes,
        gpus is not None or known.device == "cuda",
        "cuda" if gpus is not None else known.device,
        engine=engine.name,
        hosts=hosts,
        host_names=names,
        python=known.python or "",
        wait_s=None if known.wait is None else _seconds(known.wait, "--wait"),
        lost_after_s=1.0 if known.lost_after is None else _seconds(known.lost_after, "--lost-after"),
        dry_run=known.dry_run,
        of_engine=of_engine,
        detach=known.detach,
    )


def _check_detach(engine: Engine, of_engine: Mapping[str, Any]) -> None:
    """Refuse what can't outlive the kernel."""
    if engine.ends_with_us:
        raise UsageProblem(f"%mesh up: --detach with --on {engine.name} is not possible: {engine.ends_with_us}")
    if engine.name == "ssh" and of_engine.get("tunnel") != "never":
        raise UsageProblem(
            "%mesh up: --detach with --on ssh needs --tunnel never: hosts that are reached through the kernel's SSH connection "
            "are lost with it"
        )


def _environment(pairs: Sequence[str]) -> dict[str, str]:
    env = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageProblem(f"%mesh up: --env takes NAME=VALUE, not {pair!r}")
        env[key] = value
    return env


def parse_up(line: str, gpus_here: int, read_file: Callable[[str], str | None] = lambda name: None) -> UpOptions:
    """Read what follows ``%mesh up``.

    Args:
        line: the rest of the line.
        gpus_here: GPUs of this machine.
        read_file: gives the text of a file that lists hosts; None if there is no such file.

    Raises:
        UsageProblem: it can't be; the text says why and what to write.
    """
    known = _parse(line, "%mesh up")
    known.name = _name(known.name, "%mesh up: the name of a mesh")
    if known.n is not None and known.gpus is not None:
        raise UsageProblem("%mesh up: give -n N (ranks) or --gpus N (ranks with a GPU each), not both")
    if known.gpus is not None and known.device == "cpu":
        raise UsageProblem("%mesh up: --gpus asks for GPUs and --device cpu for none; use -n with --device cpu")
    if known.on != "local" or known.hosts is not None:
        options = _parse_up_hosts(known, read_file)
    else:
        for option in _ONLY_WITH_HOSTS:
            if getattr(known, option):
                flag = f"--{option.replace('_', '-')}"
                raise UsageProblem(f"%mesh up: {flag} is for hosts of an engine: say --on ENGINE --hosts N, too")
        options = _parse_up_here(known, gpus_here)
    return replace(
        options,
        env=_environment(known.env),
        restart=known.restart,
        max_restarts=_count(known.max_restarts, "--max-restarts"),
    )


def _parse_up_here(known: argparse.Namespace, gpus_here: int) -> UpOptions:
    """Read what asks for ranks on this machine."""
    count = None if known.n is None else _count(known.n, "-n")
    gpus = None if known.gpus is None else _count(known.gpus, "--gpus")
    wants_gpus = gpus is not None or known.device == "cuda"
    axes = _axes(known.axes) if known.axes else {}
    size = count or gpus
    if axes:
        total = math.prod(axes.values())
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
    device = "cuda" if wants_gpus else device
    return UpOptions(known.name, axes or {"gpus": size}, wants_gpus, device, detach=known.detach)


def parse_remote(line: str, magic: str = "%%remote") -> RemoteOptions:
    """Read what follows ``%%remote``, or another magic that takes the same.

    Raises:
        UsageProblem: it can't be; the text says why and what to write.
    """
    known = _parse(line, magic)
    if known.mesh and known.selector:
        raise UsageProblem(f"{magic}: --mesh {known.mesh} and {known.selector} both name a mesh; write one of them")
    for one, other in (("background", "block"), ("stream", "no_stream")):
        if getattr(known, one) and getattr(known, other):
            raise UsageProblem(f"{magic}: give --{one} or --{other.replace('_', '-')}, not both")
    if known.out:
        _name(known.out, f"{magic}: --out", "losses")
    timeout_s = None
    if known.timeout is not None:
        try:
            timeout_s = float(known.timeout)
        except ValueError:
            raise UsageProblem(f"{magic}: --timeout takes seconds, not {known.timeout!r}") from None
        if not timeout_s > 0:
            raise UsageProblem(f"{magic}: --timeout must be more than 0 seconds, not {known.timeout}")
    return RemoteOptions(
        selector=known.selector or known.mesh or "",
        out=known.out,
        raw=known.raw,
        timeout_s=timeout_s,
        background=known.background,
        targets="" if known.targets == "all" else known.targets,
        stream=not known.no_stream,
        local=known.local,
    )


def parse_logs(line: str) -> LogsOptions:
    """Read what follows ``%mesh logs``.

    Raises:
        UsageProblem: it can't be; the text says why and what to write.
    """
    known = _parse(line, "%mesh logs")
    if not known.lines.isdecimal() or not int(known.lines):
        raise UsageProblem(f"%mesh logs: --lines takes a whole number, such as 200, not {known.lines!r}")
    return LogsOptions(known.selector, int(known.lines), known.stderr, known.raw)


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
