"""Each module lists its public names in order, and imports of the package stay light."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "monarch_kernel"
HEAVY = ("torch", "IPython", "ipykernel", "ipywidgets", "anywidget")


def _public_modules() -> list[str]:
    """Dotted names of the modules without a leading underscore; to import ``__main__`` would run it."""
    names = []
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            names.append(".".join(parts))
    return sorted(names)


def _path(module: str) -> Path:
    path = ROOT.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _text(module: str) -> str:
    return _path(module).read_text(encoding="utf-8")


def _has_all(module: str) -> bool:
    return re.search(r"^__all__\b.*=", _text(module), re.MULTILINE) is not None


def _order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """The sort order of ruff: constants, classes, functions; numbers within names by value."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return {name.partition(".")[0] for name in run.stdout.split()}


def test_all_is_sorted_and_complete() -> None:
    wrong = []
    for module in filter(_has_all, _public_modules()):
        loaded = importlib.import_module(module)
        if list(loaded.__all__) != sorted(set(loaded.__all__), key=_order):
            wrong.append(f"{module} is not sorted: {loaded.__all__}")
        missing = [name for name in loaded.__all__ if not hasattr(loaded, name)]
        wrong += [f"{module} has no {name}" for name in missing]
    assert not wrong


def test_a_module_lists_its_public_names() -> None:
    wrong = []
    for module in _public_modules():
        defines = any(
            isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
            for node in ast.parse(_text(module)).body
        )
        if defines and not _has_all(module):
            wrong.append(module)
    assert not wrong


def test_the_package_is_light() -> None:
    assert not _loaded_after("import monarch_kernel").intersection(HEAVY)


WITHOUT_TORCH = (
    "actor",
    "base.mesh",
    "doctor.run_checks",
    "net.hosts.zmq",
    "net.wire.codec",
    "runtime.controller.runtime",
    "runtime.host.agent",
)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_modules_that_need_no_torch_do_not_load_it(module: str) -> None:
    assert "torch" not in _loaded_after(f"import monarch_kernel.{module}")


def test_the_public_names_are_those_of_the_architecture() -> None:
    text = (ROOT.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("## Public surface")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w.]+)`[^|]* \| `([\w ]+)` \|$", section, re.MULTILINE))
    assert len(rows) == section.count("\n| ") - 1, "a row of the table is not read"  # besides its head
    for module, names in rows.items():
        public = importlib.import_module(f"monarch_kernel.{module}").__all__
        assert sorted(names.split()) == sorted(public), module


def test_a_heavy_import_is_detected() -> None:
    assert "IPython" in _loaded_after("import IPython.paths")
