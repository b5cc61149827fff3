"""Compares frames with the golden files that the panel reads; ``python -m tests.notebook.view.test_frames`` writes these."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from monarch_kernel.base.events import (
    CurvePoint,
    CurveView,
    HostView,
    KnobView,
    LoopView,
    MeshView,
    RankState,
    RankView,
    TensorLineView,
    TensorsView,
    WaitView,
)
from monarch_kernel.notebook.view.frames import (
    CARDS,
    STATES,
    ErrorFrame,
    ViewState,
    curves_message,
    mesh_frame,
    pack_states,
    to_json,
)

GOLDEN = Path(__file__).parent / "golden"
AT = 1_800_000_000.0


def rank_view(rank: int, state: RankState, **more: object) -> RankView:
    return RankView(rank, (("gpus", rank),), state, **more)  # type: ignore[arg-type]


def trainers() -> MeshView:
    """Make a mesh of four ranks, each in a different state."""
    ranks = (
        rank_view(
            0, "running", activity="cell [5]", running_s=12.5, host="box", pid=4100, device="cuda:0", rss_nbytes=2 << 30,
            cpu_percent=97.6, last_line="step 120 loss 2.31", in_bytes_per_s=5e8, out_bytes_per_s=1e6,
            gpu_nbytes=61 << 30, gpu_total_nbytes=80 << 30, gpu_percent=96.7,
        ),
        rank_view(
            1, "failed", host="box", pid=4101, device="cuda:1", last_error="ZeroDivisionError: division by zero",
            rss_nbytes=1 << 30, failed_s=65.0,
        ),
        rank_view(
            2, "dead", host="box", device="cuda:2", last_error="RankDied: killed by SIGKILL, likely out of memory",
            restarts=1, failed_s=30.0,
        ),
        rank_view(3, "starting"),
    )  # fmt: skip
    return MeshView("trainers", (("gpus", 4),), ranks, age_s=100.0)


def generators() -> MeshView:
    """Make a mesh of two hosts, one of which is lost."""
    ranks = tuple(
        RankView(i, (("hosts", i // 2), ("gpus", i % 2)), "dead" if i > 1 else "idle", host=f"node{i // 2}", pid=50 + i)
        for i in range(4)
    )
    lost = HostView(2, "node1", "lost", "it has sent nothing for 1.0 s")
    return MeshView("generators", (("hosts", 2), ("gpus", 2)), ranks, "Slurm: 2 hosts (1 lost)", 7.0, (lost,))


def large() -> MeshView:
    """Make a mesh with more ranks than `CARDS`."""
    states = [STATES[i % 6] for i in range(99)]
    ranks = tuple(
        RankView(
            i, (("dp", i // 9), ("tp", i % 9)), state, activity="cell [7]" * (state == "running"), running_s=float(i),
            last_error="ValueError: no" * (state == "failed"), in_bytes_per_s=1000.0,
        )
        for i, state in enumerate(states)
    )  # fmt: skip
    return MeshView("many", (("dp", 11), ("tp", 9)), ranks, age_s=3600.0)


def in_a_loop() -> MeshView:
    """Make a mesh that runs a live loop with a knob of each kind."""
    knobs = (
        KnobView("lr", 0.0003, 1e-6, 0.01),
        KnobView("batch", 64),
        KnobView("schedule", "cosine"),
        KnobView("augment", True),
        KnobView("clip", None),
    )
    curves = (CurveView("loss", 2.30258509), CurveView("gradient norm", float("nan")))
    rates = (("samples", 1034.2219), ("tokens", 264_760.8), ("flops", 413.2e12))
    loop = LoopView(
        (41, 1),
        "trainers",
        "cell [5]",
        1234,
        10_000,
        "running",
        15.2,
        0.01234567,
        knobs,
        curves,
        rates,
        0.41764,
        left_s=108.24,
    )
    over = LoopView((40, 2), "trainers", "", 7, None, "over", 30.0)
    ranks = (rank_view(0, "running", activity="cell [5]", running_s=15.5),)
    return MeshView("trainers", (("gpus", 1),), ranks, age_s=100.0, loops=(over, loop))


def hung() -> MeshView:
    """Make a mesh in which two ranks wait for a third, and others for none."""
    ranks = tuple(rank_view(i, "running", activity="cell [5]", running_s=40.0) for i in range(3))
    text = "[0,2] wait for 36 s in all_reduce #2 (shape 4), cell [5], line 3; [1] has not started it: cell [5], line 2"
    waits = (WaitView(text, (0, 2), (1,)), WaitView("[1] waits for 11 s in barrier #1", (1,)))
    return MeshView("trainers", (("gpus", 3),), ranks, age_s=100.0, waits=waits)


def holding() -> MeshView:
    """Make a mesh on whose ranks the program has distributed tensors."""
    ranks = tuple(rank_view(i, "running") for i in range(4))
    made = "cell [7], line 3: model = trainers.distribute(GPT(config), plan)"
    lines = (
        TensorLineView(made, 148, 6_543_210_000, (0, 1, 2, 3)),
        TensorLineView("cell [9], line 5, in step: loss.backward()", 60, 1_200_000_000, (0, 1)),
        *(TensorLineView("", 1, 4096 - i, (0, 1, 2, 3)) for i in range(7)),
    )
    tensors = TensorsView(215, 7_743_238_651, 12, lines)
    return MeshView("trainers", (("gpus", 4),), ranks, age_s=100.0, tensors=tensors)


FRAMES = {
    "empty": ViewState(AT),
    "coming": ViewState(AT, (), 16, coming="t: waiting for ranks to start (1 of 4 are up, 1.2 s)"),
    "small": ViewState(
        AT,
        (mesh_frame(trainers(), AT, doing={0: ("cell [5], line 3", "all_reduce")}), mesh_frame(generators(), AT)),
        17,
    ),
    "large": ViewState(AT, (mesh_frame(large(), AT),), 18),
    "loops": ViewState(AT, (mesh_frame(in_a_loop(), AT),), 19),
    "tensors": ViewState(AT, (mesh_frame(holding(), AT),), 21),
    "waits": ViewState(AT, (mesh_frame(hung(), AT, doing={0: ("cell [5], line 3", "all_reduce")}),), 20),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames_equal_the_golden_files(name: str) -> None:
    assert json.loads((GOLDEN / f"{name}.json").read_text()) == to_json(FRAMES[name])


def test_unchanged_state_makes_an_equal_frame_later() -> None:
    before = mesh_frame(trainers(), AT)
    view = trainers()
    aged = (each._replace(failed_s=each.failed_s + 1.02) if each.failed_s else each for each in view.ranks[1:])
    ranks = (rank_view(0, "running", **{**_fields(view.ranks[0]), "running_s": 13.52}), *aged)
    later = MeshView("trainers", view.axes, ranks, age_s=101.04)
    assert mesh_frame(later, AT + 1.0, before) == before
    assert mesh_frame(later, AT + 2.0, before) != before  # the activity started again


def test_a_mesh_that_is_not_up_yet_has_no_time_since_when_it_is() -> None:
    starting = mesh_frame(MeshView("t", (("gpus", 1),), (rank_view(0, "starting"),), is_up=False), AT)
    assert starting.since == 0.0
    assert (
        mesh_frame(MeshView("t", (("gpus", 1),), (rank_view(0, "idle"),), age_s=2.0), AT + 5.0, starting).since
        == AT + 3.0
    )


def _fields(view: RankView) -> dict[str, object]:
    return {name: getattr(view, name) for name in RankView._fields if name not in ("rank", "point", "state")}


def test_1024_ranks_that_all_change_take_less_than_1400_bytes() -> None:
    ranks = tuple(
        rank_view(
            i,
            STATES[i * 7 % 6],
            activity="trainer.step",
            running_s=i / 3,
            last_error="RuntimeError: " + "x" * 300,
            failed_s=1.0,
        )
        for i in range(1024)
    )
    frame = mesh_frame(MeshView("many", (("gpus", 1024),), ranks), AT)
    assert len(json.dumps(to_json(frame), separators=(",", ":"))) < 1400
    assert len(frame.states) == 512


def test_curves_are_rounded_and_valid_json() -> None:
    nan = float("nan")
    points = (CurvePoint(0, 1.23456789, 1.0, 1.5, 3, 0), CurvePoint(2, nan, float("inf"), -float("inf")))
    spread = CurveView("loss", 0.5, (), points, ((1, 0.123456789), (0, 0.75)))
    alone = CurveView("norm", nan, (), (CurvePoint(0, 1.0, 1.0, 1.0), points[1]), ((1, nan),))
    loop = LoopView((4, 1), "t", "cell [5]", 5, 10, "running", 1.0, curves=(spread, alone))
    without = loop._replace(curves=())
    message = curves_message("t", [loop], [loop._replace(where="cell [4]", curves=(alone,)), without])
    assert json.loads(json.dumps(message, allow_nan=False)) == {
        "kind": "curves",
        "mesh": "t",
        "loops": [
            {
                "request": 4,
                "number": 1,
                "curves": {
                    "loss": [
                        *([0, 2], [1.23457, None], [1.0, None], [1.5, None], [[1, 0.123457], [0, 0.75]]),
                        *([3, -1], [0, -1]),
                    ],
                    "norm": [[0, 2], [1.0, None], [], [], [[1, None]], [], []],
                },
            }
        ],
        "earlier": [{"where": "cell [4]", "curves": {"norm": [[0, 2], [1.0, None], [], [], [[1, None]], [], []]}}],
    }


def test_an_error_has_its_time_and_is_past_while_its_rank_runs_something_else() -> None:
    failed = rank_view(2, "failed", last_error="ValueError: no", failed_s=5.0)
    others = (rank_view(0, "idle"), rank_view(1, "idle"))
    before = mesh_frame(MeshView("m", (("gpus", 3),), (*others, failed)), AT)
    assert before.errors == (ErrorFrame("ValueError: no", "[2]", 2, 1, at=AT - 5.0),)
    assert before.ranks[2].error_at == AT - 5.0
    runs = failed._replace(state="running", activity="cell [6]", running_s=0.1, failed_s=7.1)
    now = mesh_frame(MeshView("m", (("gpus", 3),), (*others, runs)), AT + 2.0, before)
    assert [(each.is_past, each.text) for each in now.errors] == [(True, "ValueError: no")]
    both = (runs._replace(rank=0), runs._replace(rank=1), failed)
    folded = mesh_frame(MeshView("m", (("gpus", 3),), both), AT).errors
    assert [(each.is_past, each.ranks) for each in folded] == [(False, "[2]"), (True, "[0-1]")]


def test_states_are_packed_two_per_character() -> None:
    assert pack_states(["starting", "idle", "stopped", "stopped", "dead"]) == "1zo"


@pytest.mark.parametrize("count", [CARDS, CARDS + 1])
def test_frames_of_small_meshes_have_each_rank_and_of_large_ones_those_that_need_attention(count: int) -> None:
    ranks = tuple(rank_view(i, "failed" if i == 9 else "idle") for i in range(count))
    frame = mesh_frame(MeshView("m", (("gpus", count),), ranks), AT)
    assert len(frame.ranks) == (count if count <= CARDS else 1)
    assert bool(frame.states) == (count > CARDS)


if __name__ == "__main__":
    for name, frame in FRAMES.items():
        (GOLDEN / f"{name}.json").write_text(json.dumps(to_json(frame), indent=1, ensure_ascii=False) + "\n")
        print(f"wrote {name}.json", file=sys.stderr)
