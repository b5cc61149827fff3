"""Checks of the installation in Jupyter: the kernelspecs, and the panel in JupyterLab."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from monarch_kernel.doctor.children import ask, package_root
from monarch_kernel.doctor.report import Finding, Sign
from monarch_kernel.doctor.software import OURS

__all__ = ["KERNEL_S", "LAB_EXTENSION", "is_disabled", "kernels", "panel"]

KERNEL_S = 30.0
"""Deadline for trying all interpreters that kernelspecs name."""

LAB_EXTENSION = "monarch-kernel-labextension"

_EACH_S = 10.0
_WHICH = f"import json, {OURS} as m; print(json.dumps([m.__version__, m.__file__]))"
_INSTALL = f"{sys.executable} -m {OURS} install --user"


def kernels() -> Iterator[Finding]:
    """Check that the kernelspecs of this package start the package that runs here."""
    from jupyter_client.kernelspec import KernelSpecManager

    manager = KernelSpecManager(ensure_native_kernel=False)
    specs = {name: _read(Path(folder) / "kernel.json") for name, folder in sorted(manager.find_kernel_specs().items())}
    ours = {name: spec for name, spec in specs.items() if _is_ours(spec)}
    if not ours:
        others = f"; Jupyter has {', '.join(specs)}" if specs else ""
        yield Finding("kernel in Jupyter", Sign.PROBLEM, f"no Monarch kernel is installed{others}", _INSTALL)
    for name, spec in ours.items():
        yield _kernel(name, spec, sys.executable)
    yield from _other_jupyter()


def _is_ours(spec: Mapping[str, Any]) -> bool:
    """Whether a kernelspec starts this package: by ``-c``, or by ``-m``, as those that earlier versions wrote."""
    return any(word == OURS or f"from {OURS}." in word for word in spec.get("argv", ()))


def _kernel(name: str, spec: Mapping[str, Any], python: str) -> Finding:
    """Check one kernelspec.

    Args:
        name: the name of the kernel.
        spec: the content of its ``kernel.json``.
        python: the interpreter of Jupyter, which Jupyter uses when a spec only says ``python``.
    """
    item = f"kernel {name!r}"
    again = f"{_INSTALL} --name {name}"
    wanted = str(spec["argv"][0])
    is_theirs = wanted in ("python", "python3", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    interpreter = python if is_theirs else wanted
    if not shutil.which(interpreter):
        return Finding(item, Sign.PROBLEM, f"its interpreter {interpreter} does not exist", again)
    env = {key: str(value) for key, value in spec.get("env", {}).items()}
    said = ask([interpreter, "-c", _WHICH], _EACH_S, env={**os.environ, **env}, cwd="/")
    if said.trouble:
        return Finding(item, Sign.PROBLEM, f"{interpreter} can't import {OURS}: {said.trouble}", again)
    version, file = json.loads(said.out.splitlines()[-1])
    root, ours = os.path.dirname(os.path.dirname(file)), str(sys.modules[OURS].__version__)
    if version != ours:
        return Finding(item, Sign.PROBLEM, f"{interpreter} imports {version} from {root}, but this is {ours}", again)
    if os.path.realpath(root) != os.path.realpath(package_root()):
        found = f"{interpreter} imports {version} from {root}, but this runs from {package_root()}"
        return Finding(item, Sign.WARNING, found, f"to make Jupyter start this one: {again}")
    return Finding(item, Sign.OK, f"starts {interpreter}, which imports {version} from {root}")


def _other_jupyter() -> Iterator[Finding]:
    """Check the ``jupyter`` on PATH if it belongs to another environment, which may have other kernels."""
    jupyter = shutil.which("jupyter")
    if not jupyter or Path(jupyter).parent.resolve() == Path(sys.executable).parent.resolve():
        return
    said = ask([jupyter, "kernelspec", "list", "--json"], _EACH_S)
    item, where = "other Jupyter", f"{jupyter} belongs to another environment"
    try:
        specs = {} if said.trouble else json.loads(said.out)["kernelspecs"]
    except (ValueError, KeyError):
        specs = {}
    ours = {name: each["spec"] for name, each in specs.items() if _is_ours(each["spec"])}
    if not ours:
        why = f": {said.trouble}" if said.trouble else ""
        yield Finding(item, Sign.WARNING, f"{where}, and lists no Monarch kernel{why}", f"if you use it: {_INSTALL}")
        return
    for name, spec in ours.items():
        finding = _kernel(name, spec, _interpreter_of(jupyter))
        sign = Sign.OK if finding.sign is Sign.OK else Sign.WARNING  # the user may not use this Jupyter
        yield Finding(item, sign, f"{where}; {finding.item}: {finding.found}", finding.remedy)


def _interpreter_of(script: str) -> str:
    """Return the interpreter that a script names in its first line; this one if it names none."""
    try:
        with open(script, "rb") as file:
            first = file.readline(512)
    except OSError:
        return sys.executable
    return os.fsdecode(first[2:].strip()) if first.startswith(b"#!/") and b" " not in first.strip() else sys.executable


def panel() -> Iterator[Finding]:
    """Check that JupyterLab finds the extension, in this version, and enabled."""
    from jupyter_core.paths import jupyter_config_path, jupyter_path

    item, ours = "panel in JupyterLab", str(sys.modules[OURS].__version__)
    found = [
        path
        for each in jupyter_path("labextensions")
        if (path := Path(each) / LAB_EXTENSION / "package.json").is_file()
    ]
    if not found:
        remedy = f"optional; the wheel contains it: pip install {OURS} (an install from source needs node)"
        yield Finding(item, Sign.WARNING, f"{LAB_EXTENSION} is not installed: there is no panel of meshes", remedy)
        return
    version = str(_read(found[0]).get("version", ""))
    where = f"{version or 'of unknown version'}, in {found[0].parent}"
    settings = [Path(each) / "labconfig" / "page_config.json" for each in jupyter_config_path()]
    if disabling := [path for path in settings if is_disabled(_read(path).get("disabledExtensions"))]:
        remedy = f"jupyter labextension enable {LAB_EXTENSION}"
        yield Finding(item, Sign.WARNING, f"{where}, and disabled in {disabling[0]}", remedy)
    elif not _is_same(version, ours):
        remedy = "reinstall the package in the environment of Jupyter, and reload the page"
        yield Finding(item, Sign.WARNING, f"{where}, but the kernel is {ours}", remedy)
    else:
        yield Finding(item, Sign.OK, where)


def is_disabled(disabled: object) -> bool:
    """Return whether JupyterLab's settings disable the extension, or a plugin of it.

    Args:
        disabled: the value of ``disabledExtensions``: a list of names, or a mapping from names to booleans.
    """
    names: Sequence[object] = ()
    if isinstance(disabled, Mapping):
        names = [name for name, is_so in disabled.items() if is_so]
    elif isinstance(disabled, list):
        names = disabled
    return any(str(name).partition(":")[0] == LAB_EXTENSION for name in names)


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if the file does not exist, or contains something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # includes invalid UTF-8
        return {}
    return content if isinstance(content, dict) else {}


def _is_same(version: str, ours: str) -> bool:
    """Compare a version in npm's notation with one in Python's: 0.1.0-alpha.1 is 0.1.0a1."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version) == Version(ours)
    except InvalidVersion:
        return version == ours
