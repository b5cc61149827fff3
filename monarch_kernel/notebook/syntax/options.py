"""Parses the lines of the magics; errors are one line that says what is allowed."""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from monarch_kernel.notebook.syntax.arguments import Known, unknown_mesh
from monarch_kernel.notebook.syntax.lines import (
    Parser,
    UsageProblem,
    checked_name,
    hint,
    refuse_unknown,
    spellings,
    tokens,
)
from monarch_kernel.notebook.syntax.selector import root_name
from monarch_kernel.notebook.syntax.up_arguments import parse_warn_after, up_parser

__all__ = [
    "COMMANDS",
    "LOOP_ACTIONS",
    "LogsOptions",
    "LoopOptions",
    "ProfileOptions",
    "RemoteOptions",
    "one_name",
    "one_selector",
    "option_names",
    "parse_check",
    "parse_debug",
    "parse_doctor",
    "parse_interrupt",
    "parse_logs",
    "parse_loop",
    "parse_profile",
    "parse_record",
    "parse_remote",
    "parse_rollback",
    "parse_sync",
    "parse_tensorboard",
    "parser_of",
    "repeatable",
    "split_options",
    "unknown_command",
]

COMMANDS = {
    "up": "bring a mesh up",
    "show": "show the live view of a mesh, or of all",
    "down": "end a mesh, or all of them",
    "attach": "attach a mesh that outlived its kernel",
    "interrupt": "interrupt what it runs and keep its state; --abort: also abort process groups",
    "loop": "show the progress of its live loop; pause, resume, step [N], stop, or set knobs",
    "rollback": "restore the state of its ranks before a step, from their snapshots; its next loop continues from there",
    "tensorboard": "write what its loops log for TensorBoard from now on",
    "record": "record what runs from now on, to compare it and to run it again; close; without arguments: what it holds",
    "heal": "start new processes in place of dead ranks; the others keep their state",
    "restart": "end ranks, and start new processes in their places",
    "sync": "send edited modules to its ranks, and reload the imported ones there",
    "stacks": "show what every rank does now",
    "check": "compare the replicas of modules and tensors between its ranks, and name the first difference",
    "traffic": "show how many bytes went between its ranks, by which data paths, and in collectives",
    "profile": "record some steps of what it runs; show where their time goes, and which rank the others wait for",
    "torchrun": "run a script that was written for torchrun in its ranks, as often as you like",
    "debug": "open pdb on a rank, where it failed or stopped; --dap: let an editor such as VS Code debug the rank",
    "logs": "show what ranks have written, including what cells left out",
    "doctor": "check the requirements of the kernel, and say how to meet those that are not met",
    "help": "show the arguments of a command",
}

LOOP_ACTIONS = ("pause", "resume", "step", "stop")
"""The commands of ``%mesh loop``, besides setting knobs."""

_GROUPS = "equal lines of several ranks are shown once here, with their ranks; --raw shows each rank's own"
# Options of ipyparallel's %%px that do not exist here, with what to use instead.
_COMPAT_OPTIONS = {
    "--group-outputs": _GROUPS,
    "--progress-after": "the table of the mesh shows what its ranks do",
    "--signal-on-interrupt": "Kernel > Interrupt raises KeyboardInterrupt on the ranks",
    "-e": _GROUPS,
    "--engine": _GROUPS,
    "--verbose": "the table of the mesh shows the cell that runs",
}


@dataclass(frozen=True)
class RemoteOptions:
    """The arguments of ``%%remote``.

    Attributes:
        selector: expression that selects a mesh; empty for the mesh last brought up.
        out: variable for the values of the last expression; empty for none.
        raw: whether to show every line of every rank separately.
        timeout_s: seconds after which the cell is interrupted; None for no timeout.
        background: whether the cell returns immediately, while the ranks continue.
        targets: which ranks of the selected mesh, such as ``0,2``, ``1-3``, ``0:4:2``; empty for all.
        stream: whether output is shown while the cell runs, or only at its end.
        local: whether the kernel runs the cell, too.
        fail_fast: whether the first rank that fails ends the cell on all ranks.
        warn_after_s: age from which waits in collectives are reported, in seconds; 0 for never, None for the mesh's default.
        needs_all: whether the code makes sense only on all ranks of the mesh, as that of ``%mesh torchrun``.
    """

    selector: str = ""
    out: str = ""
    raw: bool = False
    timeout_s: float | None = None
    background: bool = False
    targets: str = ""
    stream: bool = True
    local: bool = False
    fail_fast: bool = False
    warn_after_s: float | None = None
    needs_all: bool = False


@dataclass(frozen=True)
class LogsOptions:
    """The arguments of ``%mesh logs``.

    Attributes:
        selector: expression that selects a mesh; empty for the mesh last brought up.
        lines: maximum number of lines of each rank.
        stderr: whether to show only stderr.
        raw: whether to show every line of every rank separately.
        counts_earlier: whether to say how many lines come before those, as the user has named no number.
    """

    selector: str
    lines: int = 200
    stderr: bool = False
    raw: bool = False
    counts_earlier: bool = False


@dataclass(frozen=True)
class LoopOptions:
    """The arguments of ``%mesh loop``.

    Attributes:
        selector: expression that selects a mesh; empty for the mesh last brought up.
        command: ``pause``, ``resume``, ``step`` or ``stop``; empty to set knobs, or to only show the loop.
        count: number of steps.
        knobs: name -> value.
    """

    selector: str = ""
    command: str = ""
    count: int = 1
    knobs: Mapping[str, int | float | str | bool | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ProfileOptions:
    """The arguments of ``%mesh profile``.

    Attributes:
        selector: expression that selects a mesh; empty for the mesh last brought up.
        steps: the number of steps.
        seconds: the most that it may take.
        memory: whether to record allocations.
        to: the file for the trace; empty for none.
    """

    selector: str
    steps: int = 5
    seconds: float = 10.0
    memory: bool = False
    to: str = ""


def _remote_parser(magic: str) -> Parser:
    parser = Parser(magic)
    add = parser.add_argument
    add(
        "selector",
        nargs="?",
        default="",
        metavar="SELECTOR",
        help="t, t[0], t[0:4], t.slice(dp=0) (default: the mesh last brought up)",
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
    add("--raw", action="store_true", help="show the lines of each rank separately, also equal ones")
    add("--warn-after", metavar="S", help="report ranks that wait for others after S seconds (default: 10; 0: never)")
    add("--timeout", metavar="S", help="interrupt the ranks after S seconds")
    add("--fail-fast", action="store_true", help="when a rank fails or dies, interrupt the others and end the cell")
    # The option applies to cells only. Other magics parse it to refuse it with a specific error, but do not offer it.
    of_local = "also run the cell in the kernel, after the ranks" if magic == "%%remote" else argparse.SUPPRESS
    add("--local", action="store_true", help=of_local)
    add("-a", "--background", "--noblock", action="store_true", help="return immediately; the ranks continue")
    add("-b", "--block", action="store_true", help="wait for the ranks (default)")
    add("--stream", action="store_true", help="show output while the cell runs (default)")
    add("--no-stream", action="store_true", help="show output when the cell has ended")
    return parser


def _logs_parser(magic: str) -> Parser:
    parser = Parser(magic)
    add = parser.add_argument
    add("selector", nargs="?", default="", metavar="SELECTOR", help="a mesh or a slice of one: t, t[0], t[0:4]")
    add("--lines", metavar="N", help="show the last N lines of each rank (default: 200)")
    add("--stderr", action="store_true", help="show only stderr")
    add("--raw", action="store_true", help="show the lines of each rank separately, also equal ones")
    return parser


def _doctor_parser(magic: str) -> Parser:
    parser = Parser(magic)
    parser.add_argument("--quick", action="store_true", help="skip bringing up ranks, which takes seconds")
    return parser


def _profile_parser(magic: str) -> Parser:
    parser = Parser(magic)
    add = parser.add_argument
    add("selector", nargs="?", default="", metavar="SELECTOR", help="a mesh or a slice of one: t, t[0], t[0:4]")
    add("--steps", default="5", metavar="N", help="record N steps of a live loop, or of an optimizer (default: 5)")
    add("--seconds", default="10", metavar="S", help="record for S seconds at most (default: 10)")
    add("--memory", action="store_true", help="record allocations, too")
    add("--to", default="", metavar="FILE", help="write a trace of all ranks for https://ui.perfetto.dev")
    return parser


_PARSERS: dict[str, Callable[[str], Parser]] = {
    "%mesh up": lambda magic: up_parser(),
    "%mesh doctor": _doctor_parser,
    "%mesh logs": _logs_parser,
    "%mesh profile": _profile_parser,
    "%%remote": _remote_parser,
    "%autoremote": _remote_parser,
    "%remote": _remote_parser,
}


@functools.cache
def parser_of(magic: str, engine: str = "") -> Parser | None:
    """Return the parser of ``%mesh COMMAND`` or ``%%remote``; None for a command without options.

    Args:
        magic: the magic, with the command.
        engine: engine whose options ``%mesh up`` takes, too.
    """
    if engine:
        return up_parser(engine)
    make = _PARSERS.get(magic)
    return make(magic) if make else None


def option_names(magic: str, *, aliases: bool = False, engine: str = "") -> list[str]:
    """Return the options of ``%mesh COMMAND`` or ``%%remote``: one spelling of each for errors, or all for completion."""
    parser = parser_of(magic, engine)
    return spellings(parser, aliases=aliases) if parser else []


def repeatable(magic: str, engine: str = "") -> set[str]:
    """Return the options that may be given several times."""
    parser = parser_of(magic, engine)
    actions = parser._actions if parser else ()
    return {name for action in actions if isinstance(action.default, list) for name in action.option_strings}


def split_options(line: str, magic: str) -> tuple[str, str]:
    """Split a line into the options with which it starts and the expression that follows.

    Recognizes only long spellings, as ``-t`` is the negative of ``t``.
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


def _parse(line: str, magic: str) -> argparse.Namespace:
    words = tokens(line)
    parser = parser_of(magic)
    assert parser is not None
    for word in words:
        if instead := _COMPAT_OPTIONS.get(word.partition("=")[0]):
            raise UsageProblem(f"{magic}: there is no {word.partition('=')[0]}: {instead}")
    known, unknown = parser.parse_known_args(words)
    refuse_unknown(parser, unknown)
    return known


def parse_remote(line: str, magic: str = "%%remote") -> RemoteOptions:
    """Parse the arguments of ``%%remote``, or of another magic that takes the same.

    Raises:
        UsageProblem: the arguments are not valid; the text says why and what to write.
    """
    known = _parse(line, magic)
    if known.mesh and known.selector:
        raise UsageProblem(f"{magic}: --mesh {known.mesh} and {known.selector} both name a mesh; write one of them")
    for one, other in (("background", "block"), ("stream", "no_stream")):
        if getattr(known, one) and getattr(known, other):
            raise UsageProblem(f"{magic}: give --{one} or --{other.replace('_', '-')}, not both")
    if known.out:
        checked_name(known.out, f"{magic}: --out", "losses")
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
        fail_fast=known.fail_fast,
        warn_after_s=None if known.warn_after is None else parse_warn_after(known.warn_after, magic),
    )


def parse_doctor(line: str) -> bool:
    """Parse the arguments of ``%mesh doctor``; return whether to do only quick checks.

    Raises:
        UsageProblem: the arguments are not valid; the text says why and what to write.
    """
    return bool(_parse(line, "%mesh doctor").quick)


def _count(option: str, example: int, text: str) -> int:
    """Return the number that an option takes: 1 or more."""
    if not text.isdecimal() or not int(text):
        raise UsageProblem(f"{option} takes a whole number, such as {example}, not {text!r}")
    return int(text)


def parse_logs(line: str) -> LogsOptions:
    """Parse the arguments of ``%mesh logs``.

    Raises:
        UsageProblem: the arguments are not valid; the text says why and what to write.
    """
    known = _parse(line, "%mesh logs")
    lines = LogsOptions.lines if known.lines is None else _count("%mesh logs: --lines", 200, known.lines)
    return LogsOptions(known.selector, lines, known.stderr, known.raw, counts_earlier=known.lines is None)


def parse_profile(line: str) -> ProfileOptions:
    """Parse the arguments of ``%mesh profile``.

    Raises:
        UsageProblem: the arguments are not valid; the text says why and what to write.
    """
    known = _parse(line, "%mesh profile")
    steps = _count("%mesh profile: --steps", 5, known.steps)
    try:
        seconds = float(known.seconds)
    except ValueError:
        raise UsageProblem(f"%mesh profile: --seconds takes a number, such as 10, not {known.seconds!r}") from None
    return ProfileOptions(known.selector, steps, seconds, known.memory, known.to)


def parse_loop(line: str, known: Known) -> LoopOptions:
    """Parse the arguments of ``%mesh loop``: ``[SELECTOR] [pause | resume | step [N] | stop | KNOB=VALUE...]``.

    Raises:
        UsageProblem: the arguments are not valid; the text says why and what to write.
    """
    words = tokens(line)
    is_named = bool(words) and words[0] not in LOOP_ACTIONS and not _KNOB.match(words[0]) and known.selects(words[0])
    selector = words.pop(0) if is_named else ""
    if not words:
        return LoopOptions(selector)
    if words[0] in LOOP_ACTIONS:
        command, *more = words
        if command == "step" and len(more) == 1 and more[0].isdecimal() and int(more[0]):
            return LoopOptions(selector, command, int(more[0]))
        if more:
            if not selector and known.selects(more[0]):
                raise UsageProblem(f"%mesh loop: the mesh comes first: %mesh loop {more[0]} {command}")
            takes = "a number of steps, such as 10" if command == "step" else "no argument"
            raise UsageProblem(f"%mesh loop: {command} takes {takes}, not {' '.join(more)!r}")
        return LoopOptions(selector, command)
    knobs = {}
    for word in words:
        if not _KNOB.match(word):
            raise _no_loop_action(word, words, selector, known)
        name, _, value = word.partition("=")
        try:
            knobs[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):  # a text needs no quotes
            knobs[name] = value
    return LoopOptions(selector, knobs=knobs)


_KNOB = re.compile(r"[^=()\[\]]+=(?!=)")
_VALUE_STARTS = "0123456789.-'\""


def _no_loop_action(word: str, words: Sequence[str], selector: str, known: Known) -> UsageProblem:
    """Return the error for a word of ``%mesh loop`` that is neither an action nor a knob with its value."""
    if len(words) == 2 and word == words[0] and word.isidentifier() and words[1][:1] in _VALUE_STARTS:
        near = hint(word, LOOP_ACTIONS) or f"; to set a knob, write {word}={words[1]}"
    else:
        near = hint(word, [*LOOP_ACTIONS, *known.names])
    actions = ", ".join(LOOP_ACTIONS)
    if selector or word != words[0]:
        return UsageProblem(f"%mesh loop: {word!r} is neither one of {actions} nor KNOB=VALUE{near}")
    return known.unknown_word("loop", word, f"one of {actions}, nor KNOB=VALUE", near)


def parse_check(line: str, known: Known) -> tuple[str, list[str], str | None]:
    """Parse the arguments of ``%mesh check``, ``[SELECTOR] [NAME]... [--axis AXIS]``.

    Returns:
        The selector, empty for the mesh last brought up; the names; and the axis, None for all.

    Raises:
        UsageProblem: the axis is missing, or a word can be no name of a variable.
    """
    words = [part for word in tokens(line) for part in (word.split("=", 1) if word.startswith("--axis=") else [word])]
    axis = None
    if "--axis" in words:
        at = words.index("--axis")
        if at + 1 == len(words) or not words[at + 1]:
            raise UsageProblem("%mesh check: --axis needs the name of an axis, such as --axis dp")
        axis = words[at + 1]
        del words[at : at + 2]
    if unknown := [word for word in words if word.startswith("-")]:
        raise UsageProblem(f"%mesh check: unknown option {unknown[0]}; there is --axis AXIS")
    selector = words.pop(0) if words and known.selects(words[0]) else ""
    for number, word in enumerate(words):
        if not word.isidentifier():
            if selector or number:
                raise UsageProblem(
                    f"%mesh check: {word!r} is no name of a variable; name whole variables, such as model"
                )
            raise known.unknown_word("check", word, "a name of a variable")
    return selector, words, axis


def parse_rollback(line: str, known: Known) -> tuple[str, int | None]:
    """Parse the arguments of ``%mesh rollback``, ``[SELECTOR] [STEP]``; return selector and step, None for the newest step.

    Raises:
        UsageProblem: the arguments are not valid; the text says why and what to write.
    """
    words = tokens(line)
    selector = words.pop(0) if words and known.selects(words[0]) else ""
    if not words:
        return selector, None
    if len(words) == 2 and not selector and known.selects(words[1]):
        raise UsageProblem(f"%mesh rollback: the mesh comes first: %mesh rollback {words[1]} {words[0]}")
    if len(words) > 1 and (selector or words[0].isdecimal()):
        raise UsageProblem(f"%mesh rollback: takes a mesh and a step, such as t 40, not {line.strip()!r}")
    if not words[0].replace("_", "").isdecimal():
        if selector or re.match(r"-?[\d.]", words[0]):
            raise UsageProblem(f"%mesh rollback: a step is a whole number, such as 40, not {words[0]!r}")
        raise known.unknown_word("rollback", words[0], "a step, such as 40")
    return selector, int(words[0].replace("_", ""))


def parse_sync(line: str, known: Known) -> tuple[str, str | None]:
    """Parse the arguments of ``%mesh sync``, ``[SELECTOR] [MODULE | PATH]``; return the selector and the module, None for all.

    Raises:
        UsageProblem: there are several modules.
    """
    words = tokens(line)
    selector = words.pop(0) if words and known.selects(words[0]) else ""
    if len(words) > 1:
        after = "" if selector else f", and a mesh ({', '.join(known.names) or 'none is up'}) before it"
        near = "" if selector else hint(words[0], known.names)
        raise UsageProblem(
            f"%mesh sync: give one module or path{after}, not {' '.join(words)!r}, such as %mesh sync t mylib{near}"
        )
    return selector, words[0] if words else None


def parse_debug(line: str) -> tuple[str, bool]:
    """Parse the arguments of ``%mesh debug``, ``[SELECTOR] [--dap]``; return the selector, and whether an editor debugs.

    Raises:
        UsageProblem: there are several selectors, or none for an editor.
    """
    words = tokens(line)
    selector = one_selector(" ".join(word for word in words if word != "--dap"), "debug")
    if "--dap" in words and not selector:
        raise UsageProblem("%mesh debug --dap: name one rank, such as %mesh debug t[0] --dap")
    return selector, "--dap" in words


def parse_interrupt(line: str) -> tuple[list[str], bool]:
    """Parse the arguments of ``%mesh interrupt``, ``NAME [--abort]``; return the names, and whether to abort groups."""
    words = tokens(line)
    return [word for word in words if word != "--abort"], "--abort" in words


def one_selector(line: str, command: str) -> str:
    """Return the one selector that a command takes; empty if it is left out.

    Raises:
        UsageProblem: there are several.
    """
    words = tokens(line)
    if len(words) > 1:
        raise UsageProblem(f"%mesh {command}: give one selector, such as {words[0]}, not {line.strip()!r}")
    return words[0] if words else ""


def parse_tensorboard(line: str, known: Known) -> tuple[str, str | None]:
    """Parse the arguments of ``%mesh tensorboard``, ``[SELECTOR] FOLDER | off``; return selector and folder, None for ``off``.

    Raises:
        UsageProblem: the arguments are not valid; the text says why and what to write.
    """
    words = tokens(line)
    if not 1 <= len(words) <= 2:
        given = f", not {line.strip()!r}" if words else ""
        raise UsageProblem(f"%mesh tensorboard: takes a folder, such as runs/gpt (or off){given}")
    folder = words.pop()
    if words and known.selects(folder) and not known.selects(words[0]):
        raise UsageProblem(f"%mesh tensorboard: the mesh comes first: %mesh tensorboard {folder} {words[0]}")
    return words[0] if words else "", None if folder == "off" else folder


def parse_record(line: str) -> str:
    """Parse the arguments of ``%mesh record``, ``[FOLDER | close]``; return the word: a folder, ``close``, or empty.

    Raises:
        UsageProblem: the arguments are not valid; the text says why and what to write.
    """
    words = tokens(line)
    if len(words) > 1:
        raise UsageProblem(f"%mesh record: takes a folder, such as runs/gpt (or close), not {line.strip()!r}")
    word = words[0] if words else ""
    return "close" if word == "off" else word


def one_name(rest: Sequence[str], command: str, known: Sequence[str], *, optional: bool) -> str:
    """Return the one mesh that a command names; empty if the name is optional and left out.

    Raises:
        UsageProblem: the mesh is unknown, the name is missing, or there are several.
    """
    have = ", ".join(known) or "none"
    if not known and not (optional and not rest):
        raise UsageProblem(f"%mesh {command}: no mesh is up; bring one up with: %mesh up NAME -n 4")
    if not rest:
        if optional:
            return ""
        raise UsageProblem(f"%mesh {command}: name a mesh ({have})")
    if len(rest) > 1:
        every = f"; %mesh {command} --all ends all" if command == "down" else ""
        raise UsageProblem(f"%mesh {command}: name one mesh, not {' '.join(rest)!r}{every}")
    if rest[0] not in known:
        root = root_name(rest[0])
        if root in known:
            raise UsageProblem(f"%mesh {command}: takes a whole mesh, without an index: {root}, not {rest[0]}")
        raise unknown_mesh(rest[0], known, f"%mesh {command}: ")
    return rest[0]


def unknown_command(words: Sequence[str], known: Known) -> UsageProblem:
    """Return the error for a line of ``%mesh`` that starts with no command."""
    word, *more = words
    if known.selects(word):
        command = more[0] if more and more[0] in COMMANDS else "show"
        return UsageProblem(f"%mesh: the command comes first: %mesh {command} {' '.join([word, *more[1:]])}")
    if word in LOOP_ACTIONS and word != "stop":
        return UsageProblem(f"%mesh: {word} is a command of %mesh loop: %mesh loop {' '.join(words)}")
    meant = _SYNONYMS.get(word, "")
    near = f"; did you mean {meant}?" if meant else hint(word, COMMANDS)
    return UsageProblem(f"%mesh: unknown command {word!r}; one of {', '.join(COMMANDS)} (%mesh? shows help){near}")


_SYNONYMS = {
    "stop": "down (or loop stop)",
    "kill": "down",
    "end": "down",
    "delete": "down",
    "rm": "down",
    "start": "up",
    "create": "up",
    "new": "up",
    "status": "show",
    "list": "show",
    "ls": "show",
    "ps": "stacks",
    "log": "logs",
    "compare": "check",
    "reload": "sync",
}
"""Words of other tools for what a command does."""
