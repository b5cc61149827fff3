"""Tests the description of live loops."""

from __future__ import annotations

import pytest

from monarch_kernel.base.events import CurveView, KnobView, LoopView
from monarch_kernel.notebook.view.loops import loader_text, loop_text


def test_it_shows_progress_speed_metrics_and_knobs() -> None:
    loss = CurveView("loss", 2.30258509, ends=((1, 2.29), (0, 2.31)))
    curves = (loss, CurveView("norm", float("nan"), ends=((1, float("nan")),)))
    knobs = (KnobView("lr", 0.0003, 1e-6, 0.01), KnobView("schedule", "cosine"), KnobView("clip", None))
    rates = (("samples", 1034.2), ("tokens", 264_760.8))
    view = LoopView(
        (4, 1), "t", "cell [5]", 1234, 10_000, "running", 15.0, 0.01234567, knobs, curves, rates, left_s=108.2
    )
    assert loop_text(view) == (
        "loop in cell [5]: ▶ running, step 1,234 of 10,000, 15 s elapsed, 1 min 48 s left; "
        "12.3 ms a step, 81 steps/s, 1,034 samples/s, 264,761 tokens/s; "
        "loss 2.3026 (2.29 rank 1, 2.31 rank 0); norm nan (nan rank 1); lr=0.0003; schedule='cosine'; clip=None"
    )


@pytest.mark.parametrize(
    ("rate", "mfu", "text"),
    [
        (413.2e12, 0.4176, "413 TFLOP/s, MFU 41.8 %"),
        (2.5e15, None, "2.5 PFLOP/s"),
        (999.9e9, 1e-5, "1 TFLOP/s, MFU 0.0 %"),
        (12.0, None, "12 FLOP/s"),
    ],
)
def test_it_shows_flops_and_mfu(rate: float, mfu: float | None, text: str) -> None:
    view = LoopView((4, 1), "t", "", 3, None, "running", 15.0, 0.5, (), (), (("flops", rate),), mfu)
    assert loop_text(view) == f"loop: ▶ running, step 3, 15 s elapsed; 500 ms a step, 2 steps/s, {text}"


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (((0, 0.3), (1, 0.32)), "loader 31 % of a step"),
        (((0, 0.1), (1, 0.1), (2, 0.64)), "loader 28 % of a step, 64 % on [2]"),
        (((0, 0.0001), (1, 0.0)), "loader 0 % of a step"),
        ((), ""),
    ],
)
def test_it_shows_the_share_of_the_loader(loader: tuple[tuple[int, float], ...], text: str) -> None:
    view = LoopView((4, 1), "t", "", 3, None, "running", 15.0, 0.5, loader=loader)
    assert loader_text(view) == text
    shown = f"; {text}" if text else ""
    assert loop_text(view) == f"loop: ▶ running, step 3, 15 s elapsed; 500 ms a step, 2 steps/s{shown}"


@pytest.mark.parametrize(
    ("state", "sign"),
    [("pausing", "❚❚ pausing"), ("paused", "❚❚ paused"), ("stopping", "■ stopping"), ("over", "■ over")],
)
def test_it_omits_unknown_values(state: str, sign: str) -> None:
    view = LoopView((4, 1), "t", "", 3, None, state, 15.0, 2.5)  # type: ignore[arg-type]
    assert loop_text(view) == f"loop: {sign}, step 3, 15 s elapsed; 2.5 s a step, 0.4 steps/s"


def test_it_is_bounded_and_free_of_terminal_controls() -> None:
    knobs = tuple(KnobView(f"k{i}", i) for i in range(10))
    curves = tuple(CurveView(f"c\x1b[31m{i}", i) for i in range(9))
    text = loop_text(LoopView((4, 1), "t", "", 3, None, "running", 1.0, 0.0, knobs, curves))
    assert text.endswith("; c7 7; k0=0; k1=1; k2=2; k3=3; k4=4; k5=5; k6=6; k7=7; and 3 more")
    assert "\x1b" not in text
