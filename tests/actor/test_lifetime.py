"""The end of processes, meshes, sessions and controllers: calls get an error with the reason, and no resource is left."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_kernel.actor import Actor, Future, ProcMesh, SupervisionError, endpoint, shutdown_context, this_host
from monarch_kernel.errors import MeshDownError
from monarch_kernel.runtime.controller.session import current_session
from monarch_kernel.runtime.host.processes import rss_nbytes
from tests.support.processes import command_of, is_gone, marked, tree, wait_gone
from tests.support.ranks import LIGHT_RANKS
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until

pytestmark = pytest.mark.usefixtures("by_value")


class Victim(Actor):
    """Waits and dies on demand; counts the requests for its pid."""

    def __init__(self) -> None:
        self.calls = 0

    @endpoint
    def pid(self) -> int:
        self.calls += 1
        return os.getpid()

    @endpoint
    def count(self) -> int:
        return self.calls

    @endpoint
    def sleep(self, folder: str) -> None:
        Path(folder, str(os.getpid())).touch()
        time.sleep(1000)

    @endpoint
    def die(self) -> None:
        os._exit(17)


@pytest.fixture
def procs() -> Iterator[ProcMesh]:
    """Three processes, which a test may end."""
    mesh = this_host().spawn_procs({"r": 3}, device="cpu")
    yield mesh
    mesh.stop(grace_s=0).get(LONG_S)


# -- processes die


def test_a_call_on_a_mesh_with_a_dead_rank_fails_and_a_slice_without_it_works(procs: ProcMesh, bar: Bar) -> None:
    workers: Any = procs.spawn("workers", Victim)
    pids = workers.pid.call().get(LONG_S).values()
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: bool(procs.deaths()), "the news of the death")
    for adverb in (workers.pid.call, lambda: workers.slice(r=1).pid.call_one()):
        with bar.below(0.5, "the error"), pytest.raises(SupervisionError, match="killed by SIGKILL"):
            adverb().get(LONG_S)
    rest = workers.slice(r=slice(0, 3, 2))
    assert rest.pid.call().get(LONG_S).values() == (pids[0], pids[2])
    assert rest.count.call().get(LONG_S).values() == (2, 2)  # the refused call did not reach them
    streamed = {future.rank: future.exception(LONG_S) for future in workers.pid.stream()}
    assert isinstance(streamed.pop(1), SupervisionError)
    assert streamed == {0: None, 2: None}
    workers.pid.broadcast()  # reaches the living ranks
    assert rest.count.call().get(LONG_S).values() == (4, 4)


def test_a_death_during_a_call_is_an_error_of_the_call(procs: ProcMesh, short_path: Path, bar: Bar) -> None:
    workers: Any = procs.spawn("workers", Victim)
    pids = workers.pid.call().get(LONG_S).values()
    futures: list[Future[None]] = [workers.slice(r=r).sleep.call_one(str(short_path)) for r in range(3)]
    wait_until(lambda: len(os.listdir(short_path)) == 3, "all to be asleep")
    times = []
    for pid, future in zip(pids, futures):
        begin_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        error = future.exception(LONG_S)
        times.append(time.monotonic() - begin_s)
        assert isinstance(error, SupervisionError)
        assert "it was running workers.sleep" in str(error)
        assert error.primary.pid == pid
    bar.check(min(times), 0.1, "the error")


def test_the_death_of_a_rank_in_an_endpoint_answers_all_its_open_calls(procs: ProcMesh) -> None:
    workers: Any = procs.spawn("workers", Victim)
    one = workers.slice(r=2)
    futures = [one.die.call_one(), one.pid.call_one(), workers.pid.call(), one.count.call_one()]
    for future in futures:
        error = future.exception(LONG_S)
        assert isinstance(error, SupervisionError), error
        assert "exit code 17" in str(error)
    assert sorted(point.rank for point in futures[2].exception().results) == [0, 1]


def test_after_a_death_the_host_spawns_again(procs: ProcMesh) -> None:
    workers: Any = procs.spawn("workers", Victim)
    workers.die.call().exception(LONG_S)
    again = this_host().spawn_procs({"r": 3}, device="cpu")
    assert len(set(again.spawn("workers", Victim).pid.call().get(LONG_S).values())) == 3
    again.stop(grace_s=0).get()


def test_spawning_on_a_mesh_with_a_dead_rank_fails_and_names_it(procs: ProcMesh, bar: Bar) -> None:
    os.kill(procs.run("import os; os.getpid()").get(LONG_S).values()[1], signal.SIGKILL)
    wait_until(lambda: bool(procs.deaths()), "the news of the death")
    with bar.below(0.5, "the error"):
        workers: Any = procs.spawn("workers", Victim)
        with pytest.raises(SupervisionError, match="SIGKILL") as caught:
            workers.initialized.get(LONG_S)
    assert caught.value.ranks == (1,)
    assert len(procs.slice(r=0).spawn("workers", Victim).pid.call().get(LONG_S)) == 1


# -- processes are stopped


def test_open_calls_of_a_stopped_mesh_end_with_the_reason(procs: ProcMesh, short_path: Path) -> None:
    workers: Any = procs.spawn("workers", Victim)
    running = workers.sleep.call(str(short_path))
    wait_until(lambda: len(os.listdir(short_path)) == 3, "all to be asleep")
    procs.stop("out of budget").get(LONG_S)
    for future in (running, workers.pid.call(), procs.run("1"), procs.initialized):
        with pytest.raises(SupervisionError, match="out of budget"):
            future.get(LONG_S)
    procs.stop("another reason").get(LONG_S)
    with pytest.raises(SupervisionError, match="out of budget"):
        workers.pid.call().get(LONG_S)


def test_a_slice_of_a_mesh_can_be_stopped(procs: ProcMesh) -> None:
    pids = procs.run("import os; os.getpid()").get(LONG_S).values()
    procs.slice(r=slice(1, 3)).stop("no longer needed", grace_s=0).get()
    for pid in pids[1:]:
        wait_gone(pid)
    assert procs.slice(r=0).run("os.getpid()").get(LONG_S).item() == pids[0]


def test_a_mesh_lives_on_without_a_reference() -> None:
    pid = this_host().spawn_procs({"r": 1}, device="cpu").run("import os; os.getpid()").get(LONG_S).item(r=0)
    gc.collect()
    other = this_host().spawn_procs({"r": 1}, device="cpu")
    other.initialized.get(LONG_S)
    assert not is_gone(pid)
    other.stop(grace_s=0).get(LONG_S)
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)


# -- sessions end


def test_shutting_down_ends_all_futures_and_processes(own_session: None, short_path: Path, bar: Bar) -> None:
    procs = this_host().spawn_procs({"r": 2}, device="cpu")
    workers: Any = procs.spawn("workers", Victim)
    pids = workers.pid.call().get(LONG_S).values()
    directory = current_session().directory
    pending = [workers.sleep.call(str(short_path)), workers.pid.call()]
    wait_until(lambda: len(os.listdir(short_path)) == 2, "all to be asleep")
    waiting: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: waiting.append(pending[0].exception(LONG_S)))
    thread.start()
    with bar.below(3, "the end of the session"):
        shutdown_context().get(LONG_S)
    thread.join(LONG_S)
    for error in (*waiting, *(future.exception(LONG_S) for future in pending)):
        assert isinstance(error, SupervisionError)
        assert "the session was shut down" in str(error)
    with pytest.raises(MeshDownError, match="the session was shut down"):
        workers.pid.call()
    with pytest.raises(MeshDownError):
        procs.run("1")
    assert all(is_gone(pid) for pid in pids)
    assert not directory.exists()


def test_shutting_down_before_anything_is_up(own_session: None) -> None:
    procs = this_host().spawn_procs({"r": 2}, device="cpu")
    future = procs.run("1")
    shutdown_context().get()
    assert isinstance(future.exception(LONG_S), SupervisionError)
    shutdown_context().get()


def test_a_session_after_a_session(own_session: None) -> None:
    first = this_host().spawn_procs({"r": 1}, device="cpu").run("import os; os.getpid()").get(LONG_S).item(r=0)
    this_host().shutdown().get()
    second = this_host().spawn_procs({"r": 1}, device="cpu").run("import os; os.getpid()").get(LONG_S).item(r=0)
    assert first != second
    assert is_gone(first)


# -- the controller ends

CONTROLLER = """
    import os, signal, sys, threading, time
    from monarch_kernel.actor import this_host

    procs = this_host().spawn_procs({"r": 4}, device="cpu")
    pids = procs.run("import ctypes, os, signal, subprocess, time; os.getpid()").get().values()
    procs.run('''
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        children = [subprocess.Popen(["sleep", "1000"]), subprocess.Popen(["sleep", "1000"], start_new_session=True)]
    ''').get()
    procs.slice(r=1).run("while True: pass")
    procs.slice(r=2).run("ctypes.CDLL(None).sleep(1000)")
    procs.slice(r=3).run("os.kill(os.getpid(), signal.SIGSTOP)")
    for pid in pids[2:]:
        while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "R":
            time.sleep(0.001)
    print("ready", *pids, flush=True)
    END
"""

ENDS = {
    "killed": ("time.sleep(1000)", signal.SIGKILL),
    "killed while it waits": ("procs.run('1').get()", signal.SIGKILL),
    "terminated": ("time.sleep(1000)", signal.SIGTERM),
    "falls through": ("", 0),
    "raises": ("raise SystemExit(3)", 0),
    "leaves at once": ("os._exit(3)", 0),
}


@contextlib.contextmanager
def program(code: str, mark: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A controller in a separate process, which ends with the test or earlier."""
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "CONTROLLER_MARK": mark, "TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with run:
        try:
            yield run
        finally:
            run.kill()


def slow_unless(is_quick: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a variant; the default tier runs some variants."""
    return () if is_quick else (pytest.mark.slow,)


QUICK = ("killed", "falls through")
"""The variants of the default tier, whose ranks start without torch; those of the slow tier start as a user's."""


@pytest.mark.parametrize(
    ("start", "end", "signum"),
    [
        pytest.param(LIGHT_RANKS if name in QUICK else "", *ENDS[name], id=name, marks=slow_unless(name in QUICK))
        for name in ENDS
    ],
)
def test_a_controller_leaves_nothing_behind_however_it_ends(
    short_path: Path, start: str, end: str, signum: int, bar: Bar
) -> None:
    mark = uuid.uuid4().hex
    with program(start + textwrap.dedent(CONTROLLER).replace("END", end), mark, short_path) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("ready")
        if signum:
            # Controller, agent, zygote, four ranks and two children, which have no environment for a moment when they start.
            wait_until(lambda: len(marked(f"CONTROLLER_MARK={mark}")) >= 9, "all processes to be there")
            assert len(list(short_path.glob("monarch-*"))) == 1
            run.send_signal(signum)
        with bar.below(5, "the end of all"):
            run.wait(LONG_S)
            wait_until(
                lambda: not marked(f"CONTROLLER_MARK={mark}") and not list(short_path.iterdir()), "all to be gone"
            )


@pytest.mark.parametrize(
    "delay_s", [pytest.param(delay_s, marks=slow_unless(delay_s == 0.2)) for delay_s in (0.0, 0.05, 0.2, 0.5, 1.0)]
)
def test_a_controller_that_is_killed_during_its_start_leaves_nothing_behind(short_path: Path, delay_s: float) -> None:
    mark = uuid.uuid4().hex
    code = "from monarch_kernel.actor import this_host\nprocs = this_host().spawn_procs({'r': 2}, device='cpu')\n"
    code += "print('spawned', flush=True)\nprocs.initialized.get()\nimport time\ntime.sleep(1000)"
    with program(code, mark, short_path) as run:
        assert run.stdout is not None
        run.stdout.readline()
        time.sleep(delay_s)  # no synchronization: kills it at a random moment
        run.kill()
        run.wait(LONG_S)
        wait_until(lambda: not marked(f"CONTROLLER_MARK={mark}") and not list(short_path.iterdir()), "all to be gone")


def test_the_next_controller_removes_the_directory_of_a_killed_one(short_path: Path) -> None:
    (short_path / "monarch-other").mkdir()  # does not belong to a session
    code = "import time\nfrom monarch_kernel.actor import this_host\nhost = this_host()\n"
    code += "print('ready', flush=True)\ntime.sleep(1000)"
    mark, later = uuid.uuid4().hex, uuid.uuid4().hex
    with program(code, mark, short_path) as lives, program(code, later, short_path) as run:
        for each in (lives, run):
            assert each.stdout is not None
            each.stdout.readline()
        assert len(list(short_path.glob("monarch-*"))) == 3
        of_run = tree(run.pid)[1:]
        (agent,) = (one for one in of_run if "agent" in command_of(one))
        agent.kill()
        _, alive = psutil.wait_procs([one for one in of_run if one != agent], LONG_S)
        assert not alive
        run.kill()
        run.wait(LONG_S)
        assert len(list(short_path.glob("monarch-*"))) == 3
        third = uuid.uuid4().hex
        with program(code, third, short_path) as again:
            assert again.stdout is not None
            again.stdout.readline()
            assert len(list(short_path.glob("monarch-*/controller"))) == 2  # directories of living sessions
            assert len(list(short_path.glob("monarch-*"))) == 3
    wait_until(lambda: [path.name for path in short_path.iterdir()] == ["monarch-other"], "all to be gone")


# -- again and again


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.slow
def test_sixty_meshes_in_one_session_leave_nothing(own_session: None, bar: Bar) -> None:
    def cycle() -> None:
        procs = this_host().spawn_procs({"r": 2}, device="cpu")
        assert procs.run("rank").get(LONG_S).values() == (0, 1)
        procs.stop(grace_s=0).get(LONG_S)

    for _ in range(10):
        cycle()
    agent = current_session().runtime.host_pool.agent_pid(current_session().local_host())

    def settle() -> None:
        wait_until(lambda: len(Path(f"/proc/{agent}/task/{agent}/children").read_text().split()) == 1, "ranks to end")

    settle()
    gc.collect()
    held, memory, agents_fds = _held(), rss_nbytes(os.getpid()), len(os.listdir(f"/proc/{agent}/fd"))
    agents_memory = rss_nbytes(agent)
    with bar.below(18, "60 meshes"):
        for _ in range(60):
            cycle()
    settle()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= held[0], "connections to be closed")
    gc.collect()
    assert _held()[1] == held[1]
    # The agent closes the pipes and connections of a rank a moment after it has reaped the process.
    wait_until(lambda: len(os.listdir(f"/proc/{agent}/fd")) <= agents_fds, "the agent to close what it had opened")
    assert rss_nbytes(os.getpid()) - memory < 8 << 20
    assert rss_nbytes(agent) - agents_memory < 8 << 20


@pytest.mark.slow
def test_many_sessions_can_start_and_end(own_session: None, short_path: Path) -> None:
    held = None
    for _ in range(5):
        this_host().spawn_procs({"r": 2}, device="cpu").run("1").get(LONG_S)
        shutdown_context().get()
        held = held or _held()
    assert _held() == held
