"""Builds the JupyterLab extension into wheels, where node is there; without it the kernel is installed alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SETTING = "MONARCH_KERNEL_LABEXTENSION"
"""What to do: ``auto`` (build where that is possible), ``require`` (or fail, for releases), ``skip`` (leave it out)."""

NAME = "monarch-kernel-labextension"
SOURCES = ("src", "style", "schema", "package.json", "package-lock.json", "core.package.json", "tsconfig.json")
VIEW = "monarch_kernel/notebook/view/static"


class LabExtensionHook(BuildHookInterface):
    """Puts the extension where Jupyter looks for it, and builds it before if its sources are newer."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects the files of a wheel or an sdist."""
        mode = os.environ.get(SETTING, "auto")
        if mode not in ("auto", "require", "skip"):
            raise ValueError(f"{SETTING} is auto, require or skip, not {mode!r}")
        if mode == "skip":
            return
        folder = Path(self.root) / "labextension"
        problem = "" if is_built(Path(self.root)) else build(folder)
        if problem and mode == "require":
            raise RuntimeError(f"the JupyterLab extension was not built: {problem}")
        if problem:
            self.app.display_warning(
                f"the JupyterLab panel is left out ({problem}); the kernel works without it. With node and npm installed, "
                "install again to have it."
            )
        elif self.target_name == "wheel":
            place = f"share/jupyter/labextensions/{NAME}"
            build_data["shared_data"][str(folder / "dist")] = place
            build_data["shared_data"][str(folder / "install.json")] = f"{place}/install.json"


def is_built(root: Path) -> bool:
    """Whether the extension is there, and no older than what it is made of."""
    made = root / "labextension" / "dist" / "package.json"
    try:
        # The builder writes this file first, and where it has put the code at the end.
        if "_build" not in json.loads(made.read_text())["jupyterlab"]:
            return False
    except (OSError, ValueError, KeyError):
        return False
    tops = [root / "labextension" / name for name in SOURCES] + [root / VIEW]
    files = [file for top in tops for file in ([top] if top.is_file() else top.rglob("*")) if file.is_file()]
    return all(file.stat().st_mtime <= made.stat().st_mtime for file in files)


def build(folder: Path) -> str:
    """Build the extension; what is in the way, or nothing."""
    npm = shutil.which("npm")
    if npm is None:
        return "npm was not found on PATH"
    commands = [[npm, "run", "build"]]
    if not (folder / "node_modules").is_dir():
        commands.insert(0, [npm, "ci", "--no-audit", "--no-fund"])
    for command in commands:
        run = subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if run.returncode:
            return f"`npm {' '.join(command[1:])}` failed: {' '.join(run.stdout.split()[-60:])}"
    return ""
