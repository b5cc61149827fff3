"""Writes the script for ``sbatch``. Pure functions."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from monarch_kernel.net.wire.config import AGENT_VARIABLE

__all__ = ["job_script"]

# The shell script of a task; its arguments are the directory, and the agent's command.
_TASK = """f=$1/$SLURM_JOB_ID-$SLURM_PROCID; shift
"$@" & agent=$!
trap "kill -TERM $agent" TERM
echo "$SLURMD_NODENAME $agent" >"$f.node"
wait $agent; code=$?
while kill -0 $agent 2>/dev/null; do wait $agent; code=$?; done
echo $code >"$f.end"
exit $code"""


def job_script(n_hosts: int, options: Sequence[str], command: Sequence[str], directory: Path, cpus: int) -> str:
    """Return the script of a job that starts an agent on each of its nodes.

    Args:
        n_hosts: number of nodes.
        options: options of sbatch.
        command: command of the agent.
        directory: directory for logs.
        cpus: CPU cores of each host; 0 leaves it to the options.
    """
    directives = [
        "--job-name=monarch",
        f"--nodes={n_hosts}",
        "--ntasks-per-node=1",
        "--no-kill",
        "--no-requeue",
        f"--output={directory}/%j.log",
        *options,
    ]
    step = [
        "srun --no-kill --kill-on-bad-exit=0 --wait=0",
        "--mpi=none --cpu-bind=none" + (f" --cpus-per-task={cpus}" if cpus else ""),
        f"--output={shlex.quote(f'{directory}/%j-%t.log')}",
    ]
    lines = [
        "#!/bin/sh",
        *(f"#SBATCH {_directive(option)}" for option in directives),
        "",
        "# Starts a host agent on every node, which connects to the notebook that submitted this job. The config of the",
        f"# agents holds secrets, so it is in the environment variable {AGENT_VARIABLE}, and not in this file.",
        "",
        f"task={shlex.quote(_TASK)}",
        "",
        " \\\n  ".join(step) + " \\",
        f'  sh -c "$task" task {shlex.quote(str(directory))} {shlex.join(command)}',
    ]
    return "\n".join(lines) + "\n"


def _directive(option: str) -> str:
    """Format an option for a line that starts with ``#SBATCH``."""
    name, equals, value = option.partition("=")
    return f"{name}={json.dumps(value)}" if equals and " " in value else option
