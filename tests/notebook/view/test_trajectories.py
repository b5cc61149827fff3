"""Samples of a mesh as a table in saved notebooks, and as a message for browsers."""

from __future__ import annotations

import math

from monarch_kernel.base.events import MeshView, TrajectoryView
from monarch_kernel.notebook.view.text import mesh_html
from monarch_kernel.notebook.view.trajectories import trajectories_html, trajectories_message


def mesh(*samples: TrajectoryView, count: int = 0) -> MeshView:
    return MeshView("t", (("r", 1),), (), trajectories=samples, trajectory_count=count or len(samples))


def test_a_saved_notebook_has_the_last_five_with_the_newest_first() -> None:
    view = mesh(*(TrajectoryView(0, f"prompt {i}", f"answer {i}", i / 8, i) for i in range(9)), count=1_234)
    html = trajectories_html(view)
    assert html in mesh_html(view)
    assert "<strong>trajectories</strong>: the last 5 of 1,234 samples" in html
    places = [html.find(f"answer {i}<") for i in range(9)]
    assert places[:4] == [-1] * 4
    assert places[4:] == sorted(places[4:], reverse=True)
    assert min(places[4:]) > 0
    assert ">0.125<" not in html
    assert ">0.625<" in html


def test_texts_in_a_saved_notebook_are_short_lines_without_markup() -> None:
    html = trajectories_html(mesh(TrajectoryView(0, "<b>two\nlines</b>", "x" * 1_000)))
    assert "&lt;b&gt;two lines&lt;/b&gt;" in html
    assert f">{'x' * 199}…<" in html


def test_columns_that_no_sample_fills_are_left_out() -> None:
    html = trajectories_html(mesh(TrajectoryView(0, "p", "c")))
    assert ">prompt</th>" in html
    assert ">reward</th>" not in html
    assert ">version</th>" not in html


def test_a_mesh_without_samples_has_no_table() -> None:
    assert trajectories_html(mesh()) == ""
    assert "trajectories" not in mesh_html(mesh())


def test_a_message_has_the_newest_first_and_no_number_that_json_lacks() -> None:
    message = trajectories_message(
        mesh(
            TrajectoryView(0, "p", "\x1b[31mred\x1b[0m", 1 / 3, 4),
            TrajectoryView(1, "p", "c", math.nan),
            TrajectoryView(1, "p\n\tq", "c", None, 0),
            count=50,
        )
    )
    assert message == {
        "kind": "trajectories",
        "mesh": "t",
        "count": 50,
        "samples": [
            [1, 0, None, "p\n\tq", "c"],
            [1, None, "nan", "p", "c"],
            [0, 4, 0.333333, "p", "red"],
        ],
    }
