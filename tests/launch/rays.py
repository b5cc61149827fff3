"""A Ray cluster of several nodes on this machine, in a separate process; this file is also the program of that process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import psutil

SHARED_NODES = 4
NODE = {"num_cpus": 1, "num_gpus": 8}
NODE_NBYTES = 80 << 20  # the minimum of Ray's object store
START_S = 150.0  # for two attempts: sometimes a node of Ray never comes up
# Without this, each node starts a worker for each program that connects.
LEAN = {"RAY_prestart_worker_first_driver": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "60"}


class RayCluster:
    """A head without resources, and nodes.

    Args:
        directory: directory for Ray's files; a short path.
        nodes: resources of each node, such as ``{"num_cpus": 1, "num_gpus": 8}``.
    """

    def __init__(self, directory: Path, nodes: list[dict[str, Any]]) -> None:
        self._log = open(directory / "cluster.log", "wb")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **LEAN},
        )
        try:
            self.address: str = self._answer()
            self.raylets = [self.add(**node) for node in nodes]
        except BaseException:
            self.close()
            raise

    def add(self, **resources: Any) -> int:
        """Add a node, and return the pid of its raylet."""
        return int(self._ask("add", resources))

    def repair(self) -> None:
        """Replace each dead node, and wait until Ray knows about the dead and the new nodes."""
        from tests.support.processes import has_ended  # not importable when this file runs as a program

        dead = sum(has_ended(raylet) for raylet in self.raylets)
        self.raylets = [raylet for raylet in self.raylets if not has_ended(raylet)]
        self.raylets += [self.add(**NODE) for _ in range(dead)]
        deadline = time.monotonic() + START_S
        while self._ask("alive", None) != len(self.raylets) + 1:
            assert time.monotonic() < deadline, "Ray does not see that a node is dead"
            time.sleep(0.2)

    def hold(self, nodes: int) -> None:
        """Reserve a CPU on that many nodes, as another program; 0 frees them."""
        self._ask("hold", nodes)

    def left(self) -> list[str]:
        """Return the actors and placement groups of other programs in the cluster."""
        return list(self._ask("left", None))

    def power_off(self, raylet: int) -> None:
        """Kill a node with all its processes, and delete their files in the temporary directory."""
        from tests.support.processes import descendants

        pids = [raylet, *descendants(raylet)]
        directories = {path.parent for pid in pids for path in sockets(pid) if path.parent.name.startswith("monarch-")}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """End all nodes."""
        self._process.communicate(timeout=START_S)
        self._log.close()

    def _ask(self, what: str, argument: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, argument]).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)
        line = self._process.stdout.readline() if ready else b""
        log = Path(self._log.name)
        assert line, f"the Ray cluster did not come up: {log.read_text()}\n{logs_of_nodes(log.parent)}"
        return json.loads(line)


def logs_of_nodes(directory: Path) -> str:
    """Return the last lines of the logs of a cluster's nodes and services."""
    texts = []
    for path in sorted(directory.glob("session_2*/logs/*")):
        if path.name.startswith(("gcs_server", "raylet", "runtime_env_agent", "dashboard_agent")) and (
            lines := _lines(path)
        ):
            texts.append(f"== {path}\n" + "\n".join(lines[-15:]))
    return "\n".join(texts)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except FileNotFoundError:  # Ray has removed or renamed it meanwhile
        return []


_shared: list[RayCluster] = []


def shared() -> RayCluster:
    """Return the cluster of this process, with four live nodes; `end_shared` ends it."""
    if not _shared:
        _shared.append(RayCluster(Path(os.environ["TMPDIR"]), [NODE] * SHARED_NODES))
    _shared[0].repair()
    return _shared[0]


def end_shared() -> None:
    """End the shared cluster, if there is one."""
    while _shared:
        _shared.pop().close()


def sockets(pid: int) -> list[Path]:
    """Return the paths of the Unix sockets that a process has bound."""
    with contextlib.suppress(psutil.Error):
        return [Path(each.laddr) for each in psutil.Process(pid).net_connections("unix") if each.laddr]
    return []


def raylet_of(pid: int) -> int:
    """Return the raylet that is an ancestor of a process."""
    while Path(f"/proc/{pid}/comm").read_text().strip() != "raylet":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


class Server:
    """The process of the cluster: it answers each line of its standard input with a line."""

    def __init__(self, directory: str) -> None:
        from ray._private import utils
        from ray.cluster_utils import Cluster

        utils.write_ray_address = lambda *_: (
            None
        )  # other programs on this machine must still find their own Ray cluster
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": NODE_NBYTES, "temp_dir": directory}
        try:
            self.cluster = Cluster(initialize_head=True, head_node_args=head)
        except Exception as error:  # a plain Exception: Ray waits 30 s for a node, and a busy machine may need more
            print(error, file=sys.stderr)
            self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: list[Any] = []
        self._group: Any = None

    def serve(self, answers: TextIO) -> None:
        print(json.dumps(self.cluster.address), file=answers, flush=True)
        while True:
            # A killed raylet is a child of this process: its workers continue as long as it is a zombie.
            while not select.select([sys.stdin], [], [], 0.05)[0]:
                for node in self._nodes:
                    node.all_processes["raylet"][0].process.poll()
            line = sys.stdin.readline()
            if not line:
                return
            what, argument = json.loads(line)
            print(json.dumps(getattr(self, what)(argument)), file=answers, flush=True)

    def add(self, resources: dict[str, Any]) -> int:
        try:
            node = self.cluster.add_node(**resources, object_store_memory=NODE_NBYTES)
        except Exception as error:  # as above
            print(error, file=sys.stderr)
            node = self.cluster.add_node(**resources, object_store_memory=NODE_NBYTES)
        self._nodes.append(node)
        return int(node.all_processes["raylet"][0].process.pid)

    def hold(self, nodes: int) -> None:
        ray = self._connected()
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None
        if nodes:
            self._group = ray.util.placement_group([{"CPU": 1}] * nodes, strategy="STRICT_SPREAD")
            assert self._group.wait(START_S)

    def alive(self, _: None) -> int:
        return sum(node["Alive"] for node in self._connected().nodes())

    def left(self, _: None) -> list[str]:
        ray = self._connected()
        ours = self._group.id.hex() if self._group is not None else ""
        groups = ray.util.placement_group_table()
        return [
            *(f"actor {id}" for id, actor in ray._private.state.actors().items() if actor["State"] != "DEAD"),
            *(f"group {id}" for id, group in groups.items() if group["state"] != "REMOVED" and id != ours),
        ]

    def _connected(self) -> Any:
        import ray

        if not ray.is_initialized():
            ray.init(address=self.cluster.address, log_to_driver=False)
        return ray


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of Ray must not mix with answers
    server = Server(sys.argv[1])
    try:
        server.serve(answers)
    finally:
        server.cluster.shutdown()


if __name__ == "__main__":
    main()
