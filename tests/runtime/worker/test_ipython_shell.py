"""The shell of a rank; each test runs a script in a separate process, because the shell is the `__main__` of its process."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_kernel.runtime.worker.ipython_shell import _is_stopped, _signal
from tests.support.waiting import wait_until

Script = Callable[[str], Any]  # the value of the fixture `rank`


def test_displays_are_published_in_order_with_text(rank: Script) -> None:
    ran = rank(
        '''
        shell._shell.emit = lambda data, metadata: (os.write(1, b"<display>\\n"), published.append([data, metadata]))
        run("""
        class Picture:
            def _repr_png_(self):
                return b"PNG", {"width": 3}
        print("before"); display(Picture()); print("after")
        """)
        run("shown = display('a', display_id='d'); shown.update('b')")
        run("from IPython.display import clear_output; clear_output(wait=True)")
        report["published"] = published
        outcome = run("Picture()")
        report["result"] = [outcome.bundle["image/png"], outcome.metadata]
        '''
    )
    assert ran.stdout.startswith("before\n<display>\nafter\n")
    data, metadata = ran.report["published"][0]
    assert data["image/png"] == "UE5H"
    assert metadata == {"image/png": {"width": 3}}
    assert [shown[1].get("monarch_kernel") for shown in ran.report["published"][1:]] == [
        {"display_id": "d", "update": False},
        {"display_id": "d", "update": True},
        {"clear_output": True},
    ]
    assert ran.report["result"] == ["UE5H", {"image/png": {"width": 3}}]


@pytest.mark.parametrize("call", ["input('name? ')", "import getpass; getpass.getpass()"])
def test_input_fails_at_once_and_says_what_to_do(rank: Script, call: str) -> None:
    ran = rank(f"report['it'] = told(run({call!r}))")
    assert re.match(
        r"StdinNotImplementedError: (input|getpass)\(\) does not work on a rank", ran.report["it"]["headline"]
    )
    assert "Ask in a local cell" in ran.report["it"]["headline"]


def test_an_ended_process_counts_as_stopped() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        process = psutil.Process(child.pid)
        assert not _is_stopped(process)
        _signal(process, signal.SIGSTOP)
        wait_until(lambda: _is_stopped(process), "it to stop")
        child.kill()
    assert _is_stopped(process)  # and it has been collected
    _signal(process, signal.SIGKILL)


def test_magics_and_commands(rank: Script, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("x = 1\nint('no')\n")
    ran = rank(
        f"""
        run("print('one')\\n!echo two\\nprint('three')")
        run("word = 'four'\\n!echo {{word}} $word")
        run("!exit 7")
        report["code"] = run("_exit_code").value
        report["output"] = list(run("lines = !echo a; echo b\\nlines").value)
        run("%timeit -n1 -r1 1 + 1")
        run("%%time\\nx = 1")
        run("%%capture caught\\nprint('inside'); display(5)\\n!echo sub")
        report["captured"] = run("caught.stdout").value
        report["capture fails"] = told(run("%%capture\\n1/0"))["headline"]
        report["run"] = told(run("%run {tmp_path}/failing.py"))
        report["bash"] = told(run("%%bash\\nexit 3"))["headline"]
        report["cd"] = run("%cd -q {tmp_path}\\nimport os; os.getcwd()").value
        report["published"] = len(published)
        report["pip"] = told(run("%pip --version"))
        """
    )
    lines = ran.stdout.splitlines()
    assert lines[:4] == ["one", "two", "three", "four four"]
    assert "per loop" in lines[4]
    assert "Wall time" in ran.stdout
    assert "inside" not in ran.stdout
    assert any(re.match(r"pip \d", line) for line in lines)
    assert ran.report["code"] == 7
    assert ran.report["output"] == ["a", "b"]
    assert ran.report["captured"] == "inside\nsub\n"
    assert ran.report["capture fails"] == "ZeroDivisionError: division by zero"
    assert ran.report["run"]["headline"].startswith("ValueError: invalid literal")
    assert ran.report["run"]["frames"][-1][:3] == [f"{tmp_path}/failing.py", 2, "int('no')"]
    assert ran.report["bash"].startswith("CalledProcessError")
    assert ran.report["cd"] == str(tmp_path)
    assert ran.report["published"] == 0
    assert ran.report["pip"] is None


def test_a_value_that_cannot_be_shown(rank: Script) -> None:
    ran = rank(
        '''
        run("""
        class Half:
            def __repr__(self): return "half"
            def _repr_html_(self): raise ValueError("broken html")
        class Broken:
            def __repr__(self): raise ValueError("broken repr")
        """)
        outcome = run("Half()")
        report["half"] = [outcome.bundle, told(outcome)]
        report["broken"] = told(run("Broken()"))["headline"]
        '''
    )
    assert ran.report == {"half": [{"text/plain": "half"}, None], "broken": "ValueError: broken repr"}
    assert "broken html" in ran.stderr


def test_nothing_grows_with_the_number_of_cells(rank: Script) -> None:
    ran = rank(
        """
        import inspect, linecache
        def counts():
            gc.collect()
            return len(linecache.cache), len(gc.get_objects())
        run("def model(): pass", 1)
        code = "x = 1\\nx"
        for number in range(2, 700):
            run(code, number)
        run("%%capture\\n1", 701)
        before = counts()
        for number in range(702, 2200):
            run(code, number)
        for number in range(2200, 2300):
            run("1/0", number)
            run(f"%%capture\\n{number}", number)
        run(code, 2300)
        after = counts()
        report["sources"] = [before[0], after[0]]
        report["grown"] = after[1] - before[1]
        report["source"] = inspect.getsource(shell.namespace["model"])
        report["oldest"] = "<remote cell [1000]>" in linecache.cache
        report["latest"] = "<remote cell [2300]>" in linecache.cache
        """
    )
    assert ran.report["sources"][1] - ran.report["sources"][0] < 10
    assert ran.report["grown"] < 1000
    assert ran.report["source"] == "def model(): pass\n"
    assert (ran.report["oldest"], ran.report["latest"]) == (False, True)


def test_close_undoes_changes_to_the_process(rank: Script) -> None:
    ran = rank(
        """
        import builtins, getpass
        script = __import__("types").SimpleNamespace(run=run)
        run("import asyncio\\ntask = asyncio.create_task(asyncio.sleep(60))\\nawait asyncio.sleep(0)")
        task = shell.namespace["task"]
        try:
            CellShell({}, print)
        except RuntimeError as error:
            report["second"] = str(error)
        shell.close()
        report["cancelled"] = task.cancelled()
        report["input"] = builtins.input.__module__
        report["getpass"] = getpass.getpass.__module__
        report["main"] = sys.modules["__main__"].__dict__ is globals()
        report["hook"] = sys.displayhook is sys.__displayhook__
        shell = CellShell({}, print)
        report["again"] = shell.run("1 + 1", 1).value
        """
    )
    assert ran.report.pop("second").startswith("this process has an IPython shell already")
    assert ran.report == {
        "cancelled": True,
        "input": "builtins",
        "getpass": "getpass",
        "main": True,
        "hook": True,
        "again": 2,
    }


def test_ranks_forked_from_a_prepared_process_have_separate_shells(rank: Script) -> None:
    ran = rank(
        """
        shell.close()
        mine = sys.modules["__main__"]
        prepare()
        prepare()
        report["main"] = sys.modules["__main__"] is mine
        answers = []
        for number in range(2):
            read, write = os.pipe()
            if os.fork() == 0:
                child = CellShell({"rank": number}, lambda *_: None)
                value = child.run("import __main__\\nx = rank * 10\\n__main__.x + rank", 1).value
                os.write(write, json.dumps([value, sorted(n for n in child.namespace if len(n) == 1)]).encode())
                os._exit(0)
            os.wait()
            answers.append(json.loads(os.read(read, 1000)))
            os.close(read), os.close(write)
        report["answers"] = answers
        report["clean"] = not hasattr(mine, "x")
        shell = CellShell({}, print)
        """
    )
    assert ran.report == {"main": True, "answers": [[0, ["_", "x"]], [11, ["_", "x"]]], "clean": True}
