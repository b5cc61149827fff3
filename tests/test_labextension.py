"""The build hook: wheels carry the JupyterLab extension if it can be built; otherwise the build says why not."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
EXTENSION = "/data/share/jupyter/labextensions/monarch-kernel-labextension/"


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path, hook: ModuleType) -> Path:
    """A small project with this project's build hook; its extension is built, and newer than its sources."""
    root = tmp_path / "project"
    for name in (
        "labextension/src/index.ts",
        "labextension/install.json",
        f"{hook.VIEW}/view.js",
        "monarch_kernel/a.py",
    ):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
        os.utime(file, (1000, 1000))
    shutil.copy(ROOT / "hatch_build.py", root)
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "monarch_kernel"\nversion = "0.1.0"\n'
        '[tool.hatch.build.targets.wheel]\npackages = ["monarch_kernel"]\n'
        '[tool.hatch.build.hooks.custom]\npath = "hatch_build.py"\n'
    )
    made = root / "labextension" / "dist" / "package.json"
    made.parent.mkdir()
    made.write_text(json.dumps({"jupyterlab": {"_build": {}}}))
    return root


def wheel_of(project: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Build a wheel without npm; gives the output, and the files of the extension in the wheel."""
    run = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": "", **environment},
    )
    names = [name for wheel in project.glob("dist/*.whl") for name in zipfile.ZipFile(wheel).namelist()]
    return run, sorted(name.partition(EXTENSION)[2] for name in names if EXTENSION in name)


def test_a_built_extension_is_in_the_wheel_without_node(project: Path) -> None:
    run, names = wheel_of(project, MONARCH_KERNEL_LABEXTENSION="require")
    assert run.returncode == 0, run.stderr
    assert names == ["install.json", "package.json"]


def test_without_node_the_wheel_has_no_extension_and_the_build_says_so(project: Path) -> None:
    shutil.rmtree(project / "labextension" / "dist")
    run, names = wheel_of(project)
    assert run.returncode == 0, run.stderr
    assert names == []
    assert "npm was not found on PATH" in run.stdout + run.stderr


def test_a_release_fails_without_node(project: Path) -> None:
    shutil.rmtree(project / "labextension" / "dist")
    run, _ = wheel_of(project, MONARCH_KERNEL_LABEXTENSION="require")
    assert run.returncode != 0
    assert "npm was not found on PATH" in run.stdout + run.stderr


def test_the_extension_can_be_left_out(project: Path) -> None:
    run, names = wheel_of(project, MONARCH_KERNEL_LABEXTENSION="skip")
    assert run.returncode == 0, run.stderr
    assert names == []


def test_a_misspelt_setting_is_refused(project: Path) -> None:
    run, _ = wheel_of(project, MONARCH_KERNEL_LABEXTENSION="yes")
    assert run.returncode != 0
    assert "is auto, require or skip, not 'yes'" in run.stdout + run.stderr


def test_the_extension_is_built_again_when_a_source_is_newer(project: Path, hook: ModuleType) -> None:
    assert hook.is_built(project)
    for source in (project / "labextension" / "src" / "index.ts", project / hook.VIEW / "view.js"):
        os.utime(source, (4e9, 4e9))
        assert not hook.is_built(project)
        os.utime(source, (1000, 1000))
    assert hook.is_built(project)


@pytest.mark.parametrize("written", ["{", "{}", '{"jupyterlab": {}}'])
def test_an_unfinished_build_does_not_count(project: Path, hook: ModuleType, written: str) -> None:
    (project / "labextension" / "dist" / "package.json").write_text(written)
    assert not hook.is_built(project)


def test_the_lock_names_no_registry() -> None:
    lock = json.loads((ROOT / "labextension" / "package-lock.json").read_text())
    assert len(lock["packages"]) > 100
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]


def test_versions_agree() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    version = json.loads((ROOT / "labextension" / "package.json").read_text())["version"]
    assert f'\nversion = "{version}"\n' in text
