"""The zygote's forks share its imports but not its descriptors, and the zygote ends with its agent."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from monarch_kernel.runtime.host.zygote import Zygote
from monarch_kernel.testing import rank_spec
from tests.support.processes import is_gone
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until

PROBE = """
    import atexit, json, os, random, sys, time

    print("imported by", os.getpid(), file=sys.stderr)
    atexit.register(print, "finalized", file=sys.stderr)
    while not os.path.exists(os.environ["PROBE_GO"]):
        time.sleep(0.001)
    state = random.getstate()

    def run(spec, address, token, helper, secret):
        if spec.rank == 1:
            raise LookupError("rank 1 is broken")
        if spec.rank == 2:
            sys.exit("rank 2 leaves")
        fds = {int(name): os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
               if os.path.exists(f"/proc/self/fd/{name}")}
        print(json.dumps({
            "pid": os.getpid(), "sid": os.getsid(0), "helper": helper, "address": address, "token": token, "secret": secret,
            "proc": spec.proc, "fds": fds, "stdin": sys.stdin.read() if not sys.stdin.closed else os.read(0, 1).decode(),
            "own_random": random.getstate() != state, "prepared": os.environ.get("LATE", ""),
        }))
        print("to stderr", file=sys.stderr)
"""

LATE = """
    import os

    def prepare():
        os.environ["LATE"] = "prepared"
"""


@dataclass
class Nursery:
    """A zygote, and the output of its ranks."""

    zygote: Zygote
    log: Path
    pipes: list[int] = field(default_factory=list)

    def fork(self, *ranks: int) -> list[tuple[int, int]]:
        specs = [rank_spec(rank + 10, rank=rank, world_size=4) for rank in ranks]
        pairs, reads = [], []
        for _ in ranks:
            out, err = os.pipe(), os.pipe()
            pairs.append((out[1], err[1]))
            reads.append((out[0], err[0]))
            self.pipes += [out[0], err[0]]
        self.zygote.fork(specs, pairs, [f"secret {rank}" for rank in ranks])
        for pair in pairs:
            for fd in pair:
                os.close(fd)
        return reads

    def report(self) -> tuple[int, int, str] | None:
        assert select.select([self.zygote.socket], [], [], LONG_S)[0], "no report came"
        report = self.zygote.report()
        return None if report is None else (report.proc, report.pid, report.error)


@pytest.fixture
def nursery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nursery]:
    (tmp_path / "probe.py").write_text(textwrap.dedent(PROBE))
    (tmp_path / "late.py").write_text(textwrap.dedent(LATE))
    go = tmp_path / "go"
    go.touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PROBE_GO", str(go))
    log = tmp_path / "zygote.log"
    nursery = Nursery(
        Zygote("probe:run", ["probe"], ["late:prepare"], ("ipc://somewhere", "ipc://here"), "secret", str(log)), log
    )
    yield nursery
    nursery.zygote.close()
    for fd in nursery.pipes:
        os.close(fd)


def read_all(fd: int) -> str:
    text = b""
    deadline = time.monotonic() + LONG_S
    while True:
        assert select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0], "the pipe stays open"
        data = os.read(fd, 1 << 16)
        if not data:
            return text.decode()
        text += data


def pid_of(nursery: Nursery) -> int:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.readlink(f"/proc/{name}/fd/1") == str(nursery.log):
                    return int(name)
            except OSError:
                continue
    raise AssertionError("the zygote is not running")


def test_forks_have_separate_sessions_and_descriptors(nursery: Nursery) -> None:
    reads = nursery.fork(0, 3)
    outputs = []
    for out, err in reads:
        outputs.append(json.loads(read_all(out)))
        assert read_all(err) == "to stderr\n"
    reports = [nursery.report(), nursery.report()]
    assert reports == [(10, outputs[0]["pid"], ""), (13, outputs[1]["pid"], "")]
    for rank, one in zip((0, 3), outputs):
        assert one["sid"] == one["pid"] != os.getsid(0)
        assert one["secret"] == f"secret {one['proc'] - 10}"
        assert (one["address"], one["token"], one["proc"]) == (
            ["ipc://somewhere", "ipc://here"],
            "secret",
            rank + 10,
        )
        assert one["stdin"] == ""
        assert one["own_random"]
        kinds = {int(fd): name.partition(":")[0] for fd, name in one["fds"].items()}
        assert kinds.pop(0) == "/dev/null"
        assert (kinds.pop(1), kinds.pop(2)) == ("pipe", "pipe")
        assert not [name for name in kinds.values() if name in ("pipe", "socket")], one["fds"]
    assert outputs[0]["pid"] != outputs[1]["pid"]
    assert outputs[0]["helper"] == outputs[1]["helper"]


def test_modules_are_imported_once(nursery: Nursery) -> None:
    for _ in range(3):
        for out, err in nursery.fork(0, 3):
            assert read_all(out)
            read_all(err)
    assert nursery.log.read_text().count("imported by") == 1


def test_later_imports_do_not_delay_ranks(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = tmp_path / "gate"
    zygote = nursery.zygote
    monkeypatch.setenv("PROBE_GO", str(gate))
    try:
        nursery.zygote = Zygote("probe:run", ["probe"], ["late:prepare"], ("", ""), "", str(tmp_path / "second.log"))
        reads = nursery.fork(0, 3)  # before it has done the required imports
        gate.touch()
        assert [json.loads(read_all(out))["prepared"] for out, _ in reads] == ["", ""]
        wait_until(lambda: json.loads(read_all(nursery.fork(0)[0][0]))["prepared"], "the zygote to be prepared")
        nursery.zygote.close()
    finally:
        nursery.zygote = zygote


def test_uncaught_exceptions_of_a_rank_are_printed_and_stay_in_the_rank(nursery: Nursery) -> None:
    (broken, leaving) = nursery.fork(1, 2)
    assert read_all(broken[0]) == ""
    assert "LookupError: rank 1 is broken" in read_all(broken[1])
    assert "rank 2 leaves" in read_all(leaving[1])
    ((out, _),) = nursery.fork(0)
    assert '"proc": 10' in read_all(out)  # the zygote still works


def test_the_zygote_ends_with_its_agent(nursery: Nursery, bar: Bar) -> None:
    ((out, _),) = nursery.fork(0)
    assert read_all(out)
    pid = pid_of(nursery)
    with bar.below(5, "the end of the zygote"):
        log = nursery.zygote.close()
    assert is_gone(pid)
    assert "imported by" in log[0]


@pytest.mark.parametrize("reads", [True, False], ids=["all reports are read", "a report is not read"])
def test_the_zygote_ends_by_itself_and_does_not_finalize_what_it_has_imported(nursery: Nursery, reads: bool) -> None:
    ((out, _),) = nursery.fork(0)
    assert read_all(out)
    if reads:
        assert nursery.report() is not None
    else:
        assert select.select([nursery.zygote.socket], [], [], LONG_S)[0], "no report came"
    pid, end = pid_of(nursery), os.pidfd_open(pid_of(nursery))
    try:
        nursery.zygote.socket.close()
        found = os.waitid(os.P_PIDFD, end, os.WEXITED | os.WNOWAIT)
    finally:
        os.close(end)
    assert found is not None
    assert (found.si_pid, found.si_code, found.si_status) == (pid, os.CLD_EXITED, 0)
    assert "finalized" not in nursery.log.read_text()


def test_a_killed_zygote_is_noticed(nursery: Nursery) -> None:
    ((out, _),) = nursery.fork(0)
    assert read_all(out)
    assert nursery.report() is not None
    os.kill(pid_of(nursery), signal.SIGKILL)
    assert nursery.report() is None
    with pytest.raises(OSError, match="Broken pipe|reset"):
        nursery.fork(0)


def test_an_import_that_fails_is_in_the_log(tmp_path: Path) -> None:
    zygote = Zygote("no.such:entry", ["no_such_module"], [], ("", ""), "", str(tmp_path / "log"))
    nursery = Nursery(zygote, tmp_path / "log")
    assert nursery.report() is None
    log = zygote.close()
    assert "No module named 'no_such_module'" in log[-1]


def test_ctrl_c_in_the_terminal_does_not_end_the_zygote(nursery: Nursery) -> None:
    ((out, _),) = nursery.fork(0)
    assert read_all(out)
    os.kill(pid_of(nursery), signal.SIGINT)
    ((out, _),) = nursery.fork(0)
    assert read_all(out)


def test_the_zygote_uses_this_python(nursery: Nursery) -> None:
    ((out, _),) = nursery.fork(0)
    assert read_all(out)
    assert Path(os.readlink(f"/proc/{pid_of(nursery)}/exe")) == Path(sys.executable).resolve()
