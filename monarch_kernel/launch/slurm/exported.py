"""Which environment variables a job gets: all of the notebook's, or those of an allow-list. Pure.

sbatch sends all that it finds in its own environment (``--export=ALL``), which may hold keys and passwords that programs on the
nodes do not need. With an allow-list the launcher leaves the others out of the environment of sbatch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

__all__ = ["ALWAYS", "checked", "exported", "names_of"]

ALWAYS = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH"),
    *("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ"),
    "SBATCH_*",  # sbatch reads them as its own options
)
"""What every job gets, also with an allow-list: what programs need to start."""

_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")  # the other variables of Slurm may be those of another job
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?|\*")


def names_of(text: str) -> tuple[str, ...]:
    """Parse the value of ``--export``: ``ALL``, ``NONE``, or names that commas separate.

    Raises:
        ValueError: a part is no name of a variable.
    """
    if text in ("ALL", "NONE"):
        return ("*",) if text == "ALL" else ()
    try:
        return checked(text.split(","))
    except ValueError:
        raise ValueError("takes names of variables, such as HF_HOME,NCCL_*, or ALL, or NONE") from None


def checked(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of variables, each with an optional ``*`` at its end.

    Raises:
        ValueError: one of them is no name.
    """
    if isinstance(names, str):
        raise ValueError(f"export={names!r}: pass a list of names, such as ['HF_HOME', 'NCCL_*']")
    found = tuple(names)
    for name in found:
        if not _NAME.fullmatch(name):
            raise ValueError(f"export: {name!r} is no name of an environment variable, such as 'HF_HOME' or 'NCCL_*'")
    return found


def exported(environment: Mapping[str, str], names: Iterable[str] | None) -> dict[str, str]:
    """Return the variables for a job: all, or `ALWAYS` and ``names``; none of a job in which this process runs."""
    allowed = ("*",) if names is None else (*ALWAYS, *names)
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or (not name.startswith("SLURM_") and any(fnmatchcase(name, each) for each in allowed))
    }
