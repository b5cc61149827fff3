"""Options and magics of similar tools, help, selectors, and meshes that the user makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.notebook.kernel.conftest import BRINGS_UP, START_S
from tests.support.waiting import wait_for_files

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook
    from tests.support.timing import Bar

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def grid(notebook: Notebook) -> Iterator[Notebook]:
    """A notebook with a second mesh, ``g``, of two axes."""
    notebook.ok("%mesh up g --axes dp=2,tp=2 --device cpu", 60)
    yield notebook
    notebook.ok("%mesh down g")


# -- options


def test_ranks_are_chosen_by_number(four: Notebook) -> None:
    for option in ("-t 0,2", "--targets 0:4:2", "--ranks 0,2", "--targets [0,2]"):
        assert four.ok(f"%%remote t {option}\nrank").plain == "[0] 0\n[2] 2"
    assert four.ok("%%remote t -t 1-3\n0").plain == "[1-3] 0"
    assert four.ok("%%remote t --targets all\n0").plain == "[0-3] 0"
    assert four.ok("%%remote t[2:4] --targets 3\nrank").plain == "[3] 3"
    cell = four.run("%%remote t[2:4] --targets 0\nrank")
    assert (cell.ename, cell.evalue) == ("UsageError", "--targets 0: there is no rank 0; available: [2-3]")


def test_an_expression_takes_options_before_it(four: Notebook) -> None:
    assert four.ok("%remote t --targets 0,2 --out v rank * 2").plain == "[0] 0\n[2] 4"
    assert four.ok("%remote --targets 1 rank").plain == "[1] 1"
    assert four.value("v.values()") == (0, 4)
    assert four.ok("%remote t -rank").plain == "[0] 0\n[1] -1\n[2] -2\n[3] -3"
    assert four.run("%remote t --targets 1").evalue.startswith(
        "%remote: write an expression after t, such as %remote t[0]"
    )
    assert "--local applies to cells" in four.run("%remote t --local rank").evalue


def test_ranks_of_two_axes_are_chosen_by_flat_rank(grid: Notebook) -> None:
    assert grid.ok("%%remote --mesh g -t 1,2\nrank").plain == "[1] 1\n[2] 2"
    assert grid.ok("%%remote g[1] -t 3 -o v\nrank").plain == "[3] 3"
    assert grid.value("v.values()") == (3,)


def test_results_are_collected_under_the_short_name(notebook: Notebook) -> None:
    notebook.ok("%%remote t -o v  # the values of all\nrank + 1")
    assert notebook.value("v.values()") == (1, 2)


def test_output_only_at_the_end(notebook: Notebook, tmp_path: Path) -> None:
    code = (
        "import pathlib, time\nprint('begin', flush=True)\n"
        f"pathlib.Path({str(tmp_path)!r}, f'{{name}}-{{rank}}').touch()\n"
        f"while not pathlib.Path({str(tmp_path)!r}, '{{name}}-go').exists(): time.sleep(0.01)\nprint('end', flush=True)"
    )
    live = notebook.send("%%remote t --stream\n" + code.replace("{name}", "live"))
    live.wait_for(lambda cell: cell.lines() == {0: ["begin"], 1: ["begin"]})
    (tmp_path / "live-go").touch()
    held = notebook.send("%%remote t --no-stream\n" + code.replace("{name}", "held"))
    wait_for_files(tmp_path, "held-0", "held-1")
    notebook.sync()
    assert held.stdout == ""
    (tmp_path / "held-go").touch()
    for cell in (live, held):
        assert cell.wait().ok
        assert cell.lines() == {rank: ["begin", "end"] for rank in range(2)}


def test_a_cell_without_a_wait(notebook: Notebook, bar: Bar) -> None:
    for option in ("-a", "--noblock", "--background"):
        cell = notebook.ok(f"%%remote t {option} --out handle\nrank * 3")
        bar.check(cell.elapsed_s, 5, "the launch")
        assert notebook.ok("handle.result().values()").plain == "(0, 3)"


# -- magics of similar tools


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("%%px\n1", "%%px is an ipyparallel magic; use instead: %%remote t"),
        (
            "%%px --targets 0:2 --noblock\n1",
            "%%px is an ipyparallel magic; use instead: %%remote t --targets 0:2 --noblock",
        ),
        ("%px -t 0 rank", "%px is an ipyparallel magic; use instead: %remote t --targets 0 rank"),
        ("%px rank + 1", "%px is an ipyparallel magic; use instead: %remote t rank + 1"),
        ("%autopx", "%autopx is an ipyparallel magic; use instead: %autoremote t, and %autoremote off"),
        (
            "%%rank [0, 1]\n1",
            "%%rank is an nbdistributed magic; use instead: %%remote t --targets 0,1, or %%remote t[0:2]",
        ),
        ("%%ranks [1]\n1", "%%ranks is an nbdistributed magic; use instead: %%remote t --targets 1, or"),
        (
            "%%remote t --group-outputs type\n1",
            "there is no --group-outputs: equal lines of several ranks are shown once",
        ),
        ("%%remote t --signal-on-interrupt SIGINT\n1", "there is no --signal-on-interrupt: Kernel > Interrupt"),
    ],
)
def test_a_magic_of_another_tool_shows_its_equivalent(notebook: Notebook, code: str, says: str) -> None:
    cell = notebook.run(code)
    assert cell.ename == "UsageError"
    assert says in cell.evalue
    assert "\n" not in cell.evalue


def test_the_equivalents_work(notebook: Notebook) -> None:
    for code in ("%%px --targets 0\nrank", "%px rank", "%px -t 0 rank", "%%rank [0, 1]\nrank"):
        says = notebook.run(code).evalue
        ours = says.partition("use instead: ")[2].partition(", or ")[0]
        assert notebook.ok(ours if code.startswith("%px ") else f"{ours}\nrank").plain.startswith("[0] 0")


@pytest.mark.slow
def test_magics_of_other_tools_are_not_replaced(new_notebook: Callable[..., Notebook]) -> None:
    notebook = new_notebook("python3")
    notebook.ok("def px(line, cell=None): return 'the real one'")
    notebook.ok("get_ipython().register_magic_function(px, 'line_cell')")
    notebook.ok("%load_ext monarch_kernel")
    assert notebook.ok("%px 1").plain == "'the real one'"
    assert notebook.ok("%%px\n1").plain == "'the real one'"
    assert "nbdistributed" in notebook.run("%%rank [0]\n1").evalue
    notebook.ok("get_ipython().register_magic_function(px, 'cell', 'rank')")  # loaded later
    notebook.ok("%unload_ext monarch_kernel")
    assert notebook.ok("%px 1").plain == "'the real one'"
    assert notebook.ok("%%rank\n1").plain == "'the real one'"


# -- selectors


@pytest.mark.parametrize(
    "selector",
    [
        "t.stop()",
        "t[0].interrupt()",
        "t.run('leak=1')",
        "t['x']",
        "t[print('run')]",
        "(t)()",
        "t if 1 else t",
        "t.name",
    ],
)
def test_a_selector_is_parsed_and_not_executed(notebook: Notebook, selector: str) -> None:
    pids = notebook.pids()
    cell = notebook.run(f"%%remote {selector}\n1")
    assert cell.ename == "UsageError"
    assert "\n" not in cell.evalue
    assert cell.stdout == ""
    assert notebook.ok("%%remote t\n'leak' in globals()").plain == "[0-1] False"
    assert notebook.pids() == pids


def test_a_selector_may_use_variables(grid: Notebook) -> None:
    grid.ok("i, part, half = 1, slice(0, 1), g[0]")
    assert grid.ok("%%remote g[i, i]\nrank").plain == "[3] 3"
    assert grid.ok("%%remote g[:, part]\nrank").plain == "[0] 0\n[2] 2"
    assert grid.ok("%%remote half[i - 1]\nrank").plain == "[0] 0"
    assert grid.ok("%%remote g.slice(tp=i).flatten('r')[1:]\nrank").plain == "[3] 3"


# -- a mesh that the user has made


def test_a_mesh_of_spawn_procs_takes_cells(bare: Notebook) -> None:
    bare.ok(
        "from monarch_kernel.actor import this_host\nmine = this_host().spawn_procs({'r': 2}, device='cpu', name='m')"
    )
    cell = bare.ok("%%remote mine[1] --out v\nimport torch.distributed as dist\nrank, dist.get_world_size()", 60)
    assert "[1] (1, 2)" in cell.plain
    assert bare.value("v.item()") == (1, 2)
    assert bare.ok("%%remote\nrank").plain == "[0] 0\n[1] 1"  # it is the only one
    assert bare.ok("%mesh").stdout.splitlines()[1].split()[:2] == ["m", "r=2"]
    bare.ok("other = this_host().spawn_procs({'r': 1}, device='cpu', name='m')")
    assert "another mesh is called 'm'; give this one a different name" in bare.run("%%remote other\n1").evalue
    bare.ok("other.stop().get()")
    bare.ok("gone = this_host().spawn_procs({'r': 1}, device='cpu')\ngone.stop().get()")
    assert bare.run("%%remote gone\n1").evalue.endswith("is down; available: m")
    assert bare.ok("%mesh down m").stdout == "m: 2 ranks ended\n"
    assert bare.run("%%remote mine\n1").evalue == "mine: mesh 'm' is down; available: none"
    bare.ok(BRINGS_UP.format(n=1), START_S)


def test_an_old_slice_does_not_select_a_new_mesh_of_that_name(bare: Notebook) -> None:
    bare.up(1)
    bare.ok("old = t[0:1]")
    bare.ok("%mesh down t")
    bare.ok(BRINGS_UP.format(n=1), START_S)
    assert bare.run("%%remote old\n1").evalue == "old: mesh 't' is down; available: t"


# -- values


def test_values_by_rank(notebook: Notebook) -> None:
    notebook.ok("t['lr'] = t.per_rank([0.1, 0.2])\nt[1:2]['lr'] = 0.3")
    assert notebook.ok("%%remote\nlr").plain == "[0] 0.1\n[1] 0.3"
    notebook.ok("def work(a, b):\n    return helper(a) * b\ndef helper(x):\n    return 1 / x")
    assert notebook.ok("t.map(work, [1, 2], t['lr']).get().values()").plain == "(0.1, 0.15)"


def test_an_error_in_a_function_shows_its_lines(notebook: Notebook) -> None:
    notebook.ok("def work(a):\n    # what goes wrong\n    return helper(a)\ndef helper(x):\n    return 1 / x")
    cell = notebook.run("t.map(work, [1, 0]).get()")
    assert cell.ename == "RemoteError"
    lines = [line.strip() for line in cell.error.splitlines()]
    assert "[1] ZeroDivisionError: division by zero" in lines
    assert "at line 1 of this cell: t.map(work, [1, 0]).get()" in lines
    places = [line.partition("], ")[2] for line in lines if line.startswith("notebook cell [")]
    assert places == ["line 3, in work", "line 5, in helper"]
    assert "----> 3     return helper(a)" in lines
    assert "----> 5     return 1 / x" in lines
    assert "x: 0" in lines
    assert "monarch_kernel/" not in cell.error


def test_the_output_of_a_function_is_shown_in_its_cell(notebook: Notebook) -> None:
    cell = notebook.ok("t.map(lambda x: print('got', x), [1, 2]).get();")
    assert cell.stdout.splitlines() == ["t[0] got 1", "t[1] got 2"]


# -- help


@pytest.mark.parametrize("code", ["%mesh up --help", "%mesh help up", "%mesh up?", "%mesh up -h"])
def test_help_on_one_command(notebook: Notebook, code: str) -> None:
    says = notebook.ok(code).stdout
    assert says.startswith("%mesh up [NAME] [OPTION]...\n    bring a mesh up\n")
    assert "--axes A=N,B=M" in says


@pytest.mark.parametrize("code", ["%%remote --help", "%%remote --help\nrank", "%remote --help", "%autoremote --help"])
def test_help_is_an_option_too(notebook: Notebook, code: str) -> None:
    shown = notebook.ok(code).stdout
    assert "[SELECTOR] [OPTION]..." in shown
    assert "--timeout S" in shown


@pytest.mark.parametrize("code", ["%%remote t", "%%remote t\n\n", "# why\n%%remote t", "%%remote t --local"])
def test_a_cell_may_be_empty(notebook: Notebook, code: str) -> None:
    """It frees what a failed cell has kept for the debugger."""
    notebook.run("%remote t 1 / 0")
    assert "failed" in notebook.ok("%mesh").plain + notebook.ok("%mesh").stdout
    assert not notebook.ok(code).text.strip()
    assert "failed" not in notebook.ok("%mesh").stdout


@pytest.mark.parametrize("magic", ["%%remote", "%remote", "%autoremote", "%%local", "%mesh"])
def test_help_has_the_name_of_the_magic(notebook: Notebook, magic: str) -> None:
    (page,) = notebook.ok(f"{magic}?").reply["payload"]
    assert magic in page["data"]["text/plain"]
