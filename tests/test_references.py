"""Every reference in backticks resolves; `tests/support/references.py` defines what counts as a reference."""

from __future__ import annotations

import gc
import re

import pytest

from tests.support.references import OUTSIDE, PACKAGE, VARIABLES, Report, check, read_project


def drawn_edges(text: str) -> set[tuple[str, str]]:
    """Read a tree that is drawn with lines: (child, parent) for each branch."""
    edges: set[tuple[str, str]] = set()
    for paragraph in re.split(r"\n\s*\n", text):
        above: list[tuple[int, str]] = []
        for line in paragraph.splitlines() if "── " in paragraph else ():
            if not (match := re.match(r"[\s│├└─]*([A-Z]\w+)(?=$|\s{2})", line)):
                continue
            while above and above[-1][0] >= match.start(1):
                above.pop()
            if above:
                edges.add((match[1], above[-1][1]))
            above.append((match.start(1), match[1]))
    return edges


def subclasses(sources: str, roots: set[str]) -> set[tuple[str, str]]:
    """Find the subclasses of the roots: (class, base) for each; only the first base of a class counts."""
    bases = dict(re.findall(r"^class (\w+)\((\w+)", sources, re.MULTILINE))
    edges: set[tuple[str, str]] = set()
    while new := {(name, base) for name, base in bases.items() if base in roots} - edges:
        edges |= new
        roots = roots | {name for name, _ in new}
    return edges


@pytest.fixture(scope="module")
def texts_and_paths() -> tuple[dict[str, str], frozenset[str]]:
    return read_project()


@pytest.fixture(scope="module")
def report(texts_and_paths: tuple[dict[str, str], frozenset[str]]) -> Report:
    was_enabled = gc.isenabled()
    gc.disable()  # a collection visits all nodes of the syntax trees, and each tree triggers some
    try:
        found = check(*texts_and_paths)
    finally:
        if was_enabled:
            gc.enable()
    return found


def test_every_reference_resolves(report: Report) -> None:
    assert not report.broken, "\n".join(report.broken)
    assert {kind for kind, _ in report.resolved} == {"docstring", "comment", "Markdown"}
    assert {found for _, found in report.resolved} >= {"path", "module", "class", "member", "name"}


def test_names_from_outside_are_all_used(report: Report) -> None:
    unused = {name for names in OUTSIDE.values() for name in names} - set(report.outside)
    assert not unused, f"no document mentions {sorted(unused)} any more, or the project defines them now"


def test_variables_of_examples_have_classes(texts_and_paths: tuple[dict[str, str], frozenset[str]]) -> None:
    classes = {name for text in texts_and_paths[0].values() for name in re.findall(r"^class (\w+)", text, re.MULTILINE)}
    assert {name for names in VARIABLES.values() for name in names} <= classes


@pytest.mark.parametrize("path", ["monarch_kernel/errors.py", "docs/actors.md"])
def test_the_documented_tree_of_errors_matches_the_classes(
    path: str, texts_and_paths: tuple[dict[str, str], frozenset[str]]
) -> None:
    texts, _ = texts_and_paths
    sources = "".join(text for name, text in texts.items() if name.startswith(PACKAGE + "/"))
    assert drawn_edges(texts[path]) == subclasses(sources, {"KeyboardInterrupt", "MonarchError"})


GOOD = {
    "monarch_kernel/wire/messages.py": '''
import msgspec


class Message(msgspec.Struct):
    id: int


class HostHello(Message):
    """Says `id`, as a `Message`; `HostHello.id`, `HostHello.host`; ``HostHello(...)``."""

    host: str
''',
    "monarch_kernel/rank/cell.py": '''
"""A `cell`, of `run_cell`; see `rank/cell.py`, `cell.py`, `cell.Cell`, `wire.messages`, `tests/bed/bench_NAME.py`.

And `monarch_kernel.rank.cell.Cell.run`, `wire.messages.HostHello`, `os.path.join`, `threading.Thread.start`.
"""

from monarch_kernel.wire import messages
from threading import Thread
import zmq

GRACE_S = 3


class Cell(Thread):
    def __init__(self):
        self.stage = "new"  # see `Cell.stage`, `Cell.name`, `Cell.is_alive`

    def run(self):
        """Waits `GRACE_S`; `_helper`, `messages.HostHello.host`, `zmq.Context.term`, ``what.ever``, ``a/b.py``."""


def run_cell():
    return _helper()


def _helper(): ...
''',
    "tests/bed/bench_ssh.py": '"""Tests of `Cell.run`."""',
    "docs/cells.md": """
`Cell.run` and `.run()`, `run_cell(1)`; `mesh` has `mesh.stop()`, `x.y`, a `DataLoader`, `rank/`, `docs/cells.md`.

```
`Cell.nope`
```
""",
    "CHANGELOG.md": "`Cell.gone` is gone",
    "monarch_kernel/actor/procs.py": "class ProcMesh:\n    def stop(self): ...",
}

# Kind -> (path, text, reference); the reference is on line 3 of the text
BROKEN = {
    "path": ("monarch_kernel/a.py", '"""A.\n\n`rank/nope.py`."""', "rank/nope.py"),
    "path in code": ("monarch_kernel/a.py", '"""A.\n\n``rank/nope.py``."""', "rank/nope.py"),
    "file": ("monarch_kernel/a.py", '"""A.\n\n`nope.py`."""', "nope.py"),
    "folder": ("docs/a.md", "A.\n\n`nope/`", "nope/"),
    "path of a pattern": ("tests/a.py", '"""A.\n\n`tests/bed/pinch_NAME.py`."""', "tests/bed/pinch_NAME.py"),
    "module": ("monarch_kernel/a.py", '"""A.\n\n`wire.nope`."""', "wire.nope"),
    "module by its whole name": ("tests/a.py", '"""A.\n\n`monarch_kernel.nope.b`."""', "monarch_kernel.nope.b"),
    "module in code": ("tests/a.py", '"""A.\n\n``monarch_kernel.nope``."""', "monarch_kernel.nope"),
    "package": ("monarch_kernel/a.py", '"""A.\n\n`nope.messages`."""', "nope.messages"),
    "name in a module": ("monarch_kernel/a.py", '"""A.\n\n`wire.messages.Nope`."""', "wire.messages.Nope"),
    "class": ("monarch_kernel/a.py", '"""A.\n\n`HostNope`."""', "HostNope"),
    "class in Markdown": ("docs/a.md", "A.\n\n`HostNope`", "HostNope"),
    "class of a test": ("monarch_kernel/a.py", '"""A.\n\n`Bench`."""', "Bench"),
    "method": ("monarch_kernel/a.py", '"""A.\n\n`Cell.nope`."""', "Cell.nope"),
    "method in a comment": ("monarch_kernel/a.py", "x = 1\n# It is\n# `Cell.nope`.", "Cell.nope"),
    "method in code": ("monarch_kernel/a.py", '"""A.\n\n``Cell.nope()``."""', "Cell.nope()"),
    "method in Markdown": ("docs/a.md", "A.\n\n`Cell.nope`", "Cell.nope"),
    "member of a function": ("monarch_kernel/a.py", '"""A.\n\n`run_cell.nope`."""', "run_cell.nope"),
    "method of an example": ("docs/a.md", "A.\n\n`mesh.nope(a, b)`", "mesh.nope(a, b)"),
    "member alone": ("docs/a.md", "A.\n\n`.nope()`", ".nope()"),
    "field": ("monarch_kernel/a.py", '"""A.\n\n`HostHello.nope`."""', "HostHello.nope"),
    "function": ("monarch_kernel/a.py", '"""A.\n\n`nope`."""', "nope"),
    "function in Markdown": ("docs/a.md", "A.\n\n`nope(1)`", "nope(1)"),
    "function in a document about the code": ("ARCHITECTURE.md", "A.\n\n`nope`", "nope"),
    "private function of another folder": ("monarch_kernel/a.py", '"""A.\n\n`_helper`."""', "_helper"),
    "constant": ("monarch_kernel/a.py", '"""A.\n\n`NOPE_S`."""', "NOPE_S"),
    "of the standard library": ("monarch_kernel/a.py", '"""A.\n\n`os.path.nope`."""', "os.path.nope"),
}


def test_good_references_are_not_reported() -> None:
    good = check(GOOD)
    assert good.broken == []
    assert good.outside == {"DataLoader": 1}
    assert good.resolved == {
        ("docstring", "path"): 3,
        ("docstring", "module"): 2,
        ("docstring", "class"): 1,
        ("docstring", "member"): 7,
        ("docstring", "name"): 3,
        ("docstring", "Python"): 3,
        ("docstring", "other library"): 1,
        ("comment", "member"): 3,
        ("Markdown", "path"): 2,
        ("Markdown", "member"): 3,
        ("Markdown", "name"): 1,
    }


@pytest.mark.parametrize(("path", "text", "reference"), BROKEN.values(), ids=BROKEN)
def test_each_kind_of_broken_reference_is_reported(path: str, text: str, reference: str) -> None:
    bench = {"tests/bed/bed.py": "class Bench: ..."}
    (broken,) = check({**GOOD, **bench, path: text}).broken
    assert broken.startswith(f"{path}:3: `{reference}` ")


def test_a_drawn_tree_is_parsed() -> None:
    tree = """The tree:

    KeyboardInterrupt
    └── RemoteInterrupt    work was interrupted

    MonarchError
    ├── RanksError         something failed
    │   ├── ActorError     in an endpoint
    │   └── RemoteError
    └── LaunchError        of a host

Misuse raises another.
"""
    assert drawn_edges(tree) == {
        ("RemoteInterrupt", "KeyboardInterrupt"),
        ("RanksError", "MonarchError"),
        ("ActorError", "RanksError"),
        ("RemoteError", "RanksError"),
        ("LaunchError", "MonarchError"),
    }
