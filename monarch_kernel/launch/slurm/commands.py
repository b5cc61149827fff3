"""Runs Slurm's commands, and turns their output into messages that say what to do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from monarch_kernel.base.text import plural

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
"""How long a command may take, because a busy controller answers late."""

REASONS = {
    "AssocGrpCpuLimit": "the account has reached its limit of cores",
    "AssocGrpGRES": "the account has reached its limit of GPUs",
    "AssocMaxJobsLimit": "the account has reached its limit of jobs",
    "BeginTime": "its begin time is in the future",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held by you; release it with scontrol release",
    "Licenses": "no licence is free",
    "NodeDown": "a node that it needs is down",
    "PartitionConfig": "the partition does not allow this request",
    "PartitionDown": "the partition is down",
    "PartitionNodeLimit": "more nodes than the partition allows, or they are down",
    "PartitionTimeLimit": "longer than the partition allows",
    "Priority": "jobs of higher priority are waiting",
    "QOSMaxGRESPerUser": "you have reached the QOS limit of GPUs",
    "QOSMaxJobsPerUserLimit": "you have reached the QOS limit of jobs",
    "QOSMaxNodePerUserLimit": "you have reached the QOS limit of nodes",
    "ReqNodeNotAvail": "a requested node is not available",
    "Reservation": "its reservation has not started",
    "Resources": "the nodes are in use",
}
STATES = {
    "CONFIGURING": "waits for its nodes to boot",
    "COMPLETING": "is ending",
    "REQUEUED": "is queued again",
    "RUNNING": "has its nodes and is starting agents",
    "STAGE_OUT": "is ending",
    "STOPPED": "was stopped",
    "SUSPENDED": "is suspended",
}
ENDS = {
    "BOOT_FAIL": "a node could not boot",
    "CANCELLED": "was cancelled",
    "COMPLETED": "has ended",
    "DEADLINE": "reached its deadline",
    "FAILED": "failed",
    "NODE_FAIL": "lost its nodes",
    "OUT_OF_MEMORY": "ran out of memory: request more (mem=, --mem)",
    "PREEMPTED": "was preempted by another job",
    "REVOKED": "was revoked",
    "TIMEOUT": "reached its time limit: request more (time=, --time)",
}


def environment() -> dict[str, str]:
    """Return an environment in which commands use the formats that this module parses."""
    return {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%H:%M"}


def call(
    *words: str,
    text: str = "",
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = COMMAND_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command; report a missing program or a timeout as a failed command.

    Args:
        words: the command.
        text: its standard input.
        env: its environment; by default `environment`.
        cwd: its working directory.
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
        return subprocess.CompletedProcess(words, 1, "", f"{words[0]} timed out after {timeout_s:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(words, 1, "", f"{words[0]}: {error.strerror}")


def words_of(path: Path) -> list[str]:
    """Return the words of a file; none if its last line is not complete yet."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    return text.split() if text.endswith("\n") else []


def tail(path: Path) -> tuple[str, ...]:
    """Return the last lines of a file; none if it can't be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            return tuple(file.read().decode(errors="replace").splitlines()[-20:])
    except OSError:
        return ()


def node_names(nodes: str) -> list[str]:
    """Expand a node list in Slurm's notation, such as ``n[1-3]``, to names."""
    return call("scontrol", "show", "hostnames", nodes).stdout.split()


def time_limit(partition: str) -> str:
    """Return the time limit of a partition; empty if it is not known."""
    return "".join(_sinfo(partition, "%l")[:1])


def too_many(n: int, partition: str) -> str:
    """Say why the partition can never provide that many hosts; empty if it may."""
    sizes: dict[str, int] = {}
    for row in _sinfo(partition, "%P %D"):
        name, _, size = row.rpartition(" ")
        sizes[name] = sizes.get(name, 0) + int(size)
    if not partition:
        sizes = {name: size for name, size in sizes.items() if name.endswith("*")}  # the default partition
    if len(sizes) != 1:
        return ""
    ((name, n_there),) = sizes.items()
    if n <= n_there:
        return ""
    return f"asked for {plural(n, 'host')}; partition {name.rstrip('*')} of the Slurm cluster has {plural(n_there, 'node')}"


def why_refused(stderr: str, partition: str) -> str:
    """Format an error of sbatch, with the values that the cluster would accept."""
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
        hint = "list what you may use with: sacctmgr show assoc user=$USER format=account,partition,qos"
    elif "contact slurm controller" in lower or "connect" in lower:
        hint = "is slurmctld up? (scontrol ping)"
    return f"Slurm refused the job: {said}{f'; {hint}' if hint else ''}"


def _sinfo(partition: str, what: str) -> list[str]:
    """Return the distinct rows of ``sinfo``, sorted."""
    which = [f"--partition={partition}"] if partition else []
    rows = call("sinfo", "--noheader", *which, f"--format={what}").stdout.splitlines()
    return sorted({row.strip() for row in rows})
