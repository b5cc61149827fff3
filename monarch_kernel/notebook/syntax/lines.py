"""Splits lines of magics into words; the base of all parsers of magics."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["Parser", "UsageProblem", "checked_name", "refuse_unknown", "spellings", "tokens"]


class UsageProblem(ValueError):
    """A magic was used incorrectly; the text is one line that says what to write."""


class Parser(argparse.ArgumentParser):
    """The arguments of a magic, defined once for parsing, help, completion and errors."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageProblem(f"{self.prog}: {message}")


def spellings(parser: argparse.ArgumentParser, *, aliases: bool = False) -> list[str]:
    """Return the options of a parser: one spelling of each, or all."""
    names: list[str] = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        of_one = sorted(action.option_strings, key=lambda name: not name.startswith("--"))
        names += of_one if aliases else of_one[:1]
    return sorted(names)


def refuse_unknown(parser: Parser, unknown: Sequence[str]) -> None:
    """Refuse arguments that a parser does not know, and list its options.

    Raises:
        UsageProblem: there is an unknown argument.
    """
    if unknown:
        what = "option" if unknown[0].startswith("-") else "argument"
        names = ", ".join(spellings(parser))
        raise UsageProblem(f"{parser.prog}: unknown {what} {unknown[0]!r}; the options are {names}")


def tokens(line: str) -> list[str]:
    """Split a line at white space that is neither quoted nor inside brackets: ``t[0, 1:3] --out x`` has three tokens.

    A comment ends the line.

    Raises:
        UsageProblem: a quotation mark is not closed.
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


def checked_name(text: str, what: str, example: str = "trainers") -> str:
    """Return a name if it is a valid variable name.

    Raises:
        UsageProblem: the name is not valid.
    """
    if not text.isidentifier() or keyword.iskeyword(text):
        raise UsageProblem(f"{what} must be a Python variable name, not {text!r}, such as {example}")
    return text
