"""Execute a notebook in the terminal: show each cell's output as it arrives, and write the notebook and an HTML page.

Usage::

    python notebooks/execute.py notebooks/01_quickstart.ipynb --out build/notebooks

The notebook names its kernel. The exit code is 1 if a cell without the tag ``raises-exception`` fails, if the kernel dies, or
if a cell takes too long; the results until then are written nevertheless.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from traitlets.config import Config

__all__ = ["TerminalClient", "execute", "main"]

PREVIEW_LINES = 3
WIDGET = "application/vnd.jupyter.widget-view+json"
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def preview(source: str) -> str:
    """The first lines of a cell, and the number of other lines."""
    lines = source.strip().splitlines()
    shown = [line for line in lines if line.strip()][:PREVIEW_LINES]
    more = len([line for line in lines if line.strip()]) - len(shown)
    return "\n".join(f"  | {line}" for line in [*shown, *([f"... {more} more lines"] if more else [])])


def text_of(data: Mapping[str, Any]) -> str:
    """The plain text of a rich result, or the names of its formats if it has none."""
    if "text/plain" in data:
        return str(data["text/plain"])
    return f"<{', '.join(sorted(data))}>"


class TerminalClient(NotebookClient):
    """A notebook client that prints the output of each cell as it arrives."""

    def __init__(self, nb: NotebookNode, **options: Any) -> None:
        super().__init__(
            nb,
            on_cell_start=self.announce,
            on_cell_executed=self.conclude,
            on_cell_error=self.explain,
            **options,
        )
        self.began = 0.0
        self.line_open = False

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        """Print a message of the kernel, then let nbclient add it to the notebook."""
        content, kind = msg["content"], msg["msg_type"]
        if kind == "stream":
            self.write(content["text"])
        elif kind in ("execute_result", "display_data") and WIDGET not in content["data"]:
            self.write_line(text_of(content["data"]))
        elif kind == "error":
            self.write_line("\n".join(content["traceback"]) or f"{content['ename']}: {content['evalue']}")
        return super().process_message(msg, cell, cell_index)

    def announce(self, cell: NotebookNode, cell_index: int) -> None:
        """Print the start of a cell; of text cells, print only the headings."""
        self.began = time.perf_counter()
        if cell.cell_type == "code":
            self.write_line(f"\n[{cell_index + 1}/{len(self.nb.cells)}]\n{preview(cell.source)}")
        elif cell.source.startswith("#"):
            self.write_line(f"\n{cell.source.splitlines()[0]}")

    def conclude(self, cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        """Print the status and the time of the cell."""
        status = execute_reply["content"]["status"]
        self.write_line(f"  ({status}, {time.perf_counter() - self.began:.1f} s)")

    def explain(self, cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        """Print whether the notebook expects the error."""
        expected = "raises-exception" in cell.metadata.get("tags", [])
        self.write_line("  (this error is expected)" if expected else "  (this error ends the run)")

    def write(self, text: str) -> None:
        """Print text, without colours if the output is not a terminal."""
        if text:
            sys.stdout.write(text if sys.stdout.isatty() else ANSI.sub("", text))
            sys.stdout.flush()
            self.line_open = not text.endswith("\n")

    def write_line(self, text: str) -> None:
        """Print text on separate lines."""
        self.write(("\n" if self.line_open else "") + text + "\n")


def execute(path: Path, out: Path, timeout_s: int) -> Exception | None:
    """Run a notebook and write the result, as a notebook and as HTML.

    Args:
        path: the notebook.
        out: folder to write to; it is created if it does not exist.
        timeout_s: longest time of a cell, in seconds.

    Returns:
        The error that ended the run early: an unexpected error, a dead kernel or a timeout; None if there was none.
    """
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    client = TerminalClient(
        notebook,
        timeout=timeout_s,
        store_widget_state=False,  # for the views of meshes, the table beside each view is kept
        resources={"metadata": {"path": str(path.resolve().parent)}},
        config=Config(KernelManager={"transport_encryption": "auto"}),
    )
    error: Exception | None = None
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as ended:
        error = ended
    out.mkdir(parents=True, exist_ok=True)
    executed, page = out / path.name, out / path.with_suffix(".html").name
    nbformat.write(notebook, executed)  # type: ignore[no-untyped-call]
    exporter = HTMLExporter()  # type: ignore[no-untyped-call]
    html, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": path.stem}})
    page.write_text(html, encoding="utf-8")
    print(f"\nwrote {executed} and {page}")
    return error


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Execute a notebook, with its output live in the terminal.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the executed notebook")
    parser.add_argument("--timeout", type=int, default=600, metavar="S", help="longest time of a cell in seconds (600)")
    options = parser.parse_args(arguments)
    if not options.notebook.is_file():
        parser.error(f"no such notebook: {options.notebook}")

    began = time.perf_counter()
    error = execute(options.notebook, options.out, options.timeout)
    if error is not None:
        print(f"\n{type(error).__name__} after {time.perf_counter() - began:.1f} s:", file=sys.stderr)
        print(textwrap.indent(ANSI.sub("", str(error)).strip(), "  "), file=sys.stderr)
        return 1
    print(f"all cells as expected, in {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
