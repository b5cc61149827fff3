"""The Slurm launcher: one job of ``sbatch``, with a host agent on each of its nodes.

Theory of operation
===================

The job is a script without secrets (`SlurmLauncher.script`): one ``srun`` with one task per node, and each task is an agent.
The config of the agents is in the environment of ``sbatch``, which passes it on. Each agent takes its number, the only
difference between them, from ``SLURM_PROCID``. With ``--no-kill`` neither the job nor the step ends when a node fails.
Replacement hosts are another job.

A thread, ``monarch-slurm``, submits jobs and polls their state with ``squeue``: often at first, then less and less, because
some clusters have thousands of users. Urgent information does not come from Slurm: each task writes two small files, one when
it starts and one when it ends, beside the log of its agent, in a private directory that the nodes share with this machine.

A job ends with its last agent, and agents end by themselves without a controller; so no job remains if this process is killed.
To give back one node of several, the launcher shrinks the job (``scontrol update``), which also ends the processes on that
node. The first node of a job can't be given back before the others, because it runs the script; if the agent on it does not
end, the launcher kills it with a second ``srun``. It does the same on a node that Slurm does not take back, because Slurm
without accounting shrinks a job only once; that node stays in the job.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import agent_command
from monarch_kernel.launch.slurm.commands import (
    COMMAND_S,
    ENDS,
    REASONS,
    STATES,
    call,
    node_names,
    tail,
    time_limit,
    too_many,
    why_refused,
    words_of,
)
from monarch_kernel.launch.slurm.exported import checked, exported
from monarch_kernel.launch.slurm.host import FIRST_ASK_S, SlurmHost, SlurmJob
from monarch_kernel.launch.slurm.script import job_script
from monarch_kernel.launch.task_thread import DelayedTasks
from monarch_kernel.launch.text import last_line, signal_name
from monarch_kernel.net.wire.config import AGENT_VARIABLE, AgentConfig

__all__ = ["SlurmLauncher"]

_LOOK_S = 0.2
"""Interval between reads of the files of tasks, in seconds."""

_KILL_TRIES, _KILL_S = 5, 5.0
_GONE_S = 10.0
"""How long to wait until Slurm has the nodes back, in seconds; after that, Slurm continues alone."""


class SlurmLauncher:
    """Gets nodes from a Slurm cluster, with ``sbatch`` on this machine.

    If neither ``cpus``, ``gpus`` nor ``mem`` is given, hosts are whole nodes (``--exclusive --mem=0``).

    Args:
        partition: partition of the cluster; by default the cluster's default.
        account: account to charge.
        qos: quality of service.
        time: time limit of the hosts, such as ``4:00:00``.
        nodelist: nodes that must be included.
        exclude: nodes to exclude.
        constraint: features that nodes must have.
        cpus: CPU cores of each host.
        gpus: GPUs of each host.
        mem: memory of each host, such as ``64G``.
        export: names of the environment variables that the hosts get, such as ``HF_HOME`` or ``NCCL_*``, besides those that
            programs need to start (`launch.slurm.exported.ALWAYS`); by default all of this process.
        sbatch: other options of ``sbatch``, such as ``--reservation=week``.
        python: interpreter on the nodes, which must have this package; by default the path of this one.
        directory: directory for logs, on a file system that the nodes share with this machine; by default ``~/.monarch``.
        ask_s: longest interval between polls of the state of jobs, in seconds.
    """

    name = "slurm"

    def __init__(
        self,
        *,
        partition: str = "",
        account: str = "",
        qos: str = "",
        time: str = "",
        nodelist: str = "",
        exclude: str = "",
        constraint: str = "",
        cpus: int = 0,
        gpus: int = 0,
        mem: str = "",
        export: Sequence[str] | None = None,
        sbatch: Sequence[str] = (),
        python: str = "",
        directory: str | os.PathLike[str] = "",
        ask_s: float = 10.0,
    ) -> None:
        self._partition = partition
        self._cpus = cpus
        is_whole = not (cpus or gpus or mem)
        options = {
            "partition": partition,
            "account": account,
            "qos": qos,
            "time": time,
            "nodelist": nodelist,
            "exclude": exclude,
            "constraint": constraint,
            "cpus-per-task": cpus,
            "gpus-per-node": gpus,
            "mem": "0" if is_whole else mem,
        }
        self._options = [f"--{name}={value}" for name, value in options.items() if value]
        if is_whole:
            self._options.append("--exclusive")
        self._options += [option if option.startswith("-") else f"--{option}" for option in sbatch]
        for option in self._options:
            if "\n" in option:
                raise ValueError(f"an option of sbatch must be one line, not {option!r}")
        self._export = None if export is None else checked(export)
        self._command = agent_command(python)
        parent = Path(directory).expanduser() if directory else Path.home() / ".monarch"
        self.directory = parent.absolute() / f"slurm-{secrets.token_hex(4)}"
        self._ask_s = ask_s
        self._jobs: list[SlurmJob] = []
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._tasks = DelayedTasks("monarch-slurm")
        self._is_looking = False
        self._is_closed = False
        self._trouble = ""

    def script(self, n_hosts: int) -> str:
        """Return the input of ``sbatch`` for that many hosts."""
        return job_script(n_hosts, self._options, self._command, self.directory, self._cpus)

    plan = script

    def launch(self, configs: Sequence[AgentConfig]) -> list[SlurmHost]:
        """Submit a job for these hosts; one job for each run of consecutive host numbers.

        Raises:
            LaunchError: there is no Slurm on this machine, or the launcher is closed.
        """
        if shutil.which("sbatch") is None:
            raise LaunchError(
                f"there is no sbatch on {os.uname().nodename}: run the notebook on a machine of the cluster, such as its "
                "login node, and check that Slurm's commands are on PATH"
            )
        jobs: list[SlurmJob] = []
        for config in configs:
            settings = json.loads(config.encode())
            number = settings.pop("host")
            last = jobs[-1] if jobs else None
            if last is None or settings != last.settings or number != last.first + len(last.hosts):
                jobs.append(last := SlurmJob(number, settings, self.directory, self.close_host))
            last.hosts.append(SlurmHost(last, len(last.hosts)))
        with self._lock:
            if self._is_closed:
                raise LaunchError("Slurm: this launcher is closed")
            self._jobs += jobs
            for job in jobs:
                self._tasks.at(0.0, lambda job=job: self._submit(job))  # type: ignore[misc]
            if not self._is_looking:
                self._is_looking = True
                self._tasks.at(0.0, self._look)
        return [host for job in jobs for host in job.hosts]

    def progress(self) -> str:
        """Return why jobs have not started."""
        waiting = [job for job in self._jobs if job.is_waiting]
        if not waiting:
            return ""
        if self._trouble:
            return f"Slurm does not answer: {self._trouble}"
        job = waiting[0]
        if not job.id:
            return "Slurm: submitting a job"
        if job.state != "PENDING":
            return f"Slurm: job {job.id} {STATES.get(job.state, f'is {job.state}' if job.state else 'is submitted')}"
        words = REASONS.get(job.reason, "")
        text = (
            f"Slurm: {job.reason}{f' ({words})' if words else ''}" if job.reason else f"Slurm: job {job.id} is pending"
        )
        return f"{text}, expected at {job.start}" if job.start else text

    def close(self, timeout_s: float) -> None:
        """Wait for all agents to end, cancel the remaining jobs, and remove the directory."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            jobs = list(self._jobs)
        self._end(jobs, timeout_s)
        self._tasks.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        for parent in (self.directory.parent,):
            _remove_if_empty(parent)

    # -- called by hosts

    def close_host(self, host: SlurmHost, timeout_s: float) -> None:
        """Give back a node; end the job with its last node."""
        job = host.job
        with self._lock:
            if host.is_closed:
                return
            host.is_closed = True
            is_last = all(other.is_closed for other in job.hosts)
        if is_last:
            self._end([job], timeout_s)
            return
        self._wait(lambda: host.has_ended, timeout_s if host.node else 0.0)
        host.is_leaving = True
        self._give_back_nodes(job)

    # -- tasks of the thread monarch-slurm

    def _submit(self, job: SlurmJob) -> None:
        if all(host.is_closed for host in job.hosts):
            self._set_over(job, "was given back before it was submitted")
            return
        n = len(job.hosts)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = {**job.settings, "host": job.first, "number_from": "SLURM_PROCID"}
        ours = {**exported(os.environ, self._export), AGENT_VARIABLE: json.dumps(settings)}
        if (problem := too_many(n, self._partition)) == "":
            done = call("sbatch", "--parsable", "--export=ALL", text=self.script(n), env=ours)
            if done.returncode:
                problem = why_refused(done.stderr, self._partition)
            elif not (id := done.stdout.strip().rpartition("\n")[2].partition(";")[0]):
                problem = "sbatch did not print the id of the job"
        if problem:
            self._set_over(job, problem)
            return
        with self._lock:
            job.id = id
            is_late = job.is_abandoned
            self._changed.notify_all()
        if is_late:
            call("scancel", id)
            self._set_over(job, f"Slurm job {id} was given back")

    def _look(self) -> None:
        """Update the state of all jobs, and schedule the next update."""
        with self._lock:
            jobs = [job for job in self._jobs if job.id and not job.over]
            if all(job.over for job in self._jobs):
                self._is_looking = False
                return
        try:
            for job in jobs:
                for host in job.hosts:
                    self._read_files(host)
            now = time.monotonic()
            due = [job for job in jobs if now >= job.ask_at]
            if due:
                self._ask(due, now)
        finally:
            self._tasks.at(_LOOK_S, self._look)

    def _read_files(self, host: SlurmHost) -> None:
        if not host.node_is_sure and len(words := words_of(host.file("node"))) == 2 and words[1].isdecimal():
            host.node, host.pid = words[0], int(words[1])
            host.node_is_sure = True
            if host.is_leaving:
                host.job.ask_at = 0.0
        if not host.has_ended and len(words := words_of(host.file("end"))) == 1 and words[0].isdecimal():
            code = int(words[0])
            how = f"ended with exit code {code}"
            if code > 128:
                how = f"was killed by {signal_name(code - 128)}"
            elif code in (126, 127):
                how = f"could not be started: {' / '.join(host.log_tail()[-1:])}; does {self._command[0]} exist on the node?"
            elif code:
                how += "".join(f": {line}" for line in host.log_tail()[-1:])
            text = f"the host agent on {host.node} (Slurm job {host.job.id}) {how}"
            if code > 128 and not host.pending_end:
                host.pending_end = text  # Slurm may have killed it, and then has the reason
                host.job.ask_at = 0.0
            elif code <= 128:
                host.end(text)
            with self._lock:
                self._changed.notify_all()

    def _ask(self, jobs: Sequence[SlurmJob], now: float) -> None:
        ids = ",".join(job.id for job in jobs)
        done = call("squeue", "--noheader", "--states=all", f"--jobs={ids}", "--format=%i|%T|%r|%N|%S")
        known = {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines() if "|" in line}
        self._trouble = ""
        if done.returncode and "Invalid job id" not in done.stderr:
            self._trouble = last_line(done.stderr)
        for job in jobs:
            before = (job.state, job.reason)
            if job.id in known:
                job.state, reason, nodes, start = known[job.id]
                job.reason = "" if reason == "None" else reason
                job.start = "" if start == "N/A" else start.replace("T", " ")
                self._handle_state(job, nodes)
            elif not self._trouble:
                self._set_over(job, f"Slurm job {job.id} has ended")
            if (job.state, job.reason) != before:
                job.ask_s = FIRST_ASK_S
            job.ask_s = min(self._ask_s, 1.5 * job.ask_s)
            job.ask_at = now + job.ask_s

    def _handle_state(self, job: SlurmJob, nodes: str) -> None:
        """React to Slurm's state of a job."""
        if job.state in ENDS:
            text = f"Slurm job {job.id} {ENDS[job.state]}"
            if job.state in ("COMPLETED", "FAILED"):
                for host in job.hosts:
                    if host.pending_end:
                        host.end(host.pending_end)
            if job.state == "FAILED":
                text += self._why_failed(job)
            self._set_over(job, text)
        elif job.state == "PENDING" and job.reason == "PartitionTimeLimit":
            call("scancel", job.id)
            limit = time_limit(self._partition)
            most = f" ({limit})" if limit else ""
            self._set_over(
                job,
                f"Slurm would never start it: its time is longer than the partition allows{most}: request less (time=, --time)",
            )
        elif nodes and nodes != job.nodes and job.state != "COMPLETING":  # an ending job leaves its nodes one by one
            names = node_names(nodes)
            if not job.nodes and len(names) == len(job.hosts):
                for host, name in zip(job.hosts, names):
                    host.node = host.node or name
            job.nodes = nodes
            for host in job.hosts:
                if host.node and host.node not in names and not host.has_ended:
                    said = call("sinfo", "--noheader", f"--nodes={host.node}", "--format=%T, %E").stdout.split("\n")[0]
                    host.is_lost = True
                    host.end(f"Slurm removed node {host.node} from job {job.id} ({said.strip()})")
            with self._lock:
                self._changed.notify_all()
        if job.state == "RUNNING":
            for host in job.hosts:
                if host.pending_end:
                    host.end(host.pending_end)
        elif job.state == "COMPLETING":
            job.ask_s = FIRST_ASK_S
        if job.state == "RUNNING":
            self._give_back_nodes(job)

    def _set_over(self, job: SlurmJob, text: str) -> None:
        for host in job.hosts:
            if job.id:
                self._read_files(host)  # they may have a more exact reason
            host.end(text)
        with self._lock:
            job.over = text
            self._changed.notify_all()

    # -- texts

    def _why_failed(self, job: SlurmJob) -> str:
        log = self.directory / f"{job.id}.log"
        if not log.exists():
            return f" and wrote no log: do the nodes share {self.directory.parent} with this machine (directory=)?"
        return "".join(f": {line}" for line in tail(log)[-1:])

    # -- ending jobs

    def _end(self, jobs: Sequence[SlurmJob], timeout_s: float) -> None:
        """Wait for jobs to end, then cancel them."""
        for job in jobs:
            for host in job.hosts:
                host.is_closed = True
        self._wait(lambda: all(job.id or job.over for job in jobs), COMMAND_S)  # sbatch must not be interrupted
        with self._lock:
            for job in jobs:
                job.is_abandoned = not job.id
        live = [job for job in jobs if job.id and not job.over]
        for job in live:
            for host in job.hosts:
                self._read_files(host)
        running = [host for job in live if job.is_up for host in job.hosts]

        def have_ended() -> bool:
            return all(host.has_ended or host.pending_end or host.job.over for host in running)

        self._wait(have_ended, timeout_s)
        self._cancel(live)
        for job in live:
            self._set_over(job, f"Slurm job {job.id} was given back")

    def _cancel(self, jobs: Sequence[SlurmJob]) -> None:
        """Cancel jobs, and wait until Slurm has the nodes back, except lost nodes, which Slurm can't reach."""
        deadline = time.monotonic() + _GONE_S
        lost = {host.node for job in jobs for host in job.hosts if host.is_lost}
        is_cancelled = False
        while jobs:
            if not is_cancelled:  # scancel terminates processes, and kills them after the cluster's KillWait
                is_cancelled = call("scancel", *(job.id for job in jobs)).returncode == 0
            done = call("squeue", "--noheader", f"--jobs={','.join(job.id for job in jobs)}", "--format=%T|%N")
            is_known = done.returncode == 0 or "Invalid job id" in done.stderr
            left = [line.split("|") for line in done.stdout.split("\n") if "|" in line]
            if lost and all(state == "COMPLETING" for state, _ in left):
                left = [pair for pair in left if not lost.issuperset(node_names(pair[1]))]
            if (is_known and not left) or time.monotonic() > deadline:
                return
            with self._lock:
                self._changed.wait(0.1)

    def _give_back_nodes(self, job: SlurmJob) -> None:
        """Shrink a job to the hosts that stay; failures are retried after the next poll of Slurm."""
        first = job.hosts[0]
        with self._lock:
            if job.over or not all(host.node or host.has_ended for host in job.hosts):
                return  # shrinking needs the names of the nodes that stay
            leaving = [host for host in job.hosts if host.is_leaving and not host.is_released]
            if first in leaving and not (first.pid or first.has_ended):
                leaving.remove(first)  # until its task has written the pid of its agent
            if not leaving:
                return
            for host in leaving:
                host.is_released = True
            staying = [host for host in job.hosts if not host.is_released]
        if first in leaving and not self._kill(first):
            first.is_released = False
        others = [host for host in leaving if host is not first]
        if others:
            nodes = {host.node for host in staying if not host.has_ended}
            if not first.is_lost:
                nodes.add(first.node)
            done = call(
                "scontrol", "update", f"JobId={job.id}", f"NodeList={','.join(sorted(nodes))}", cwd=self.directory
            )
            for host in others:
                if done.returncode == 0:
                    host.end(f"node {host.node} was given back")
                elif not host.pid or not self._kill(host):  # without accounting Slurm shrinks a job only once
                    host.is_released = False

    def _kill(self, host: SlurmHost) -> bool:
        """Kill an agent whose node stays in the job, such as the first node, which runs the script."""
        # A step that Slurm does not start at once may wait half a minute before it retries; a new step is faster.
        step = (
            "--overlap",
            f"--jobid={host.job.id}",
            f"--nodelist={host.node}",
            "--nodes=1",
            "--ntasks=1",
            "--mem=0",
        )
        for _ in range(_KILL_TRIES):
            if host.has_ended or host.pending_end:
                return True
            if call("srun", *step, "kill", "-KILL", str(host.pid), timeout_s=_KILL_S).returncode == 0:
                return True
        return False

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        with self._lock:
            return self._changed.wait_for(condition, timeout_s)


def _remove_if_empty(path: Path) -> None:
    try:
        if path.name == ".monarch":
            path.rmdir()
    except OSError:
        pass
