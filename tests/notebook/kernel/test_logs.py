"""`%mesh logs` shows all output of ranks, including omitted lines and the output of dead ranks, until the mesh ends."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook

pytestmark = pytest.mark.timeout(120)


def test_the_last_lines_of_ranks_with_their_cells(notebook: Notebook) -> None:
    notebook.ok("%%remote\nprint('hello'); print('from', rank)")
    notebook.ok("%%remote t[1]\nimport sys\nprint('alone'); print('oh', file=sys.stderr)")
    cell = notebook.ok("%mesh logs t")
    lines = cell.lines()
    for rank in range(2):
        first = lines[rank].index("hello")
        assert re.fullmatch(r"-- cell \[\d+\], \d\d:\d\d:\d\d --", lines[rank][first - 1])
        assert lines[rank][first + 1] == f"from {rank}"
    assert "[0-1] hello" in cell.stdout, "equal lines are shown once"
    assert "alone" in lines[1]
    assert "alone" not in lines[0]
    assert cell.lines("stderr") == {1: ["oh"]}
    assert notebook.ok("%mesh logs t[0]").stdout.endswith("[0] from 0\n")
    assert notebook.ok("%mesh logs t[1] --stderr --lines 1").stderr == "[1] oh\n"
    assert notebook.ok("%mesh logs t[0] --stderr").stdout == "t[0] has written nothing to stderr\n"
    assert "[0] hello\n" in notebook.ok("%mesh logs --raw").stdout


def test_the_log_has_the_omitted_lines_of_a_flood(notebook: Notebook) -> None:
    n = 60_000
    cell = notebook.ok(f"%%remote t[0]\nfor i in range({n}): print('flood', i)", 60)
    assert "lines left out here" in cell.stdout
    assert "more: %mesh logs t --lines 60000)" in cell.stdout
    log = notebook.ok("%mesh logs t[0] --lines 20000")
    assert log.lines()[0][-20_000:] == [f"flood {i}" for i in range(n - 20_000, n)]
    first = notebook.ok("%mesh logs t[0]").stdout.partition("\n")[0]
    assert re.fullmatch(r"… [\d,]+ earlier lines left out here; more: %mesh logs t\[0\] --lines \d+000", first)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("t --lines many", "%mesh logs: --lines takes a whole number, such as 200, not 'many'"),
        ("t --lines 0", "%mesh logs: --lines takes a whole number, such as 200, not '0'"),
        ("nope", "there is no mesh 'nope'; available: t"),
        ("t[7]", "t[7]: axis 'gpus' has size 2: index 7 is out of range -2 to 1"),
        ("t --nope", "%mesh logs: unknown option '--nope'; the options are --lines, --raw, --stderr"),
    ],
)
def test_a_usage_error_is_one_line(notebook: Notebook, line: str, answer: str) -> None:
    cell = notebook.run(f"%mesh logs {line}")
    assert cell.ename == "UsageError"
    assert cell.evalue == answer


def test_the_log_of_a_dead_rank_exists_until_its_mesh_ends_and_errors_say_how_to_end_it(bare: Notebook) -> None:
    bare.up(2)
    bare.ok("%%remote\nprint('last words of', rank)")
    files = bare.value(
        "[str(p) for p in __import__('pathlib').Path("
        "__import__('monarch_kernel.runtime.controller.session', fromlist=['x']).current_session().directory).glob('output-*')]"
    )
    assert len(files) >= 2
    bare.run(f"%%remote t[1]\nimport os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    assert bare.ok("%mesh logs t").lines()[1][-1] == "last words of 1"
    bare.ok("t.stop().get()")
    assert bare.ok("%mesh logs t[1]").stdout == "t[1] was stopped: the output of stopped ranks is not kept\n"
    hint = "stop() has ended the ranks of t; to have new ones: %mesh down t, then %mesh up t"
    assert bare.run("%remote t 1").error.endswith(f"\n\n{hint}")
    cell = bare.run("%mesh up t -n 2 --device cpu")
    assert cell.evalue == "%mesh up: stop() has ended the ranks of t; end t itself first: %mesh down t"
    bare.ok("%mesh down t")
    wait_until(lambda: not any(map(os.path.exists, files)), "the end of the log files")


def test_logged_lines_of_ranks_fold_whatever_their_times(notebook: Notebook) -> None:
    notebook.ok("%%remote\nprint(f'12:00:0{rank}.500 INFO epoch 0 done')\nprint(f'12:00:05 INFO loss {rank}.5')")
    said = notebook.ok("%mesh logs t --lines 2").stdout
    assert "[0-1] 12:00:00.500 INFO epoch 0 done\n" in said
    assert "[0] 12:00:05 INFO loss 0.5\n" in said
    assert "[1] 12:00:05 INFO loss 1.5\n" in said
    assert "equal but for numbers such as times, ranks or pids" in said
    assert "[1] 12:00:01.500 INFO epoch 0 done\n" in notebook.ok("%mesh logs t --lines 2 --raw").stdout
