"""Moving tensors between ranks that share nothing but the network."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.errors import SupervisionError
from monarch_kernel.runtime.rpc.future import Future
from tests.failures.machines import APART, Machines, can_be_apart, hosts_on
from tests.features.resharding.conftest import run
from tests.support.waiting import LONG_S, wait_for_files, wait_until

WHOLE = torch.arange(5 * 7 * 3.0).reshape(5, 7, 3)
MODEL = """
import torch
from monarch_kernel.runtime.rpc.handles import PROCESS

def make(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(600, 700), torch.nn.BatchNorm1d(700), torch.nn.Linear(700, 3))
"""
LARGE = "x = {'w': torch.full((96 << 20,), float(rank))}"  # 384 MiB
# Rank 0 stops before it reads, so that the copy does not end; rank 1 reads meanwhile.
TRAPPED = """
import pathlib, time
class Trap(dict):
    looks = 0
    def items(self):
        Trap.looks += 1
        if Trap.looks == 2 and rank == 0:  # the first look describes it, the second fills it
            pathlib.Path('{folder}/reads').touch()
            while not pathlib.Path('{folder}/go').exists():
                time.sleep(0.001)
        return super().items()
x = Trap(w=torch.zeros(96 << 20))
"""
N_LENT = "len(PROCESS.client.exports)"


def main_thread_waits_for_a_copy() -> bool:
    """Whether the main thread waits for the ranks; an interrupt before would not reach them."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not Future._wait_and_attend.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.fixture(scope="module")
def apart(session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProcMesh, ProcMesh]]:
    """Four ranks on two hosts, and two here."""
    if not can_be_apart():
        pytest.skip("no process namespaces can be made here")
    hosts = hosts_on(Machines(tmp_path_factory.mktemp("far"), within=APART), 2)
    far = hosts.spawn_procs({"gpus": 2}, name="far", device="cpu")
    near = this_host().spawn_procs({"gpus": 2}, name="near", device="cpu")
    for procs in (near, far):
        procs.initialized.get(LONG_S)
        run(procs, MODEL)
    yield far, near
    near.stop(grace_s=0).get(LONG_S)
    hosts.shutdown().get(LONG_S)


@pytest.mark.slow
def test_parts_are_scattered_resharded_and_gathered(apart: tuple[ProcMesh, ProcMesh]) -> None:
    far, near = apart
    far.scatter("x", WHOLE, dim=1)
    assert torch.equal(far.gather("x", dim=1), WHOLE)
    moved = near.all_to_all("x", far, from_dim=1, dim=0)
    assert all(torch.equal(got, part) for got, part in zip(run(near, "x"), WHOLE.tensor_split(2)))
    assert not {"memory", "process"} & moved.data_paths.keys()
    moved = far.all_to_all("x", near, dim=2)
    assert torch.equal(far.gather("x", dim=2), WHOLE)
    far.all_to_all("x", axis="hosts", from_dim=2)  # among two hosts
    one, other = WHOLE.tensor_split(2)
    assert all(torch.equal(got, part) for got, part in zip(run(far, "x"), (one, one, other, other)))
    assert run(far, N_LENT) + run(near, N_LENT) == (0,) * 6


@pytest.mark.slow
def test_a_model_is_read_from_the_nearest_source(apart: tuple[ProcMesh, ProcMesh]) -> None:
    far, near = apart
    run(far, "model = make(rank // 2)")
    run(near, "model = make(7)")
    moved = near.copy_state(far.slice(hosts=1), "model")
    assert moved.data_paths.keys() <= {"network", "messages"}
    expected = run(far, "model.state_dict()")[2]
    for got in run(near, "model.state_dict()"):
        assert all(torch.equal(got[name], value) for name, value in expected.items())
    run(far, "model = make(9)")
    moved = far.copy_state(far.slice(gpus=0), "model")  # each host has a rank with it
    assert moved.data_paths.keys() == {"memory"}  # a rank does not read what it has itself


@pytest.mark.slow
def test_a_host_that_dies_during_a_copy_is_named(
    apart: tuple[ProcMesh, ProcMesh], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, near = apart
    directory = tmp_path_factory.mktemp("dies")
    machines = Machines(
        directory, within=("env", f"TMPDIR={directory}", *APART)
    )  # no process is left there to clean up
    doomed = hosts_on(machines, 1).spawn_procs({"gpus": 1}, name="doomed", device="cpu")
    run(doomed, MODEL + LARGE)
    run(near, TRAPPED.format(folder=tmp_path))
    errors: list[BaseException] = []

    def copy() -> None:
        try:
            near.copy_state(doomed, "x")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    wait_for_files(tmp_path, "reads")
    machines.signal(0, signal.SIGKILL)
    (tmp_path / "go").touch()
    thread.join(LONG_S)
    assert not thread.is_alive()
    with pytest.raises(SupervisionError, match=r"(?s)from doomed to near failed.*undefined now.*\[0\] RankDied"):
        raise errors[0]
    assert run(near, "x['w'].zero_(); 1") == (1, 1)


@pytest.mark.slow
def test_ranks_work_after_an_interrupt_during_a_copy(apart: tuple[ProcMesh, ProcMesh], tmp_path: Path) -> None:
    far, near = apart
    run(far, LARGE)
    run(near, TRAPPED.format(folder=tmp_path))

    def interrupt() -> None:
        wait_for_files(tmp_path, "reads")
        wait_until(main_thread_waits_for_a_copy, "the main thread to wait")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        near.copy_state(far.slice(hosts=0, gpus=0), "x")
    thread.join(LONG_S)
    wait_until(lambda: set(run(far, N_LENT)) == {0}, "all leases to have ended")
    run(far, "x = torch.ones(3)")
    run(near, "x = torch.zeros(3)")
    near.copy_state(far.slice(hosts=0, gpus=0), "x")
    assert run(near, "x.tolist()") == ([1.0] * 3,) * 2
