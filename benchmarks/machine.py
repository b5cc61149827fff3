"""The context that every figure needs: the machine, the versions and the commit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import psutil

__all__ = ["PEERS", "Machine", "PeerPackage", "describe_machine", "is_installed"]


@dataclass(frozen=True)
class PeerPackage:
    """The package of a peer."""

    module: str
    distribution: str
    """Name in the package index; empty for our own code, which the commit identifies."""


PEERS: dict[str, PeerPackage] = {
    "ours": PeerPackage("monarch_kernel.actor", ""),
    "monarch": PeerPackage("monarch.actor", "torchmonarch"),
    "ray": PeerPackage("ray", "ray"),
    "dask": PeerPackage("distributed", "distributed"),
    "ipyparallel": PeerPackage("ipyparallel", "ipyparallel"),
}


@dataclass(frozen=True)
class Machine:
    """The facts in the header of the report."""

    processor: str
    cores: int
    memory_gib: float
    system: str
    python: str
    torch: str
    peers: dict[str, str]
    """Version of each peer that is installed."""
    commit: str
    load: float
    """Processes that wanted a core in the last minute before the run; other programs falsify the figures."""
    date: str


def is_installed(package: PeerPackage) -> bool:
    """Tell whether the package of a peer can be found by this Python, without importing it."""
    return importlib.util.find_spec(package.module.partition(".")[0]) is not None


def version_of(distribution: str) -> str:
    """Return the installed version of a distribution, or `none`."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def processor_name() -> str:
    """Return the name of the processor as Linux reports it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit_of(folder: Path) -> str:
    """Return the short commit of a checkout, with `+ changes` when files differ from it."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        changes = git("status", "--porcelain")
    except FileNotFoundError:
        return "unknown (git is not installed)"
    if commit is None:
        return "none yet" if changes is not None else "unknown (not a checkout)"
    return f"{commit} + changes" if changes else commit


def describe_machine(peers: list[str], packages: Mapping[str, PeerPackage] = PEERS) -> Machine:
    """Collect the facts about this machine and the peers that take part."""
    return Machine(
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / 1024**3, 1),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=version_of("torch"),
        peers={
            peer: version_of(packages[peer].distribution)
            for peer in peers
            if packages[peer].distribution and is_installed(packages[peer])
        },
        commit=commit_of(Path(__file__).parent),
        load=round(psutil.getloadavg()[0], 2),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
