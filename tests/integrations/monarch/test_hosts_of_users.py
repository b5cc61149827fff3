"""Hosts that the user brings, jobs, and programs for torchrun, through the alias."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_kernel.integrations.monarch import PATH
from tests.support.processes import has_ended
from tests.support.waiting import LONG_S, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
COMMON = """
import asyncio, os, socket, subprocess, sys
from monarch.actor import Actor, ActorError, attach_to_workers, current_rank, endpoint, shutdown_context, this_host
from monarch.config import configured
from monarch.job import LocalJob, ProcessJob
from monarch.spmd import SPMDActor

class Rank(Actor):
    @endpoint
    def rank(self):
        return current_rank().rank
"""
WORKERS = """
addresses = sys.argv[1].split(",")
with configured(mesh_attach_config_timeout="10ms"):
    absent = attach_to_workers(ca="trust_all_connections", workers=[addresses[0] + "x"])
try: absent.initialized.get(timeout=60)
except RuntimeError as error: print("could not be reached within 0.01 s" in str(error))
code = "from monarch.actor import run_worker_loop_forever; run_worker_loop_forever(address={!r}, ca='trust_all_connections')"
workers = [subprocess.Popen([sys.executable, "-c", code.format(address)]) for address in addresses]
try:
    for _ in range(2):
        hosts = attach_to_workers(ca="trust_all_connections", workers=addresses)
        hosts.initialized.get(timeout=60)
        ranks = hosts.spawn_procs({"gpus": 2}).spawn("rank", Rank).rank.call().get(timeout=60)
        print(hosts.extent, ranks.values())
        hosts.shutdown().get()
    shutdown_context().get()
finally:
    for worker in workers:
        worker.kill()
        worker.wait()
"""
ORPHANS = """
code = "from monarch.actor import run_worker_loop_forever; run_worker_loop_forever(address={!r}, ca='trust_all_connections')"
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
worker = subprocess.Popen([sys.executable, "-c", code.format(sys.argv[1])], **quiet)
hosts = attach_to_workers(ca="trust_all_connections", workers=[sys.argv[1]])
rank = hosts.spawn_procs({"gpus": 1}).spawn("rank", Rank)
rank.rank.call().get(timeout=60)
print(worker.pid, flush=True)
os._exit(0)
"""
OTHER_LOOPS = """
until = "from monarch.actor import run_worker_loop_until_shutdown as run; run(address={!r}, ca='trust_all_connections')"
thread = "from monarch.actor import *; loop = start_worker_loop_forever({!r}, 'trust_all_connections'); input()"
worker, other = (
    subprocess.Popen([sys.executable, "-c", code.format(f"{sys.argv[1]}{number}")], stdin=subprocess.PIPE)
    for number, code in enumerate((until, thread))
)
hosts = attach_to_workers(ca="trust_all_connections", workers=[sys.argv[1] + "0", sys.argv[1] + "1"])
print(hosts.spawn_procs({"gpus": 1}).spawn("rank", Rank).rank.call().get(timeout=60).values())
hosts.shutdown().get()
print(worker.wait())
shutdown_context().get()
other.communicate(b"end")
print(other.returncode)
"""
JOBS = """
job = ProcessJob({"trainers": 2, "others": 1})
hosts = job.state(cached_path=None)
print(hosts.trainers.spawn_procs({"gpus": 1}).spawn("rank", Rank).rank.call().get(timeout=60).values(), hosts.others.extent)
kept = job.state().others.spawn_procs({"gpus": 1}).spawn("rank", Rank)
hosts.others.stop().get()
print(kept.rank.call_one().get(timeout=60))
async def use():
    async with hosts.others as others:
        await others.spawn_procs({"gpus": 1}).spawn("rank", Rank).rank.call_one()
    try: await others.spawn_procs({"gpus": 1}).initialized
    except RuntimeError as error: print(type(error).__name__)
asyncio.run(use())
try: hosts.third
except AttributeError as error: print(error)
job.kill()
print(job.active, LocalJob().state().hosts.spawn_procs({"a": 1}).spawn("rank", Rank).rank.call_one().get())
shutdown_context().get()
"""
SPMD = """
procs = this_host().spawn_procs({"gpus": 2})
actor = procs.spawn("spmd", SPMDActor)
address, port = actor.slice(gpus=0).get_host_port.call_one(None).get()
sys.path.append(sys.argv[1])
print(actor.main.call(address, port, [sys.argv[1] + "/script.py", "--a", "1"]).get(timeout=60).values())
try: actor.main.call(address, port, ["-m", "script", "fail"]).get(timeout=60)
except ActorError as error: print(error.ranks, "rank one" in str(error))
try: actor.main.call(address, port, []).get(timeout=60)
except ActorError as error: print(type(error.exception).__name__)
shutdown_context().get()
"""
SCRIPT = """
import os, sys
assert __name__ == "__main__"
if sys.argv[1:] == ["fail"]:
    if os.environ["RANK"] == "1":
        raise ValueError("rank one")
else:
    assert sys.argv[1:] == ["--a", "1"], sys.argv
    import torch.distributed as dist
    dist.init_process_group("gloo")
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 2
    dist.barrier()
    dist.destroy_process_group()
"""


def run(code: str, *arguments: str) -> list[str]:
    """Run a program through the alias, and return the lines that it prints."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([PATH, str(ROOT)])}
    command = [sys.executable, "-c", COMMON + code, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=3 * LONG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_program_attaches_to_workers_again_and_again(short_path: Path) -> None:
    addresses = ",".join(f"ipc://{short_path}/w{i}" for i in range(2))
    assert run(WORKERS, addresses) == ["True", *["{hosts: 2} (0, 1, 2, 3)"] * 2]


def test_a_worker_ends_with_the_program_that_has_started_it(short_path: Path) -> None:
    (pid,) = run(ORPHANS, f"ipc://{short_path}/w")
    wait_until(lambda: has_ended(int(pid)), "the end of the worker")


def test_a_worker_can_serve_one_program_or_run_on_a_thread(short_path: Path) -> None:
    assert run(OTHER_LOOPS, f"ipc://{short_path}/w") == ["(0, 1)", "0", "0"]


def test_jobs_give_hosts_by_name() -> None:
    assert run(JOBS) == [
        "(0, 1) {hosts: 1}",
        "0",
        "SupervisionError",
        "the job has no mesh 'third'; it has trainers, others",
        "False 0",
    ]


def test_scripts_for_torchrun_run_on_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert run(SPMD, str(tmp_path)) == ["(True, True)", "(1,) True", "ValueError"]
