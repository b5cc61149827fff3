"""Splits lines of magics into words; the base of all parsers of magics."""

from __future__ import annotations

import argparse
import difflib
import keyword
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import NoReturn

__all__ = ["Parser", "UsageProblem", "checked_name", "hint", "refuse_unknown", "spellings", "tokens", "without_comment"]


class UsageProblem(ValueError):
    """A magic was used incorrectly; the text is one line that says what to write."""


class Parser(argparse.ArgumentParser):
    """The arguments of a magic, defined once for parsing, help, completion and errors."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse has found; it says for the frequent cases what to write."""
        found = _ARGPARSE.fullmatch(message)
        names = found["names"].split("/") if found else []
        action = next((each for each in self._actions if names and names[0] in each.option_strings), None)
        if found is None or action is None:
            raise UsageProblem(f"{self.prog}: {message}")
        name, value = names[-1], found["value"]
        if value is None:
            example = action.metavar or "|".join(action.choices or ()) or "VALUE"
            raise UsageProblem(f"{self.prog}: {name} needs a value: {name} {example}")
        choices = [str(choice) for choice in action.choices or ()]
        raise UsageProblem(
            f"{self.prog}: {name} takes one of {', '.join(choices)}, not {value}{hint(value.strip(chr(39)), choices)}"
        )


_ARGPARSE = re.compile(
    r"argument (?P<names>\S+): (?:expected one argument|invalid choice: (?P<value>.+) \(choose from .*\))", re.DOTALL
)


def hint(word: str, choices: Iterable[str]) -> str:
    """Return ``; did you mean step?`` for a word that resembles one of the choices; else an empty text."""
    meant = _nearest(word, choices)
    return f"; did you mean {meant}?" if meant else ""


def _nearest(word: str, choices: Iterable[str]) -> str:
    by_lower = {choice.lower().lstrip("-"): choice for choice in choices}
    near = difflib.get_close_matches(word.lower().lstrip("-"), by_lower, n=1, cutoff=0.7)
    return by_lower[near[0]] if near else ""


def spellings(parser: argparse.ArgumentParser, *, aliases: bool = False) -> list[str]:
    """Return the options of a parser: one spelling of each, or all."""
    names: list[str] = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        of_one = sorted(action.option_strings, key=lambda name: not name.startswith("--"))
        names += of_one if aliases else of_one[:1]
    return sorted(names)


_NUMBERS = {
    "%mesh up": "-n {} for a number of ranks",
    "%mesh logs": "--lines {} for a number of lines",
    "%%remote": "--ranks {} for a rank",
    "%remote": "--ranks {} for a rank",
    "%autoremote": "--ranks {} for a rank",
}
"""What to write in place of a number that is no argument, by magic."""


def refuse_unknown(parser: Parser, unknown: Sequence[str]) -> None:
    """Refuse arguments that a parser does not know, say what may have been meant, and list its options.

    Raises:
        UsageProblem: there is an unknown argument.
    """
    if unknown:
        word = unknown[0]
        what = "option" if word.startswith("-") else "argument"
        meant = _nearest(word.partition("=")[0], spellings(parser, aliases=True))
        meant = f" (did you mean {meant}?)" if meant else ""
        if word.isdecimal() and (instead := _NUMBERS.get(parser.prog)):
            meant = f" (write {instead.format(word)})"
        raise UsageProblem(
            f"{parser.prog}: unknown {what} {word!r}{meant}; the options are {', '.join(spellings(parser))}"
        )


def tokens(line: str) -> list[str]:
    """Split a line at white space that is neither quoted nor inside brackets: ``t[0, 1:3] --out x`` has three tokens.

    A comment ends the line.

    Raises:
        UsageProblem: a quotation mark is not closed.
    """
    found: list[str] = []
    depth = 0
    line = without_comment(line)
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


def without_comment(line: str) -> str:
    """Return a line without its comment, which starts at a ``#`` after white space, outside quotes."""
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
