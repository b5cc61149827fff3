"""Cells of a rank; each test runs a script in a separate process, because the shell is the `__main__` of its process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.timing import Bar

Script = Callable[[str], Any]  # the value of the fixture `rank`

pytestmark = pytest.mark.parametrize("rank", ["CellShell", "LightShell"], indirect=True)


def test_the_last_expression_is_the_result(rank: Script) -> None:
    ran = rank(
        """
        for name, code in {
            "value": "x = rank\\nx + 1",
            "hidden": "x + 1;",
            "hidden, remarked": "(x + 1) ; # ; and more",
            "string": "'a;'",
            "none": "None",
            "statement": "y = 1",
            "underscore": "x + 1;\\n_",
            "nothing": "# only a comment",
            "blank": "  \\n ",
            "empty": "",
            "nested": "if True:\\n    5",
            "cache": "dict(Out), len(In)",
        }.items():
            outcome = run(code)
            report[name] = [outcome.value, outcome.bundle, told(outcome)]
        """
    )
    assert ran.report == {
        "value": [4, {"text/plain": "4"}, None],
        "hidden": [4, {}, None],
        "hidden, remarked": [4, {}, None],
        "string": ["a;", {"text/plain": "'a;'"}, None],
        "none": [None, {}, None],
        "statement": [None, {}, None],
        "underscore": ["a;", {"text/plain": "'a;'"}, None],
        "nothing": [None, {}, None],
        "blank": [None, {}, None],
        "empty": [None, {}, None],
        "nested": [None, {}, None],
        "cache": [[{}, 1], {"text/plain": "({}, 1)"}, None],
    }
    assert (ran.stdout, ran.stderr) == ("", "")


def test_cells_are_the_main_module(rank: Script) -> None:
    ran = rank(
        '''
        import cloudpickle, inspect, linecache, pickle
        main = sys.modules["__main__"]
        run("""
        import dataclasses, pickle
        @dataclasses.dataclass
        class Config:
            lr: float = 0.1
        def double(x):
            return 2 * x
        """, 7)
        run("def later(): pass", 8)
        linecache.checkcache()
        config = shell.namespace["Config"](0.5)
        report["module"] = shell.namespace["Config"].__module__
        report["same"] = main.__dict__ is shell.namespace and main.Config is shell.namespace["Config"]
        report["pickled"] = pickle.loads(pickle.dumps(config)).lr
        report["by value"] = b"lr" in cloudpickle.dumps(shell.namespace["Config"])
        report["source"] = inspect.getsource(shell.namespace["double"])
        report["file"] = inspect.getfile(shell.namespace["double"])
        report["name"] = run("__name__").value
        report["shell"] = run("get_ipython().execution_count", 9).value
        '''
    )
    assert ran.report == {
        "module": "__main__",
        "same": True,
        "pickled": 0.5,
        "by value": True,
        "source": "def double(x):\n    return 2 * x\n",
        "file": "<remote cell [7]>",
        "name": "__main__",
        "shell": 9,
    }


def test_other_expressions_are_displayed_on_request(rank: Script) -> None:
    ran = rank(
        """
        run("get_ipython().ast_node_interactivity = 'all'")
        report["value"] = run("1\\n2\\nx = 3\\n4").value
        report["published"] = [data["text/plain"] for data, _ in published]
        run("get_ipython().ast_node_interactivity = 'last_expr_or_assign'")
        report["assigned"] = run("y = 5").value
        """
    )
    assert ran.report == {"value": 4, "published": ["1", "2"], "assigned": 5}


def test_hooks_run_after_each_cell_and_their_errors_fail_it(rank: Script) -> None:
    ran = rank(
        """
        run("def flush(): display('figure')\\nget_ipython().events.register('post_execute', flush)")
        published.clear()
        report["failed"] = told(run("1/0"))["headline"]
        report["published"] = [data["text/plain"] for data, _ in published]
        run("def flush2(): raise ValueError('broken hook')\\nget_ipython().events.register('post_execute', flush2)")
        report["broken"] = told(run("1"))["headline"]
        """
    )
    assert ran.report == {
        "failed": "ZeroDivisionError: division by zero",
        "published": ["'figure'"],
        "broken": "ValueError: broken hook",
    }


def test_a_failure_is_returned_not_printed(rank: Script) -> None:
    ran = rank(
        """
        report["plain"] = told(run("x = 1\\n\\nx / 0", 5))
        report["after blank lines"] = told(run("\\n  \\n\\nx / 0", 6))
        run("def f(n):\\n    return 1 / n", 7)
        report["called"] = told(run("f(0)", 8))
        report["magic"] = told(run("a = 1\\nb = !echo hi\\nc = a / 0", 9))
        report["timed"] = told(run("%%time\\na = 1\\na / 0", 10))
        report["kept"] = run("x").value
        """
    )
    plain, blank = ran.report["plain"], ran.report["after blank lines"]
    assert (plain["kind"], plain["headline"]) == ("exception", "ZeroDivisionError: division by zero")
    assert plain["frames"] == [["<remote cell [5]>", 3, "x / 0", True]]
    assert 'File "<remote cell [5]>", line 3, in <module>\n    x / 0' in plain["text"]
    assert blank["frames"] == [["<remote cell [6]>", 4, "x / 0", True]]
    assert [frame[:3] for frame in ran.report["called"]["frames"]] == [
        ["<remote cell [8]>", 1, "f(0)"],
        ["<remote cell [7]>", 2, "    return 1 / n"],
    ]
    assert ran.report["magic"]["frames"] == [["<remote cell [9]>", 3, "c = a / 0", True]]
    assert ran.report["timed"]["frames"][-1] == ["<timed exec>", 2, "a / 0", True]
    for told in (plain, blank, ran.report["called"]):
        assert "monarch_kernel" not in told["text"]
        assert "IPython" not in told["text"]
    assert ran.report["kept"] == 1
    assert ran.stderr == ""


@pytest.mark.parametrize(
    ("code", "headline", "line"),
    [
        ("x = 1\ny = = 2", "SyntaxError: invalid syntax", 2),
        ("x = 1\nreturn 5", "SyntaxError: 'return' outside function", 2),
        ("x = 1\n%nomagic", "UsageError: Line magic function `%nomagic` not found.", 2),
        ("if True:\nx = 1", "IndentationError: expected an indented block after 'if' statement on line 1", 2),
    ],
)
def test_a_syntax_error_is_reported_with_its_line(rank: Script, code: str, headline: str, line: int) -> None:
    ran = rank(f"report['it'] = told(run({code!r}, 4)); report['ran'] = 'x' in shell.namespace")
    assert ran.report["it"]["headline"] == headline
    assert ran.report["it"]["frames"][-1] == ["<remote cell [4]>", line, code.splitlines()[line - 1], True]
    assert ran.report["ran"] == headline.startswith("Usage"), "a cell with a syntax error runs nothing"
    assert "codeop" not in ran.report["it"]["text"]


@pytest.mark.parametrize(
    ("code", "headline"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3 (a cell cannot end its rank; use %mesh down)"),
        ("import sys; sys.exit()", "SystemExit: a cell cannot end its rank; use %mesh down"),
        ("exit", "SystemExit: a cell cannot end its rank; use %mesh down"),
        ("quit('bye')", "SystemExit: bye (a cell cannot end its rank; use %mesh down)"),
        (
            "import asyncio\nawait asyncio.sleep(0)\nraise SystemExit",
            "SystemExit: a cell cannot end its rank; use %mesh",
        ),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args()",
            "SystemExit: 2 (argparse parses the command line of a program, and a cell has none: pass parse_args([...]))",
        ),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args([])",
            "SystemExit: 2 (argparse refuses the arguments that the cell passes to parse_args; its text above says why)",
        ),
        (
            "import argparse\nargparse.ArgumentParser().parse_args(['--help'])",
            "SystemExit: 0 (argparse ends a program after it has printed its help or version; leave that option out)",
        ),
    ],
)
def test_a_cell_does_not_end_its_rank(rank: Script, code: str, headline: str) -> None:
    ran = rank(f"report['it'] = told(run({code!r})); report['alive'] = run('1 + 1').value")
    assert ran.report["it"]["headline"].startswith(headline)
    assert ran.report["it"]["kind"] == "exception"
    assert ran.report["alive"] == 2


def test_an_interrupt_stops_the_cell_and_keeps_its_state(rank: Script, bar: Bar) -> None:
    ran = rank(
        """
        report["loop"] = interrupted("n = 0\\nwhile True:\\n    n += 1\\n    if n == 1: started.set()", 2)
        report["n"] = run("n > 0").value
        waits = "import asyncio\\nm = 1\\nasyncio.get_running_loop().call_soon(started.set)\\nawait asyncio.sleep(60)\\nm = 2"
        report["await"] = interrupted(waits, 3)
        report["async loop"] = interrupted("await asyncio.sleep(0)\\nstarted.set()\\nwhile True:\\n    pass", 4)
        report["m"] = run("await asyncio.sleep(0.01)\\nm").value
        report["command"] = interrupted("started.set()\\n!sleep 60 | sleep 60\\nm = 3", 5)
        report["captured"] = interrupted("started.set()\\nz = !sleep 60\\nm = 3", 6)
        report["after"] = run("m").value
        import psutil
        report["children"] = [str(child) for child in psutil.Process().children(recursive=True)]
        """
    )
    for name in ("loop", "await", "async loop", "command", "captured"):
        assert ran.report[name]["kind"] == "interrupted", name
        assert ran.report[name]["headline"] == "KeyboardInterrupt"
        bar.check(ran.report[name]["seconds"], 20, f"the interrupt of {name}")
    assert ran.report["loop"]["frames"][0][0] == "<remote cell [2]>"
    assert ran.report["await"]["frames"][0] == ["<remote cell [3]>", 4, "await asyncio.sleep(60)", True]
    assert ran.report["async loop"]["frames"][0][0] == "<remote cell [4]>"
    assert (ran.report["n"], ran.report["m"], ran.report["after"]) == (True, 1, 1)
    assert ran.report["children"] == []


def test_awaiting_cells_share_a_loop(rank: Script) -> None:
    ran = rank(
        '''
        run("""
        import asyncio
        queue = asyncio.Queue()
        async def serve():
            while True:
                item, answer = await queue.get()
                answer.set_result(item * 2)
        server = asyncio.create_task(serve())
        await asyncio.sleep(0)
        """)
        ask = "answer = asyncio.get_running_loop().create_future()\\nqueue.put_nowait((21, answer))\\nawait answer"
        report["answer"] = run(ask).value
        report["failed"] = told(run("async def f():\\n    1/0\\nawait f()", 4))["frames"]
        report["still"] = run(ask).value
        report["sync"] = run("async def g(): return 5\\nasyncio.run(g())").value
        report["comprehension"] = run("[x async for x in aiter_()]").failure is not None
        '''
    )
    assert ran.report["answer"] == ran.report["still"] == 42
    assert [frame[:3] for frame in ran.report["failed"]] == [
        ["<remote cell [4]>", 3, "await f()"],
        ["<remote cell [4]>", 2, "    1/0"],
    ]
    assert ran.report["sync"] == 5
    assert "never" not in ran.stderr


def test_the_last_error_is_kept_until_the_next_cell(rank: Script) -> None:
    ran = rank(
        '''
        gc.disable()  # freed by counting alone: tensors must not wait for a collection
        run("""
        class Tensor: pass
        import weakref
        seen = []
        def step():
            tensor = Tensor()
            seen.append(weakref.ref(tensor))
            raise ValueError("step")
        """)
        seen = shell.namespace["seen"]
        run("step()")
        report["kept"] = seen[-1]() is not None and sys.last_value is shell.last_error
        frame = shell.last_error.__traceback__.tb_frame
        report["first frame"] = frame.f_code.co_filename
        del frame
        run("pass")
        report["freed"] = seen[-1]() is None and shell.last_error is None and not hasattr(sys, "last_value")
        run("import asyncio\\nawait asyncio.sleep(0)\\nstep()")
        run("pass")
        report["freed after await"] = seen[-1]() is None
        run("%%capture\\nstep()")
        run("pass")
        gc.collect()  # the frames of IPython's run_cell are a separate cycle
        report["freed after capture"] = seen[-1]() is None
        run("t = Tensor()\\nseen.append(weakref.ref(t))\\nt")
        run("del t")
        run("1")
        report["result freed"] = seen[-1]() is None
        '''
    )
    assert ran.report.pop("first frame") == "<remote cell [1]>"
    assert ran.report == dict.fromkeys(
        ["kept", "freed", "freed after await", "freed after capture", "result freed"], True
    )


def test_an_empty_cell_is_cheap(rank: Script, bar: Bar) -> None:
    ran = rank(
        """
        def cost():
            begin = time.process_time()
            for number in range(500):
                run("pass", number)
            return (time.process_time() - begin) / 500
        report["us"] = min(cost() for _ in range(5)) * 1e6
        report["threads"] = threading.active_count()
        report["files"] = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2
                           if os.path.exists(f"/proc/self/fd/{fd}")]
        """
    )
    bar.check(ran.report["us"] / 1e6, 500e-6, "an empty cell")  # it takes about 85 us if nothing else runs
    assert ran.report["threads"] == 1
    assert not [name for name in ran.report["files"] if "sqlite" in name or "ipython" in name]


def test_plain_python_passes_no_transformer_until_the_user_adds_one(rank: Script) -> None:
    ran = rank(
        """
        run("%who_ls")
        from IPython import get_ipython
        ip = get_ipython()
        passed, transform = [], ip.transform_cell
        ip.transform_cell = lambda code: passed.append(code) or transform(code)
        report["values"] = [run("x = 1\\nx + 1").value, run("import os\\n\\nos.sep").value, run("x\\n# %pwd").value]
        report["plain"] = list(passed)
        report["magics"] = [told(run("%pwd\\nx")), told(run("y = !true\\nx")), told(run("x?\\n1"))]
        report["passed"] = len(passed)
        ip.input_transformers_post.append(lambda lines: [line.replace("five", "5") for line in lines])
        report["added"] = run("five\\nfive").value
        """
    )
    assert ran.report == {
        "values": [2, "/", 1],
        "plain": [],
        "magics": [None] * 3,
        "passed": 3,
        "added": 5,
    }
