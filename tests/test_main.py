"""Our processes import libraries, and not files with the same names in the notebook's folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_kernel.cli import TEMPLATE
from monarch_kernel.launch.base import agent_command, module_command

SHADOWS = [
    "types",
    "functools",
    "collections",
    "contextlib",
    "enum",
    "operator",
    "keyword",
    "reprlib",
    "warnings",
    "importlib",
    "typing",
    "torch",
    "queue",
    "random",
    "logging",
    "token",
    "select",
    "numbers",
    "secrets",
    "statistics",
    "os",
    "re",
    "json",
    "ast",
    "io",
    "abc",
    "copy",
    "string",
    "time",
    "threading",
    "socket",
    "signal",
    "struct",
    "selectors",
    "pathlib",
    "dataclasses",
    "inspect",
    "tempfile",
    "subprocess",
    "asyncio",
    "weakref",
    "heapq",
    "bisect",
    "calendar",
    "datetime",
    "decimal",
    "email",
    "html",
    "http",
    "platform",
    "traceback",
    "tokenize",
    "zmq",
    "IPython",
    "ipykernel",
    "msgspec",
    "errors",
    "actor",
    "base",
]
"""Names of libraries, most of which Python itself imports when it starts; the others are ours, and those that we import."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}.py of the working directory was imported')")
    return tmp_path


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_working_directory_does_not_shadow_libraries(tmp_path: Path) -> None:
    for name in ("selectors", "pathlib", "ipykernel"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}.py of the working directory was imported')")
    done = run([sys.executable, "-m", "monarch_kernel", "--version"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_command_of_the_kernel_imports_no_file_of_the_working_directory(folder: Path) -> None:
    python, *arguments = json.loads((TEMPLATE / "kernel.json").read_text())["argv"]
    assert (python, arguments[-2:]) == ("python", ["-f", "{connection_file}"])
    done = run([sys.executable, *arguments[:-2], "--version"], folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_command_of_other_processes_imports_no_file_of_the_working_directory(folder: Path) -> None:
    done = run(module_command("monarch_kernel.bootstrap", "none"), folder)
    assert done.stderr == "unknown role 'none'\n"


def test_the_command_of_agents_on_other_hosts_imports_no_file_of_the_working_directory(folder: Path) -> None:
    done = run(list(agent_command()), folder)
    assert done.stderr.startswith("this is not a configuration of a host agent: "), done.stderr
