"""Parses the arguments of ``%mesh up``."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from monarch_kernel.base.text import plural, were
from monarch_kernel.launch.registry import ENGINES, Engine, EngineOption
from monarch_kernel.net.wire.config import LEAST_SILENCE_S
from monarch_kernel.notebook.syntax.lines import Parser, UsageProblem, checked_name, refuse_unknown, tokens
from monarch_kernel.runtime.controller.restart_policy import Restart
from monarch_kernel.runtime.host.gpus import VISIBLE, gpus_named

__all__ = ["WARN_AFTER_S", "UpOptions", "engine_of", "parse_up", "parse_warn_after", "up_parser"]

WARN_AFTER_S = 10.0
"""The default of ``--warn-after``."""


MAX_HOSTS = 100_000
"""More hosts are considered a typing error."""


MAX_PER_HOST = 10_000
"""More ranks of one host are considered a typing error: they would take all of its memory before the first answers."""

MAX_NAME = 200
"""Characters in the name of a mesh."""

_MOST_S = 100_000_000.0


@dataclass(frozen=True)
class UpOptions:
    """The arguments of ``%mesh up``.

    Attributes:
        name: name of the mesh.
        axes: axis -> number of ranks along it.
        gpus: whether each rank was asked to have a GPU (``--gpus``).
        device: ``auto``, ``cpu`` or ``cuda``.
        env: variables to add to the environment of the ranks.
        detach: whether the mesh outlives the kernel.
        keep_s: how long a detached mesh is kept without a kernel, in seconds; 0 for no limit.
        restart: what to replace when a rank dies: nothing (``never``), that ``rank``, or the ``mesh``.
        max_restarts: maximum number of such replacements.
        engine: the engine that provides the hosts (``--on``).
        hosts: number of hosts; 0 for this machine itself, without an axis for hosts.
        host_names: names of the hosts, for engines that do not choose them.
        python: interpreter of the hosts; empty for that of the notebook.
        wait_s: how long the hosts may take to come up, in seconds; None for the default.
        lost_after_s: how long a host may be silent, in seconds, before it is considered lost.
        dry_run: whether to only show what the engine would be asked for.
        fail_fast: whether the first rank that fails ends each cell on all ranks.
        warn_after_s: age from which waits in collectives are reported, in seconds; 0 for never.
        of_engine: fields of the engine's own options -> values.
    """

    name: str
    axes: dict[str, int]
    gpus: bool
    device: str
    env: dict[str, str] = field(default_factory=dict)
    detach: bool = False
    keep_s: float = 0.0
    restart: Restart = "never"
    max_restarts: int = 3
    engine: str = "local"
    hosts: int = 0
    host_names: tuple[str, ...] = ()
    python: str = ""
    wait_s: float | None = None
    lost_after_s: float = 1.0
    dry_run: bool = False
    fail_fast: bool = False
    warn_after_s: float = WARN_AFTER_S
    of_engine: dict[str, Any] = field(default_factory=dict)

    @property
    def per_host(self) -> int:
        """Number of ranks of each host."""
        return math.prod(self.axes.values()) // max(1, self.hosts)


def up_parser(engine: str = "") -> Parser:
    """Return the parser of ``%mesh up``, with the options of an engine."""
    parser = Parser("%mesh up")
    add = parser.add_argument
    add("name", nargs="?", default="mesh", metavar="NAME", help="name of the mesh and of its variable (default: mesh)")
    add("-n", metavar="N", help="bring up N ranks (processes) on this machine, or on each host")
    add("--gpus", metavar="N", help="bring up N ranks with a GPU each")
    add("--axes", metavar="A=N,B=M", help="axes of the mesh, such as dp=2,tp=4 (default: gpus, or hosts and gpus)")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto", help="auto (default): GPUs if there are enough")
    add(
        "--on",
        choices=list(ENGINES),
        default="local",
        metavar="ENGINE",
        help=f"engine that provides the hosts: {', '.join(ENGINES)}",
    )
    add(
        "--hosts",
        metavar="N|NAMES",
        help="number of hosts; with --on ssh their names: a,b,c, or a file with one per line",
    )
    add("--python", metavar="PATH", help="interpreter of the hosts, with --hosts (default: the kernel's path)")
    add("--wait", metavar="S", help="give all hosts back if they are not up within S seconds")
    add("--lost-after", metavar="S", help="consider a host lost after S seconds of silence (default: 1)")
    add("--dry-run", action="store_true", help="show what the engine would be asked for, without asking it")
    add("--env", action="append", default=[], metavar="K=V", help="add to the ranks' environment; may be repeated")
    add("--restart", choices=get_args(Restart), default="never", help="what to replace when a rank dies")
    add(
        "--max-restarts",
        default="3",
        metavar="N",
        help="replace at most N times within 5 minutes (default: 3)",
    )
    add(
        "--fail-fast",
        action="store_true",
        help="run all cells of the notebook on this mesh as with %%remote --fail-fast",
    )
    add("--warn-after", metavar="S", help="report ranks that wait for others after S seconds (default: 10; 0: never)")
    add("--detach", action="store_true", help="the mesh outlives the kernel, until %mesh down")
    add("--keep-for", metavar="TIME", help="with --detach: end the mesh after 45 (s), 30m or 2h without a kernel")
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


def _dest(option: EngineOption) -> str:
    return f"of_engine.{option.field}"


def engine_of(words: Sequence[str]) -> str:
    """Return the engine that a line of ``%mesh up`` names; empty if it names none, or an unknown one."""
    for i, word in enumerate(words):
        flag, equals, name = word.partition("=")
        if flag == "--on":
            name = name if equals else "".join(words[i + 1 : i + 2])
            return name if name in ENGINES else ""
    return ""


def _foreign(flag: str, owners: Sequence[str], engine: str) -> str:
    """Format the error for an option that only other engines have."""
    whose = f"{flag} is an option of --on {' and --on '.join(owners)}"
    if not engine:
        return f"%mesh up: {whose}; add --on ENGINE"
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


def _axes(text: str) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals:
            raise UsageProblem(f"%mesh up: --axes takes NAME=SIZE,..., such as --axes dp=2,tp=4, not {part!r}")
        name = checked_name(name.strip(), "%mesh up: an axis")
        if name in axes:
            raise UsageProblem(f"%mesh up: axis {name!r} is named twice in --axes {text}")
        axes[name] = _count(size.strip(), f"the size of axis {name}")
    return axes


def _seconds(text: str, option: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise UsageProblem(f"%mesh up: {option} takes seconds, not {text!r}") from None
    if not 0.0 < seconds <= _MOST_S:
        bound = "a finite number of" if seconds == math.inf else "more than 0"
        bound = f"at most {_MOST_S:,.0f}" if _MOST_S < seconds < math.inf else bound
        raise UsageProblem(f"%mesh up: {option} must be {bound} seconds, not {text}")
    return seconds


def parse_warn_after(text: str, magic: str) -> float:
    """Parse the value of ``--warn-after``; 0 means never.

    Raises:
        UsageProblem: it is no such number.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds <= _MOST_S:
        raise UsageProblem(f"{magic}: --warn-after takes seconds, or 0 for never, not {text!r}")
    return seconds


def _silence(text: str) -> float:
    seconds = _seconds(text, "--lost-after")
    if seconds < LEAST_SILENCE_S:
        raise UsageProblem(
            f"%mesh up: --lost-after must be at least {LEAST_SILENCE_S} seconds, not {text}: hosts send a heartbeat four "
            "times a second"
        )
    return seconds


def _span(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text)
    seconds = float(found[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[found[2] or "s"] if found else 0.0
    if not 0.0 < seconds <= _MOST_S:
        raise UsageProblem(f"%mesh up: --keep-for takes a time, such as 45 (seconds), 30m or 2h, not {text[:40]!r}")
    return seconds


def _host_names(text: str, origin: str) -> tuple[str, ...]:
    """Parse a list of hosts, or a file, which may have comments and ``slots=N`` as in MPI and DeepSpeed."""
    lines = [line.partition("#")[0] for line in text.splitlines()]
    words = [word for line in lines for word in re.split(r"[\s,]+", line) if word]
    names = [word for word in words if not re.fullmatch(r"(max_)?slots=\d+", word)]
    for name in names:
        if name.startswith("-"):  # ssh would parse it as an option
            raise UsageProblem(f"%mesh up: {name!r} in {origin} is not a host name")
        if names.count(name) > 1:
            raise UsageProblem(f"%mesh up: host {name!r} is listed twice in {origin}")
    if not names:
        raise UsageProblem(f"%mesh up: there is no host in {origin}")
    return tuple(names)


def _hosts(text: str, engine: Engine, read: Callable[[str], str | None]) -> tuple[int, tuple[str, ...]]:
    """Parse ``--hosts`` into the number of hosts and their names."""
    if "hosts" not in engine.takes:
        if not text.isdecimal():
            raise UsageProblem(
                f"%mesh up: --on {engine.name} takes a number of hosts, such as --hosts 4, and chooses them; not {text!r}"
            )
        if (hosts := _count(text, "--hosts")) > MAX_HOSTS:
            raise UsageProblem(f"%mesh up: --hosts {text} is more than a mesh can have, which is {MAX_HOSTS:,}")
        return hosts, ()
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
    """Parse the given options of an engine."""
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
    """Parse arguments that ask for hosts of an engine, whose number of GPUs is not known here."""
    engine = ENGINES[known.on]
    if known.hosts is None:
        example = "a,b,c" if "hosts" in engine.takes else "4"
        raise UsageProblem(f"%mesh up: --on {engine.name} requires --hosts, such as --hosts {example}")
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
                f"%mesh up: --axes {known.axes} makes {plural(total, 'rank')}, which {plural(hosts, 'host')} can't share evenly"
            )
        if per_host is not None and total != hosts * per_host:
            raise UsageProblem(
                f"%mesh up: --axes {known.axes} makes {plural(total, 'rank')}, but {plural(hosts, 'host')} with "
                f"{per_host} each have {hosts * per_host}"
            )
    elif per_host is None:
        raise UsageProblem("%mesh up: specify the number of ranks of each host: -n N, or --gpus N with a GPU each")
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
        lost_after_s=1.0 if known.lost_after is None else _silence(known.lost_after),
        dry_run=known.dry_run,
        of_engine=of_engine,
        detach=known.detach,
    )


def _check_detach(engine: Engine, of_engine: Mapping[str, Any]) -> None:
    """Refuse options with which the mesh can't outlive the kernel."""
    if engine.ends_with_us:
        raise UsageProblem(f"%mesh up: --detach with --on {engine.name} is not possible: {engine.ends_with_us}")
    if engine.name == "ray" and of_engine.get("dials"):
        raise UsageProblem("%mesh up: --detach with --on ray needs hosts that connect to this machine; remove --dial")
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


def parse_up(
    line: str,
    gpus_here: int,
    read_file: Callable[[str], str | None] = lambda name: None,
    count_named: Callable[[str], int] = lambda visible: len(gpus_named(visible)),
    visible: str | None = None,
) -> UpOptions:
    """Parse the arguments of ``%mesh up``.

    Args:
        line: the rest of the line.
        gpus_here: number of GPUs of this machine that the notebook may use.
        read_file: returns the text of a file that lists hosts; None if there is no such file.
        count_named: returns the number of ranks for which a value of CUDA_VISIBLE_DEVICES for a mesh names a GPU.
        visible: CUDA_VISIBLE_DEVICES of the notebook; None if it is not set.

    Raises:
        UsageProblem: the arguments are not valid; the text says why and what to write.
    """
    words = tokens(line)
    engine = engine_of(words)
    parser = up_parser(engine)
    known, unknown = parser.parse_known_args(words)
    if unknown:
        flag = unknown[0].partition("=")[0]
        owners = [one.name for one in ENGINES.values() if any(flag in option.flags for option in one.options)]
        if owners:
            raise UsageProblem(_foreign(flag, owners, engine))
        refuse_unknown(parser, unknown)
    if known.name.isdecimal():
        raise UsageProblem(f"%mesh up: {known.name!r} is no name for a mesh: write %mesh up trainers -n {known.name}")
    if len(known.name) > MAX_NAME:
        raise UsageProblem(
            f"%mesh up: the name of a mesh has at most {MAX_NAME} characters; {known.name[:20]}… has {len(known.name):,}"
        )
    known.name = checked_name(known.name, "%mesh up: the name of a mesh")
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
                raise UsageProblem(
                    f"%mesh up: {flag} applies to hosts of an engine; add --on ENGINE --hosts N, or --on local --hosts 1 for "
                    "this machine"
                )
        named = _environment(known.env).get(VISIBLE)
        gpus = gpus_here if named is None else count_named(named)
        options = _parse_up_here(known, gpus, visible if named is None else named)
    if options.per_host > MAX_PER_HOST:
        raise UsageProblem(
            f"%mesh up: {options.per_host:,} ranks are more than one host can run; these are at most {MAX_PER_HOST:,}"
        )
    if known.keep_for is not None and not known.detach:
        raise UsageProblem("%mesh up: --keep-for says how long a detached mesh is kept; add --detach")
    return replace(
        options,
        keep_s=0.0 if known.keep_for is None else _span(known.keep_for),
        env=_environment(known.env),
        restart=known.restart,
        max_restarts=_count(known.max_restarts, "--max-restarts"),
        fail_fast=known.fail_fast,
        warn_after_s=WARN_AFTER_S if known.warn_after is None else parse_warn_after(known.warn_after, "%mesh up"),
    )


def _parse_up_here(known: argparse.Namespace, gpus_here: int, visible: str | None) -> UpOptions:
    """Parse arguments that ask for ranks on this machine, where CUDA_VISIBLE_DEVICES may limit or repeat GPUs."""
    limit = "" if visible is None else f" with {VISIBLE}={visible}"
    count = None if known.n is None else _count(known.n, "-n")
    gpus = None if known.gpus is None else _count(known.gpus, "--gpus")
    wants_gpus = gpus is not None or known.device == "cuda"
    axes = _axes(known.axes) if known.axes else {}
    size = count or gpus
    if axes:
        total = math.prod(axes.values())
        if size is not None and size != total:
            raise UsageProblem(
                f"%mesh up: --axes {known.axes} makes {plural(total, 'rank')}, but {size} {were(size)} asked for"
            )
        size = total
    elif size is None:
        if known.device == "cpu" or not gpus_here:
            raise UsageProblem(f"%mesh up: specify the number of ranks: -n N (this machine has no GPU to count{limit})")
        size = gpus_here
    if wants_gpus and size > gpus_here:
        raise UsageProblem(
            f"%mesh up: {plural(size, 'GPU')} {were(size)} asked for, this machine has "
            f"{gpus_here}{limit}; ask for fewer, or for ranks without a GPU: -n {size} --device cpu"
        )
    device = known.device
    if device == "auto" and not wants_gpus and gpus_here and size > gpus_here:
        raise UsageProblem(
            f"%mesh up: {plural(size, 'rank')} can't have a GPU each, this machine has {gpus_here}{limit}; add --device cpu"
        )
    device = "cuda" if wants_gpus else device
    return UpOptions(known.name, axes or {"gpus": size}, wants_gpus, device, detach=known.detach)
