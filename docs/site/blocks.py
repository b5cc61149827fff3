"""Run the examples of the texts: ``python -m docs.site.blocks`` (``make docs-test``).

An example is a block of Python that is followed at once by a block without a language, which is its output. All examples of a
page run in one kernel, in order, with the other blocks of Python between them only where the page says so. Comments in the
Markdown, which no page shows, control that:

- ``<!-- setup: CODE -->`` runs code of one or more lines at this place.
- ``<!-- run -->`` before a block of Python without an output runs it, too.
- ``<!-- not run: REASON -->`` before an example leaves it out.
- ``<!-- needs: PACKAGE, ... -->`` leaves out the examples of the page where a package is not installed.

Each line of the expected output must appear in the actual output, in this order; the actual output may have more lines. What
differs from run to run is compared as a pattern: times, sizes, rates, process ids, addresses, numbers of cells, lines that end
in ``...``. The memory of a rank may be missing, because it is not known at first.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import queue
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Example", "examples", "missing_line", "missing_packages", "steady"]

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0  # DeepSpeed compiles an extension, and machines may be busy
LATE_S = 20.0  # what actors print in a local cell may arrive after its end


@dataclass(frozen=True)
class Example:
    """Code of a page, in the order in which it runs.

    Attributes:
        line: its line in the page.
        code: the code.
        output: what it prints; None if the page does not say so.
        reason: why it is not run; empty if it runs.
    """

    line: int
    code: str
    output: str | None = None
    reason: str = ""


_PART = re.compile(
    r"^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$|^<!-- (?P<word>setup|run|not run)(?:: ?(?P<text>.*?))?\s*-->$",
    re.DOTALL | re.MULTILINE,
)


def examples(text: str) -> Iterator[Example]:
    """Find the examples of a Markdown text, and the code that runs between them."""
    parts = list(_PART.finditer(text))
    word = reason = ""
    for number, part in enumerate(parts):
        line = text.count("\n", 0, part.start()) + 1
        if part["word"] == "setup":
            yield Example(line, textwrap.dedent(part["text"]).strip())
        elif part["word"]:
            word, reason = part["word"], part["text"] or ""
        else:
            after = parts[number + 1] if number + 1 < len(parts) else None
            is_example = (
                part["language"] == "python"
                and after is not None
                and after["language"] == ""
                and not text[part.end() : after.start()].strip()
            )
            if is_example and after is not None:
                yield Example(line, part["body"], after["body"], reason if word == "not run" else "")
            elif part["language"] == "python" and word == "run":
                yield Example(line, part["body"])
            word = reason = ""


def missing_packages(text: str) -> list[str]:
    """Return the packages that the examples of a text need, and that are not installed."""
    found = re.search(r"^<!-- needs: (.*?) -->$", text, re.MULTILINE)
    return [name for name in found[1].split(", ") if importlib.util.find_spec(name) is None] if found else []


_UNITS = r"(?:s|ms|us|min|h|%|bytes|B/s|[KMGT]i?B(?:/s)?|steps/s)"
_VARIES = [
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"\b0x[0-9a-f]{5,16}\b"), "0x…"),
    (re.compile(rf"\b\d[\d,]*(?:\.\d+)? ?{_UNITS}(?!\w)"), "…"),
    (re.compile(r"\b(?:pid |pids )\d+"), "pid …"),
    (re.compile(r"\bon [\w.-]+ \(pid …\)"), "on … (pid …)"),
    (re.compile(r"(?<=cell )\[\d+\]"), "[…]"),
    (re.compile(r"\d\d:\d\d:\d\d(?:[.,]\d+)?"), "…"),
    (re.compile(r"; it held … at the last reading"), ""),  # there is a reading each second
    (re.compile(r"(?<=device)\s+memory(?:\s+in\s+out)?\s*$|(?<=cpu)(?:\s+…)+\s*$"), ""),
    (re.compile(r"\s+"), " "),
]


def steady(line: str) -> str:
    """Return a line without what differs from run to run."""
    for pattern, instead in _VARIES:
        line = pattern.sub(instead, line)
    return line.strip()


def missing_line(expected: str, actual: str) -> str | None:
    """Return the first line of the expected output that the actual one lacks; None if there is none."""
    lines = iter([steady(line) for line in actual.splitlines()])
    for line in expected.splitlines():
        wanted = steady(line)
        if not wanted or wanted in ("...", "…"):
            continue
        begin, dots, _ = wanted.partition("...")
        if not any(line == wanted or (dots and begin and line.startswith(begin)) for line in lines):
            return line
    return None


class Kernel:
    """A kernel that runs the examples of a page, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        self._manager, self._client = start_new_kernel(
            startup_timeout=LIMIT_S,
            kernel_name="monarch",
            cwd=str(folder),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )

    def run(self, code: str) -> tuple[str, bool]:
        """Run code; return its text, and whether it ended without an error."""
        texts: list[str] = []
        reply = self._client.execute_interactive(
            code, timeout=LIMIT_S, allow_stdin=False, output_hook=lambda message: texts.append(_text_of(message))
        )
        return "".join(texts), reply["content"]["status"] == "ok"

    def wait_for(self, expected: str, actual: str) -> str:
        """Add output that arrives after the end of the last cell, until the expected lines are there; return all output."""
        deadline = time.monotonic() + LATE_S
        while missing_line(expected, actual) is not None and (left_s := deadline - time.monotonic()) > 0:
            try:
                message = self._client.get_iopub_msg(timeout=left_s)
            except queue.Empty:
                break
            if message["msg_type"] in ("stream", "error", "display_data", "update_display_data", "execute_result"):
                actual += _text_of(message)
        return actual

    def end(self) -> None:
        """End the kernel and its meshes."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=False)


def _text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    if message["msg_type"] == "stream":
        return str(content["text"])
    if message["msg_type"] == "error":
        return "\n".join([*content["traceback"], ""])
    return f"{content['data'].get('text/plain', '')}\n" if "data" in content else ""


def run_page(path: Path, folder: Path) -> tuple[int, list[str]]:
    """Run the examples of a page; return how many ran, and the failures."""
    todo = list(examples(path.read_text(encoding="utf-8")))
    if not any(example.output is not None and not example.reason for example in todo):
        return 0, []
    failures, n_run = [], 0
    kernel = Kernel(folder)
    try:
        for example in todo:
            if example.reason:
                continue
            place = f"{path.relative_to(ROOT)}:{example.line}"
            try:
                actual, is_ok = kernel.run(example.code)
            except TimeoutError:
                failures.append(f"{place}: it does not end within {LIMIT_S:g} s; the rest of the page was not run")
                break
            if example.output is None:
                failures += [] if is_ok else [f"{place}: failed\n{textwrap.indent(actual, '    ')}"]
                continue
            n_run += 1
            actual = kernel.wait_for(example.output, actual)
            if (missing := missing_line(example.output, actual)) is not None:
                failures.append(f"{place}: no line {missing!r} in\n{textwrap.indent(actual, '    ')}")
    finally:
        kernel.end()
    return n_run, failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    import tempfile

    parser = argparse.ArgumentParser(description="Run the examples of the texts, and compare their outputs.")
    parser.add_argument("pages", nargs="*", type=Path, help="the pages (default: the README and all of docs/)")
    options = parser.parse_args(arguments)
    pages = [path.resolve() for path in options.pages] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    total, left_out, failed = 0, 0, 0
    for path in pages:
        text = path.read_text(encoding="utf-8")
        if missing := missing_packages(text):
            print(f"{path.relative_to(ROOT)}: not run, because {', '.join(missing)} is not installed")
            continue
        left_out += sum(bool(example.reason) for example in examples(text))
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="monarch-docs-") as folder:
            n_run, failures = run_page(path, Path(folder))
        if n_run:
            print(f"{path.relative_to(ROOT)}: {n_run} examples, {time.perf_counter() - began:.1f} s", flush=True)
        for failure in failures:
            print(failure, file=sys.stderr, flush=True)
        total, failed = total + n_run, failed + len(failures)
    print(f"{total} examples ran, {left_out} are marked as not run, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
