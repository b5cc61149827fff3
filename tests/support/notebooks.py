"""Run the project's notebooks in tests, as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

__all__ = ["NOTEBOOKS", "Run", "read", "shrink", "text_of"]

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
MODEL = "CONTEXT, WIDTH, HEADS, LAYERS = 128, 128, 4, 5\n"
SMALL = "CONTEXT, WIDTH, HEADS, LAYERS = 128, 64, 4, 2\n"


class Run:
    """The result of ``execute.py`` for a notebook.

    Attributes:
        code: exit code.
        stdout: its output to the terminal.
        stderr: its error output, if an error ended the run.
        notebook: the notebook with its outputs.
        html: the HTML page.
    """

    def __init__(self, notebook: NotebookNode, folder: Path) -> None:
        path = folder / "demo.ipynb"
        nbformat.write(notebook, path)  # type: ignore[no-untyped-call]
        run = subprocess.run(
            [sys.executable, str(NOTEBOOKS / "execute.py"), str(path), "--out", str(folder / "out")],
            capture_output=True,
            text=True,
            check=False,
            timeout=380,
            # Four CPU ranks on every machine, so that tests can name the rank that fails.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        self.code, self.stdout, self.stderr = run.returncode, run.stdout, run.stderr
        self.notebook = read(folder / "out" / "demo.ipynb")
        self.html = (folder / "out" / "demo.html").read_text(encoding="utf-8")

    def shown_by(self, snippet: str) -> str:
        """All text below the only cell that contains this piece of source."""
        (cell,) = [cell for cell in self.notebook.cells if cell.cell_type == "code" and snippet in cell.source]
        return text_of(cell)


def read(path: Path) -> NotebookNode:
    notebook: NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    return notebook


def shrink(notebook: NotebookNode) -> None:
    """Give the model of a notebook half its width and two layers: tests show how it is trained, not how well."""
    (model,) = [cell for cell in notebook.cells if MODEL in cell.source]
    model.source = model.source.replace(MODEL, SMALL)


def text_of(cell: NotebookNode) -> str:
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append("\n".join([f"{output.ename}: {output.evalue}", *output.traceback]))
        else:
            parts.append(output.data.get("text/plain", ""))
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(parts))
