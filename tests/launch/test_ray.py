"""The Ray launcher, against a cluster of a head and four nodes on this machine; the last test kills a node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from monarch_kernel.actor.host_mesh import HostMesh, serve_ranks
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.launch.ray import RayHost, RayLauncher
from monarch_kernel.net.wire.config import AgentConfig
from monarch_kernel.runtime.controller.session import Session
from tests.launch.rays import RayCluster, raylet_of
from tests.launch.standin import STAND_IN, Home
from tests.support.processes import is_gone, wait_gone
from tests.support.timing import Bar
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG_S = 100.0  # for operations that take Ray seconds, on a busy machine
# A stand-in for the agent, in Ray's interpreter: it runs the code in the field `log` of its config.
OBEYING = """
import json, os, sys
os.environ["MONARCH_AGENT"] = sys.stdin.read()
config = json.loads(os.environ["MONARCH_AGENT"])
names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONBREAKPOINT", "RAY_JOB_ID")
print(*(f"{name}={os.environ.get(name)}" for name in names), flush=True)
exec(config["log"])
"""
COMMAND = ("", "-c", OBEYING)


@pytest.fixture(scope="module")
def cluster(ray_cluster: RayCluster) -> RayCluster:
    return ray_cluster


def make_launcher(cluster: RayCluster, **options: Any) -> RayLauncher:
    return RayLauncher(**{"address": cluster.address, "gpus": 8, "command": COMMAND, **options})


@pytest.fixture(scope="module")
def kept(cluster: RayCluster) -> Iterator[RayLauncher]:
    """A launcher whose driver has started before the first test."""
    launcher = make_launcher(cluster)
    (host,) = launcher.launch([AgentConfig(host=0, token="", addresses=(), log="raise SystemExit(3)")])
    wait_ended(host, "ended with exit code 3")
    yield launcher
    launcher.close(0.0)


@pytest.fixture
def launcher(kept: RayLauncher) -> Iterator[RayLauncher]:
    """The launcher of the module; its hosts are given back after the test."""
    yield kept
    assert kept._driver is not None
    for host in kept._driver._hosts.values():
        host.close(0.0)


@pytest.fixture
def home() -> Iterator[Home]:
    home = Home()
    yield home
    home.close()


def configs(home: Home, numbers: Sequence[int], code: str = STAND_IN) -> list[AgentConfig]:
    return [msgspec.structs.replace(config, log=code) for config in home.configs(numbers)]


def come(home: Home, numbers: Sequence[int]) -> None:
    """Wait until these hosts have connected."""
    wait_until(lambda: home.pids.keys() >= set(numbers), f"hosts {numbers}", LONG_S)


def wait_ended(host: RayHost, *words: str) -> None:
    """Wait until a host has ended, and check that the reason contains these words."""
    wait_until(lambda: host.poll() is not None, f"the end of a host ({words})", LONG_S)
    reason = host.poll() or ""
    assert all(word in reason for word in words), reason


def driver_of(launcher: RayLauncher) -> int:
    assert launcher._driver is not None
    return launcher._driver._process.pid


# -- hosts come up and end


def test_each_host_comes_up_on_a_separate_node(launcher: RayLauncher, home: Home, bar: Bar) -> None:
    assert launcher.progress() == ""
    with bar.below(0.5, "the launch, which waits for no host,"):
        hosts = launcher.launch(configs(home, [1, 2, 3, 4]))
    wait_until(lambda: launcher.progress() in ("Ray: placing", "Ray: starting 4 workers"), "progress")
    come(home, [1, 2, 3, 4])
    wait_until(lambda: launcher.progress() == "", "no more progress")
    assert len({raylet_of(pid) for pid in home.pids.values()}) == 4
    wait_until(lambda: all(len(host.log_tail()) == 3 for host in hosts), "the logs")
    surroundings = "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 OMP_NUM_THREADS=1 PYTHONBREAKPOINT=None RAY_JOB_ID=None"
    assert [host.log_tail()[0] for host in hosts] == [surroundings] * 4
    assert hosts[2].log_tail()[1:] == ("host 3 starts", "host 3 is connected")
    assert [host.poll() for host in hosts] == [None] * 4
    for pid in [driver_of(launcher), *home.pids.values(), *(int(_parent(pid)) for pid in home.pids.values())]:
        for name in ("cmdline", "environ"):
            assert home.token.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    home.end(2, 0)
    with bar.below(3.0, "the end of a host that ends by itself"):
        hosts[1].close(5.0)
    assert hosts[1].poll()
    hosts[1].close(0.0)  # a second call has no effect
    assert is_gone(home.pids[2])
    assert [hosts[0].poll(), hosts[2].poll()] == [None] * 2


def _parent(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]


def test_more_hosts_than_nodes_are_refused_in_numbers(launcher: RayLauncher, home: Home) -> None:
    hosts = launcher.launch(configs(home, range(5)))
    for host in hosts:
        wait_ended(
            host,
            "asked for 5 hosts with 8 GPUs and 1 CPU each",
            "the cluster has 4 such nodes (of 5 nodes: 4 with 8 GPUs",
        )


def test_progress_says_what_is_free_and_waiting_hosts_can_be_closed(
    cluster: RayCluster, launcher: RayLauncher, home: Home
) -> None:
    second = make_launcher(cluster)
    held = launcher.launch(configs(home, [1, 2, 3]))
    come(home, [1, 2, 3])
    hosts = second.launch(configs(home, [4, 5]))
    waits = "Ray: 2 hosts with 8 GPUs and 1 CPU (free on 1 of 4 nodes)"
    wait_until(lambda: second.progress() == waits, "the progress text", LONG_S)
    hosts[1].close(0.0)  # now one node is enough
    come(home, [4])
    late = second.launch(configs(home, [6]))
    wait_until(lambda: "1 host with 8 GPUs" in second.progress(), "the progress text")
    second.close(0.0)
    assert late[0].poll() == "it was given back"
    assert is_gone(home.pids[4])
    assert [host.poll() for host in held] == [None] * 3
    launcher.launch(configs(home, [7]))  # the second launcher has left nothing that blocks it
    come(home, [7])
    assert 6 not in home.pids


def test_the_end_of_an_agent_is_reported_and_its_node_reused(launcher: RayLauncher, home: Home) -> None:
    hosts = launcher.launch(configs(home, [1, 2, 3, 4]))
    come(home, [1, 2, 3, 4])
    raylet = raylet_of(home.pids[3])
    home.end(3, 7)
    wait_ended(hosts[2], f"the host agent (pid {home.pids[3]} on node ", " ended with exit code 7")
    assert hosts[2].log_tail()[-1] == "host 3 ends: 7"
    launcher.launch(configs(home, [5]))
    come(home, [5])
    assert raylet_of(home.pids[5]) == raylet
    os.kill(home.pids[5], signal.SIGKILL)
    os.kill(home.pids[1], signal.SIGKILL)
    wait_ended(hosts[0], "was killed by SIGKILL")
    assert [hosts[1].poll(), hosts[3].poll()] == [None] * 2


def test_a_missing_interpreter_ends_the_host_with_a_log(cluster: RayCluster, home: Home) -> None:
    launcher = make_launcher(cluster, command=("/no/such/python", "-c", ""))
    (host,) = launcher.launch(configs(home, [1]))
    wait_ended(host, "ended with exit code 1")
    assert host.log_tail() == ("/no/such/python can't be run: No such file or directory",)
    launcher.close(0.0)


TALKATIVE = """
import os
os.write(1, b"".join(b"line %d\\n" % i for i in range(50_000)))
os._exit(7)
"""


def test_the_last_output_of_an_agent_is_known_before_its_end(launcher: RayLauncher, home: Home) -> None:
    """The reader of its output lags behind when it ends."""
    (host,) = launcher.launch(configs(home, [1], TALKATIVE))
    wait_ended(host, " ended with exit code 7")
    assert host.log_tail()[-1] == "line 49999"


STUBBORN = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("MONARCH-AGENT 4711", flush=True)
print(child.pid, flush=True)
time.sleep(1000)
"""


def test_an_agent_that_does_not_end_is_killed_with_its_children(launcher: RayLauncher, home: Home) -> None:
    (host,) = launcher.launch(configs(home, [1], STUBBORN))
    wait_until(lambda: len(host.log_tail()) == 2, "its child", LONG_S)
    assert host.address.startswith("tcp://")
    assert host.address.endswith(":4711")
    child = int(host.log_tail()[1])
    assert not is_gone(child)
    host.close(0.1)
    assert is_gone(child)


def test_the_end_of_the_driver_ends_the_hosts(cluster: RayCluster, home: Home) -> None:
    launcher = make_launcher(cluster)
    hosts = launcher.launch(configs(home, [1, 2]))
    come(home, [1, 2])
    os.kill(driver_of(launcher), signal.SIGKILL)
    for host in hosts:
        wait_ended(host, f"the process that talks to Ray (pid {driver_of(launcher)}) was killed by SIGKILL")
    wait_gone(home.pids[1], home.pids[2])
    launcher.launch(configs(home, [3]))  # starts another driver
    come(home, [3])
    launcher.close(0.0)


# -- without a cluster


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:9", "can't reach a Ray cluster at 127.0.0.1:9: Connect call failed"),
        ("nonsense", "'nonsense' is not an address of a Ray cluster; write auto, HOST:PORT or ray://HOST:PORT"),
    ],
)
def test_an_unreachable_cluster_ends_the_hosts(home: Home, address: str, message: str) -> None:
    launcher = RayLauncher(address=address, command=COMMAND)
    hosts = launcher.launch(configs(home, [1, 2]))
    for host in hosts:
        wait_ended(host, f"Ray: {message}")
    launcher.close(0.0)


# -- a program that uses Ray itself

PROGRAM = """
import json, os, sys, time
import ray
from monarch_kernel.launch.ray import RayLauncher
from monarch_kernel.net.wire.config import AgentConfig

configs = [AgentConfig.decode(config.encode()) for config in json.loads(sys.argv[1])]
command = json.loads(sys.argv[2])
"""

FROM_GROUP = """
ray.init(address=sys.argv[3], log_to_driver=False)
group = ray.util.placement_group([{"CPU": 1, "GPU": 8}] * 2, strategy="STRICT_SPREAD")
assert group.wait(30)
launcher = RayLauncher.from_placement_group(group, command=command)
assert launcher.places == 2
hosts = launcher.launch(configs[:2])
print(json.dumps(list(ray.util.placement_group_table(group)["bundles_to_node_id"].values())), flush=True)
sys.stdin.readline()  # they are up
(more,) = launcher.launch(configs[2:])
print(json.dumps(None), flush=True)
sys.stdin.readline()  # a host has ended: its bundle is free
sys.stdin.readline()  # another host uses the bundle
launcher.close(0.0)
print(json.dumps(ray.util.placement_group_table(group)["state"]), flush=True)
"""

FROM_ACTORS = """
ray.init(address=sys.argv[3], log_to_driver=False)
Worker = ray.remote(num_gpus=3)(type("Worker", (), {}))
workers = [Worker.options(scheduling_strategy="SPREAD").remote() for _ in range(3)]
launcher = RayLauncher.from_actors(workers, command=command, timeout_s=60)
hosts = launcher.launch(configs[: launcher.places])
print(json.dumps(launcher.places), flush=True)
sys.stdin.readline()  # they are up
while not all(host.log_tail() for host in hosts):
    time.sleep(0.01)
print(json.dumps([host.log_tail()[0].split()[0] for host in hosts]), flush=True)
launcher.close(0.0)
"""

OUTLIVED = """
launcher = RayLauncher(address=sys.argv[3], gpus=8, command=command)
hosts = launcher.launch(configs)
while not launcher._driver:
    pass
print(json.dumps(launcher._driver._process.pid), flush=True)
sys.stdin.readline()
"""


class Program:
    """A program of a user, which exchanges lines of JSON with the test."""

    def __init__(self, code: str, configs: Sequence[AgentConfig], address: str) -> None:
        encoded = json.dumps([config.encode().decode() for config in configs])
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM + code), encoded, json.dumps(COMMAND), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()
        return json.loads(line)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        _, err = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, err


def test_hosts_in_a_placement_group_of_the_program(cluster: RayCluster, home: Home) -> None:
    program = Program(FROM_GROUP, configs(home, [1, 2, 3]), cluster.address)
    assert len(set(program.receive())) == 2
    come(home, [1, 2])
    raylets = [raylet_of(home.pids[1]), raylet_of(home.pids[2])]
    assert len(set(raylets)) == 2
    program.go_on()
    program.receive()
    assert 3 not in home.pids  # there is no free bundle
    home.end(1, 0)
    come(home, [3])
    assert raylet_of(home.pids[3]) == raylets[0]
    program.go_on()
    program.go_on()
    assert program.receive() == "CREATED"  # the program's group is not removed
    assert all(map(is_gone, home.pids.values()))
    program.end()


def test_hosts_on_the_nodes_of_the_programs_actors(cluster: RayCluster, home: Home) -> None:
    program = Program(FROM_ACTORS, configs(home, [1, 2, 3]), cluster.address)
    places = program.receive()
    come(home, range(1, places + 1))
    assert len({raylet_of(pid) for pid in home.pids.values()}) == places
    program.go_on()
    gpus = [text.removeprefix("CUDA_VISIBLE_DEVICES=").split(",") for text in program.receive()]
    assert sum(map(len, gpus)) == 3 * 3
    program.end()


def test_agents_that_outlive_the_program_keep_their_hosts_until_they_end(cluster: RayCluster, home: Home) -> None:
    program = Program(OUTLIVED, configs(home, [1, 2]), cluster.address)
    driver = program.receive()
    come(home, [1, 2])
    program.process.kill()
    program.process.communicate()
    home.end(1, 0)
    wait_gone(home.pids[1])
    assert not is_gone(driver)
    assert not is_gone(home.pids[2])
    home.end(2, 0)
    wait_gone(driver)


# -- real agents


def test_the_controller_can_dial_hosts(cluster: RayCluster) -> None:
    session = Session()
    serve_ranks(session)
    numbers = session.add_hosts(RayLauncher(address=cluster.address, dials=True), 2, timeout_s=LONG_S, is_light=True)
    hosts = HostMesh(session.runtime, Region.whole(Extent({"hosts": 2})), numbers)
    ranks = hosts.spawn_procs({"gpus": 1}, device="cpu")
    assert list(ranks.run("rank + 1").get(LONG_S).values()) == [1, 2]
    session.close()


# -- a node dies


def test_a_dead_node_is_replaced_by_another_at_once(
    cluster: RayCluster, launcher: RayLauncher, home: Home, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts = launcher.launch(configs(home, [1, 2, 3]))
    come(home, [1, 2, 3])
    raylets = {number: raylet_of(pid) for number, pid in home.pids.items()}
    cluster.power_off(raylets[2])
    launcher.launch(configs(home, [4]))  # as the controller does when heartbeats stop
    come(home, [4])
    assert raylet_of(home.pids[4]) not in raylets.values()
    (impossible,) = launcher.launch(configs(home, [5]))
    wait_ended(impossible, "asked for 1 host", "4 of these already have a host of this mesh")
    hosts[1].close(0.0)
    wait_ended(hosts[1], "it was given back")
    assert [hosts[0].poll(), hosts[2].poll()] == [None] * 2
    assert capfd.readouterr() == ("", "")
