"""Source files of the user's modules are found by module, name or path, without an import."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import monarch_kernel
from monarch_kernel.features.editing.sources import check_syntax, find_source, is_users, sources_for


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on ``sys.path`` with a module, a package with a module, a namespace package, and files that are not modules."""
    for name, text in {
        "single.py": "raise RuntimeError('not to be imported')",
        "pack/__init__.py": "",
        "pack/one.py": "x = 1",
        "pack/deep/__init__.py": "",
        "pack/deep/two.py": "x = 2",
        "pack/data/notes.py": "not a module of the package",
        "pack/not-a-name.py": "",
        "space/part.py": "x = 3",
        "latin.py": "# -*- coding: latin-1 -*-\nx = 'é'",
        "text.txt": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "latin-1")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def names(what: str | Path) -> list[str]:
    return [source.name for source in sources_for(what)]


def test_a_name_means_a_module_or_all_of_a_package(folder: Path) -> None:
    assert names("single") == ["single"]
    assert names("pack") == ["pack", "pack.deep", "pack.deep.two", "pack.one"]
    assert names("pack.deep") == ["pack.deep", "pack.deep.two"]
    assert names("pack.one") == ["pack.one"]
    assert names("space") == ["space.part"]
    assert "single" not in sys.modules


def test_a_path_means_a_module_or_all_of_a_package(folder: Path) -> None:
    assert names(folder / "single.py") == ["single"]
    assert names(folder / "pack") == names("pack")
    assert names(folder / "pack" / "deep" / "two.py") == ["pack.deep.two"]
    assert names(str(folder / "pack" / "__init__.py")) == names("pack")
    assert names(folder) == ["latin", "pack", "pack.deep", "pack.deep.two", "pack.one", "single"]


def test_a_module_is_found_as_an_import_would(folder: Path) -> None:
    source = find_source("pack.deep.two")
    assert source is not None
    assert (source.file, source.text, source.is_package) == (str(folder / "pack/deep/two.py"), "x = 2", False)
    latin = find_source("latin")
    assert latin is not None
    assert latin.text.endswith("é'")
    space = find_source("space")
    assert space is not None
    assert (space.file, space.is_package) == ("", True)
    assert find_source("pack.nothing") is None
    assert find_source("single.below") is None
    assert find_source("") is None


def test_threads_look_for_modules_at_the_same_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes the interpreter read directories again, and its caches are shared."""
    gone = {f"{folder}/gone-{i}": None for i in range(500)}
    monkeypatch.setattr(sys, "path_importer_cache", {**sys.path_importer_cache, **gone})
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(find_source, ["single"] * 40))
    finally:
        sys.setswitchinterval(interval_s)
    assert all(source is not None and source.text for source in found)


def test_a_directory_that_is_created_later_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = tmp_path / "later"
    monkeypatch.syspath_prepend(str(later))
    assert find_source("comes_later") is None
    later.mkdir()
    (later / "comes_later.py").write_text("x = 1")
    source = find_source("comes_later")
    assert source is not None
    assert source.text == "x = 1"


def test_modules_that_are_not_the_users_are_not_found() -> None:
    for module in (json, pytest, monarch_kernel):
        assert find_source(module.__name__) is None
        assert not is_users(module.__file__)
    assert find_source("sys") is None
    assert find_source("__main__") is None


@pytest.mark.parametrize("what", ["text.txt", "pack/data", "nothing.py", "no such name"])
def test_paths_that_can_not_be_imported_are_refused(folder: Path, what: str) -> None:
    if what == "pack/data":
        (folder / what / "notes.py").unlink()
    with pytest.raises(ValueError, match=r"not a Python file|contains no module|no file, folder or module"):
        sources_for(folder / what)


def test_a_listed_file_that_no_longer_exists_is_skipped(folder: Path) -> None:
    (folder / "pack" / "gone.py").symlink_to(folder / "removed.py")
    assert names("pack") == ["pack", "pack.deep", "pack.deep.two", "pack.one"]


def test_syntax_is_checked_with_the_name_of_the_file(folder: Path) -> None:
    (folder / "single.py").write_text("x = 1\ny = (")
    with pytest.raises(SyntaxError) as error:
        check_syntax(sources_for("single"))
    assert (error.value.filename, error.value.lineno) == (str(folder / "single.py"), 2)
