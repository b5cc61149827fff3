"""``%autoremote``, ``%%local`` and ``%%remote --local``: where a cell runs, in this kernel, the stock kernel and a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.notebook.kernel.conftest import BRINGS_UP, START_S, Notebook, Terminal

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", params=["monarch", pytest.param("python3", marks=pytest.mark.slow)])
def two(request: pytest.FixtureRequest) -> Notebook:
    """This kernel or the stock one, with a mesh ``t`` of two ranks."""
    notebook = request.getfixturevalue("notebook" if request.param == "monarch" else "stock")
    notebook.ok("%load_ext monarch_kernel")
    return notebook


@pytest.fixture
def auto(two: Notebook) -> Iterator[Notebook]:
    """A kernel where every cell runs on ``t``."""
    two.ok("%autoremote t")
    yield two
    two.ok("%autoremote off")


# -- the mode


def test_autoremote_reports_its_state(two: Notebook) -> None:
    off = "autoremote is off: cells run in the kernel; %autoremote SELECTOR switches it on\n"
    on = "autoremote is on: cells run as %%remote {}; %%local runs one in the kernel, %autoremote off ends it\n"
    assert two.ok("%autoremote").stdout == off
    assert two.ok("%autoremote t[0] --raw").stdout == on.format("t[0] --raw")
    assert two.ok("%autoremote").stdout == on.format("t[0] --raw")
    assert two.ok("rank").plain == "[0] 0"
    assert two.ok("%autoremote --raw").stdout == on.format("t --raw")  # the mesh that was brought up last, by its name
    assert two.ok("%autoremote on").stdout == on.format("t")
    assert two.ok("%autoremote off").stdout == off
    assert two.ok("1 + 1").plain == "2"


def test_cells_run_on_the_ranks_and_leave_the_kernel_alone(auto: Notebook) -> None:
    assert auto.ok("x = rank + 10\nx").plain == "[0] 10\n[1] 11"
    assert auto.value("'x' in globals()") is False
    assert auto.ok("print('hello')").lines() == {0: ["hello"], 1: ["hello"]}
    assert auto.ok("%%capture caught\nprint('quiet')").stdout == ""
    assert auto.ok("caught.stdout").plain == "[0-1] 'quiet\\n'"
    assert auto.ok("!echo $RANK").lines() == {0: ["0"], 1: ["1"]}
    assert auto.ok("import asyncio\nawait asyncio.sleep(0, rank)").plain == "[0] 0\n[1] 1"


def test_options_hold_for_every_cell(two: Notebook) -> None:
    two.ok("%autoremote t --targets 1 --out seen")
    try:
        assert two.ok("rank * 2").plain == "[1] 2"
        assert two.ok("%%local\nseen.values()").plain == "(2,)"
    finally:
        two.ok("%autoremote off")


def test_local_cells_and_magics_stay_in_the_kernel(auto: Notebook) -> None:
    assert auto.ok("%%local\nrank = 'here'\nrank").plain == "'here'"
    assert auto.ok("# with a comment\n\n%%local\nrank").plain == "'here'"
    assert auto.ok("%mesh").stdout.startswith("name")
    assert auto.ok("# look\n%mesh\nrank").plain == "'here'"
    assert auto.ok("%remote t[1] rank").plain == "[1] 1"
    assert auto.ok("%%remote t[1] --out v\nrank").plain == "[1] 1"
    assert auto.ok("%%remote?").reply["payload"]
    failed = auto.run("1/0").error
    assert auto.ok("%tb").error == failed
    assert auto.ok("%mesh help down").stdout.startswith("%mesh down NAME | --all")
    auto.ok("# nothing but a comment")


def test_errors_have_the_line_numbers_of_the_cell(auto: Notebook) -> None:
    failed = auto.run("x = 1\n\n1 / (1 - rank)")
    assert failed.ename == "RemoteError"
    assert re.search(r"remote cell \[\d+\], line 3\n", failed.error)
    assert re.search(r"-+> 3 1 / \(1 - rank\)", failed.error)
    failed = auto.run("\n\n1 / (1 - rank)")
    assert re.search(r"remote cell \[\d+\], line 3\n", failed.error)
    failed = auto.run("x = 1\ndef f(:\n    pass")
    assert (failed.ename, "SyntaxError in line 2" in failed.evalue) == ("UsageError", True)
    failed = auto.run("%%autoremote t\nx = 1\n1 / (1 - rank)")  # unusual, but its lines are counted correctly, too
    assert re.search(r"remote cell \[\d+\], line 3\n", failed.error)
    local = auto.run("%%local\nx = 1\n1 / 0")
    assert local.ename == "ZeroDivisionError"
    assert "line 3" in local.error
    assert "# %%local" in local.error


def test_cells_that_local_code_runs_are_not_sent(auto: Notebook, tmp_path: Path) -> None:
    script = tmp_path / "script.ipy"
    script.write_text("from_script = 1\n")
    auto.ok("%%local\nget_ipython().run_cell('nested = 1')\nnested")
    auto.ok(f"%%local\n%run {script}\nfrom_script")
    auto.ok("%%local\n%%time\ntimed = 1")
    auto.ok("%%local\nimport asyncio\nawait asyncio.sleep(0)\nawaited = 1")
    assert auto.value("(nested, from_script, timed, awaited)") == (1, 1, 1, 1)
    assert auto.ok("any(n in globals() for n in ('nested', 'from_script', 'timed', 'awaited'))").plain == "[0-1] False"


def test_requests_of_frontends_are_not_sent(auto: Notebook) -> None:
    auto.run("hidden = 1", silent=True, store_history=False)
    auto.run("aside = 1", store_history=False)
    assert auto.value("(hidden, aside)") == (1, 1)
    assert auto.ok("'hidden' in globals() or 'aside' in globals()").plain == "[0-1] False"


def test_completeness_is_checked_on_the_cell_as_written(auto: Notebook) -> None:
    for code, status in (("for i in x:", "incomplete"), ("x = 1", "complete"), ("x = )", "invalid")):
        assert auto.ask(auto.client.is_complete(code))["status"] == status


def test_an_interrupt_reaches_the_ranks(auto: Notebook) -> None:
    cell = auto.send("n = 0\nprint('go', flush=True)\nwhile True: n += 1")
    cell.wait_for(lambda cell: len(cell.lines()) == 2)
    auto.interrupt()
    assert cell.wait().ename == "RemoteInterrupt"
    assert auto.ok("n > 0").plain == "[0-1] True"


def test_history_has_the_cell_as_written(auto: Notebook) -> None:
    auto.ok("41 + rank")
    assert auto.value("get_ipython().history_manager.input_hist_raw[-1]") == "41 + rank"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nope", "there is no mesh 'nope'; available: t"),
        ("t.stop()", "'t.stop()' selects no mesh"),
        ("t --wrong", "%autoremote: unknown option '--wrong'; the options are --background"),
        ("t --local", "%autoremote: --local applies to a single cell; use %%remote --local"),
        ("t u", "%autoremote: unknown argument 'u'"),
        ("t --targets 7", "--targets 7: there is no rank 7; available: [0-1]"),
    ],
)
def test_a_usage_error_is_one_line_and_leaves_autoremote_off(two: Notebook, line: str, says: str) -> None:
    cell = two.run(f"%autoremote {line}")
    assert cell.ename == "UsageError"
    assert says in cell.evalue
    assert "\n" not in cell.evalue
    assert two.ok("1 + 1").plain == "2"


def test_autoremote_is_off_after_its_mesh_is_gone(two: Notebook) -> None:
    two.ok("%mesh up u -n 1 --device cpu", 60)
    two.ok("%autoremote u")
    two.ok("%mesh down u")
    cell = two.run("x_of_u = 1")
    assert (cell.ename, cell.evalue) == (
        "UsageError",
        "%autoremote u: there is no mesh 'u'; available: t; autoremote is off now, this cell has not run",
    )
    assert two.value("'x_of_u' in globals()") is False
    assert two.ok("1 + 1").plain == "2"


@pytest.mark.slow
def test_unloading_the_extension_ends_autoremote(new_notebook: Callable[..., Notebook]) -> None:
    notebook = new_notebook("python3")
    notebook.ok("%load_ext monarch_kernel")
    notebook.ok(BRINGS_UP.format(n=1), START_S)
    notebook.ok("%autoremote t")
    assert notebook.ok("rank").plain == "[0] 0"
    notebook.ok("%unload_ext monarch_kernel")
    assert notebook.ok("1 + 1").plain == "2"
    for magic in ("%autoremote", "%%local\n1", "%%px\n1", "%px 1"):
        assert "not found" in notebook.run(magic).stderr
    assert notebook.value("get_ipython().input_transformer_manager.cleanup_transforms[0].__name__") == (
        "leading_empty_lines"
    )


# -- %%local and --local without the mode


def test_a_local_cell_is_an_ordinary_cell(two: Notebook) -> None:
    assert two.ok("%%local\n1 + 1").plain == "2"
    misplaced = two.run("1 + 1\nget_ipython().run_cell_magic('local', '', '1')")
    assert misplaced.evalue == "%%local must be the first line of a cell"


def test_one_cell_defines_on_both_sides(two: Notebook) -> None:
    cell = two.ok(
        "%%remote t --local --out areas\nimport math\ndef area(r):\n    return math.pi * r * r\nround(area(1), 2)"
    )
    assert cell.plain.split("\n") == ["[0-1] 3.14", "3.14"]  # the ranks first, then the kernel
    assert two.value("round(area(2), 2), areas.values()") == (12.57, (3.14, 3.14))
    assert two.ok("%%remote t\nround(area(2), 2)").plain == "[0-1] 12.57"


def test_a_class_that_a_cell_defines_on_both_sides_is_one_class(two: Notebook) -> None:
    two.ok(
        "%%remote t --local\nfrom dataclasses import dataclass\nfrom enum import Enum\nclass Color(Enum):\n    RED = 1\n"
        "@dataclass(frozen=True)\nclass Config:\n    lr: float\n    color: Color = Color.RED\n"
        "    def place(self): return globals().get('local_rank')"
    )
    two.ok("%%remote t --out got\nConfig(0.5), Color.RED")
    here = "[(config == Config(0.5), color is Color.RED, config.place()) for config, color in got.values()]"
    assert two.value(here) == [(True, True, None)] * 2
    two.ok("t['config'] = Config(0.25)")
    there = "config == Config(0.25), isinstance(config, Config), config.color is Color.RED, config.place()"
    assert two.ok(f"%%remote t\n{there}").plain == "[0] (True, True, True, 0)\n[1] (True, True, True, 1)"


def test_an_instance_of_an_earlier_class_says_so_on_both_sides(two: Notebook) -> None:
    define = "%%remote t --local\nclass Plan:\n    def __init__(self, lr): self.lr = lr"
    two.ok(define)
    two.ok("plan = Plan(1); t['plan'] = plan")
    said = (
        "plan is an instance of an earlier class Plan, which a cell has defined again: isinstance(plan, Plan) is False"
    )
    lines = two.ok(f"{define}  # again").stderr.splitlines()
    assert any(line.startswith(f"[0-1] {said}") for line in lines), lines
    assert any(line.startswith(said) for line in lines), lines
    two.ok("%%remote t --out got\nplan")
    assert two.ok("came = got.item(gpus=1)").stderr.startswith("came is an instance of an earlier class Plan")
    two.ok("%%remote t --local\ndel plan, Plan")
    assert two.ok("1").stderr == ""


def test_a_class_of_a_remote_cell_is_one_class_in_the_values_of_all_ranks(two: Notebook) -> None:
    two.ok("%%remote t --out got\nfrom enum import Enum\nclass Mode(Enum):\n    FAST = 1\nMode.FAST")
    assert two.value("got.item(gpus=0) is got.item(gpus=1)") is True
    two.ok("t['mode'] = got.item(gpus=1)")
    assert two.ok("%%remote t\nmode is Mode.FAST").plain == "[0-1] True"


def test_a_cell_for_both_that_fails_on_a_rank_does_not_run_in_the_kernel(two: Notebook) -> None:
    cell = two.run("%%remote t --local\nhalf_way = 1\n1 / rank")
    assert cell.ename == "RemoteError"
    assert re.search(r"remote cell \[\d+\], line 3\n", cell.error)
    assert two.value("'half_way' in globals()") is False


def test_a_cell_for_both_that_fails_in_the_kernel_fails(two: Notebook) -> None:
    cell = two.run("%%remote t --local\nboth = 1\n\nassert 'world_size' in globals(), 'not here'")
    assert (cell.ename, cell.evalue) == ("AssertionError", "not here")
    assert "line 4" in cell.error
    assert two.ok("%%remote t\nboth").plain == "[0-1] 1"


def test_a_cell_for_both_with_a_syntax_error_is_not_sent(two: Notebook) -> None:
    before = two.value("next(t.runtime._ids)")
    cell = two.run("%%remote t --local\nx = 1\nif True print(x)")
    assert cell.ename == "SyntaxError"
    assert "line 3" in cell.error
    assert two.value("next(t.runtime._ids)") == before + 1


def test_a_cell_may_start_with_comments_blank_lines_and_spaces(two: Notebook) -> None:
    for code in (
        "\n\n%%remote t\n1 / (1 - rank)",
        "# why\n\n%%remote t --local\n1 / (1 - rank)",
        "# why\n# --local\n%%remote t\nq = 1\n1 / (1 - rank)",
        "  %%remote t\n1 / (1 - rank)",
        "\n\t%%remote t\n\t1 / (1 - rank)",
    ):
        cell = two.run(code)
        assert cell.ename == "RemoteError"
        assert re.search(rf"remote cell \[\d+\], line {code.count(chr(10)) + 1}\n", cell.error)
    assert two.ok("# why\n%%remote t # not --local\nhere_too = rank\nhere_too").plain == "[0] 0\n[1] 1"
    assert two.value("'here_too' in globals()") is False


def test_a_cell_for_both_can_wait_in_the_kernel(two: Notebook) -> None:
    assert two.ok("%%remote t --local\nimport asyncio\nawait asyncio.sleep(0, 5)").plain.split() == ["[0-1]", "5", "5"]


# -- in a terminal


@pytest.mark.slow
def test_in_a_terminal(terminal: Terminal) -> None:
    assert "autoremote is on" in terminal.enter("%autoremote t")
    assert re.search(r"\[0\] 0\s+\[1\] 1", terminal.enter("rank"))
    assert "[1] ZeroDivisionError" in terminal.enter("1 / (1 - rank)")
    assert "autoremote is off" in terminal.enter("autoremote off")
    assert "Out[" in terminal.enter("1 + 1")
    terminal.enter("%autoremote t")
    terminal.leave()
