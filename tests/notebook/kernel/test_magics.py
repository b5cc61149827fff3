"""``%mesh``, ``%%remote`` and ``%remote`` in a notebook."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Cell, Notebook
    from tests.support.timing import Bar

pytestmark = pytest.mark.timeout(120)


# -- up and down


def test_up_shows_what_it_waits_for_and_then_the_mesh(bare: Notebook) -> None:
    wait_until(lambda: bare.zygotes(), "the zygote that ranks are forked from")
    (zygote,) = bare.zygotes()
    zygote.suspend()  # no rank starts until it continues
    try:
        cell = bare.send("%mesh up t -n 2 --device cpu")
        cell.wait_for(lambda cell: cell.of_type("display_data"))
    finally:
        zygote.resume()
    assert cell.wait().ok, cell.error
    first = cell.of_type("display_data")[0]
    assert (len(cell.shown), len(cell.widgets)) == (1, 1)
    updates = cell.of_type("update_display_data")
    assert "t: waiting for ranks to start (0 of 2 are up" in first["content"]["data"]["text/plain"]
    assert {m["content"]["transient"]["display_id"] for m in [first, *updates]} == {
        first["content"]["transient"]["display_id"]
    }
    last = updates[-1]["content"]["data"]
    assert "t: gpus=2, 2 ranks (2 idle), local" in last["text/plain"]
    assert "<table" in last["text/html"]
    assert bare.value("(type(t).__name__, dict(t.extent))") == ("ProcMesh", {"gpus": 2})
    assert bare.ok("%%remote\nrank, world_size").plain == "[0] (0, 2)\n[1] (1, 2)"  # the first cell works at once


def test_a_second_up_keeps_the_state(notebook: Notebook) -> None:
    notebook.ok("%%remote\nkept = rank + 10")
    pids = notebook.pids()
    cell = notebook.ok("%mesh up t -n 2 --device cpu")
    assert "t: gpus=2, 2 ranks" in cell.plain
    assert notebook.pids() == pids
    assert notebook.ok("%%remote\nkept").plain == "[0] 10\n[1] 11"


def test_a_different_mesh_of_the_same_name_is_refused(notebook: Notebook) -> None:
    cell = notebook.run("%mesh up t -n 3 --device cpu")
    assert (cell.ename, len(notebook.pids())) == ("UsageError", 2)
    assert "'t' is already up" in cell.evalue
    assert "%mesh down t" in cell.evalue


def test_a_variable_of_the_user_is_not_overwritten(notebook: Notebook) -> None:
    notebook.ok("precious = [1, 2]")
    cell = notebook.run("%mesh up precious -n 1 --device cpu")
    assert cell.ename == "UsageError"
    assert "'precious' is already a variable (a list)" in cell.evalue
    assert notebook.value("precious") == [1, 2]


def test_meshes_are_listed_shown_and_ended(notebook: Notebook) -> None:
    notebook.ok("%mesh up other --axes dp=2,tp=1 --device cpu --env SPICE=pepper")
    try:
        listed = notebook.ok("%mesh").stdout.splitlines()
        assert [line.split()[0] for line in listed] == ["name", "t", "other"]
        assert "gpus=2" in listed[1]
        assert "dp=2 tp=1" in listed[2]
        assert notebook.ok("%mesh show other").plain.startswith("other: dp=2 tp=1, 2 ranks (2 idle)")
        both = notebook.ok("%mesh show").shown
        assert [data["text/plain"].split(":")[0] for data in both] == ["t", "other"]
        # The default mesh is the one that was brought up last; other meshes need their names.
        where = "import os; os.environ.get('SPICE')"
        assert notebook.ok(f"%%remote\n{where}").plain == "[0-1] 'pepper'"
        assert notebook.ok(f"%%remote t\n{where}").plain == ""
        assert notebook.ok("%remote other.slice(dp=1) rank, mesh.mesh_dim_names").plain == "[1] (1, ('dp', 'tp'))"
    finally:
        pids = notebook.pids("other")
        ended = notebook.ok("%mesh down other")
    assert ended.stdout == "other: 2 ranks ended\n"
    assert len(pids) == 2
    assert notebook.value("'other' in globals()") is False
    assert notebook.ok("%remote rank").plain == "[0] 0\n[1] 1"  # the remaining mesh is the default


def test_ranks_have_what_the_notebook_has_set_and_what_comes_too_late_is_named(notebook: Notebook) -> None:
    notebook.ok("import os\n%env SPICE=salt\nos.environ['LD_OF_A_TEST'] = '1'")
    up = notebook.ok("%mesh up other -n 1 --device cpu")
    try:
        assert notebook.ok("%remote other __import__('os').environ.get('SPICE')").plain == "[0] 'salt'"
        (line,) = up.stderr.splitlines()
        assert line.startswith("other: LD_OF_A_TEST: read when a process starts, but ranks are forked from one")
        assert line.endswith("change it with %env, then %mesh down --all and %mesh up")
    finally:
        notebook.ok("del os.environ['SPICE'], os.environ['LD_OF_A_TEST']")
        notebook.ok("%mesh down other")


def test_names_of_gpus_that_do_not_exist_give_ranks_without_a_gpu(notebook: Notebook) -> None:
    notebook.ok("%env CUDA_VISIBLE_DEVICES=NoDevFiles")
    try:
        up = notebook.ok("%mesh up other -n 1")
        said = "other: CUDA_VISIBLE_DEVICES=NoDevFiles names no GPU that torch can use: ranks use CPUs\n"
        assert up.stderr == said
        assert notebook.ok("%remote other str(device)").plain == "[0] 'cpu'"
    finally:
        notebook.ok("import os; del os.environ['CUDA_VISIBLE_DEVICES']")
        notebook.ok("%mesh down other")


@pytest.mark.slow
def test_the_first_mesh_has_also_what_takes_effect_when_a_process_starts(
    new_notebook: Callable[..., Notebook],
) -> None:
    kernel = new_notebook()
    child = "int(subprocess.check_output([sys.executable, '-c', 'print(hash(\"a\"))']))"
    for seed in "7", "8":
        kernel.ok(f"import os\nos.environ['PYTHONHASHSEED'] = '{seed}'")
        assert kernel.up(1).stderr == ""
        assert kernel.ok(f"%%remote\nimport subprocess, sys\nhash('a') == {child}").plain == "[0] True"
        kernel.ok("%mesh down --all")


def test_all_meshes_end_at_once(bare: Notebook) -> None:
    bare.up(1)
    bare.ok("%mesh up u -n 1 --device cpu")
    assert bare.ok("%mesh down --all").stdout == "t: 1 rank ended\nu: 1 rank ended\n"
    assert "No mesh is up" in bare.ok("%mesh").stdout
    cell = bare.run("%%remote\n1")
    assert (cell.ename, cell.evalue) == ("UsageError", "no mesh is up; bring one up with: %mesh up NAME -n 4")
    bare.ok("%mesh up t -n 1 --device cpu")
    assert bare.ok("%remote world_size").plain == "[0] 1"


def test_the_table_follows_a_cell_in_place(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok("%%remote t\n1")  # forms the process group
    shown = notebook.ok("%mesh show t").of_type("display_data")[0]["content"]["transient"]["display_id"]

    def drawn(cell: Cell) -> list[dict[str, Any]]:
        messages = cell.of_type("update_display_data")
        return [message for message in messages if message["content"]["transient"]["display_id"] == shown]

    gate = tmp_path / "gate"
    cell = notebook.send(f"%%remote t\nimport os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)")
    cell.wait_for(lambda cell: sum("2 running" in m["content"]["data"]["text/plain"] for m in drawn(cell)) >= 3)
    gate.touch()
    assert cell.wait().ok
    updates = drawn(cell)
    texts = [m["content"]["data"]["text/plain"] for m in updates]
    running = [text for text in texts if "2 running" in text]
    assert all("cell [" in text for text in running), running
    assert "2 idle" in texts[-1]
    span_s = updates[-1]["sent_s"] - updates[0]["sent_s"]
    assert len(updates) <= 5 * span_s + 3  # the first and the last update always come
    assert cell.of_type("display_data") == []


# -- values


def test_a_view_is_shown_as_the_table_of_its_mesh(notebook: Notebook) -> None:
    (shown,) = notebook.ok("t.view()").shown
    assert re.match(r"t: gpus=2, 2 ranks \(2 idle\), local, up for \S+ s\nrank +state", shown["text/plain"])
    assert "<table" in shown["text/html"]
    assert notebook.value("len(t.view().ranks)") == 2


def test_push_and_pull(notebook: Notebook) -> None:
    notebook.ok("import torch; t['x'] = {'a': torch.arange(3)}; t['y'] = 2.5")
    assert notebook.ok("%%remote\nx['a'].sum().item() * y").plain == "[0-1] 7.5"
    notebook.ok("%%remote\nz = rank * 100")
    assert notebook.value("t['z'].values()") == (0, 100)
    assert notebook.value("t['z'].item(gpus=1)") == 100
    assert notebook.value("t[1]['z'].item()") == 100
    notebook.ok("t[0]['only'] = 1")
    assert notebook.ok("%%remote\n'only' in globals()").plain == "[0] True\n[1] False"


def test_variables_of_the_notebook_and_of_the_ranks_are_separate(notebook: Notebook) -> None:
    notebook.ok("apart = [1, 2, 3]")
    notebook.ok("%%remote\napart = rank")
    assert notebook.value("apart") == [1, 2, 3]


@pytest.mark.parametrize(
    ("selector", "ranks"),
    [
        ("t", [0, 1, 2, 3]),
        ("t[0]", [0]),
        ("t[1:3]", [1, 2]),
        ("t[-1]", [3]),
        ("t[[0, 3]]", [0, 3]),
        ("t.slice(gpus=slice(0, 4, 2))", [0, 2]),
        ("part", [1, 2]),
        ("part[ 0 ]", [1]),
    ],
)
def test_selectors(four: Notebook, selector: str, ranks: list[int]) -> None:
    four.ok("part = t[1:3]")
    four.ok(f"%%remote {selector} --out v\nrank")
    assert list(four.value("v.values()")) == ranks
    assert four.ok(f"%remote {selector} rank * 2").plain == "\n".join(f"[{rank}] {rank * 2}" for rank in ranks)


def test_out_collects_the_values_and_shows_them(notebook: Notebook) -> None:
    cell = notebook.ok("%%remote --out squares\nrank + 3\n(rank + 3) ** 2")
    assert cell.plain == "[0] 9\n[1] 16"
    assert notebook.value("(type(squares).__name__, dict(squares.extent))") == ("ValueMesh", {"gpus": 2})
    assert notebook.value("squares.values()") == (9, 16)
    quiet = notebook.ok("%%remote --out squares\nrank;")
    assert quiet.plain == ""
    assert notebook.value("squares.values()") == (0, 1)
    notebook.ok("%%remote --out nothing\nx = 1")
    assert notebook.value("nothing.values()") == (None, None)


def test_out_replaces_no_mesh(notebook: Notebook) -> None:
    assert "--out t would replace the mesh t; choose another name" in notebook.run("%%remote --out t\nrank").stderr
    assert notebook.value("type(t).__name__") == "ProcMesh"


def test_equal_results_are_shown_once(four: Notebook) -> None:
    assert four.ok("%%remote\n'same'").plain == "[0-3] 'same'"
    assert four.ok("%%remote\nrank == 2").plain == "[0-1,3] False\n[2] True"
    assert four.ok("%%remote\nNone").plain == ""


def test_equal_lines_are_shown_once_unless_raw(four: Notebook) -> None:
    folded = [four.ok("%%remote\nprint('same')").stdout for _ in range(5)]
    assert "[0-3] same\n" in folded  # on a busy machine, a rank may sometimes be too late
    raw = four.ok("%%remote --raw\nprint('same')").stdout
    assert sorted(raw.splitlines()) == [f"[{rank}] same" for rank in range(4)]


def test_timeout_stops_a_cell_and_keeps_the_state(notebook: Notebook, bar: Bar) -> None:
    cell = notebook.run("%%remote --timeout 0.5\nstate = 'kept'\nimport time\ntime.sleep(60)")
    assert cell.ename == "RemoteInterrupt"
    assert cell.evalue == "stopped after 0.5 s (--timeout) on [0-1]; their state is kept"
    bar.check(cell.elapsed_s, 2.5, "the cell")
    assert notebook.ok("%%remote\nstate").plain == "[0-1] 'kept'"


# -- the initial state of ranks


def test_a_rank_has_its_variables_and_a_process_group(notebook: Notebook) -> None:
    notebook.ok(
        "%%remote --out place\n"
        "import torch.distributed as dist\n"
        "(rank, world_size, local_rank, device.type, mesh.mesh_dim_names, tuple(mesh.shape), mesh.get_local_rank(),\n"
        " dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_backend())"
    )
    assert list(notebook.value("place.values()")) == [
        (rank, 2, rank, "cpu", ("gpus",), (2,), rank, True, rank, 2, "gloo") for rank in range(2)
    ]


def test_a_rank_has_the_environment_of_torchrun(notebook: Notebook) -> None:
    notebook.ok("%%remote --out env\nimport os\ndict(os.environ)")
    for rank, env in enumerate(notebook.value("env.values()")):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }
        assert {name: env.get(name) for name in expected} == expected
        assert int(env["MASTER_PORT"]) > 0
        assert env["TORCHELASTIC_RUN_ID"]


def test_pasted_torchrun_code_works(notebook: Notebook) -> None:
    reduce = "x = torch.ones(1) * (rank + 1); dist.all_reduce(x); x.item()"
    notebook.ok("%%remote\nimport torch, torch.distributed as dist\nbefore = dist.group.WORLD")
    cell = notebook.ok(
        "%%remote\ndist.init_process_group('gloo')\ndist.init_process_group(backend='gloo', rank=rank, "
        f"world_size=world_size)\nassert dist.group.WORLD is before\n{reduce}"
    )
    assert cell.plain == "[0-1] 3.0"
    for _ in range(2):  # a script that is run twice
        cell = notebook.ok(
            "%%remote\ndist.destroy_process_group()\nassert not dist.is_initialized()\n"
            f"dist.init_process_group('gloo')\n{reduce}"
        )
        assert cell.plain == "[0-1] 3.0"
    notebook.ok("%%remote\ndist.destroy_process_group()\ndist.init_process_group('gloo', init_method='env://')")
    assert notebook.ok(f"%%remote\n{reduce}").plain == "[0-1] 3.0"


# -- bad input


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("%mesh up u -n 0", "-n must be at least 1, not 0"),
        ("%mesh up u -n two", "-n takes a whole number, such as 4, not 'two'"),
        ("%mesh up u -n 2 --color red", "unknown option '--color'; the options are"),
        ("%mesh up my-mesh -n 2", "must be a Python variable name, not 'my-mesh'"),
        ("%mesh up u --gpus 999", "999 GPUs were asked for, this machine has"),
        ("%mesh nonsense", "unknown command 'nonsense'; one of up, show"),
        ("%mesh down", "name a mesh (t)"),
        ("%mesh down u", "there is no mesh 'u'; available: t"),
        ("%mesh show u", "there is no mesh 'u'; available: t"),
        ("%%remote u\n1", "there is no mesh 'u'; available: t"),
        ("%%remote 1+1\n1", "selects no mesh"),
        ("%%remote t.name\n1", "'t.name' selects no mesh"),
        ("%%remote t[9]\n1", "t[9]: axis 'gpus' has size 2: index 9 is out of range"),
        ("%%remote t[0, 0]\n1", "too many indices"),
        ("%%remote t[[]]\n1", "t[[]]: an empty list selects no rank"),
        (
            "%remote tt rank",
            "SyntaxError in line 1: invalid syntax: 'tt rank'; nothing was sent; tt is no mesh (available: t)",
        ),
        ("%%remote t.slice(dp=0)\n1", "dp"),
        ("%%remote --color red\n1", "unknown option '--color'; the options are --background, --block"),
        ("%%remote --timeout soon\n1", "--timeout takes seconds, not 'soon'"),
        ("%remote", "write an expression"),
        ("%remote t", "write an expression"),
        ("%%remote\nx = 1\ndef f(:\n    pass", "SyntaxError in line 3: invalid syntax: 'def f(:'; nothing was sent"),
        (
            "%%remote\nfor i in range(3):\nprint(i)",
            "IndentationError in line 3: expected an indented block after 'for' statement"
            " on line 2: 'print(i)'; nothing was sent",
        ),
        ("\n%%remote\n\nx = 'open", "SyntaxError in line 4: unterminated string literal (detected at line 4)"),
        ("%%remote t\n\n%%remote t\n1", "the code below it begins with %%remote: write one of them; nothing was sent"),
        (
            "x = 1\n%%remote t\n1",
            "%%remote must be the first line of a cell; the lines above it have run in the kernel",
        ),
        ("x = 1\n%%local\n1", "%%local must be the first line of a cell; the lines above it have run in the kernel"),
        ("%%remote --out v\nimport threading\nthreading.Lock()", "can't be pickled: TypeError: cannot pickle '_thread"),
    ],
)
def test_a_usage_error_is_one_line_and_changes_nothing(notebook: Notebook, code: str, says: str) -> None:
    cell = notebook.run(code)
    assert (cell.reply["status"], cell.ename) == ("error", "UsageError")
    assert says in cell.evalue
    assert cell.stderr.strip() == f"UsageError: {cell.evalue}"
    assert cell.error == ""
    assert "\n" not in cell.evalue
    assert notebook.ok("%%remote\nrank").plain == "[0] 0\n[1] 1"


def test_a_cell_with_a_syntax_error_is_not_sent(notebook: Notebook) -> None:
    before = notebook.value("next(t.runtime._ids)")
    cell = notebook.run("%%remote\nleaked = 1\nif True print(leaked)")
    assert "SyntaxError in line 3" in cell.evalue
    assert notebook.value("next(t.runtime._ids)") == before + 1  # no request was made in between
    assert notebook.ok("%%remote\n'leaked' in globals()").plain == "[0-1] False"


def test_ipython_syntax_is_accepted(notebook: Notebook) -> None:
    cell = notebook.ok(
        "%%remote t[0]\n%cd -q .\nname = !echo from a shell\nimport asyncio\nawait asyncio.sleep(0)\nname"
    )
    assert cell.plain == "[0] ['from a shell']"


def test_a_value_that_cant_be_pushed_is_one_line(notebook: Notebook) -> None:
    cell = notebook.run("import threading\nt['x'] = threading.Lock()")
    assert cell.ename == "PayloadError"
    assert cell.error.splitlines() == [
        "PayloadError: the value for 'x' (a lock) can't be pickled: TypeError: cannot pickle '_thread.lock' object",
        "    at line 2 of this cell: t['x'] = threading.Lock()",
    ]


def test_the_path_to_what_cant_be_sent_is_named(notebook: Notebook) -> None:
    pushed = notebook.run("import threading\ncfg = {'opt': [threading.Lock()]}\nt['cfg'] = cfg").error
    assert "cannot pickle '_thread.lock' object, at cfg['opt'][0]\n" in pushed
    notebook.ok("%%remote\nimport threading\nheld = {'deep': [threading.Lock()]}")
    assert "cannot pickle '_thread.lock' object, at held['deep'][0]\n" in notebook.run("t['held']").error
    shown = notebook.run(
        "%%remote\nimport torch.distributed as dist\ndist.broadcast_object_list([1, {'key': lambda: 1}])"
    ).error
    assert "    object_list[1]['key'] (a function) can't be pickled\n" in shown


def test_pulling_an_unknown_variable_names_it(notebook: Notebook) -> None:
    cell = notebook.run("t['no_such_thing']")
    assert cell.ename == "RemoteError"
    assert "[0-1] NameError: name 'no_such_thing' is not defined on this rank" in cell.error
    assert "at line 1 of this cell: t['no_such_thing']" in cell.error
    assert "monarch_kernel/" not in cell.error


# -- Tab


@pytest.mark.parametrize(
    ("code", "matches"),
    [
        (
            "%mesh ",
            {
                "up",
                "show",
                "down",
                "attach",
                "interrupt",
                "loop",
                "rollback",
                "tensorboard",
                "heal",
                "restart",
                "sync",
                "stacks",
                "check",
                "traffic",
                "profile",
                "record",
                "torchrun",
                "debug",
                "logs",
                "help",
                "doctor",
            },
        ),
        ("%mesh d", {"down", "debug", "doctor"}),
        ("x = 1\n%mesh down ", {"t", "--all"}),
        ("%mesh up --de", {"--detach", "--device"}),
        ("%mesh up --device c", {"cpu", "cuda"}),
        ("%mesh up -n 2 --a", {"--axes"}),
        (
            "%%remote --",
            {
                "--background",
                "--block",
                "--fail-fast",
                "--local",
                "--mesh",
                "--no-stream",
                "--noblock",
                "--out",
                "--ranks",
            }
            | {"--raw", "--stream", "--targets", "--timeout", "--warn-after"},
        ),
        ("%%remote t --t", {"--targets", "--timeout"}),
    ],
)
def test_tab_completes_lines_of_magics(notebook: Notebook, code: str, matches: set[str]) -> None:
    assert set(notebook.complete(code)) == matches


def test_help_lists_all_options(notebook: Notebook) -> None:
    (page,) = notebook.ok("%%remote?").reply["payload"]
    assert all(word in page["data"]["text/plain"] for word in ("SELECTOR", "--out", "--raw", "--timeout"))
    (page,) = notebook.ok("%mesh?").reply["payload"]
    assert all(word in page["data"]["text/plain"] for word in ("up", "show", "down", "--axes", "--gpus", "--env"))


# -- the doctor


def test_the_doctor_checks_the_environment_of_the_kernel(notebook: Notebook) -> None:
    cell = notebook.ok("%mesh doctor --quick")
    assert cell.stdout.startswith("✓ ok       Python")
    assert "items" in cell.stdout.splitlines()[-1]


# -- traffic


def test_replicas_are_compared(notebook: Notebook) -> None:
    assert "no rank has a module in its variables" in notebook.ok("%mesh check").stdout
    notebook.ok("%%remote t\nimport torch; weights = torch.ones(3) + rank")
    said = notebook.ok("%mesh check t weights").stdout
    assert "t: 1 of 1 tensor of weights differs between 2 ranks" in said
    assert "  weights: [0] and [1] differ, at [0]: 2 on [1], 1 on [0]; 3 of 3 elements differ, by up to 1\n" in said
    assert "t[0]: nothing to compare in weights on 1 rank" in notebook.ok("%mesh check t[0] weights").stdout
    assert "is not defined on any rank of t" in notebook.send("%mesh check t wieghts").wait().text
    assert "failed" not in notebook.ok("%mesh").stdout
    assert "unknown option --ax" in notebook.send("%mesh check --ax dp").wait().text
    assert "%mesh check: t has no axis 'dp'" in notebook.send("%mesh check weights --axis dp").wait().text


def test_what_ranks_run_is_profiled(notebook: Notebook, tmp_path: Path) -> None:
    assert (
        "%mesh profile: t runs nothing: start a cell with %%remote --background"
        in notebook.send("%mesh profile").wait().text
    )
    assert "--steps takes a whole number, such as 5, not 'x'" in notebook.send("%mesh profile t --steps x").wait().text
    assert "there is no folder no" in notebook.send("%mesh profile t --to no/trace.json").wait().text
    gate, trace = tmp_path / "gate", tmp_path / "trace.json.gz"
    notebook.ok(
        f"%%remote t --background --out h\nimport os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    )
    try:
        said = notebook.ok(f"%mesh profile t --seconds 0.2 --to {trace}").stdout
    finally:
        gate.touch()
    notebook.ok("h.result()")
    assert "without steps of live.loop or of an optimizer" in said
    assert re.search(r"longest lines: .* cell \[\d+\], line 3$", said, re.MULTILINE)
    assert f"{trace} (" in said
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def test_traffic_between_ranks_is_a_table(notebook: Notebook) -> None:
    notebook.ok("import torch; t['big'] = torch.zeros(1 << 20, dtype=torch.uint8)")
    notebook.ok("%%remote t\nimport torch, torch.distributed as dist\ndist.all_reduce(torch.zeros(250))")
    (shown,) = notebook.ok("%mesh traffic t[1]").shown
    assert "program  t[1]  shared memory  1.0 MiB           1" in shown["text/plain"]
    assert "all_reduce" in shown["text/plain"]
    assert shown["text/html"].count("<table") == 2
    assert "there is no mesh 'nope'" in notebook.send("%mesh traffic nope").wait().text
