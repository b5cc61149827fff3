"""A rank as a process: its environment, threads and random numbers, its interrupts, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, ActorError, ProcMesh, endpoint, shutdown_context, this_host
from monarch_kernel.errors import RemoteError
from tests.support.processes import wait_gone
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_for_files, wait_until

CPUS = len(os.sched_getaffinity(0))


class Body(Actor):
    """Runs code in its process."""

    @endpoint
    def run(self, code: str) -> Any:
        return eval(code)

    @endpoint
    def execute(self, code: str) -> None:
        exec(code)

    @endpoint
    def spin(self, started: str) -> None:
        Path(started).touch()
        while True:
            pass


@pytest.fixture(scope="module")
def procs(by_value: None) -> Iterator[ProcMesh]:
    """Two ranks in a separate session of this module: the agent and the zygote keep the environment in which they started."""
    shutdown_context().get(LONG_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS")
        patch.setenv("OF_THE_CONTROLLER", "seen")
        mesh = this_host().spawn_procs({"r": 2}, device="cpu", env={"MINE": "1"})
        mesh.initialized.get(LONG_S)
        yield mesh
        shutdown_context().get(LONG_S)


@pytest.fixture
def spare(procs: ProcMesh) -> Iterator[ProcMesh]:
    """One more process, which a test may end."""
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    yield mesh
    mesh.stop(grace_s=0).get()


# -- environment


def test_a_rank_has_its_coordinates_and_device(procs: ProcMesh) -> None:
    assert procs.run("rank, world_size, local_rank, str(device)").get().values() == ((0, 2, 0, "cpu"), (1, 2, 1, "cpu"))


def test_each_rank_leads_a_separate_session(procs: ProcMesh) -> None:
    procs.run("import os").get()
    for sid, pgid, pid in procs.run("os.getsid(0), os.getpgid(0), os.getpid()").get().values():
        assert sid == pgid == pid
    assert os.getsid(0) not in procs.run("os.getsid(0)").get().values()


def test_environment(procs: ProcMesh) -> None:
    expression = "[os.environ.get(name) for name in ('MINE', 'OF_THE_CONTROLLER', 'CUDA_VISIBLE_DEVICES')]"
    procs.run("import os").get()
    assert procs.run(expression).get().values() == (["1", "seen", ""],) * 2
    assert "MINE" not in os.environ


def test_ranks_have_the_directory_and_import_path_of_the_controller(
    procs: ProcMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("answer = 42")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    try:
        assert mesh.run("import os, only_here\nos.getcwd(), only_here.answer").get().values() == ((str(tmp_path), 42),)
    finally:
        mesh.stop().get()


def test_processors_are_divided_among_the_ranks_of_a_host(procs: ProcMesh, spare: ProcMesh) -> None:
    look = "(__import__('torch').get_num_threads(), __import__('os').environ['OMP_NUM_THREADS'])"
    for mesh, per_rank in ((procs, max(1, CPUS // 2)), (spare, CPUS)):
        actors = mesh.spawn("body", Body)
        assert set(actors.run.call(look).get().values()) == {(per_rank, str(per_rank))}  # before any cell
        assert set(mesh.run(look).get().values()) == {(per_rank, str(per_rank))}


def test_a_requested_number_of_threads_is_kept(procs: ProcMesh) -> None:
    mesh = this_host().spawn_procs({"r": 1}, device="cpu", env={"OMP_NUM_THREADS": "3"})
    try:
        assert mesh.run("import torch; torch.get_num_threads()").get().values() == (3,)
    finally:
        mesh.stop().get()


def test_random_numbers_differ_between_ranks(procs: ProcMesh) -> None:
    code = "import random, uuid, numpy\nrandom.random(), numpy.random.rand(), uuid.uuid4()"
    first, second = procs.run(code).get().values()
    assert all(a != b for a, b in zip(first, second))


def test_standard_input_is_empty(procs: ProcMesh) -> None:
    assert procs.run("import os; os.read(0, 1)").get().values() == (b"",) * 2


def test_ranks_share_no_descriptors(procs: ProcMesh) -> None:
    """Otherwise the pipe of a dead rank would stay open, and its death would be noticed late."""
    pipes = procs.run("import os; [os.readlink('/proc/self/fd/%d' % fd) for fd in (1, 2)]").get().values()
    assert len({pipe for pair in pipes for pipe in pair}) == 4
    code = (
        "[os.readlink(fd.path) for fd in os.scandir('/proc/self/fd') if fd.is_symlink() and os.path.lexists(fd.path)]"
    )
    for i, links in enumerate(procs.run(code).get().values()):
        assert set(pipes[i]) <= set(links)
        assert not set(links) & set(pipes[1 - i])


def test_a_second_mesh_starts_from_the_warm_zygote(procs: ProcMesh, bar: Bar) -> None:
    for _ in range(3):
        with bar.below(0.5, "the start of two ranks"):
            mesh = this_host().spawn_procs({"r": 2}, device="cpu")
            mesh.initialized.get(LONG_S)
        mesh.stop().get(LONG_S)


# -- interrupts and exits


def test_interrupts_from_elsewhere_do_nothing(procs: ProcMesh) -> None:
    pids = procs.run("import os; os.getpid()").get().values()
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    assert procs.run("os.getpid()").get().values() == pids
    busy = procs.run("import time\nend = time.monotonic() + 0.3\nwhile time.monotonic() < end: pass\n'whole'")
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    assert busy.get(LONG_S).values() == ("whole",) * 2


def test_sys_exit_in_a_cell_does_not_end_it(procs: ProcMesh) -> None:
    with pytest.raises(RemoteError, match="SystemExit"):
        procs.run("import sys; sys.exit(3)").get(LONG_S)
    assert procs.run("rank").get().values() == (0, 1)


def test_cells_and_actors_are_interrupted_within_two_seconds(procs: ProcMesh, tmp_path: Path, bar: Bar) -> None:
    loop = f"open(r'{tmp_path}/cell', 'w').close()\nwhile True: pass"
    one = procs.slice(r=0)
    cell = one.run(loop)
    wait_until((tmp_path / "cell").exists, "the cell to run")
    with bar.below(2, "the interrupt of the cell"):
        one.interrupt()
        error = cell.exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert error.primary.kind == "interrupted"
    body: Any = one.spawn("body", Body)
    call = body.spin.call_one(f"{tmp_path}/call")
    wait_until((tmp_path / "call").exists, "the endpoint to run")
    with bar.below(2, "the interrupt of the endpoint"):
        one.interrupt()
        error = call.exception(LONG_S)
    assert isinstance(error, ActorError)
    assert error.primary.kind == "interrupted"
    assert body.run.call_one("1 + 1").get(LONG_S) == 2
    assert one.run("1 + 1").get(LONG_S).item() == 2


def test_an_interrupt_reaches_only_its_request(procs: ProcMesh) -> None:
    """At any time, the actor goes on answering: an interrupt does not reach its thread outside of the user's code."""
    one = procs.slice(r=0)
    body: Any = one.spawn("body", Body)
    ends = set()
    for i in range(300):
        call = body.run.call_one(f"sum(range({i * 20}))")
        call.interrupt()
        error = call.exception(LONG_S)
        ends.add(None if error is None else error.primary.kind)
        assert body.run.call_one(str(i)).get(LONG_S) == i
    assert ends <= {None, "interrupted"}


def test_a_rank_can_run_programs(procs: ProcMesh) -> None:
    code = "import subprocess; subprocess.run(['sh', '-c', 'echo out; exit 7'], capture_output=True, text=True)"
    for done in procs.run(code).get(LONG_S).values():
        assert isinstance(done, subprocess.CompletedProcess)
        assert (done.returncode, done.stdout) == (7, "out\n")


# -- the end


BUSY = {
    "idle": "",
    "computes": "while True: pass",
    "catches all": "while True:\n    try:\n        while True: pass\n    except BaseException: break",
    "sleeps": "import time; time.sleep(1000)",
}


@pytest.mark.parametrize("work", BUSY.values(), ids=BUSY.keys())
def test_a_stop_runs_atexit_functions(spare: ProcMesh, tmp_path: Path, work: str, bar: Bar) -> None:
    pid = (
        spare.run(
            "import atexit, os, pathlib\n"
            f"atexit.register(lambda: pathlib.Path(r'{tmp_path}/left').write_text(str(os.getpid())))\nos.getpid()"
        )
        .get(LONG_S)
        .item(r=0)
    )
    if work:
        spare.run(f"open(r'{tmp_path}/started', 'w').close()\n{work}")
        wait_until((tmp_path / "started").exists, "the cell to run")
    with bar.below(5, "the stop"):
        spare.stop(grace_s=30).get(LONG_S)
        wait_gone(pid)
    assert (tmp_path / "left").read_text() == str(pid)


def test_a_stop_ends_a_rank_whose_actor_computes(spare: ProcMesh, tmp_path: Path, bar: Bar) -> None:
    body: Any = spare.spawn("body", Body)
    pid = body.run.call("__import__('os').getpid()").get(LONG_S).item(r=0)
    body.execute.call(f"import atexit; atexit.register(lambda: open(r'{tmp_path}/left', 'w').close())").get(LONG_S)
    running = body.spin.call(f"{tmp_path}/started")
    wait_until((tmp_path / "started").exists, "the endpoint to run")
    with bar.below(10, "the stop"):
        spare.stop("enough", grace_s=30).get(LONG_S)
        wait_gone(pid)
    assert (tmp_path / "left").exists()
    assert "enough" in str(running.exception(LONG_S))


@pytest.mark.parametrize(
    "stubborn",
    [
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "import atexit, time; atexit.register(time.sleep, 1000)",
        "import ctypes; ctypes.CDLL(None).signal(15, 1)",
    ],
    ids=["ignores", "hangs in atexit", "ignores natively"],
)
def test_a_rank_that_does_not_end_is_killed_after_the_grace(spare: ProcMesh, stubborn: str, bar: Bar) -> None:
    pid = spare.run(f"{stubborn}\nimport os; os.getpid()").get(LONG_S).item(r=0)
    begin = time.monotonic()
    spare.stop(grace_s=0.3).get(LONG_S)
    wait_gone(pid)
    took_s = time.monotonic() - begin
    bar.check_above(took_s, 0.2, "the grace")
    bar.check(took_s, 3, "the kill")


def test_a_rank_without_grace_is_killed_at_once(spare: ProcMesh, bar: Bar) -> None:
    pid = spare.run("import atexit, time, os; atexit.register(time.sleep, 1000); os.getpid()").get(LONG_S).item(r=0)
    with bar.below(1, "the kill"):
        spare.stop(grace_s=0).get(LONG_S)
        wait_gone(pid)


# -- activities


def doing(mesh: ProcMesh, ready: Callable[[dict[int, Any]], bool]) -> dict[int, Any]:
    """Wait until the activities of the ranks are as expected."""

    def look() -> dict[int, Any] | None:
        answers: dict[int, Any] = mesh.doing().get(LONG_S)
        return answers if ready(answers) else None

    found = wait_until(look, "the ranks to be where they are expected")
    assert found is not None
    return found


def where(answer: Any) -> tuple[str, int, str]:
    frame = answer.activities[0].user_frame
    return frame.file, frame.line, frame.function


@pytest.mark.parametrize("wait", ["time.sleep(600)", "await asyncio.sleep(600)", "while True: pass"])
def test_doing_reports_the_line_of_a_cell(procs: ProcMesh, tmp_path: Path, wait: str) -> None:
    # An earlier request may be answered a moment before the thread that ran it is done.
    doing(procs, lambda answers: all(answer.activities == () for answer in answers.values()))
    cell = procs.run(f"import asyncio, time\n\n{wait}")
    found = doing(procs, lambda answers: all(a.activities and a.activities[0].user_frame for a in answers.values()))
    found = doing(procs, lambda answers: all(where(a)[1] == 3 for a in answers.values()))
    assert {where(answer) for answer in found.values()} == {("<remote cell [0]>", 3, "<module>")}
    procs.interrupt()
    assert isinstance(cell.exception(LONG_S), RemoteError)


def test_doing_reports_the_line_of_an_endpoint(procs: ProcMesh, tmp_path: Path) -> None:
    body: Any = procs.spawn("body", Body)
    call = body.execute.call(f"import os, time\nwhile not os.path.exists(r'{tmp_path}/seen'): time.sleep(0.01)")
    found = doing(procs, lambda answers: all(a.activities and a.activities[0].user_frame for a in answers.values()))
    (tmp_path / "seen").touch()
    assert {answer.activities[0].executor for answer in found.values()} == {"actor body"}
    assert call.exception(LONG_S) is None


def test_doing_does_not_count_as_work(procs: ProcMesh) -> None:
    assert isinstance(procs.run("1/0").exception(LONG_S), RemoteError)
    before = [(rank.state, rank.last_error) for rank in procs.view().ranks]
    procs.doing().get(LONG_S)
    assert [(rank.state, rank.last_error) for rank in procs.view().ranks] == before
    assert before[0][0] == "failed"
    procs.run("1").get(LONG_S)


def test_doing_does_not_wait_for_a_dead_rank(spare: ProcMesh) -> None:
    with pytest.raises(Exception, match="SIGKILL"):
        spare.run("import os; os.kill(os.getpid(), 9)").get(LONG_S)
    assert [answer.kind for answer in spare.doing().get(LONG_S).values()] == ["lost"]  # type: ignore[union-attr]


def test_doing_gives_up_a_rank_that_can_not_answer(procs: ProcMesh, tmp_path: Path) -> None:
    """It waits for a byte in native code that holds the GIL."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    cell = procs.slice(r=0).run(
        f"import ctypes, os\nfd = os.open(r'{gate}', os.O_RDWR)\nopen(r'{tmp_path}/started', 'w').close()\n"
        "_ = ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1)\nos.close(fd)"
    )
    wait_for_files(tmp_path, "started")
    look = procs.doing()
    procs.slice(r=1).doing().get(LONG_S)  # by now the other has answered the first request, too
    assert not look.done()
    look.cancel()
    answers = look.get(LONG_S)
    assert [type(answers[rank]).__name__ for rank in (0, 1)] == ["Failure", "Doing"]
    with gate.open("wb") as end:
        end.write(b"x")
    assert cell.exception(LONG_S) is None
    assert procs.run("rank").get(LONG_S).values() == (0, 1)


# -- reach of interrupts


@pytest.fixture
def pair(procs: ProcMesh) -> Iterator[ProcMesh]:
    """Two ranks of one test, for an actor that goes on after it."""
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    yield mesh
    mesh.stop(grace_s=0).get(LONG_S)


def test_a_cell_that_waits_for_an_answer_is_interrupted(pair: ProcMesh) -> None:
    pair["body"] = pair.spawn("asked", Body).slice(r=1)
    cell = pair.slice(r=0).run("body.execute.call('import time; time.sleep(600)').get()")
    doing(pair, lambda answers: list(answers.values())[1].activities)
    cell.interrupt()
    error = cell.exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert "the wait was interrupted, and the interrupt was sent to the ranks that work for it" in str(error)
    assert pair.run("rank").get(LONG_S).values() == (0, 1)


@pytest.mark.parametrize("how", ["SIG_IGN", "SIG_DFL"])
def test_code_that_ignores_the_signal_is_interrupted(procs: ProcMesh, tmp_path: Path, how: str, bar: Bar) -> None:
    one = procs.slice(r=0)
    cell = one.run(
        f"import signal, time\nsignal.signal(signal.SIGINT, signal.{how})\n"
        f"open(r'{tmp_path}/started', 'w').close()\ntime.sleep(600)"
    )
    wait_until((tmp_path / "started").exists, "the cell to run")
    with bar.below(2, "the interrupt"):
        cell.interrupt()
        error = cell.exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert error.primary.kind == "interrupted"


SWALLOWS = {
    "__del__": "class Waits:\n    def __del__(self): wait()\nWaits()",
    "a callback": "import weakref\nclass One: pass\none = One()\nnote = weakref.ref(one, lambda note: wait())\ndel one",
}


@pytest.mark.parametrize("swallows", SWALLOWS.values(), ids=SWALLOWS)
def test_an_interrupt_that_python_swallows_is_raised_again(procs: ProcMesh, tmp_path: Path, swallows: str) -> None:
    """Python only reports an exception of such code, and goes on."""
    one = procs.slice(r=0)
    wait = f"import time\ndef wait():\n    open(r'{tmp_path}/started', 'w').close()\n    time.sleep(600)\n"
    cell = one.run(f"{wait}{swallows}\ntime.sleep(600)")
    wait_until((tmp_path / "started").exists, "the cell to run")
    cell.interrupt()
    error = cell.exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert error.primary.kind == "interrupted"


LIBRARY = """
import os, time, slow_library.part
with open(r'{here}/imports', 'a') as file: file.write('x')
open(r'{here}/started', 'w').close()
while not os.path.exists(r'{here}/go'): time.sleep(0.01)
"""


@pytest.fixture
def library(procs: ProcMesh, tmp_path: Path) -> Iterator[ProcMesh]:
    """A rank on whose path is an installed library, the import of which waits for the file ``go``."""
    folder = tmp_path / "site-packages" / "slow_library"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(LIBRARY.format(here=tmp_path))
    (folder / "part.py").write_text("VALUE = 7\n")
    one = procs.slice(r=0)
    one.run(f"import sys; sys.path.insert(0, r'{folder.parent}')").get(LONG_S)
    yield one
    one.run("sys.path.pop(0)\nfor name in ('slow_library', 'slow_library.part'): sys.modules.pop(name, None)").get(
        LONG_S
    )


@pytest.mark.parametrize("waits", ["time.sleep(0.01)", "importlib.util.find_spec('no_such_library')"])
def test_an_interrupt_waits_for_the_end_of_an_import(library: ProcMesh, tmp_path: Path, waits: str) -> None:
    """The import hook of ranks asks the controller for a module that no finder has, in a wait that defers interrupts."""
    file = tmp_path / "site-packages" / "slow_library" / "__init__.py"
    file.write_text(f"import importlib.util\n{file.read_text().replace('time.sleep(0.01)', waits)}")
    cell = library.run("import slow_library, time\nwhile True: time.sleep(0.01)")
    wait_until((tmp_path / "started").exists, "the import to run")
    cell.interrupt()
    assert not cell.wait(0.3)
    (tmp_path / "go").touch()
    error = cell.exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert error.primary.kind == "interrupted"
    assert library.run("import slow_library\nslow_library.part.VALUE").get(LONG_S).item() == 7
    assert (tmp_path / "imports").read_text() == "x"


def test_an_abort_ends_an_import_and_the_next_one_starts_over(library: ProcMesh, tmp_path: Path) -> None:
    cell = library.run("import slow_library")
    wait_until((tmp_path / "started").exists, "the import to run")
    cell.interrupt(abort=True)
    error = cell.exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert error.primary.kind == "interrupted"
    assert library.run("[name for name in sys.modules if name.startswith('slow_library')]").get(LONG_S).item() == []
    (tmp_path / "go").touch()
    assert library.run("import slow_library\nslow_library.part.VALUE").get(LONG_S).item() == 7
    assert (tmp_path / "imports").read_text() == "xx"


def test_an_interrupt_of_an_actor_waits_for_the_end_of_an_import(library: ProcMesh, tmp_path: Path) -> None:
    body: Any = library.spawn("importer", Body)
    call = body.execute.call_one("import slow_library\nimport time\nwhile True: time.sleep(0.01)")
    wait_until((tmp_path / "started").exists, "the import to run")
    call.interrupt()
    assert not call.wait(0.3)
    (tmp_path / "go").touch()
    error = call.exception(LONG_S)
    assert isinstance(error, ActorError)
    assert error.primary.kind == "interrupted"
    assert body.run.call_one("__import__('slow_library').part.VALUE").get(LONG_S) == 7
    assert (tmp_path / "imports").read_text() == "x"


FINALIZER = """
class Slow:
    def __del__(self):
        import os, time
        open(r'{here}/started', 'w').close()
        while not os.path.exists(r'{here}/go'): time.sleep(0.01)
Slow()
import time
while True: time.sleep(0.01)
"""


def test_an_interrupt_of_an_actor_waits_for_the_end_of_a_finalizer(procs: ProcMesh, tmp_path: Path) -> None:
    """Python prints an exception that leaves a finalizer, and goes on: the interrupt would be lost."""
    body: Any = procs.slice(r=0).spawn("finalizer", Body)
    work = body.execute.call_one(FINALIZER.format(here=tmp_path))
    wait_until((tmp_path / "started").exists, "the finalizer")
    work.interrupt()
    assert not work.wait(0.3)
    (tmp_path / "go").touch()
    error = work.exception(LONG_S)
    assert isinstance(error, ActorError)
    assert error.primary.kind == "interrupted"


def test_an_abort_ends_an_import_of_an_actor_and_the_next_one_starts_over(library: ProcMesh, tmp_path: Path) -> None:
    body: Any = library.spawn("importer", Body)
    call = body.execute.call_one("import slow_library")
    wait_until((tmp_path / "started").exists, "the import to run")
    call.interrupt()
    call.interrupt(abort=True)
    error = call.exception(LONG_S)
    assert isinstance(error, ActorError)
    assert error.primary.kind == "interrupted"
    names = "[name for name in __import__('sys').modules if name.startswith('slow_library')]"
    assert body.run.call_one(names).get(LONG_S) == []
    (tmp_path / "go").touch()
    assert body.run.call_one("__import__('slow_library').part.VALUE").get(LONG_S) == 7
    assert (tmp_path / "imports").read_text() == "xx"


def test_a_handler_of_the_user_is_called_once_and_overruled_by_an_abort(procs: ProcMesh, tmp_path: Path) -> None:
    one = procs.slice(r=0)
    cell = one.run(
        "import signal, time\ncalls = []\n"
        f"def note(*_): calls.append(1); open(r'{tmp_path}/called', 'w').close()\n"
        f"signal.signal(signal.SIGINT, note)\nopen(r'{tmp_path}/started', 'w').close()\ntime.sleep(600)"
    )
    wait_until((tmp_path / "started").exists, "the cell to run")
    cell.interrupt()
    wait_until((tmp_path / "called").exists, "the handler to be called")
    assert not cell.wait(0.3)
    cell.interrupt(abort=True)
    error = cell.exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert error.primary.kind == "interrupted"
    assert one.run("calls").get(LONG_S).item() == [1]
