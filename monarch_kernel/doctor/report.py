"""What was found, in words: as text with aligned columns, and for other programs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from monarch_kernel.base.text import plain

__all__ = ["Finding", "Sign", "as_json", "exit_code", "finding_text", "summary"]

_LEAST_WIDTH = 30


class Sign(Enum):
    """Whether what was found is good: a sign and a word, for a colour says nothing to many."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"

    @property
    def mark(self) -> str:
        """The sign that stands before the word."""
        return {"ok": "✓", "warning": "!", "problem": "✗"}[self.value]


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        item: what was looked at.
        sign: whether it is good.
        found: what was found, in words; may have several lines.
        remedy: what to do; empty where nothing has to be done.
    """

    item: str
    sign: Sign
    found: str
    remedy: str = ""


def finding_text(finding: Finding, item_width: int, width: int = 100) -> str:
    """One finding as lines whose columns are those of the others.

    Args:
        finding: what was found.
        item_width: of the column of items, in characters.
        width: of a line, in characters; words that are longer, such as paths, stay whole.
    """
    sign = finding.sign
    head = f"{sign.mark} {sign.value:<7}  {plain(finding.item):<{item_width}}  "
    lines = _wrapped(finding.found, len(head), width)
    if finding.remedy:
        lines += [
            f"{'→ ' if i == 0 else '  '}{line}" for i, line in enumerate(_wrapped(finding.remedy, len(head) + 2, width))
        ]
    indent = " " * len(head)
    return "\n".join(f"{indent if i else head}{line}".rstrip() for i, line in enumerate(lines))


def summary(findings: Sequence[Finding]) -> str:
    """How it is altogether, in one line."""
    n_problems, n_warnings = (_count(findings, sign) for sign in (Sign.PROBLEM, Sign.WARNING))
    if not n_problems + n_warnings:
        return f"All {len(findings)} items are good."
    parts = [f"{n} {word}{'s' * (n != 1)}" for n, word in ((n_problems, "problem"), (n_warnings, "warning")) if n]
    return f"{' and '.join(parts)} among {len(findings)} items; what to do stands at the arrows."


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if there is no problem, warnings or not; else 1."""
    return int(_count(findings, Sign.PROBLEM) > 0)


def as_json(findings: Sequence[Finding], version: str) -> dict[str, Any]:
    """The same for other programs.

    Args:
        findings: all of them.
        version: of this package.
    """
    rows = [
        {"item": f.item, "sign": f.sign.value, "found": plain(f.found), "remedy": plain(f.remedy)} for f in findings
    ]
    return {
        "version": version,
        "problems": _count(findings, Sign.PROBLEM),
        "warnings": _count(findings, Sign.WARNING),
        "findings": rows,
    }


def _count(findings: Sequence[Finding], sign: Sign) -> int:
    return sum(finding.sign is sign for finding in findings)


def _wrapped(text: str, indent: int, width: int) -> list[str]:
    room = max(_LEAST_WIDTH, width - indent)
    return [
        piece
        for line in plain(text).splitlines() or [""]
        for piece in textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]
    ]
