"""What package indexes and archives read about the project is valid and agrees."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def metadata() -> Any:
    return ProjectMetadata(str(ROOT), PluginManager()).core


def test_classifiers_are_known_and_in_order(metadata: Any) -> None:
    known = pytest.importorskip("trove_classifiers").classifiers
    assert set(metadata.classifiers) <= known
    assert list(metadata.config["classifiers"]) == sorted(metadata.config["classifiers"])


def test_advice_to_install_names_the_extra_that_has_the_package(metadata: Any) -> None:
    """The extra has the version that was tested, so messages and documents name no package that an extra has."""
    extras = {
        name: {re.split(r"[<>=~!\[; ]", each)[0] for each in requirements}
        for name, requirements in metadata.optional_dependencies.items()
    }
    of_users = {
        "checkpoint",
        "kubernetes",
        "lightning",
        "mcp",
        "mlflow",
        "parquet",
        "ray",
        "rdma",
        "ssh",
        "tensorboard",
    }
    packages = set().union(*(extras[name] for name in of_users | {"trackio", "wandb"}))
    texts = [*(ROOT / "monarch_kernel").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    for path in texts:
        text = path.read_text(encoding="utf-8")
        for named in re.findall(r"monarch_kernel\[([a-z,]+)\]", text):
            assert set(named.split(",")) <= set(extras), f"{path}: monarch_kernel[{named}]"
        for what in re.findall(r"pip install ['\"]?([A-Za-z0-9_-]+)", text):
            assert what not in packages, f"{path}: pip install {what}"


def test_versions_agree(metadata: Any) -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    package = json.loads((ROOT / "labextension" / "package.json").read_text())
    assert metadata.version == citation["version"] == package["version"]
    assert metadata.license_expression == citation["license"] == package["license"]
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "type"} <= set(citation)


def test_the_first_line_of_make_says_what_comes(tmp_path: Path) -> None:
    def first_lines(goal: str, *settings: str) -> list[str]:
        command = ["make", "--dry-run", "--always-make", goal, *settings]
        run = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
        )
        return run.stdout.splitlines()[:2]

    fresh = f"VENV={tmp_path}"
    about, installs = first_lines("demo", fresh)
    assert about == "make demo: runs notebooks/01_quickstart.ipynb on this machine; about two minutes on two cores"
    assert installs.startswith("First, once, it installs torch, Jupyter and their dependencies into")
    (tmp_path / ".stamp").touch()
    assert not any(line.startswith("First") for line in first_lines("demo", fresh))
    about, installs = first_lines("docs", fresh, f"DOCS_VENV={tmp_path}/docs")
    assert about.startswith("make docs: builds the documentation site")
    assert installs == f"Once, it installs Sphinx into {tmp_path}/docs (0.3 GB, a minute)"


def test_the_sdist_has_what_its_makefile_uses() -> None:
    include = set(ProjectMetadata(str(ROOT), PluginManager()).hatch.build_targets["sdist"]["include"])
    assert {"/monarch_kernel", "/tests", "/notebooks", "/benchmarks", "/docs", "/CITATION.cff", "/LICENSE"} <= include


def test_the_first_documents_are_short() -> None:
    """Longer theory goes into the docstring of the file that it explains, and guides into `docs/`."""
    assert (ROOT / "ARCHITECTURE.md").stat().st_size <= 9 * 1024
    assert (ROOT / "README.md").read_text().count("\n") <= 220
