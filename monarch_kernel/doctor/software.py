"""Checks of installed software: the interpreter, this package, its requirements, and torch with its devices."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from monarch_kernel.base.text import format_nbytes
from monarch_kernel.doctor.children import ask_python, package_root
from monarch_kernel.doctor.report import Finding, Sign

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = [
    "DISTRIBUTION",
    "OURS",
    "TORCH_S",
    "missing",
    "package",
    "packages",
    "python",
    "requirements",
    "torch",
    "torch_finding",
]

OURS = __name__.partition(".")[0]
DISTRIBUTION = "monarch_kernel"
TORCH_S = 60.0
"""How long the import of torch may take: from a network file system with a cold cache it is slow."""

_LEAST_PYTHON = (3, 10)
_SHOWN = ("torch", "ipykernel", "ipywidgets", "anywidget", "pyzmq", "cloudpickle")
_LAB = "jupyterlab"

_TORCH = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch
    del said[:]
    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
distributed = torch.distributed.is_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "is_available": cuda,
    "devices": [[device.name, device.total_memory] for device in devices],
    "gloo": distributed and torch.distributed.is_gloo_available(),
    "nccl": distributed and torch.distributed.is_nccl_available(),
    "said": [str(each.message).split("\\n")[0].strip() for each in said],
}))
"""


def python() -> Iterator[Finding]:
    """Check the interpreter and the operating system."""
    where = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    if sys.version_info[:2] < _LEAST_PYTHON:
        least = ".".join(map(str, _LEAST_PYTHON))
        yield Finding("Python", Sign.PROBLEM, where, f"Python {least} or newer is required: create another environment")
    elif not sys.platform.startswith("linux"):
        remedy = "starting and watching ranks requires Linux; use a container or another machine"
        yield Finding("Python", Sign.PROBLEM, f"{where}, on {platform.system()}", remedy)
    else:
        kind = "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
        yield Finding("Python", Sign.OK, f"{where} ({kind})")


def package() -> Iterator[Finding]:
    """Check the version of this package, and how it is installed."""
    version, root = str(sys.modules[OURS].__version__), package_root()
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        remedy = f"{sys.executable} -m pip install -e {root}"
        yield Finding(DISTRIBUTION, Sign.WARNING, f"{version} runs from {root}, but is not installed", remedy)
        return
    editable = _editable_root(distribution)
    place = editable or str(distribution.locate_file(""))
    how = "installed in editable form" if editable else "installed"
    if os.path.realpath(place) != os.path.realpath(root):
        found = f"{version} runs from {root}, but {distribution.version} is {how} in {place}"
        remedy = "Python uses the first on sys.path: check PYTHONPATH and the working directory"
        yield Finding(DISTRIBUTION, Sign.WARNING, found, remedy)
    elif distribution.version != version:
        found = f"{version} runs, but its metadata in {place} say {distribution.version}"
        yield Finding(DISTRIBUTION, Sign.WARNING, found, f"reinstall it: {sys.executable} -m pip install -e {root}")
    else:
        yield Finding(DISTRIBUTION, Sign.OK, f"{version}, {how}, in {root}")


def _editable_root(distribution: metadata.Distribution) -> str:
    """Return the source folder of an editable install; empty for any other install."""
    origin: Any = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return ""
    return unquote(urlsplit(origin["url"]).path)


def packages() -> Iterator[Finding]:
    """Compare the installed versions of required packages with the metadata of this package."""
    try:
        needed = requirements()
    except metadata.PackageNotFoundError:
        needed = []
    except ImportError as error:  # it comes with ipykernel
        remedy = f"{sys.executable} -m pip install packaging"
        yield Finding("required packages", Sign.PROBLEM, f"can't compare versions: {error}", remedy)
        return
    lacking = [problem for each in needed if (problem := missing(each))]
    versions = {each: _version(each) for each in (*_SHOWN, _LAB)}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if not versions[_LAB]:
        found += ("; " if found else "") + f"no {_LAB}"
    if lacking:
        wanted = " ".join(f"'{each.name}{each.specifier}'" for each in needed if missing(each))
        remedy = f"{sys.executable} -m pip install {wanted}"
        yield Finding("required packages", Sign.PROBLEM, f"{'; '.join(lacking)} (and {found})", remedy)
    elif not needed:
        remedy = "install the package: its metadata list what it requires"
        yield Finding("required packages", Sign.WARNING, f"{found}; not compared with the requirements", remedy)
    else:
        yield Finding("required packages", Sign.OK, found)


def requirements(extra: str = "") -> list[Requirement]:
    """Return the requirements of this package in this environment, or only those that an extra adds.

    Raises:
        PackageNotFoundError: this package is not installed.
        ImportError: ``packaging`` is not installed.
    """
    from packaging.requirements import Requirement

    found = []
    for text in metadata.requires(DISTRIBUTION) or ():
        each = Requirement(text)
        applies = each.marker is None or each.marker.evaluate({"extra": extra})
        if applies and bool(extra) == (each.marker is not None and "extra" in str(each.marker)):
            found.append(each)
    return found


def missing(requirement: Requirement) -> str:
    """Say why a requirement is not met; empty if it is met."""
    version = _version(requirement.name)
    if not version:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} is {version}, but {requirement.specifier} is required"
    return ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def torch() -> Iterator[Finding]:
    """Check torch and its devices, in a child process, because the import may hang or crash, and takes memory."""
    from monarch_kernel.runtime.host.gpus import gpu_ids

    if not _version("torch"):
        yield Finding("torch", Sign.PROBLEM, "not installed", f"{sys.executable} -m pip install torch")
        return
    said = ask_python(_TORCH, TORCH_S)
    if said.trouble:
        remedy = f"run {sys.executable} -c 'import torch'; if that fails too, reinstall torch"
        yield Finding("torch", Sign.PROBLEM, f"import failed: {said.trouble}", remedy)
        return
    yield torch_finding(json.loads(said.out.splitlines()[-1]), gpu_ids())


def torch_finding(facts: dict[str, Any], gpus: Sequence[str]) -> Finding:
    """Turn what torch reports about itself into a finding.

    Args:
        facts: the JSON object that the child prints.
        gpus: the GPUs that ranks on this machine would get, by their names in CUDA_VISIBLE_DEVICES.
    """
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU only"
    found = f"{facts['version']}, built for {build}"
    if not facts["gloo"]:
        remedy = "ranks form process groups with gloo: install a build that has it, such as those of pytorch.org"
        return Finding("torch", Sign.PROBLEM, f"{found}, without gloo", remedy)
    said = "".join(f"; torch warns: {text}" for text in facts["said"])
    if facts["is_available"]:
        devices = [f"{name} ({format_nbytes(nbytes)})" for name, nbytes in facts["devices"]]
        counted = [f"{devices.count(each)} x {each}" for each in dict.fromkeys(devices)]
        found += f"; devices: {', '.join(counted) or 'none'}{said}"
        if facts["said"]:
            return Finding("torch", Sign.WARNING, found, "check whether this build of torch supports the devices")
        return Finding("torch", Sign.OK, found if facts["nccl"] or facts["hip"] else f"{found}; without NCCL")
    if not gpus:
        return Finding("torch", Sign.OK, f"{found}; no GPU, so ranks use CPUs")
    counted_gpus = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}"
    found += f"; torch can't use the {counted_gpus} of this machine{said}"
    if build == "CPU only":
        remedy = "install a build of torch for CUDA (see pytorch.org)"
    else:
        remedy = f"check with nvidia-smi that the driver runs and is new enough for {build}"
    return Finding("torch", Sign.PROBLEM, found, f"{remedy}; or start meshes with --device cpu")
