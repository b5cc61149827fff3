"""Calls between ranks go directly to the peer, in order, and end also when the peer or the controller fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    ActorMesh,
    ProcMesh,
    SupervisionError,
    ValueMesh,
    context,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until

PROCS = {"gpus": 3}


class Log(Actor):
    """Records values."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    def note(self, what: Any) -> int:
        self.seen.append(what)
        return os.getpid()

    @endpoint
    def all(self) -> list[Any]:
        return self.seen

    @endpoint
    def fail(self, what: str) -> None:
        raise ValueError(what)

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Client(Actor):
    """Calls other actors."""

    @endpoint
    def ask(self, other: Any, what: Any) -> Any:
        return other.note.call(what).get(LONG_S)

    @endpoint
    def ask_to_fail(self, other: Any) -> Any:
        return other.fail.call("as asked").get(LONG_S)

    @endpoint
    def spawn_on(self, procs: Any, count: int) -> Any:
        """Spawn, and let another rank call at once, before the actor can exist."""
        return [procs.spawn(f"log{i}", Log) for i in range(count)]

    @endpoint
    def look_and_ask(self, other: Any) -> tuple[int, Any]:
        try:
            return 0, other.all.call().get(LONG_S).values()
        except SupervisionError as error:
            return 1, (error.ranks, str(error))

    @endpoint
    def wait_for(self, other: Any, seconds: float) -> None:
        other.sleep.call(seconds).get(LONG_S)

    @endpoint
    def kill_self(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_call_reaches_all_ranks_of_a_mesh_including_the_caller(procs: ProcMesh) -> None:
    log = procs.spawn("log", Log)
    client = procs.slice(gpus=1).spawn("client", Client)
    pids = client.ask.call_one(log, "x").get(LONG_S)
    assert isinstance(pids, ValueMesh)
    assert dict(pids.extent) == {"gpus": 3}
    assert list(pids.values()) == list(procs.run("import os; os.getpid()").get(LONG_S).values())
    assert client.ask.call_one(log.slice(gpus=slice(1, 3)), "y").get(LONG_S).values() == pids.values()[1:]
    assert list(log.all.call().get(LONG_S).values()) == [["x"], ["x", "y"], ["x", "y"]]


def test_a_failure_names_the_ranks_of_the_mesh_that_was_called(procs: ProcMesh) -> None:
    log = procs.spawn("log", Log)
    client = procs.slice(gpus=0).spawn("client", Client)
    with pytest.raises(ActorError) as caught:
        client.ask_to_fail.call_one(log.slice(gpus=slice(1, 3))).get(LONG_S)
    inner = caught.value.exception
    assert isinstance(inner, ActorError)
    assert inner.ranks == (0, 1)
    assert "ValueError: as asked" in str(inner)
    log.note.call("alive").get(LONG_S)


def test_calls_that_arrive_before_the_actor_wait_for_it(procs: ProcMesh) -> None:
    """Rank 0 spawns on rank 2 and returns the handles. Rank 1 and the test call at once; the spawn takes another path."""
    spawner, other = (procs.slice(gpus=i).spawn("client", Client) for i in (0, 1))
    place = procs.slice(gpus=2)
    for _ in range(20):
        logs = spawner.spawn_on.call_one(place, 3).get(LONG_S)
        futures = [other.ask.call_one(log, "from a rank") for log in logs]
        for log in logs:
            log.note.call_one("from the program").get(LONG_S)
        for future in futures:
            future.get(LONG_S)
        for log in logs:
            assert sorted(log.all.call_one().get(LONG_S)) == ["from a rank", "from the program"]


def test_a_call_of_a_stopped_actor_has_the_reason(procs: ProcMesh) -> None:
    spawner, other = (procs.slice(gpus=i).spawn("client", Client) for i in (0, 1))
    (log,) = spawner.spawn_on.call_one(procs.slice(gpus=2), 1).get(LONG_S)
    log.stop("no longer needed").get(LONG_S)
    assert other.look_and_ask.call_one(log).get(LONG_S)[0] == 1
    assert "no longer needed" in other.look_and_ask.call_one(log).get(LONG_S)[1][1]


def test_the_death_of_a_rank_fails_the_calls_of_its_peers(procs: ProcMesh, bar: Bar) -> None:
    mine = this_host().spawn_procs({"gpus": 2}, device="cpu")
    client = mine.slice(gpus=0).spawn("client", Client)
    log = procs.spawn("log", Log)
    victim = this_host().spawn_procs({"gpus": 2}, device="cpu")
    theirs = victim.spawn("log", Log)
    assert client.look_and_ask.call_one(theirs).get(LONG_S)[0] == 0
    waiting = client.wait_for.call_one(theirs.slice(gpus=1), 1000.0)
    victim.spawn("killer", Client).slice(gpus=1).kill_self.broadcast()
    with bar.below(5.0, "the error"), pytest.raises(ActorError) as caught:
        waiting.get(LONG_S)
    assert isinstance(caught.value.exception, SupervisionError)
    assert "SIGKILL" in str(caught.value)
    failed, (ranks, text) = client.look_and_ask.call_one(theirs).get(LONG_S)
    assert (failed, ranks) == (1, (1,))
    assert "slice it out" in text
    assert client.look_and_ask.call_one(theirs.slice(gpus=0)).get(LONG_S)[0] == 0
    assert client.look_and_ask.call_one(log).get(LONG_S)[0] == 0
    mine.stop().get(LONG_S)
    victim.stop().get(LONG_S)


def test_an_actor_knows_its_rank_and_its_process(procs: ProcMesh) -> None:
    class Where(Actor):
        @endpoint
        def tell(self) -> tuple[Any, ...]:
            here = context().actor_instance
            return current_rank(), here.rank, here.proc, here.proc_mesh, this_proc()

    where = procs.spawn("where", Where)
    for point, (rank, spawned, proc, mesh, this) in where.tell.call().get(LONG_S):
        assert rank == spawned == point
        assert dict(mesh.extent) == {"gpus": 3}
        assert (proc.procs, this.procs) == ((procs.procs[point.rank],),) * 2
    assert where.slice(gpus=1).tell.call_one().get(LONG_S)[0].extent == {}


def test_the_programs_own_process_hosts_actors(session: None) -> None:
    place = this_proc()
    log: Any = place.spawn("log", Log)
    assert log.note.call_one("x").get(LONG_S) == os.getpid()
    value = ["not shared"]
    log.note.call_one(value).get(LONG_S)
    value.append("changed")
    assert log.all.call_one().get(LONG_S) == ["x", ["not shared"]]
    with pytest.raises(ActorError, match="as asked"):
        log.fail.call_one("as asked").get(LONG_S)
    assert isinstance(log, ActorMesh)
    log.stop("done").get(LONG_S)
    with pytest.raises(SupervisionError, match="done"):
        log.all.call_one().get(LONG_S)
    with pytest.raises(Exception, match="for ranks"):
        place.run("1 + 1").get(LONG_S)


SCRIPT = """
import os, signal, sys, threading, time
from monarch_kernel.actor import Actor, endpoint, this_host

class Log(Actor):
    def __init__(self): self.count = 0
    @endpoint
    def note(self): self.count += 1; return self.count

class Asker(Actor):
    @endpoint
    def go(self, log, path):
        log.note.call_one().get()
        open(path + '.met', 'w').close()
        while os.stat('/proc/%d' % os.getpid()) and not state(int(os.environ['CONTROLLER'])) == 'T':
            time.sleep(0.01)
        counts = [log.note.call_one().get(timeout=60) for _ in range(50)]
        with open(path + '.new', 'w') as file: file.write(repr(counts))
        os.rename(path + '.new', path)

def state(pid):
    return open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0]

procs = this_host().spawn_procs({'gpus': 2}, env={'CONTROLLER': str(os.getpid())}, device='cpu')
log = procs.slice(gpus=1).spawn('log', Log)
future = procs.slice(gpus=0).spawn('client', Asker).go.call_one(log, sys.argv[1])
future.get()
print('over')
"""


def test_calls_between_ranks_do_not_go_through_the_controller(tmp_path: Path) -> None:
    """Two connected ranks go on while the controller is stopped."""
    script, answer = tmp_path / "script.py", tmp_path / "answer"
    script.write_text(SCRIPT)
    controller = subprocess.Popen([sys.executable, str(script), str(answer)], stdout=subprocess.PIPE, text=True)
    try:

        def have_met() -> bool:
            assert controller.poll() is None
            return Path(f"{answer}.met").exists()

        wait_until(have_met, "the ranks to have met")
        controller.send_signal(signal.SIGSTOP)
        wait_until(answer.exists, "the answers, which the controller has no part in")
        assert answer.read_text() == repr(list(range(2, 52)))
        controller.send_signal(signal.SIGCONT)
        assert controller.communicate(timeout=LONG_S)[0] == "over\n"
        assert controller.returncode == 0
    finally:
        controller.kill()
        controller.wait()
