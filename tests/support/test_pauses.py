"""The random pauses that find races."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pauses import environment, random_pauses
from tests.support.pauses.random_pauses import MEAN_S, MOST_S, PROBABILITY, Pauses, after, before

CHILD = """
import os, socket, sys, threading

import random_pauses

random_pauses.PROBABILITY = 1.0
made = []
random_pauses.time.sleep = made.append


def count(name, act):
    made.clear()
    act()
    print(name, len(made))


left, right = socket.socketpair()
count("send", lambda: left.send(b"x"))
count("recv", lambda: right.recv(1))
thread = threading.Thread(target=int)
count("thread", lambda: (thread.start(), thread.join()))
count("signal", lambda: os.kill(os.getpid(), 0))
child, parent = os.pipe()
made.clear()
if (pid := os.fork()) == 0:
    os.write(parent, b"%d" % len(made))
    os._exit(0)
print("in the fork", os.read(child, 1).decode())
os.waitpid(pid, 0)
print("zmq" in sys.modules)

import zmq

sockets = [zmq.Context.instance().socket(zmq.PAIR) for _ in range(2)]
sockets[0].bind("inproc://pauses")
sockets[1].connect("inproc://pauses")
count("zmq", lambda: (sockets[0].send_multipart([b"a"]), sockets[1].recv_multipart()))
"""


def delays(seed: str, calls: int = 10_000) -> list[float]:
    made: list[float] = []
    pauses = Pauses(seed, made.append)
    for _ in range(calls):
        pauses()
    return made


def test_a_seed_gives_the_same_few_short_delays_each_time() -> None:
    made = delays("7")
    assert made == delays("7") != delays("8")
    assert 0.5 * PROBABILITY < len(made) / 10_000 < 2 * PROBABILITY
    assert 0.5 * MEAN_S < sum(made) / len(made) < 2 * MEAN_S
    assert max(made) <= MOST_S


def test_a_forked_process_draws_other_delays() -> None:
    made: list[float] = []
    pauses = Pauses("7", made.append)
    pauses.diverge(1)
    for _ in range(10_000):
        pauses()
    assert made
    assert made != delays("7")


def test_a_wrapped_call_gives_what_it_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_pauses, "PROBABILITY", 1.0)
    made: list[float] = []
    pauses = Pauses("7", made.append)
    assert before(pauses, divmod)(7, 2) == (3, 1)
    assert len(made) == 1
    assert after(pauses, divmod)(7, 2) == (3, 1)
    assert len(made) == 2
    with pytest.raises(ZeroDivisionError):
        after(pauses, divmod)(7, 0)
    assert len(made) == 2


def test_without_a_seed_nothing_is_changed() -> None:
    assert environment("", {"A": "1"}) == {"A": "1"}


def test_each_process_of_a_run_makes_pauses_where_processes_and_threads_meet(tmp_path: Path) -> None:
    given = environment("7", {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert given["PYTHONPATH"].split(os.pathsep)[1:] == [str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", CHILD], env=given, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert [line.rsplit(" ", 1) for line in done.stdout.splitlines()[:5]] == [
        ["send", "1"],
        ["recv", "1"],
        ["thread", "3"],  # the wait for the thread's start, the new thread, and the thread that has started it
        ["signal", "1"],
        ["in the fork", "1"],
    ]
    assert done.stdout.splitlines()[5:] == ["False", "zmq 2"]
