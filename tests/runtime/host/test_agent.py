"""The host agent: it reports how ranks end and what they wrote, leaves no process behind, and may itself die."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, ProcMesh, SupervisionError, endpoint, host_mesh, this_host
from monarch_kernel.base.events import OutputEvent
from monarch_kernel.net.wire.stream_marks import FIRST_MARK, mark_bytes, new_secret, switch_mark
from monarch_kernel.runtime.controller.session import current_session
from monarch_kernel.runtime.host.agent import GROUP_GRACE_S, remove_all_but_kept_files, write_detached
from monarch_kernel.runtime.host.processes import rss_nbytes
from tests.support.processes import children, is_gone, wait_gone
from tests.support.ranks import warm_up
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_for_files, wait_until


@pytest.fixture(scope="module")
def warm(session: None) -> Iterator[None]:
    """Start the agent and the zygote before the tests of the module, and again after them, since some tests end them."""
    warm_up()
    yield
    warm_up()


@pytest.fixture
def procs(warm: None) -> Iterator[ProcMesh]:
    """Three ranks, idle."""
    mesh = this_host().spawn_procs({"r": 3}, device="cpu")
    mesh.run("import ctypes, os, signal, subprocess, sys, time").get(LONG_S)
    yield mesh
    mesh.stop(grace_s=0).get()


@pytest.fixture
def mortal(warm: None, own_session: None) -> ProcMesh:
    """Three ranks in a separate session, since the test kills their agent or their zygote."""
    mesh = this_host().spawn_procs({"r": 3}, device="cpu")
    mesh.run("import os, time").get(LONG_S)
    return mesh


@pytest.fixture
def written(warm: None) -> Iterator[list[OutputEvent]]:
    """Events of output of ranks from now on."""
    events: list[OutputEvent] = []
    stop = current_session().runtime.watch(
        lambda event: events.append(event) if isinstance(event, OutputEvent) else None
    )
    yield events
    stop()


def agent_pid() -> int:
    (pid,) = (pid for pid, line in children(os.getpid()).items() if line.endswith(b"\0agent\0"))
    return pid


def zygote_pids() -> list[int]:
    """Return the agent's children that write to the log."""

    def logs(pid: int) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/fd/1").endswith(".log")
        except OSError:
            return False

    return [pid for pid in children(agent_pid()) if logs(pid)]


def zygote_pid() -> int:
    (pid,) = zygote_pids()
    return pid


def pids_of(procs: ProcMesh) -> list[int]:
    return list(procs.run("import os; os.getpid()").get(LONG_S).values())


def text_of(events: list[OutputEvent], stream: str = "stdout") -> str:
    return "".join(event.text for event in events if event.stream == stream)


TAKES_MARKS = """
import gc
from monarch_kernel.runtime.worker.stdio import OutputMarks
from monarch_kernel.net.wire.stream_marks import mark_bytes, switch_mark
(marks,) = (each for each in gc.get_objects() if type(each) is OutputMarks)
"""

DAEMONS = """
import os, signal, subprocess, sys, time
def double_fork():
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write_end, b"%d" % os.getpid())
            time.sleep(1000)
        os._exit(0)
    os.waitpid(child, 0)
    pid = int(os.read(read_end, 20))
    os.close(read_end)
    os.close(write_end)
    return pid
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
deaf = subprocess.Popen([sys.executable, "-c", DEAF], start_new_session=True, stdout=subprocess.PIPE)
_ = deaf.stdout.readline()
family = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], start_new_session=True, stdout=subprocess.PIPE, env={})
grandchild = int(family.stdout.readline())
(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, deaf.pid, double_fork(), grandchild)
"""
"""Starts processes in separate sessions, and returns their pids; the last one has another environment than its rank."""

# -- the end of a rank


class Speaker(Actor):
    @endpoint
    def say(self, text: str) -> None:
        print(text)

    @endpoint
    def die(self) -> None:
        os._exit(3)


def test_the_last_lines_are_not_those_of_earlier_calls_and_of_children_of_earlier_cells(
    procs: ProcMesh, written: list[OutputEvent], tmp_path: Path
) -> None:
    speaker = procs.spawn("speaker", Speaker)
    speaker.say.call("words of an earlier call").get(LONG_S)
    gate = tmp_path / "gate"
    waits = f"while [ ! -e {gate} ]; do sleep 0.01; done; echo words of a child; exec sleep 1000"
    procs.run(f"child = subprocess.Popen(['sh', '-c', {waits!r}])").get(LONG_S)
    procs.run("print('words of an earlier cell')").get(LONG_S)
    gate.touch()
    wait_until(lambda: text_of(written).count("words of a child") == 3, "the words of the children")
    with pytest.raises(SupervisionError) as caught:
        speaker.die.call().get(LONG_S)
    assert caught.value.primary.last_lines == ()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os._exit(17)", "exit code 17"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL ("),
        ("os.abort()", "killed by SIGABRT"),
        ("ctypes.string_at(0)", "killed by SIGSEGV"),
        (
            "os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(1000)",
            "killed by SIGTERM (something asked it to end: likely a",
        ),
        ("os.execlp('sh', 'sh', '-c', 'exit 3')", "exit code 3"),
    ],
)
def test_the_end_of_a_rank_is_reported_with_its_last_lines(procs: ProcMesh, code: str, message: str) -> None:
    pid = pids_of(procs)[1]
    procs.run("print('words of an earlier cell')").get(LONG_S)
    cell = f"if rank == 1:\n    print('last words of', rank)\n    os.write(2, b'and a warning')\n    {code}\n'fine'"
    with pytest.raises(SupervisionError) as caught:
        procs.run(cell).get(LONG_S)
    error = caught.value
    assert message in str(error)
    assert error.ranks == (1,)
    assert {point.rank: value for point, value in error.results.items()} == {0: "fine", 2: "fine"}
    assert (error.primary.kind, error.primary.etype, error.primary.pid) == ("lost", "RankDied", pid)
    assert error.primary.host
    assert "last words of 1" in error.primary.last_lines
    assert "words of an earlier cell" not in error.primary.last_lines
    assert any("and a warning" in line for line in error.primary.last_lines)
    if code != "os._exit(17)":
        assert "it was running" in error.primary.message


def test_a_fault_in_native_code_shows_the_python_stack(procs: ProcMesh) -> None:
    events: list[OutputEvent] = []
    code = "def inner():\n    ctypes.string_at(0)\ndef outer():\n    inner()\nouter()"
    with pytest.raises(SupervisionError) as caught:
        procs.slice(r=0).run_cell(code, cell=3, listen=events.append).get(LONG_S)
    shown = "".join(event.text for event in events)
    for stack in ("\n".join(caught.value.primary.last_lines), shown):
        assert "Segmentation fault" in stack
        assert stack.index("in inner") < stack.index("in outer")
        assert "monarch_kernel/" not in stack
        assert "Extension modules" not in stack


def test_a_death_is_reported_within_100_ms(procs: ProcMesh, bar: Bar) -> None:
    times = []
    for rank, pid in enumerate(pids_of(procs)):
        running = procs.slice(r=rank).run("time.sleep(1000)")
        begin = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert isinstance(running.exception(LONG_S), SupervisionError)
        times.append(time.monotonic() - begin)
    bar.check(min(times), 0.1, "the quickest report")


def test_a_call_on_a_dead_rank_is_refused_at_once_and_other_ranks_work(procs: ProcMesh, bar: Bar) -> None:
    os.kill(pids_of(procs)[1], signal.SIGKILL)
    wait_until(lambda: bool(procs.deaths()), "the report of the death")
    assert list(procs.deaths()) == [1]
    with bar.below(0.5, "the refusal"), pytest.raises(SupervisionError, match=r"killed by SIGKILL") as caught:
        procs.run("ran = True").get(LONG_S)
    assert caught.value.ranks == (1,)
    assert "it was not sent" in str(caught.value)
    assert procs.slice(r=slice(0, 3, 2)).run("'ran' in globals()").get(LONG_S).values() == (False, False)
    assert [rank.state for rank in procs.view().ranks] == ["idle", "dead", "idle"]


def test_a_rank_that_is_being_stopped_is_not_reported_as_dead(procs: ProcMesh) -> None:
    procs.stop("the work is done").get()
    with pytest.raises(SupervisionError, match="the work is done") as caught:
        procs.run("1").get(LONG_S)
    assert {report.kind for report in caught.value.reports.values()} == {"stopped"}
    assert [rank.state for rank in procs.view().ranks] == ["stopped"] * 3


# -- output of a rank


def test_all_output_is_shown_when_the_cell_ends(procs: ProcMesh, written: list[OutputEvent]) -> None:
    for i in range(20):
        written.clear()
        procs.slice(r=0).run(f"print('python {i}'); print('err {i}', file=sys.stderr)").get(LONG_S)
        assert text_of(written) == f"python {i}\n"
        assert text_of(written, "stderr") == f"err {i}\n"
    written.clear()
    one = procs.slice(r=2)
    one.run("libc = ctypes.CDLL(None); libc.puts(b'from C'); libc.fflush(None)").get(LONG_S)
    one.run("_ = subprocess.run(['sh', '-c', 'echo from a child; echo its error >&2'])").get(LONG_S)
    wait_until(lambda: "from a child" in text_of(written) and "its error" in text_of(written, "stderr"), "the output")
    assert text_of(written) == "from C\nfrom a child\n"
    assert {event.rank for event in written} == {2}


def test_output_belongs_to_the_cell_that_wrote_it(procs: ProcMesh, written: list[OutputEvent]) -> None:
    for i in range(10):
        written.clear()
        future = procs.run(f"print('cell {i}')")
        future.get(LONG_S)
        said = sorted((event.rank, event.text) for event in written if event.request == future.id)
        assert said == [(rank, f"cell {i}\n") for rank in range(3)]


def test_text_that_looks_like_a_mark_is_shown_as_text(procs: ProcMesh, written: list[OutputEvent]) -> None:
    texts = [
        "\0monarch-kernel mark 4503599627370496\n",
        "\0monarch-kernel mark 4503599627370497\n",
        f"\0monarch-kernel mark {FIRST_MARK:016d}\n",
        f"\0monarch-kernel mark {switch_mark(1, 99_999)}\n",
        f"\0monarch-kernel mark {'9' * 16}\n",
        mark_bytes(new_secret(), switch_mark(1, 0)).decode() + "\n",
        mark_bytes(new_secret(), FIRST_MARK + 1).decode() + "\n",
    ]
    pids, agent = pids_of(procs), agent_pid()
    written.clear()
    for text in texts:
        for stream in (1, 2):
            procs.slice(r=0).run(f"_ = os.write({stream}, {text.encode()!r})").get(LONG_S)
    procs.slice(r=0).run(f"for i in range(39): _ = os.write(1, {texts[0].encode()!r}[i : i + 1])").get(LONG_S)
    procs.slice(r=0).run(f"_ = os.write(1, {texts[0].encode()[:-2]!r})").get(LONG_S)
    procs.slice(r=0).run("print('the end')").get(LONG_S)
    assert text_of(written) == "".join([*texts, texts[0], texts[0][:-2], "the end\n"])
    assert text_of(written, "stderr") == "".join(texts)
    assert (pids_of(procs), agent_pid()) == (pids, agent)


def test_the_secrets_of_marks_are_not_in_arguments_or_environment(procs: ProcMesh) -> None:
    assert procs.run(TAKES_MARKS + "marks._secret").get(LONG_S).values()[0]
    secrets = procs.run("marks._secret").get(LONG_S).values()
    assert len(set(secrets)) == len(secrets)
    paths = [f"/proc/{pid}/{name}" for pid in (*pids_of(procs), agent_pid()) for name in ("cmdline", "environ")]
    shown = b"".join(Path(path).read_bytes() for path in paths)
    assert not [secret for secret in secrets if secret.encode() in shown]


@pytest.mark.parametrize(
    "opens",
    [
        "number = 0",  # the null device
        "file = open('/proc/self/exe', 'rb'); number = file.fileno()",
        "ends = __import__('socket').socketpair(); number = ends[0].fileno()",
        "folder = __import__('tempfile').TemporaryDirectory(); path = folder.name + '/fifo'; os.mkfifo(path)\n"
        "number = os.open(path, os.O_RDWR)",
        "number = 99_999",
        # A terminal can be watched like a pipe.
        "import pty; end, number = pty.openpty(); _ = os.write(end, b'from a terminal\\n')",
    ],
    ids=["device", "file", "socket", "fifo", "none", "terminal"],
)
def test_the_agent_survives_a_mark_that_names_no_pipe(procs: ProcMesh, written: list[OutputEvent], opens: str) -> None:
    pids, agent = pids_of(procs), agent_pid()
    one = procs.slice(r=0)
    one.run(TAKES_MARKS + opens).get(LONG_S)
    one.run("_ = os.write(1, mark_bytes(marks._secret, switch_mark(0, number))); print('shown')").get(LONG_S)
    wait_until(lambda: "shown\n" in text_of(written), "the text after the mark")
    one.run("print('later')").get(LONG_S)
    assert "from a terminal" not in text_of(written)
    assert (pids_of(procs), agent_pid()) == (pids, agent)


def test_an_agent_whose_directory_is_gone_writes_no_files(tmp_path: Path) -> None:
    for name in ("output-1", "manifest"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    assert write_detached(str(tmp_path), 1.0)
    remove_all_but_kept_files(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"manifest", "detached"}
    gone = str(tmp_path / "gone")
    remove_all_but_kept_files(gone)
    assert not write_detached(gone, 1.0)


def test_a_flood_in_a_notebook_is_bounded_and_does_not_grow_the_agent(
    warm: None, written: list[OutputEvent], bar: Bar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_mesh, "shows_all_output", lambda: False)
    procs = this_host().spawn_procs({"r": 2}, device="cpu")
    procs.run("import os").get(LONG_S)
    one = procs.slice(r=0)
    before = rss_nbytes(agent_pid())
    lines, blocks = 1024, 400
    flood = f"block = (b'x' * 1023 + b'\\n') * {lines}\nfor _ in range({blocks}):\n    _ = os.write(1, block)\nprint('the end')"
    one.run(flood)
    other = procs.slice(r=1)
    slowest, highest = 0.0, 0
    while "the end\n" not in text_of(written[-5:]):
        begin = time.monotonic()
        assert other.run("rank").get(LONG_S).item() == 1
        slowest = max(slowest, time.monotonic() - begin)
        highest = max(highest, rss_nbytes(agent_pid()))
    assert highest - before < 192 << 20  # of the 400 MiB that it reads
    bar.check(slowest, 2, "the slowest answer of the other rank")
    shown = text_of(written)
    dropped = sum(event.dropped_lines for event in written)
    assert shown.count("\n") + dropped == lines * blocks + 1
    assert len(shown) < 64 << 20
    assert dropped > lines * blocks // 2
    procs.stop(grace_s=0).get()


# -- processes that a rank leaves behind


def test_children_of_a_dead_rank_end_with_it(procs: ProcMesh) -> None:
    start = "child = subprocess.Popen(['sleep', '1000']); child.pid"
    kids = list(procs.run(start).get(LONG_S).values())
    os.kill(pids_of(procs)[0], signal.SIGKILL)
    wait_gone(kids[0])
    assert not is_gone(kids[1])
    procs.stop().get()
    for kid in kids:
        wait_gone(kid)


def test_concurrent_cells_can_write_while_children_run(procs: ProcMesh) -> None:
    procs.run("child = subprocess.Popen(['sleep', '1000'])").get(LONG_S)
    futures = [procs.run(f"print('line')\n{i}") for i in range(30)]
    assert [set(future.get(LONG_S).values()) for future in futures] == [{i} for i in range(30)]


def test_children_that_ignore_the_request_to_end_are_killed(procs: ProcMesh, bar: Bar) -> None:
    code = (
        "child = subprocess.Popen(['sh', '-c', 'trap \"\" TERM; echo ready; while :; do sleep 0.1; done'], "
        "stdout=subprocess.PIPE)\nchild.stdout.readline()\nchild.pid"
    )
    one = procs.slice(r=0)
    kid = one.run(code).get(LONG_S).item()
    begin = time.monotonic()
    os.kill(pids_of(procs)[0], signal.SIGKILL)
    wait_gone(kid)
    bar.check_above(time.monotonic() - begin, GROUP_GRACE_S / 2, "the grace")


def test_processes_in_a_separate_session_end_with_their_rank_only(procs: ProcMesh) -> None:
    other = this_host().spawn_procs({"r": 1}, device="cpu")
    theirs = other.run(DAEMONS).get(LONG_S).values()[0]
    ours: Any = procs.run(DAEMONS).get(LONG_S).values()
    os.kill(pids_of(procs)[1], signal.SIGKILL)
    wait_gone(*ours[1][:-1])  # the last one has no sign of its rank, and might come from another one
    assert not any(map(is_gone, (*ours[0], *ours[2], *theirs)))
    procs.stop().get(LONG_S)
    wait_gone(*ours[0], *ours[2])
    assert not any(map(is_gone, theirs))
    other.stop().get(LONG_S)
    wait_gone(*theirs)


def test_output_of_a_child_after_the_death_of_its_rank_is_harmless(procs: ProcMesh) -> None:
    """The agent gets both events at once, and first the death, for which it closes the rank's pipes."""
    one = procs.slice(r=0)
    code = "child = subprocess.Popen(['sh', '-c', 'read x; sleep 0.2; echo late'], stdin=subprocess.PIPE)\nchild.pid"
    kid = one.run(code).get(LONG_S).item()
    pid = pids_of(procs)[0]
    agent = agent_pid()
    os.kill(agent, signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: b") Z " in Path(f"/proc/{kid}/stat").read_bytes(), "the child to have ended")
    finally:
        os.kill(agent, signal.SIGCONT)
    wait_until(lambda: bool(procs.deaths()), "the report of the death")
    assert procs[1:3].run("rank").get(LONG_S).values() == (1, 2)
    assert "SIGKILL" in procs.deaths()[0].message


def test_the_agent_keeps_no_zombies(procs: ProcMesh) -> None:
    procs.run("child = subprocess.Popen(['sleep', '1000'])").get(LONG_S)
    for pid in pids_of(procs):
        os.kill(pid, signal.SIGKILL)
    agent, zygote = agent_pid(), zygote_pid()
    wait_until(lambda: set(children(agent)) == {zygote}, "the agent to have collected all")


# -- the agent itself


def test_the_agent_does_not_load_torch(procs: ProcMesh) -> None:
    maps = Path(f"/proc/{agent_pid()}/maps").read_text()
    assert "libzmq" in maps or "zmq" in maps
    assert "libtorch" not in maps  # Python itself may be in a folder with that name
    assert rss_nbytes(agent_pid()) < 100 << 20


def test_an_interrupt_of_the_terminal_does_not_end_the_agent(procs: ProcMesh) -> None:
    os.kill(agent_pid(), signal.SIGINT)
    os.kill(zygote_pid(), signal.SIGINT)
    assert procs.run("rank").get(LONG_S).values() == (0, 1, 2)
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    assert mesh.run("rank").get(LONG_S).values() == (0,)
    mesh.stop(grace_s=0).get()


def test_ranks_use_the_python_of_the_controller(procs: ProcMesh) -> None:
    found: Any = procs.run("sys.executable").get(LONG_S).values()
    assert set(found) == {sys.executable}


# -- the zygote dies


@pytest.mark.slow
def test_processes_whose_origin_is_unknown_end_with_the_last_rank(mortal: ProcMesh) -> None:
    daemons: Any = mortal.slice(r=0).run(DAEMONS).get(LONG_S).values()
    for pid in pids_of(mortal):
        os.kill(pid, signal.SIGKILL)
    wait_gone(*daemons[0])


def test_ranks_survive_a_killed_zygote_and_the_next_mesh_starts_a_new_one(mortal: ProcMesh) -> None:
    old = zygote_pid()
    os.kill(old, signal.SIGKILL)
    assert mortal.run("rank").get(LONG_S).values() == (0, 1, 2)
    wait_gone(old)
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    assert mesh.run("rank").get(LONG_S).values() == (0, 1)
    assert zygote_pid() != old
    assert mortal.run("rank").get(LONG_S).values() == (0, 1, 2)
    mesh.stop(grace_s=0).get()


@pytest.mark.parametrize("is_second", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_children_of_ranks_end_when_the_agent_is_killed(mortal: ProcMesh, is_second: bool) -> None:
    if is_second:  # it knows of ranks that another zygote has forked
        old = zygote_pid()
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: zygote_pids() not in ([], [old]), "another zygote")
    kids = mortal.run("import subprocess\nsubprocess.Popen(['sleep', '1000']).pid").get(LONG_S).values()
    daemons: Any = mortal.run(DAEMONS).get(LONG_S).values()
    os.kill(agent_pid(), signal.SIGKILL)
    wait_gone(*kids, *(pid for pids in daemons for pid in pids[:-1]))
    for *_, unknown in daemons:  # nothing tells that it belongs to a rank
        os.kill(unknown, signal.SIGKILL)


def test_starting_ranks_report_that_the_zygote_was_killed(mortal: ProcMesh) -> None:
    earlier = this_host().spawn_procs({"r": 1}, device="cpu")
    earlier.initialized.get(LONG_S)
    zygote = zygote_pid()
    os.kill(zygote, signal.SIGSTOP)
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    starting = mesh.initialized
    assert mortal.run("rank").get(LONG_S).values() == (0, 1, 2)
    earlier.stop(grace_s=0).get(LONG_S)  # the agent has requested the ranks: it does all in order
    assert not starting.done()
    os.kill(zygote, signal.SIGKILL)
    with pytest.raises(SupervisionError, match=r"starting procs\d+") as caught:
        starting.get(LONG_S)
    assert "the process that ranks are forked from" in str(caught.value)
    assert {report.etype for report in caught.value.reports.values()} == {"RankNotStarted"}
    assert mortal.run("rank").get(LONG_S).values() == (0, 1, 2)


def test_ranks_that_are_stopped_before_they_are_up_never_run(mortal: ProcMesh) -> None:
    zygote = zygote_pid()
    os.kill(zygote, signal.SIGSTOP)
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    starting = mesh.initialized
    stopping = mesh.stop("changed my mind")
    with pytest.raises(SupervisionError, match="changed my mind"):
        starting.get(LONG_S)
    known = {*children(agent_pid())}
    os.kill(zygote, signal.SIGCONT)
    stopping.get(LONG_S)
    again = this_host().spawn_procs({"r": 1}, device="cpu")  # forked after them
    pid = again.run("import os; os.getpid()").get(LONG_S).item(r=0)
    wait_until(lambda: {*children(agent_pid())} == {*known, pid}, "only the wanted rank to be left")
    again.stop(grace_s=0).get()


# -- the agent dies


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "message"),
    [
        (signal.SIGKILL, r"the host agent \(pid {agent}\) was killed by SIGKILL"),
        (signal.SIGTERM, r"killed by SIGTERM \(something asked it to end"),
    ],
)
def test_ranks_end_with_the_agent_and_the_next_host_works(
    mortal: ProcMesh, signum: int, message: str, bar: Bar
) -> None:
    pids, agent, zygote = pids_of(mortal), agent_pid(), zygote_pid()
    running = mortal.run("time.sleep(1000)")
    with bar.below(2, "the report"):
        os.kill(agent, signum)
        error = running.exception(LONG_S)
    assert isinstance(error, SupervisionError)
    assert error.ranks == (0, 1, 2)
    message = message.format(agent=agent)
    assert re.search(message, str(error))
    wait_gone(*pids, zygote, agent)
    with pytest.raises(SupervisionError, match=message):
        mortal.run("1").get(LONG_S)
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    assert mesh.run("rank").get(LONG_S).values() == (0, 1)
    assert agent_pid() != agent
    mesh.stop(grace_s=0).get()


SAVES = """
import pathlib, time
from monarch_kernel import live
folder = pathlib.Path({folder!r})
def save():
    (folder / f"saves{{rank}}").touch()
    while not (folder / "go").exists(): time.sleep(0.01)
for step in live.loop(on_preempt=save):
    (folder / f"in{{rank}}").touch()
    time.sleep(0.01)
"""


@pytest.mark.slow  # another agent, which imports torch
def test_an_agent_that_ends_starts_no_rank_and_the_next_host_is_another(mortal: ProcMesh, tmp_path: Path) -> None:
    """Ranks that save their work delay its end."""
    pids, agent, hosts = pids_of(mortal), agent_pid(), this_host()
    saving = mortal.run(SAVES.format(folder=str(tmp_path)))
    wait_for_files(tmp_path, *(f"in{rank}" for rank in range(3)))
    os.kill(agent, signal.SIGTERM)
    wait_for_files(tmp_path, *(f"saves{rank}" for rank in range(3)))
    wait_until(lambda: hosts.is_ending, "the agent to say that it ends")
    refused = hosts.spawn_procs({"r": 1}, device="cpu")
    with pytest.raises(SupervisionError, match="no more ranks; request them again"):
        refused.initialized.get(LONG_S)
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    assert mesh.run("rank").get(LONG_S).values() == (0, 1)
    (tmp_path / "go").touch()
    assert saving.exception(LONG_S) is not None
    wait_gone(*pids, agent)
    assert agent_pid() != agent
    assert mesh.run("rank").get(LONG_S).values() == (0, 1)
    mesh.stop(grace_s=0).get()


def test_ranks_without_descriptors_are_reported_lost_and_others_continue(mortal: ProcMesh) -> None:
    agent = agent_pid()
    soft, hard = resource.prlimit(agent, resource.RLIMIT_NOFILE)
    assert soft == hard  # the maximum, whatever the shell's limit is
    used = len(os.listdir(f"/proc/{agent}/fd"))
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (used + 20, hard))
    more = this_host().spawn_procs({"r": 2}, device="cpu")
    with pytest.raises(SupervisionError, match=r"no file descriptors left for this rank; its limit is \d+: raise it"):
        more.initialized.get(LONG_S)
    assert mortal.run("1 + 1").get(LONG_S).values() == (2, 2, 2)
    more.stop(grace_s=0).get()
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (hard, hard))
    others = this_host().spawn_procs({"r": 2}, device="cpu")
    others.initialized.get(LONG_S)


def test_output_waits_until_the_agent_has_a_descriptor(mortal: ProcMesh, written: list[OutputEvent]) -> None:
    one = mortal.slice(r=0)
    one.run("import subprocess; child = subprocess.Popen(['sleep', '1000'])").get(LONG_S)
    agent = agent_pid()
    log = Path(os.readlink(f"/proc/{agent}/fd/2"))
    limits = resource.prlimit(agent, resource.RLIMIT_NOFILE)
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (3, limits[1]))  # each new descriptor would have a higher number
    try:
        one.run("print('late'); print('too', file=__import__('sys').stderr)").get(LONG_S)
        wait_until(lambda: log.read_text().count("yet: [Errno 24]") == 2, "the agent's attempts")
        assert "late" not in text_of(written)
    finally:
        resource.prlimit(agent, resource.RLIMIT_NOFILE, limits)
    wait_until(lambda: (text_of(written), text_of(written, "stderr")) == ("late\n", "too\n"), "the output")
    assert log.read_text().count("[Errno 24]") == 2
    one.run("print('then')").get(LONG_S)
    assert text_of(written) == "late\nthen\n"
