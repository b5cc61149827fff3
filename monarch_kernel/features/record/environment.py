"""What a record says of where a run ran: versions, packages, the git commit, and variables of an allow-list."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata

from monarch_kernel.base.text import plural

__all__ = ["ALLOWED", "allowed_variables", "describe", "git_state"]

ALLOWED = (
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "LANG",
    "LC_ALL",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "SLURM_JOB_ID",
    "SLURM_NNODES",
    "SLURM_NTASKS",
    "TOKENIZERS_PARALLELISM",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TZ",
)
"""Variables of the environment that a record holds. It holds no others, as these may be secrets."""

_GIT_S = 5.0
_LARGEST_DIFF = 1 << 20


def allowed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a record may hold: those of `ALLOWED`, and those of NCCL and gloo."""
    prefixes = ("NCCL_", "GLOO_")
    return {name: value for name, value in sorted(environment.items()) if name in ALLOWED or name.startswith(prefixes)}


def git_state(folder: str) -> dict[str, str]:
    """Return the commit of a folder and the diff of what is not committed; empty where there is no repository."""

    def git(*words: str) -> str:
        run = subprocess.run(
            ["git", "-C", folder, *words], capture_output=True, timeout=_GIT_S, check=True, stdin=subprocess.DEVNULL
        )
        return run.stdout.decode("utf-8", "backslashreplace")

    try:
        commit, diff = (
            git("rev-parse", "HEAD").strip(),
            git("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD"),
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    if len(diff) > _LARGEST_DIFF:
        diff = f"{diff[:_LARGEST_DIFF]}\n… {plural(len(diff) - _LARGEST_DIFF, 'more character')}\n"
    return {"git_commit": commit, "git_diff": diff}


def describe() -> dict[str, str]:
    """Return what is known at once: versions, packages, the machine, and the variables that are allowed."""
    packages: dict[str, str] = {}
    for each in metadata.distributions():
        name = each.metadata["Name"]
        if name and name not in packages:  # the first on the path is the one that is imported
            packages[name] = each.version
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "argv": " ".join(os.path.basename(word) for word in sys.argv[:1]),
    }
    found.update({f"package:{name}": version for name, version in sorted(packages.items())})
    found.update({f"env:{name}": value for name, value in allowed_variables(os.environ).items()})
    return found
