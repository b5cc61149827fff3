"""Generates help on our magics from their parsers."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import TypeVar

from monarch_kernel.launch.registry import ENGINES, Engine
from monarch_kernel.notebook.syntax.arguments import ARGUMENTS
from monarch_kernel.notebook.syntax.lines import UsageProblem, hint
from monarch_kernel.notebook.syntax.options import COMMANDS, parser_of

__all__ = ["command_help", "documented", "engine_help", "mesh_help", "options_help"]

_WIDTH = 24

F = TypeVar("F", bound=Callable[..., object])


def options_help(magic: str) -> str:
    """Describe the arguments of a magic: a usage line and a line for each argument; empty if it has no options."""
    parser = parser_of(magic)
    if parser is None:
        return ""
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    options = [action for action in actions if action.option_strings]
    names = [f"[{action.metavar}]" for action in actions if not action.option_strings]
    rows = [(_spelling(action), action.help or "") for action in actions]
    return "\n".join([" ".join([magic, *names, "[OPTION]..." if options else ""]).rstrip(), *_table(rows)])


def engine_help(engine: Engine) -> str:
    """Describe an engine: a line about it, and one for each of its options."""
    hosts = "a,b,c|FILE" if "hosts" in engine.takes else "N"
    rows = [(f"{', '.join(option.flags)} {option.metavar}".strip(), option.help) for option in engine.options]
    needs = f"; needs monarch_kernel[{engine.extra}]" if engine.extra else ""
    return "\n".join([f"--on {engine.name} --hosts {hosts}: {engine.help}{needs}", *_table(rows)])


def _spelling(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(action.choices) if action.choices else "")
    return f"{', '.join(action.option_strings)} {value}".strip()


def _table(rows: list[tuple[str, str]]) -> list[str]:
    lines = []
    for left, right in rows:
        if len(left) >= _WIDTH:
            lines.append(f"    {left}")
            left = ""
        lines.append(f"    {left:<{_WIDTH}}{right}")
    return lines


def mesh_help() -> str:
    """Describe all commands of ``%mesh`` with their options, without the options of engines."""
    rows = [("%mesh", "list the meshes that are up")]
    for command, does in COMMANDS.items():
        parser = parser_of(f"%mesh {command}")
        arguments = ARGUMENTS.get(command, "[NAME] [OPTION]..." if parser else "")
        rows.append((f"%mesh {command} {arguments}".strip(), does))
    left = max(len(row[0]) for row in rows) + 2
    parts = ["\n".join(f"{magic:<{left}}{does}" for magic, does in rows)]
    parts += filter(None, (options_help(f"%mesh {command}") for command in COMMANDS))
    return "\n\n".join(parts)


def command_help(command: str) -> str:
    """Describe one command of ``%mesh``.

    Raises:
        UsageProblem: there is no such command.
    """
    if command not in COMMANDS:
        raise UsageProblem(
            f"%mesh help: there is no command {command!r}; one of {', '.join(COMMANDS)}{hint(command, COMMANDS)}"
        )
    usage = options_help(f"%mesh {command}") or f"%mesh {command} {ARGUMENTS.get(command, '')}".rstrip()
    first, newline, rest = usage.partition("\n")
    parts = [f"{first}\n    {COMMANDS[command]}{newline}{rest}"]
    if command == "up":
        parts += [engine_help(engine) for engine in ENGINES.values()]
    return "\n\n".join(parts)


def documented(usage: str) -> Callable[[F], F]:
    """Add usage to the docstring of a magic; ``%%remote?`` shows it."""

    def add(function: F) -> F:
        indented = "\n".join(f"    {line}".rstrip() for line in usage.splitlines())
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n::\n\n{indented}\n"
        return function

    return add
