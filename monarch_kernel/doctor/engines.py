"""Checks of optional parts: the engines that provide hosts, and RDMA hardware."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from monarch_kernel.doctor.report import Finding, Sign
from monarch_kernel.doctor.software import DISTRIBUTION, missing, requirements

__all__ = ["engines", "rdma"]

_COMMANDS = {"slurm": ("sbatch", "squeue", "scancel")}
_LIBRARIES = {"ray": "ray", "ssh": "asyncssh", "kubernetes": "kubernetes", "lightning": "lightning_sdk"}


def engines() -> Iterator[Finding]:
    """List the engines of ``%mesh up --on`` that are usable, as far as that depends on this machine."""
    from monarch_kernel.launch.registry import ENGINES

    lacks = {name: _lacks(name, engine.extra) for name, engine in ENGINES.items()}
    usable = [name for name, lack in lacks.items() if not lack]
    absent = [f"{name} ({lack})" for name, lack in lacks.items() if lack]
    found = f"available: {', '.join(usable)}"
    if "kubernetes" in usable and not _knows_a_cluster():
        found += " (kubernetes: no cluster is configured)"
    if not absent:
        yield Finding("engines", Sign.OK, found)
        return
    extras = [ENGINES[name].extra for name, lack in lacks.items() if lack and ENGINES[name].extra]
    remedy = f"if you want them: {sys.executable} -m pip install '{DISTRIBUTION}[{','.join(extras)}]'" if extras else ""
    yield Finding("engines", Sign.OK, f"{found}; not available: {', '.join(absent)}", remedy)


def _lacks(name: str, extra: str) -> str:
    """Say what an engine needs and does not find; empty if nothing is missing."""
    commands = [each for each in _COMMANDS.get(name, ()) if not shutil.which(each)]
    if commands:
        return f"no {', '.join(commands)}"
    if not extra:
        return ""
    try:
        return "; ".join(filter(None, map(missing, requirements(extra)))) or _not_found(name)
    except (metadata.PackageNotFoundError, ImportError):
        return _not_found(name)


def _not_found(name: str) -> str:
    """Look for the library directly, when no metadata names it: the package is not installed, or excludes this Python."""
    library = _LIBRARIES[name]
    return "" if importlib.util.find_spec(library) else f"{library} is not installed"


def _knows_a_cluster() -> bool:
    """Return whether there is a kubeconfig, or this process runs in a pod."""
    paths = os.environ.get("KUBECONFIG", "") or str(Path.home() / ".kube" / "config")
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(map(os.path.isfile, paths.split(os.pathsep)))


def rdma() -> Iterator[Finding]:
    """Check for RDMA hardware, and for NIXL, the library that drives it."""
    from monarch_kernel.runtime.buffers.nixl import has_hardware, is_installed

    hardware, library = has_hardware(), is_installed()
    if hardware and not library:
        found = "there are devices, but NIXL, which drives them, is not installed: data to other machines uses TCP"
        remedy = f"{sys.executable} -m pip install '{DISTRIBUTION}[rdma]'"
        yield Finding("RDMA", Sign.WARNING, found, remedy)
        return
    has = "NIXL is installed" if library else "NIXL is not installed"
    where = "there are devices" if hardware else "there is no hardware, so data to other machines uses TCP"
    yield Finding("RDMA", Sign.OK, f"{has}, and {where}" if library == hardware else f"{has}; {where}")
