"""Meshes on hosts of an engine, in a notebook: messages while hosts start, when they fail to start, and when one is lost."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from monarch_kernel.launch.base import agent_command
from monarch_kernel.runtime.host.software import software_here
from tests.notebook.kernel.conftest import WIDGET
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook
    from tests.support.timing import Bar

UP = "%mesh up {name} --on local --hosts {hosts} -n {n} --device cpu"


class Machine:
    """Controls the start of a program that replaces Python on a host."""

    def __init__(self, directory: Path) -> None:
        self._stall = directory / "stall"
        self._directory = directory

    def python(self, name: str = "python", env: str = "") -> Path:
        """Write an interpreter that waits while there is a stall, and then runs Python with more environment variables."""
        path = self._directory / name
        path.write_text(
            f'#!/bin/sh\nwhile test -e {self._stall}; do sleep 0.05; done\nexec env {env} {sys.executable} "$@"\n'
        )
        path.chmod(0o700)
        return path

    def stall(self) -> None:
        self._stall.touch()

    def go_on(self) -> None:
        self._stall.unlink()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(scope="module")
def hosts(notebook: Notebook) -> Iterator[Notebook]:
    """A notebook with a mesh ``h`` of three hosts with two ranks each."""
    notebook.ok(UP.format(name="h", hosts=3, n=2), 60.0)
    yield notebook
    notebook.run("%mesh down h")


@pytest.fixture
def given_back(notebook: Notebook) -> Iterator[None]:
    """Check that no process that was started for a host outlives the meshes of the test."""
    before = set(notebook.processes())
    yield
    left = [process for process in notebook.processes() if process not in before]
    assert not left, left


def agent_of(notebook: Notebook, rank: int, mesh: str = "d") -> int:
    return int(
        notebook.value(
            f"(lambda runtime: runtime._state.hosts[runtime.host_pool.host_of({mesh}.procs[{rank}])].pid)({mesh}.runtime)"
        )
    )


def test_collectives_that_differ_between_hosts_are_refused_on_all_ranks(hosts: Notebook) -> None:
    code = "import torch, torch.distributed as dist\nx = torch.ones(4, dtype=torch.int32 if rank == 5 else torch.float32)\n"
    refused = hosts.run(f"%%remote h\n{code}dist.all_reduce(x)", 60.0)
    assert (
        "[0-5] CollectiveError: the ranks of the default process group call all_reduce with different dtypes"
        in refused.error
    )
    assert "[5] all_reduce of int32 (4), sum: cell [" in refused.error
    assert hosts.ok("%%remote h\nx = torch.ones(1); dist.all_reduce(x); x.item()", 60.0).plain == "[0-5] 6.0"
    allowed = hosts.ok("%%remote h\nx = torch.ones(2, 3) * (rank == 4); dist.broadcast(x, 4); x.sum().item()", 60.0)
    assert allowed.plain == "[0-5] 6.0"
    code = "if rank == 0: dist.send(torch.ones(4), 5)\nif rank == 5: dist.recv(torch.ones(3), 0)"
    refused = hosts.run(f"%%remote h\n{code}", 60.0)
    assert "[0] send of float32 (4), to rank 5: cell [" in refused.error
    assert "[5] recv of float32 (3), from rank 0: cell [" in refused.error


def test_a_mesh_on_hosts_is_a_mesh(hosts: Notebook) -> None:
    assert hosts.value("dict(h.extent)") == {"hosts": 3, "gpus": 2}
    cell = hosts.ok(
        "%%remote h --out total\nimport torch.distributed as dist, torch\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()"
    )
    assert hosts.value("list(total.values())") == [6.0] * 6, cell.text
    assert hosts.ok("%remote h[1] print(rank, local_rank)").lines() == {2: ["2 0"], 3: ["3 1"]}
    table = hosts.ok("%mesh").stdout
    assert re.search(r"^h +hosts=3 gpus=2 +6 idle +local: 3 hosts ", table, re.M), table
    assert re.search(r"^t +gpus=2 +2 idle +local ", table, re.M), table
    shown = hosts.ok("%mesh show h").plain
    names = re.findall(r"hosts=(\d), gpus=\d +(\S+#\d+) ", shown)
    assert len(set(names)) == 3, shown
    assert len(names) == 6


def test_output_of_ranks_on_other_hosts_comes_from_their_agents(hosts: Notebook) -> None:
    hosts.ok("%remote h print('from', rank)")
    lines = hosts.ok("%mesh logs h[1:3]").lines()
    assert {rank: lines[rank][-1] for rank in lines} == {rank: f"from {rank}" for rank in (2, 3, 4, 5)}


@pytest.mark.usefixtures("given_back")
@pytest.mark.slow
def test_axes_may_cut_across_hosts(notebook: Notebook) -> None:
    notebook.ok("%mesh up cut --on local --hosts 2 --axes dp=2,pp=1,tp=3 --device cpu", 60.0)
    assert notebook.value("dict(cut.extent)") == {"dp": 2, "pp": 1, "tp": 3}
    notebook.ok("%remote cut where = dict(zip(mesh.mesh_dim_names, mesh.shape)), local_rank")
    assert notebook.value("list(cut['where'].values())[4]") == ({"dp": 2, "pp": 1, "tp": 3}, 1)
    notebook.ok("%mesh down cut")


@pytest.mark.usefixtures("given_back")
@pytest.mark.slow
def test_one_line_shows_what_hosts_wait_for(notebook: Notebook, machine: Machine) -> None:
    machine.stall()
    cell = notebook.send(f"{UP.format(name='slow', hosts=2, n=1)} --python {machine.python()}")
    cell.wait_for(lambda cell: "waiting for this machine" in _last(cell))
    assert re.fullmatch(r"slow: 0 of 2 hosts up; waiting for this machine \(\d+\.\d s\)", _last(cell))
    machine.go_on()
    cell.wait(60.0)
    assert "2 ranks (2 idle)" in _last(cell), cell.text
    assert notebook.ok("%mesh down slow").stdout == "slow: 2 ranks ended\n"


@pytest.mark.usefixtures("given_back")
@pytest.mark.slow
def test_hosts_that_do_not_start_in_time_are_reported_and_returned(notebook: Notebook, machine: Machine) -> None:
    machine.stall()
    cell = notebook.run(f"{UP.format(name='late', hosts=2, n=1)} --wait 1.5 --python {machine.python()}")
    assert not cell.ok
    assert re.search(r"late: 2 of 2 hosts did not come up, after \d+\.\d", cell.error + cell.stderr), cell.text
    assert "hosts [0-1]: the host agent did not come up in time" in cell.text
    assert "check that the hosts can reach it" in cell.text
    assert "tcp://127.0.0.1:" in cell.text
    assert "late" not in notebook.ok("%mesh").stdout


@pytest.mark.usefixtures("given_back")
@pytest.mark.slow
def test_a_host_that_dies_while_its_ranks_start_is_reported_at_once(notebook: Notebook, bar: Bar) -> None:
    before = set(notebook.processes())
    cell = notebook.send(UP.format(name="dying", hosts=2, n=2))

    def zygotes() -> list[psutil.Process]:
        return [one for one in notebook.zygotes() if one not in before]

    wait_until(lambda: len(zygotes()) == 2, "the zygotes of both hosts")
    slow, dying = zygotes()
    for one in (slow, dying):
        one.suspend()  # no rank starts on this host
    cell.wait_for(lambda cell: "dying: waiting for ranks to start (0 of 4 are up, " in _last(cell))
    with bar.below(4.0, "the news"):  # ranks that were never forked get no time to end
        agent = dying.parent()
        assert agent is not None
        agent.kill()
        dying.resume()  # the zygote notices that its agent is gone
        cell.wait()
    assert re.search(r"dying: 2 of 4 ranks did not come up, after \d+\.\d s; all were stopped", cell.text), cell.text
    assert re.search(r"  ranks \[(0-1|2-3)\]: the host agent \(pid \d+\) was killed by SIGKILL", cell.text), cell.text
    wait_until(lambda: not dying.is_running(), "the zygote to import torch, and to notice that its agent is gone")
    assert "dying" not in notebook.ok("%mesh").stdout


@pytest.mark.usefixtures("given_back")
@pytest.mark.slow
def test_an_interrupt_cancels_the_request_for_hosts(notebook: Notebook, machine: Machine) -> None:
    machine.stall()
    cell = notebook.send(f"{UP.format(name='never', hosts=2, n=1)} --python {machine.python()}")
    cell.wait_for(lambda cell: "0 of 2 hosts up" in _last(cell))
    notebook.interrupt()
    cell.wait()
    assert "interrupted while never waited for its hosts; they were given back" in cell.text
    notebook.ok("%remote t rank")  # the other mesh still works


@pytest.mark.usefixtures("given_back")
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--on local --hosts 2 -n 1 --python /no/such/python", "/no/such/python can't be run: No such file"),
        ("--on local --hosts 2 -n 1 -p debug", "-p is an option of --on slurm; --on local has none"),
        ("--on ray -n 1", "--on ray requires --hosts, such as --hosts 4"),
    ],
)
def test_invalid_options_are_reported_at_once(notebook: Notebook, line: str, says: str) -> None:
    cell = notebook.run(f"%mesh up odd {line}")
    assert not cell.ok
    assert says in cell.text


def test_a_dry_run_requests_no_hosts(notebook: Notebook) -> None:
    assert notebook.ok("%mesh up dry --on local --hosts 3 -n 2 --python /p --dry-run").stdout == (
        f"would ask this machine for 3 hosts, and run on each: {shlex.join(agent_command('/p'))}\n"
    )
    assert "dry" not in notebook.ok("%mesh").stdout


@pytest.mark.usefixtures("given_back")
@pytest.mark.slow
def test_a_host_with_other_versions_is_refused_with_a_table(
    notebook: Notebook, machine: Machine, tmp_path: Path
) -> None:
    cell = notebook.run(
        f"{UP.format(name='old', hosts=2, n=1)} --python {_with_torch(machine, tmp_path, '1.13.1')}", 60.0
    )
    assert not cell.ok
    here = software_here()
    assert f"can't be used: torch is 1.13.1 there and {here.packages['torch']} here" in cell.text
    assert re.search(rf"^this kernel +{sys.executable} +{re.escape(here.packages['torch'])}", cell.text, re.M), (
        cell.text
    )
    assert re.search(r"^\S+#\d+, \S+#\d+ +\S+ +1\.13\.1", cell.text, re.M), cell.text


@pytest.mark.usefixtures("given_back")
@pytest.mark.slow
def test_a_different_patch_version_or_time_of_hosts_is_one_warning(
    notebook: Notebook, machine: Machine, tmp_path: Path
) -> None:
    here = software_here().packages["torch"]
    release = here.partition("+")[0].split(".")
    there = ".".join([*release[:2], str(int(release[2]) + 1)])
    python = _with_torch(machine, tmp_path, there)
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import time\nnow = time.time\ntime.time = lambda: now() - 7.0\n"
    )
    cell = notebook.ok(f"{UP.format(name='near', hosts=2, n=1)} --python {python}", 60.0)
    versions, *clocks = cell.stderr.splitlines()
    assert re.fullmatch(rf"near: torch is {there} on \S+#\d+, \S+#\d+ and {re.escape(here)} here", versions), (
        cell.stderr
    )
    assert len(clocks) == 2
    for clock in clocks:
        assert re.fullmatch(r"near: the clock of \S+#\d+ is \d\.\d s behind this machine's", clock), cell.stderr
    notebook.ok("%mesh down near")


@pytest.mark.usefixtures("given_back")
@pytest.mark.slow
def test_a_host_that_dies_is_reported_and_replaced_by_heal(notebook: Notebook) -> None:
    notebook.ok(UP.format(name="d", hosts=2, n=2), 60.0)
    notebook.ok("%remote d x = rank")
    os.kill(agent_of(notebook, 2), signal.SIGKILL)
    notebook.ok("import time\nwhile len(d.deaths()) < 2: time.sleep(0.01)")
    assert re.search(r"2 idle, 2 dead +local: 2 hosts \(1 lost\)", notebook.ok("%mesh").stdout)
    shown = notebook.ok("%mesh show d").plain
    assert re.search(r"^host \S+#\d+ is lost: the host agent \(pid \d+\) was killed by SIGKILL$", shown, re.M), shown
    assert shown.endswith("%mesh heal d requests a replacement")
    assert notebook.ok("%remote d[0] print(x)").lines() == {0: ["0"], 1: ["1"]}
    said = notebook.ok("%mesh heal d", 60.0).stdout
    assert re.match(
        r"d: \[2-3\] replaced in \d+\.\d\d s on another host of this machine \(\S+\); they have no", said
    ), said
    assert notebook.value("[rank.state for rank in d.view().ranks]") == ["idle"] * 4
    assert notebook.value("list(d[0]['x'].values())") == [0, 1]
    notebook.ok("%mesh down d")


@pytest.mark.usefixtures("given_back")
@pytest.mark.slow
def test_a_second_heal_after_an_interrupt_continues_to_wait(notebook: Notebook, machine: Machine) -> None:
    notebook.ok(f"{UP.format(name='d', hosts=2, n=1)} --python {machine.python()}", 60.0)
    machine.stall()
    os.kill(agent_of(notebook, 1), signal.SIGKILL)
    notebook.ok("import time\nwhile len(d.deaths()) < 1: time.sleep(0.01)")
    cell = notebook.send("%mesh heal d")
    cell.wait_for(lambda cell: "0 of 1 new host up" in _last(cell))
    notebook.interrupt()
    cell.wait()
    assert "interrupted; the replacement continues" in cell.text
    again_at = time.monotonic()
    cell = notebook.send("%mesh heal d")
    cell.wait_for(lambda cell: "0 of 1 new host up" in _last(cell))
    machine.go_on()
    cell.wait(60.0)
    again_s = time.monotonic() - again_at
    (took_s,) = re.findall(r"d: \[1\] replaced in (\d+\.\d\d) s on another host of this machine", cell.text)
    assert float(took_s) > again_s  # the time includes the first wait
    updates = [message["content"]["data"]["text/plain"] for message in cell.of_type("update_display_data")]
    assert [text for text in updates if "new host" in text][-1].startswith("d: 1 of 1 new host up, after ")
    assert notebook.ok("%mesh heal d").stdout == "d: no rank is dead; %mesh restart replaces live ranks\n"
    notebook.ok("%mesh down d")


def _with_torch(machine: Machine, directory: Path, version: str) -> Path:
    """An interpreter that seems to have another version of torch."""
    info = directory / "site" / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return machine.python("other", env=f"PYTHONPATH={info.parent}:{os.environ.get('PYTHONPATH', '')}")


def _last(cell: object) -> str:
    """The text that the live view of a cell shows now."""
    messages = cell.of_type("display_data", "update_display_data")  # type: ignore[attr-defined]
    texts = [
        message["content"]["data"]["text/plain"] for message in messages if WIDGET not in message["content"]["data"]
    ]
    return str(texts[-1]) if texts else ""
