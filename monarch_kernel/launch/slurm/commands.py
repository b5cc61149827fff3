"""Slurm's commands, and what they say, in words that tell what to do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = [
    "COMMAND_S",
    "ENDS",
    "REASONS",
    "STATES",
    "call",
    "environment",
    "node_names",
    "tail",
    "time_limit",
    "too_many",
    "why_refused",
    "words_of",
]

COMMAND_S = 60.0
"""How long a command may take; a controller that is busy may take its time."""

REASONS = {
    "AssocGrpCpuLimit": "the account has as many cores as it may",
    "AssocGrpGRES": "the account has as many GPUs as it may",
    "AssocMaxJobsLimit": "the account runs as many jobs as it may",
    "BeginTime": "it was to start later",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held by you: scontrol release",
    "Licenses": "a licence is not free",
    "NodeDown": "a node that it needs is down",
    "PartitionConfig": "the partition does not allow what was asked for",
    "PartitionDown": "the partition is down",
    "PartitionNodeLimit": "more nodes than the partition allows, or they are down",
    "PartitionTimeLimit": "longer than the partition allows",
    "Priority": "others are before it",
    "QOSMaxGRESPerUser": "you have as many GPUs as the QOS allows",
    "QOSMaxJobsPerUserLimit": "you run as many jobs as the QOS allows",
    "QOSMaxNodePerUserLimit": "you have as many nodes as the QOS allows",
    "ReqNodeNotAvail": "a node that was asked for is not available",
    "Reservation": "its reservation has not begun",
    "Resources": "the nodes are in use",
}
STATES = {
    "CONFIGURING": "waits for its nodes to boot",
    "COMPLETING": "is ending",
    "REQUEUED": "is queued again",
    "RUNNING": "has its nodes, where agents are being started",
    "STAGE_OUT": "is ending",
    "STOPPED": "was stopped",
    "SUSPENDED": "is suspended",
}
ENDS = {
    "BOOT_FAIL": "a node could not boot",
    "CANCELLED": "was cancelled",
    "COMPLETED": "has ended",
    "DEADLINE": "has reached its deadline",
    "FAILED": "failed",
    "NODE_FAIL": "lost its nodes",
    "OUT_OF_MEMORY": "ran out of memory: ask for more (mem=, --mem)",
    "PREEMPTED": "was preempted by another job",
    "REVOKED": "was revoked",
    "TIMEOUT": "has reached its time limit: ask for more (time=, --time)",
}


def environment() -> dict[str, str]:
    """In which commands say things as they are expected here."""
    return {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%H:%M"}


def call(
    *words: str,
    text: str = "",
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = COMMAND_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command; one that can't be run, or takes too long, has failed like any other.

    Args:
        words: the command.
        text: its standard input.
        env: its environment; left out, `environment`.
        cwd: where it runs.
        timeout_s: how long it may take, in seconds.
    """
    try:
        return subprocess.run(
            words,
            input=text,
            env=env or environment(),
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"{words[0]} has not answered for {timeout_s:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(words, 1, "", f"{words[0]}: {error.strerror}")


def words_of(path: Path) -> list[str]:
    """The words of a file that is written at once; none if it is not complete yet."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    return text.split() if text.endswith("\n") else []


def tail(path: Path) -> tuple[str, ...]:
    """The last lines of a file; none if it can't be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            return tuple(file.read().decode(errors="replace").splitlines()[-20:])
    except OSError:
        return ()


def node_names(nodes: str) -> list[str]:
    """The names of nodes that Slurm writes as ``n[1-3]``."""
    return call("scontrol", "show", "hostnames", nodes).stdout.split()


def time_limit(partition: str) -> str:
    """How long a job may take in a partition; empty if that is not known."""
    return "".join(_sinfo(partition, "%l")[:1])


def too_many(n: int, partition: str) -> str:
    """Why there will never be so many hosts; empty if there may be."""
    sizes: dict[str, int] = {}
    for row in _sinfo(partition, "%P %D"):
        name, _, size = row.rpartition(" ")
        sizes[name] = sizes.get(name, 0) + int(size)
    if not partition:
        sizes = {name: size for name, size in sizes.items() if name.endswith("*")}  # the default
    if len(sizes) != 1:
        return ""
    ((name, n_there),) = sizes.items()
    if n <= n_there:
        return ""
    nodes = "1 node" if n_there == 1 else f"{n_there} nodes"
    return f"asked for {n} hosts; partition {name.rstrip('*')} of the Slurm cluster has {nodes}"


def why_refused(stderr: str, partition: str) -> str:
    """What sbatch has said, and what there is instead."""
    lines = []
    for line in stderr.splitlines():
        for prefix in ("sbatch: ", "error: ", "Batch job submission failed: "):
            line = line.removeprefix(prefix)
        lines.append(line)
    said = "; ".join(line for line in dict.fromkeys(lines) if line)
    hint = ""
    lower = said.lower()
    if "partition" in lower:
        hint = f"the partitions are {', '.join(_sinfo('', '%R'))}"
    elif any(word in lower for word in ("node configuration", "gres", "generic resource", "memory")):
        hint = f"the nodes are: {'; '.join(_sinfo(partition, '%D with %c cores, %m MB, GPUs: %G'))}"
    elif "feature" in lower:
        hint = f"the features of the nodes are: {', '.join(_sinfo(partition, '%f'))}"
    elif "qos" in lower or "account" in lower:
        hint = "what you may use: sacctmgr show assoc user=$USER format=account,partition,qos"
    elif "contact slurm controller" in lower or "connect" in lower:
        hint = "is slurmctld up? (scontrol ping)"
    return f"Slurm refused the job: {said}{f'; {hint}' if hint else ''}"


def _sinfo(partition: str, what: str) -> list[str]:
    """Distinct rows of ``sinfo``, sorted."""
    which = [f"--partition={partition}"] if partition else []
    rows = call("sinfo", "--noheader", *which, f"--format={what}").stdout.splitlines()
    return sorted({row.strip() for row in rows})
