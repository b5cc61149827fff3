"""Formats findings as text with aligned columns, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from monarch_kernel.base.text import plain

__all__ = ["Finding", "Sign", "as_json", "exit_code", "finding_text", "summary"]

_LEAST_WIDTH = 30


class Sign(Enum):
    """The severity of a finding, shown as a mark and a word, because not every reader can tell colours apart."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"

    @property
    def mark(self) -> str:
        """The mark before the word."""
        return {"ok": "✓", "warning": "!", "problem": "✗"}[self.value]


class Finding(NamedTuple):
    """The result of a check.

    Attributes:
        item: what was checked.
        sign: the severity.
        found: what was found, as text; may have several lines.
        remedy: what to do; empty if there is nothing to do.
    """

    item: str
    sign: Sign
    found: str
    remedy: str = ""


def finding_text(finding: Finding, item_width: int, width: int = 88) -> str:
    """Format one finding as lines with aligned columns.

    Args:
        finding: the finding.
        item_width: width of the column of items, in characters.
        width: width of a line, in characters; longer words, such as paths, stay whole.
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
    """Summarize all findings in one line."""
    n_problems, n_warnings = (_count(findings, sign) for sign in (Sign.PROBLEM, Sign.WARNING))
    if not n_problems + n_warnings:
        return f"All {len(findings)} items are ok."
    parts = [f"{n} {word}{'s' * (n != 1)}" for n, word in ((n_problems, "problem"), (n_warnings, "warning")) if n]
    return f"{' and '.join(parts)} among {len(findings)} items; each arrow (→) says what to do."


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if there is a problem, else 0; warnings do not count."""
    return int(_count(findings, Sign.PROBLEM) > 0)


def as_json(findings: Sequence[Finding], version: str) -> dict[str, Any]:
    """Return the findings as a JSON object for other programs.

    Args:
        findings: all findings.
        version: the version of this package.
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
