"""The Lightning launcher: the real SDK, against a fake cloud that runs commands as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.lightning import LightningLauncher
from tests.launch.lightnings import Cloud, RefusedRequest, lightning_cloud
from tests.launch.standin import STAND_IN, Home
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the SDK needs Python 3.11")

Launch = Callable[..., LightningLauncher]


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with lightning_cloud(tmp_path) as cloud:
        yield cloud


@pytest.fixture
def home() -> Iterator[Home]:
    home = Home()
    yield home
    home.close()


@pytest.fixture
def make(cloud: Cloud, tmp_path: Path) -> Iterator[Launch]:
    """A function that creates launchers with stand-in agents; they are closed after the test."""
    made: list[LightningLauncher] = []
    (tmp_path / "standin.py").write_text(STAND_IN)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/standin.py "$@"\n')
    python.chmod(0o700)

    def launcher(**options: Any) -> LightningLauncher:
        made.append(LightningLauncher(**{"machine": "CPU", "python": str(python), "poll_s": 0.1, **options}))
        return made[-1]

    yield launcher
    for one in made:
        one.close(0.0)
    assert cloud.unknown == []


def test_hosts_are_the_machines_of_a_job(cloud: Cloud, home: Home, make: Launch) -> None:
    launcher = make(machine="H100_X_8")
    hosts = launcher.launch(home.configs([3, 4, 5]))
    home.wait_for([3, 4, 5])
    wait_until(lambda: all(host.runs for host in hosts), "hosts to be known as running")
    assert launcher.progress() == ""
    assert [host.poll() for host in hosts] == [None, None, None]
    (name,) = cloud.names()
    machine = cloud.machine(name, 1)
    assert machine.spec["instanceName"] == "lit-h100-8"
    assert machine.spec["cloudspaceId"] == "studio-1"
    assert home.token not in machine.spec["command"]
    environment = Path(f"/proc/{home.pids[4]}/environ").read_bytes().split(b"\0")
    assert b"NODE_RANK=1" in environment
    assert not any(variable.startswith((b"MASTER_ADDR=", b"WORLD_SIZE=")) for variable in environment)
    launcher.close(0.0)
    assert cloud.names() == []
    assert cloud.deleted == [name]
    with pytest.raises(LaunchError, match="is closed"):
        launcher.launch(home.configs([6]))


def test_log_tail_has_the_output_of_the_machine(home: Home, make: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_kernel.launch.lightning.launcher._LOG_AFTER_S", (0.1, 0.5))
    hosts = make().launch(home.configs([1, 2]))
    home.wait_for([1, 2])
    for host, number in zip(hosts, (1, 2)):
        wait_until(lambda host=host, n=number: host.log_tail()[-1:] == (f"host {n} is connected",), "a log")  # type: ignore[misc]


def test_a_replacement_is_a_separate_job(cloud: Cloud, home: Home, make: Launch) -> None:
    launcher = make()
    hosts = launcher.launch(home.configs([1, 2]))
    home.wait_for([1, 2])
    (first,) = cloud.names()
    hosts[0].close(0.0)  # the other machine of its job is still needed
    assert cloud.names() == [first]
    (third,) = launcher.launch(home.configs([3]))
    home.wait_for([3])
    assert len(cloud.names()) == 2
    wait_until(lambda: third.runs, "the host to be known as running")
    third.close(0.0)
    third.close(0.0)
    wait_until(lambda: cloud.names() == [first], "its job to go")
    hosts[1].close(0.0)
    wait_until(lambda: cloud.names() == [], "the first job to go")


def test_each_host_can_be_a_separate_job(cloud: Cloud, home: Home, make: Launch) -> None:
    cloud.rank_variable = ""
    launcher = make(separate=True)
    hosts = launcher.launch(home.configs([1, 2]))
    home.wait_for([1, 2])
    assert len(cloud.names()) == 2
    hosts[0].close(0.0)
    wait_until(lambda: len(cloud.names()) == 1, "its job to go")


def test_a_machine_without_its_number_fails_with_a_message(cloud: Cloud, home: Home, make: Launch) -> None:
    cloud.rank_variable = ""
    host, _ = make().launch(home.configs([1, 2]))
    wait_until(host.poll, "the end")
    assert "has failed: exit code 64" in str(host.poll())
    assert host.log_tail() == (
        "NODE_RANK, which has the number of this machine, is not set: start the hosts with --separate",
    )


def test_progress_while_machines_are_missing(cloud: Cloud, home: Home, make: Launch) -> None:
    cloud.capacity = 2
    launcher = make()
    first = launcher.launch(home.configs([1, 2]))
    second = launcher.launch(home.configs([3]))
    home.wait_for([1, 2])
    said = "Lightning: waiting for a machine: no capacity in this region"
    wait_until(lambda: launcher.progress() == said, "the text")
    assert second[0].poll() is None
    cloud.add_machines(1)
    home.wait_for([3])
    assert [host.poll() for host in first] == [None, None]


def test_close_cancels_a_partial_allocation(cloud: Cloud, home: Home, make: Launch) -> None:
    cloud.capacity = 0
    launcher = make()
    launcher.launch(home.configs([1, 2]))
    launcher.launch(home.configs([3]))
    launcher.close(0.0)
    assert cloud.names() == []
    assert home.pids == {}


def test_close_waits_for_an_agent_that_ends_by_itself(cloud: Cloud, home: Home, make: Launch) -> None:
    launcher = make()
    (host,) = launcher.launch(home.configs([1]))
    home.wait_for([1])
    wait_until(lambda: host.runs, "the host to be known as running")
    log = cloud.machine(cloud.names()[0]).log
    home.end(1, 0)
    launcher.close(10.0)
    assert log.read_text().splitlines()[-1] == "host 1 ends: 0"


def test_poll_says_how_machines_ended(cloud: Cloud, home: Home, make: Launch) -> None:
    launcher = make(separate=True, interruptible=True)
    hosts = launcher.launch(home.configs([1, 2, 3, 4]))
    home.wait_for([1, 2, 3, 4])
    machines = [cloud.machine(name) for name in cloud.names()]
    assert machines[0].spec["spot"] is True
    home.end(1, 3)
    cloud.take_away(machines[1])
    assert machines[2].process is not None
    os.kill(machines[2].process.pid, signal.SIGKILL)
    cloud.delete_job(machines[3].id)
    for host in hosts:
        wait_until(host.poll, "the end")
    said = [str(host.poll()) for host in hosts]
    assert said[0] == f"the machine {machines[0].name} has failed: exit code 3"
    assert hosts[0].log_tail()[-1] == "host 1 ends: 3"
    assert said[1] == (
        f"the machine {machines[1].name} has failed: machine was preempted; Lightning took the machine away (interruptible)"
    )
    assert said[2] == f"the machine {machines[2].name} has failed: exit code -9"
    assert said[3] == f"the job {machines[3].name} was deleted"


def test_records_of_failed_calls_do_not_contain_the_keys(cloud: Cloud, home: Home, make: Launch) -> None:
    cloud.refusals["POST", "multi-machine-jobs"] = [RefusedRequest(400, "billing is not set up")]
    host, _ = make().launch(home.configs([1, 2]))
    wait_until(host.poll, "the end")
    assert host.poll() == "Lightning did not run the job: billing is not set up (400)"
    wait_until(lambda: any("_submit" in record or "MONARCH_AGENT" in record for record in cloud.history), "the record")
    assert all(home.token not in record for record in cloud.history)


def test_the_launcher_tolerates_a_temporary_failure_of_the_cloud(
    cloud: Cloud, home: Home, make: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.capacity = 0
    launcher = make()
    (host,) = launcher.launch(home.configs([1]))
    wait_until(lambda: "no capacity" in launcher.progress(), "the text")
    (name,) = cloud.names()
    answer = RefusedRequest(400, "the database is being moved")
    cloud.refusals["GET", cloud.machine(name).id] = [answer] * 5
    wait_until(
        lambda: "Lightning does not answer: the database is being moved (400)" in launcher.progress(), "the text"
    )
    assert host.poll() is None
    cloud.add_machines(1)
    home.wait_for([1])


def test_invalid_arguments_are_refused(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"there is no machine 'H100_X_9'; did you mean H100_X_8 .* There are: CPU_SMALL, "
    ):
        LightningLauncher(machine="H100_X_9")
    with pytest.raises(LaunchError, match="no machine was given"):
        LightningLauncher()
    with pytest.raises(LaunchError, match="not both"):
        LightningLauncher(machine="cpu", studio="here", image="monarch:1")
    from lightning_sdk.lightning_cloud.login import Auth

    monkeypatch.delenv("LIGHTNING_API_KEY")
    monkeypatch.setattr(Auth, "secrets_file", tmp_path / "credentials.json")
    with pytest.raises(LaunchError, match="there are no credentials: set LIGHTNING_USER_ID and LIGHTNING_API_KEY"):
        LightningLauncher(machine="CPU")


def test_a_missing_studio_ends_the_host(cloud: Cloud, home: Home, make: Launch) -> None:
    (host,) = make(studio="elsewhere").launch(home.configs([1]))
    wait_until(host.poll, "the end")
    assert str(host.poll()).startswith("Lightning did not run the job: ")
    assert "elsewhere" in str(host.poll())


def test_the_plan_is_a_call_of_the_sdk(make: Launch) -> None:
    plan = make(machine="L4_X_4", interruptible=True).plan(4)
    assert "machine=Machine.L4_X_4," in plan
    assert "num_machines=4," in plan
    assert "interruptible=True," in plan
    assert "4 times" in make(separate=True).plan(4)


def test_the_sdk_has_no_side_effects(cloud: Cloud) -> None:
    code = """
import io, os, sys
class Notebook(io.StringIO):  # has no file descriptor
    pass
sys.stderr = said = Notebook()
before = dict(os.environ)
from monarch_kernel.launch.lightning import LightningLauncher
assert "lightning_sdk" not in sys.modules
LightningLauncher(machine="CPU").close(0.0)
assert "lightning_sdk" in sys.modules and "torch" not in sys.modules
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
assert said.getvalue() == "", said.getvalue()
import logging
logging.getLogger("lightning_sdk.job").info("from another thread")
assert said.getvalue() == "INFO - from another thread\\n", said.getvalue()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
