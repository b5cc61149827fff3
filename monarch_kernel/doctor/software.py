"""What is installed: the interpreter, this package, what it requires, and what torch finds."""

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
"""How long torch may take to be imported: from a cold file system of a network it does."""

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
    """The interpreter, and the system below it."""
    where = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    if sys.version_info[:2] < _LEAST_PYTHON:
        least = ".".join(map(str, _LEAST_PYTHON))
        yield Finding("Python", Sign.PROBLEM, where, f"Python {least} or newer is needed: make another environment")
    elif not sys.platform.startswith("linux"):
        remedy = "only Linux has what ranks are started and watched with; use a container or another machine"
        yield Finding("Python", Sign.PROBLEM, f"{where}, on {platform.system()}", remedy)
    else:
        kind = "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
        yield Finding("Python", Sign.OK, f"{where} ({kind})")


def package() -> Iterator[Finding]:
    """This package: its version, and how it is installed."""
    version, root = str(sys.modules[OURS].__version__), package_root()
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        remedy = f"{sys.executable} -m pip install -e {root}"
        yield Finding(DISTRIBUTION, Sign.WARNING, f"{version}, in {root}, which is not installed", remedy)
        return
    editable = _editable_root(distribution)
    place = editable or str(distribution.locate_file(""))
    how = "installed in editable form" if editable else "installed"
    if os.path.realpath(place) != os.path.realpath(root):
        found = f"{version} runs from {root}, and {distribution.version} is {how} in {place}"
        remedy = "whichever is first on sys.path is used: see PYTHONPATH, and the working directory"
        yield Finding(DISTRIBUTION, Sign.WARNING, found, remedy)
    elif distribution.version != version:
        found = f"{version} runs, while its metadata in {place} say {distribution.version}"
        yield Finding(DISTRIBUTION, Sign.WARNING, found, f"install it again: {sys.executable} -m pip install -e {root}")
    else:
        yield Finding(DISTRIBUTION, Sign.OK, f"{version}, {how}, in {root}")


def _editable_root(distribution: metadata.Distribution) -> str:
    """The folder of a package that is installed in editable form; empty for any other."""
    told: Any = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not told.get("dir_info", {}).get("editable"):
        return ""
    return unquote(urlsplit(told["url"]).path)


def packages() -> Iterator[Finding]:
    """The versions of what we require, against what our metadata ask for."""
    try:
        needed = requirements()
    except metadata.PackageNotFoundError:
        needed = []
    except ImportError as error:  # it comes with ipykernel
        remedy = f"{sys.executable} -m pip install packaging"
        yield Finding("required packages", Sign.PROBLEM, f"can't be compared: {error}", remedy)
        return
    lacking = [problem for each in needed if (problem := missing(each))]
    versions = {each: _version(each) for each in (*_SHOWN, _LAB)}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if not versions[_LAB]:
        found += ("; " if found else "") + f"no {_LAB} here"
    if lacking:
        wanted = " ".join(f"'{each.name}{each.specifier}'" for each in needed if missing(each))
        remedy = f"{sys.executable} -m pip install {wanted}"
        yield Finding("required packages", Sign.PROBLEM, f"{'; '.join(lacking)} (and {found})", remedy)
    elif not needed:
        remedy = "install the package, which says what it requires"
        yield Finding("required packages", Sign.WARNING, f"{found}; not compared with what is required", remedy)
    else:
        yield Finding("required packages", Sign.OK, found)


def requirements(extra: str = "") -> list[Requirement]:
    """What our metadata say that we require here; of an extra only what it adds.

    Raises:
        PackageNotFoundError: we are not installed.
        ImportError: there is no ``packaging``.
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
    """What is wrong with what is installed for a requirement, in words; empty if it is met."""
    version = _version(requirement.name)
    if not version:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} is {version}, and {requirement.specifier} is needed"
    return ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def torch() -> Iterator[Finding]:
    """What torch is, and which devices it finds; asked in a child, for it may hang or crash, and takes memory."""
    from monarch_kernel.runtime.host.processes import gpu_ids

    if not _version("torch"):
        yield Finding("torch", Sign.PROBLEM, "not installed", f"{sys.executable} -m pip install torch")
        return
    said = ask_python(_TORCH, TORCH_S)
    if said.trouble:
        remedy = f"try it alone: {sys.executable} -c 'import torch'; install it again if that fails, too"
        yield Finding("torch", Sign.PROBLEM, f"it can't be used: {said.trouble}", remedy)
        return
    yield torch_finding(json.loads(said.out.splitlines()[-1]), gpu_ids())


def torch_finding(told: dict[str, Any], gpus: Sequence[str]) -> Finding:
    """What follows from what torch has told of itself.

    Args:
        told: as the child prints it.
        gpus: that ranks of this machine would be given, by the names that CUDA takes.
    """
    build = f"CUDA {told['cuda']}" if told["cuda"] else f"ROCm {told['hip']}" if told["hip"] else "CPU only"
    found = f"{told['version']}, built for {build}"
    if not told["gloo"]:
        remedy = "ranks form process groups by it: take a build of torch that has it, such as those of pytorch.org"
        return Finding("torch", Sign.PROBLEM, f"{found}, without gloo", remedy)
    said = "".join(f"; it says: {text}" for text in told["said"])
    if told["is_available"]:
        devices = [f"{name} ({format_nbytes(nbytes)})" for name, nbytes in told["devices"]]
        counted = [f"{devices.count(each)} x {each}" for each in dict.fromkeys(devices)]
        found += f"; devices: {', '.join(counted) or 'none'}{said}"
        if told["said"]:
            return Finding("torch", Sign.WARNING, found, "see whether this build of torch fits the devices")
        return Finding("torch", Sign.OK, found if told["nccl"] or told["hip"] else f"{found}; without NCCL")
    if not gpus:
        return Finding("torch", Sign.OK, f"{found}; no GPU here, so ranks use CPUs")
    counted_gpus = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}"
    found += f"; it can't use the {counted_gpus} of this machine{said}"
    if build == "CPU only":
        remedy = "install a build of torch for CUDA (pytorch.org says how)"
    else:
        remedy = f"see with nvidia-smi whether the driver runs, and is new enough for {build}"
    return Finding("torch", Sign.PROBLEM, found, f"{remedy}; or bring meshes up with --device cpu")
