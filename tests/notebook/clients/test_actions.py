"""What commands of clients take: some ranks of a mesh, or only a whole mesh; wrong words end the program with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel import cli
from monarch_kernel.notebook.clients.actions import of_ranks, read_loop, whole_mesh
from monarch_kernel.notebook.clients.command_line import add_mesh, run_mesh
from monarch_kernel.notebook.clients.kernels import ClientError
from monarch_kernel.notebook.clients.texts import mesh_text
from monarch_kernel.notebook.view.frames import unpack_states

GOLDEN = Path(__file__).parents[1] / "view" / "golden"

MESH = {
    "name": "t",
    "axes": [["gpus", 4]],
    "counts": {"idle": 2, "failed": 2},
    "where": "local",
    "since": 1.0,
    "in_rate": 700,
    "ranks": [
        {"rank": 0, "state": "idle"},
        {"rank": 1, "state": "failed", "error": "OSError: a"},
        {"rank": 2, "state": "failed", "error": "OSError: a"},
        {"rank": 3, "state": "idle"},
    ],
    "errors": [{"text": "OSError: a", "ranks": "[1-2]", "rank": 1, "count": 2}],
    "waits": [
        {"text": "[0] waits for [3]", "ranks": "[0]", "missing": "[3]"},
        {"text": "a metric is not finite", "ranks": ""},
    ],
    "loops": [{"where": "cell [1]", "state": "running"}],
}


def run(*arguments: str) -> int:
    return cli.main(["mesh", *arguments], {"mesh": cli.Command(add_mesh, run_mesh)})


def test_the_frame_of_some_ranks_has_only_these_ranks_with_their_errors_and_waits() -> None:
    found = of_ranks(MESH, [2, 3])
    assert (found["selected"], found["counts"]) == ([2, 3], {"failed": 1, "idle": 1})
    assert found["ranks"] == [MESH["ranks"][2], MESH["ranks"][3]]
    assert found["errors"] == [{"text": "OSError: a", "ranks": "[2]", "rank": 2, "count": 1}]
    assert found["waits"] == MESH["waits"]  # [0] waits for [3]
    assert found["loops"] == MESH["loops"]
    assert "in_rate" not in found  # the sum over all ranks
    alone = of_ranks(MESH, [1])
    assert alone["waits"] == MESH["waits"][1:]
    assert "errors" not in of_ranks(MESH, [0])


def large_mesh() -> dict[str, Any]:
    """The golden frame of a mesh whose ranks are not all described, as clients read it."""
    for path in sorted(GOLDEN.glob("*.json")):
        for mesh in json.loads(path.read_text()).get("meshes", ()):
            if "states" in mesh and mesh.get("errors"):
                return {**mesh, "states": unpack_states(mesh["states"], sum(mesh["counts"].values()))}
    pytest.fail("no golden frame has a large mesh with errors")


def test_each_rank_of_a_large_mesh_can_be_selected() -> None:
    mesh = large_mesh()
    for rank, state in enumerate(mesh["states"]):
        found = of_ranks(mesh, [rank])
        assert [(each["rank"], each["state"]) for each in found["ranks"]] == [(rank, state)]
        assert found["counts"] == {state: 1}
        assert mesh_text(found).startswith(f"{mesh['name']}[{rank}]: ")
    first = mesh["errors"][0]
    assert of_ranks(mesh, [first["rank"]])["ranks"][0]["error"] == first["text"]


def test_a_loop_is_refused_for_some_ranks() -> None:
    assert read_loop("t", ["step", "3"]).count == 3
    with pytest.raises(
        ClientError, match=r"t\[0\]: a loop is controlled on all of its ranks together; write t, without"
    ):
        read_loop("t[0]", ["pause"])
    with pytest.raises(ClientError, match="'t\\[' is no mesh"):
        whole_mesh("t[", "why")


@pytest.mark.parametrize("words", [[], ["", " "]])
def test_a_loop_needs_an_action(words: list[str]) -> None:
    with pytest.raises(ClientError, match="write one of pause, resume, step, stop, or KNOB=VALUE"):
        read_loop("t", words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["loop", "t[0]", "pause"], "write t, without ranks"),
        (["loop", "t", "faster"], "'faster' is neither one of pause, resume, step, stop nor KNOB=VALUE"),
        (["loop", "t", "step", "0"], "step takes a number of steps, such as 10, not '0'"),
        (["loop", "t", ""], "write one of pause, resume, step, stop, or KNOB=VALUE"),
        (["profile", "t", "--seconds", "nan"], "--seconds: write a number of seconds above 0, such as 10, not 'nan'"),
        (["profile", "t", "--seconds", "inf"], "--seconds: write a number"),
        (["profile", "t", "--seconds", "-1"], "--seconds: write a number"),
        (["profile", "t", "--steps", "0"], "--steps: write a whole number of 1 or more, not '0'"),
        (["logs", "t", "--lines", "-3"], "--lines: write a whole number of 1 or more, not '-3'"),
        (["logs", "t", "--lines", "1.5"], "--lines: write a whole number of 1 or more, not '1.5'"),
        (["show", ""], "'' is no mesh"),
        (["show", "t[0"], "'t[0' is no mesh"),
        (["interrupt", ""], "'' is no mesh"),
    ],
)
def test_wrong_words_end_the_command_line_with_exit_code_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*words)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
