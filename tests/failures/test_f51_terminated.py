"""F51: a scheduler ends ranks, or only their agent, by SIGTERM; loops save before, and the error names the signal."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from monarch_kernel.runtime.controller.exit_reasons import describe_exit
from monarch_kernel.train.process_group.worker import GroupStore
from tests.failures.machines import Machines, family, hosts_on
from tests.support.processes import is_alive
from tests.support.waiting import LONG_S, wait_for_files, wait_until

SAYS = "killed by SIGTERM (something asked it to end"
SAVES = """
import pathlib, torch, torch.distributed as dist
from monarch_kernel import live
folder = pathlib.Path({folder!r})
def save():
    torch.save(at, folder / f"rank{{rank}}-step{{at}}")
for at in live.loop(on_preempt=save):
    if at == 1: (folder / f"in{{rank}}").touch()
    dist.all_reduce(torch.ones(1))
"""
"""A loop whose steps are collectives, so that a rank which ends too early would make the others fail."""


def test_the_signal_is_named() -> None:
    assert describe_exit(0, signal.SIGTERM).startswith(SAYS)


@pytest.mark.slow  # a separate agent, which imports torch
def test_ranks_save_and_others_end_when_only_their_agent_gets_the_signal(machines: Machines, tmp_path: Path) -> None:
    """As in a pod of Kubernetes, whose main process is the agent."""
    hosts = hosts_on(machines, 1)
    saving, others = (hosts.spawn_procs({"gpus": 2}, device="cpu") for _ in range(2))
    store = GroupStore()
    store.form(saving).get(LONG_S)
    below = family(machines.pid(0))
    futures = [
        saving.run_cell(SAVES.format(folder=str(tmp_path)), cell=1),
        others.run(f"(__import__('pathlib').Path({str(tmp_path)!r}) / f'other{{rank}}').touch()\nwhile True: pass"),
    ]
    wait_for_files(tmp_path, "in0", "in1", "other0", "other1")
    machines.signal(0, signal.SIGTERM)
    assert all(future.exception(LONG_S) is not None for future in futures)
    saved = [name for name in os.listdir(tmp_path) if name.startswith("rank")]
    assert len(saved) == 2
    assert len({name.partition("-")[2] for name in saved}) == 1  # the same step
    for procs in (saving, others):
        assert all(SAYS in death.message for death in procs.deaths().values()), procs.deaths()
    wait_until(lambda: not any(map(is_alive, below)), "the agent to end with its ranks")
    store.close()
