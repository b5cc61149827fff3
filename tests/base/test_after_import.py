"""A function is called when a module has been imported, and the import stays as it is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.base.after_import import after_import

NAME = "imported_later_by_a_test"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module that can be imported."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / f"{NAME}.py"
    path.write_text("value = 1\n")
    yield path
    sys.modules.pop(NAME, None)


def test_functions_are_called_in_order_at_the_end_of_the_import(module: Path) -> None:
    seen: list[int] = []
    after_import(NAME, lambda there: seen.append(there.value))
    after_import(NAME, lambda there: seen.append(there.value + 1))
    assert not seen
    assert importlib.import_module(NAME).value == 1
    assert seen == [1, 2]
    module.write_text("value = 5\n")
    importlib.reload(sys.modules[NAME])
    assert seen == [1, 2, 5, 6]


def test_an_imported_module_is_passed_at_once(module: Path) -> None:
    there = importlib.import_module(NAME)
    seen: list[object] = []
    after_import(NAME, seen.append)
    assert seen == [there]


def test_a_missing_module_stays_missing(module: Path) -> None:
    after_import("no_such_module_of_a_test", print)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_a_test"):
        importlib.import_module("no_such_module_of_a_test")


def test_an_error_of_the_function_is_one_of_the_import(module: Path) -> None:
    def fail(there: object) -> None:
        raise LookupError("the other version")

    after_import(NAME, fail)
    with pytest.raises(LookupError, match="the other version"):
        importlib.import_module(NAME)
    assert NAME not in sys.modules
