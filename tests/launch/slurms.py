"""A real Slurm cluster of several nodes on this machine for tests, with daemons, keys and state in one directory."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.ports import free_ports
from tests.support.processes import tree
from tests.support.waiting import wait_until

__all__ = ["SlurmCluster", "why_no_slurm"]

_DAEMONS = ("munged", "slurmctld", "slurmd")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_HOST = "127.0.0.1"


def why_no_slurm() -> str:
    """Say why a cluster can't run on this machine; empty if it can."""
    missing = [name for name in (*_DAEMONS, "sbatch", "srun") if shutil.which(name, path=_PATH) is None]
    return f"no {', '.join(missing)} here: apt-get install slurmctld slurmd slurm-client munge" if missing else ""


class SlurmCluster:
    """A cluster, which the constructor starts.

    Args:
        path: directory for all its files.
        nodes: names of the nodes.
    """

    def __init__(self, path: Path, nodes: Sequence[str]) -> None:
        self.path = path
        self.nodes = tuple(nodes)
        self.config = path / "slurm.conf"
        self.environment = {"SLURM_CONF": str(self.config)}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        user = getpass.getuser()
        ports = free_ports(1 + len(nodes), _HOST)
        (path / "state").mkdir()
        (path / "munge.key").write_bytes(secrets.token_bytes(64))
        (path / "munge.key").chmod(0o400)
        lines = [
            "ClusterName=monarch",
            f"SlurmctldHost={socket.gethostname()}({_HOST})",
            f"SlurmctldPort={ports[0]}",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            "AuthType=auth/munge",
            f"AuthInfo=socket={path}/munge",
            "CredType=cred/munge",
            f"StateSaveLocation={path}/state",
            f"SlurmdSpoolDir={path}/spool-%n",
            f"SlurmctldPidFile={path}/slurmctld.pid",
            f"SlurmdPidFile={path}/slurmd-%n.pid",
            "MailProg=/bin/true",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SwitchType=switch/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0",
            "ReturnToService=2",
            "SlurmdTimeout=20",
            "KillWait=1",
            "GresTypes=gpu",
            *(
                f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr={_HOST} Port={port} CPUs=2 Gres=gpu:1"
                for node, port in zip(nodes, ports[1:])
            ),
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE",
            "PartitionName=short Nodes=ALL MaxTime=10",
        ]
        self.config.write_text("\n".join(lines) + "\n")
        (path / "gres.conf").write_text(f"NodeName={','.join(nodes)} Name=gpu File=/dev/null\n")
        self._start("munged", ["--force", "--foreground", *self._munge_files()])
        wait_until((path / "munge").exists, "munged")
        self._start("slurmctld", ["-D", "-f", str(self.config)])
        for node in nodes:
            (path / f"spool-{node}").mkdir()
            self.start_node(node)
        wait_until(lambda: self.is_idle() or self._check(), "the nodes to be idle")

    def start_node(self, node: str) -> None:
        self._start("slurmd", ["-D", "-N", node, "-f", str(self.config)], node)

    def kill_node(self, node: str) -> None:
        """Kill a node's daemon and all its processes like a power failure: no process notices the death of another."""
        daemon = self._daemons.pop(node)
        daemon.send_signal(signal.SIGSTOP)
        steps = [step for step in psutil.process_iter(["name"]) if self._is_on(step, node)]
        for step in steps:
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                step.suspend()
        doomed = [process for step in steps for process in tree(step)]
        assert doomed, f"nothing runs on {node}"
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        # Children first: srun has a child that cancels the step on all nodes when srun dies before it.
        for process in reversed(doomed):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        daemon.kill()
        daemon.wait()
        self.run(
            "scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power failure"
        )  # else Slurm takes 20 s

    def is_idle(self) -> bool:
        """Return whether all nodes are idle."""
        states = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).split()
        return states == ["idle"] * len(self.nodes)

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command in the environment of the cluster, and return its output."""
        done = subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, text=True)
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def close(self) -> None:
        """End all daemons and their processes."""
        daemons, self._daemons = dict(self._daemons), {}
        munged = daemons.pop("munged", None)  # the other daemons need it until they end
        for daemon in daemons.values():
            daemon.terminate()
        for daemon in daemons.values():
            _end(daemon)
        if munged is not None:
            munged.terminate()
            _end(munged)

    def log(self, name: str) -> str:
        return (self.path / f"{name}.log").read_text(errors="replace")

    def _is_on(self, step: psutil.Process, node: str) -> bool:
        """Return whether a process is the daemon of a step on a node; its children have the name in their environment."""
        try:
            if step.name() != "slurmstepd":
                return False
        except psutil.NoSuchProcess:
            return False
        for process in tree(step)[1:]:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended meanwhile, or is about to
                environment = process.environ()
                if environment.get("SLURMD_NODENAME") == node and environment.get("SLURM_CONF") == str(self.config):
                    return True
        return False

    def _start(self, program: str, arguments: Sequence[str], name: str = "") -> None:
        command = shutil.which(program, path=_PATH)
        assert command is not None
        with (self.path / f"{name or program}.log").open("ab") as log:
            self._daemons[name or program] = subprocess.Popen([command, *arguments], stdout=log, stderr=log)

    def _munge_files(self) -> list[str]:
        path = self.path
        return [
            f"--socket={path}/munge",
            f"--key-file={path}/munge.key",
            f"--pid-file={path}/munged.pid",
            f"--log-file={path}/munged.log",
            f"--seed-file={path}/munge.seed",
        ]

    def _check(self) -> bool:
        for name, daemon in self._daemons.items():
            assert daemon.poll() is None, f"{name}: {self.log(name)}"
        return False


def _end(daemon: subprocess.Popen[bytes]) -> None:
    try:
        daemon.wait(5.0)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
