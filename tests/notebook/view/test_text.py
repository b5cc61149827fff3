"""Tests meshes as text and as HTML."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from monarch_kernel.base.events import (
    DetachedView,
    HostView,
    MeshView,
    RankState,
    RankView,
    TensorLineView,
    TensorsView,
    WaitView,
)
from monarch_kernel.base.text import format_nbytes, format_seconds, last_line, plain
from monarch_kernel.notebook.view.frames import mesh_frame
from monarch_kernel.notebook.view.text import detached_text, mesh_html, mesh_line, mesh_text, meshes_text

MIB = 2**20


def rank_view(rank: int, state: RankState = "idle", **fields: Any) -> RankView:
    return RankView(rank, (("gpus", rank),), state, host="node1", rss_nbytes=300 * MIB)._replace(**fields)


def mesh_view(*ranks: RankView, name: str = "trainers") -> MeshView:
    return MeshView(name, (("gpus", len(ranks)),), ranks, age_s=12)


FOUR = mesh_view(
    rank_view(0, "running", activity="cell [5]", running_s=245),
    rank_view(1),
    rank_view(2, "failed", last_error="ZeroDivisionError: division by zero"),
    rank_view(3, "dead", rss_nbytes=0, last_error="killed by SIGKILL"),
)


def big_view(n: int = 1024) -> MeshView:
    ranks = [rank_view(rank) for rank in range(n)]
    ranks[7] = rank_view(7, "dead", last_error="killed by SIGKILL")
    for rank in range(100, 160):
        ranks[rank] = rank_view(rank, "failed", last_error="ValueError: x")
    for rank in range(200, 300):
        ranks[rank] = rank_view(rank, "running", activity="step", running_s=rank)
    return mesh_view(*ranks, name="big")


class TestMeshText:
    def test_one_rank_per_line_in_aligned_columns(self) -> None:
        assert mesh_text(FOUR).split("\n") == [
            "trainers: gpus=4, 4 ranks (1 idle, 1 running, 1 failed, 1 dead), local, up for 12 s",
            "rank  state      activity                 device   memory  last error",
            "   0  ▶ running  cell [5] for 4 min 05 s  cpu     300 MiB",
            "   1  ○ idle                              cpu     300 MiB",
            "   2  ✗ failed                            cpu     300 MiB  ZeroDivisionError: division by zero",
            "   3  † dead                              cpu              killed by SIGKILL",
        ]

    def test_the_error_of_a_rank_that_runs_is_an_earlier_one(self) -> None:
        text = mesh_text(
            mesh_view(
                *(rank_view(i, state, last_error="ValueError: x") for i, state in enumerate(("running", "failed")))
            )
        )
        assert [line.rpartition("MiB")[2].strip() for line in text.split("\n")[2:]] == [
            "earlier: ValueError: x",
            "ValueError: x",
        ]

    def test_a_mesh_is_a_line_if_all_ranks_are_well_and_else_a_table(self) -> None:
        well = mesh_view(rank_view(0), rank_view(1, "starting"))
        assert mesh_line(well) == "trainers: gpus=2, 2 ranks (1 starting, 1 idle), local, up for 12 s"
        assert mesh_line(FOUR) == mesh_text(FOUR)
        assert mesh_line(replace(well, is_up=False)) == "trainers: gpus=2, 2 ranks (1 starting, 1 idle), local"

    def test_distributed_tensors_are_listed_by_line(self) -> None:
        many = tuple(TensorLineView("", 1, 1024, (0, 1)) for _ in range(3))
        lines = (
            TensorLineView("cell [7], line 1: y = x @ x.t()", 1, 4 * MIB, (0, 1)),
            TensorLineView("cell [8], line 2: z = y[0]", 2, 2048, (1,)),
            *many,
        )
        view = replace(mesh_view(rank_view(0), rank_view(1)), tensors=TensorsView(6, 4 * MIB + 5120, 1, lines))
        assert mesh_text(view).split("\n")[4:] == [
            "6 distributed tensors, 4.0 MiB a rank; 1 operation outstanding",
            "  4.0 MiB in 1 tensor: cell [7], line 1: y = x @ x.t()",
            "  2.0 KiB in 2 tensors on [1]: cell [8], line 2: z = y[0]",
            "  1.0 KiB in 1 tensor: an earlier line",
            "  1.0 KiB in 1 tensor: an earlier line",
            "  1.0 KiB by 1 other line",
        ]
        assert "y = x @ x.t()" in mesh_html(view)
        assert mesh_line(view) == "trainers: gpus=2, 2 ranks (2 idle), local, up for 12 s"

    def test_rates_are_shown_where_bytes_flow(self) -> None:
        lines = mesh_text(mesh_view(rank_view(0, in_bytes_per_s=1.5 * 2**30), rank_view(1))).split("\n")
        assert lines[1].split() == ["rank", "state", "device", "memory", "in"]
        assert lines[2].endswith("300 MiB  1.5 GiB/s")

    def test_points_are_shown_if_there_are_several_axes(self) -> None:
        ranks = tuple(
            RankView(dp * 2 + tp, (("dp", dp), ("tp", tp)), "starting", host="a") for dp in range(2) for tp in range(2)
        )
        lines = mesh_text(MeshView("m", (("dp", 2), ("tp", 2)), ranks)).split("\n")
        assert lines[0].startswith("m: dp=2 tp=2, 4 ranks (4 starting)")
        assert lines[1].split() == ["rank", "point", "state", "device"]
        assert lines[4] == "   2  dp=1, tp=0  … starting  cpu"

    def test_hosts_are_shown_if_there_are_several(self) -> None:
        text = mesh_text(mesh_view(rank_view(0), rank_view(1, host="node2")))
        assert "  host   " in text
        assert "node2" in text

    def test_a_record_that_is_written_is_named_with_its_size(self) -> None:
        view = replace(FOUR, record="record runs/gpt: 212 KiB")
        assert mesh_text(view).split("\n")[-1] == "record runs/gpt: 212 KiB"
        assert "record runs/gpt: 212 KiB" in mesh_html(view)
        assert mesh_frame(view, 0.0).notes == ("record runs/gpt: 212 KiB",)

    def test_lost_hosts_are_named_with_the_reason_and_a_remedy(self) -> None:
        lost = HostView(2, "node2", "lost", "it has sent nothing for 1.0 s\nand more", ("its log",))
        view = replace(
            mesh_view(rank_view(0), rank_view(1, "dead", host="node2"), name="t"), where="ray: 2 hosts (1 lost)"
        )
        for n, remedy in ((1, "a replacement"), (3, "replacements")):
            text = mesh_text(replace(view, lost_hosts=(lost,) * n))
            assert "2 ranks (1 idle, 1 dead), ray: 2 hosts (1 lost), up for" in text
            assert text.split("\n")[4:] == [
                *["host node2 is lost: it has sent nothing for 1.0 s"] * n,
                f"%mesh heal t requests {remedy}",
            ]
        assert "and 6 more hosts are lost" in mesh_text(replace(view, lost_hosts=(lost,) * 10))
        html = mesh_html(replace(view, lost_hosts=(lost,)))
        assert "host node2 is lost" in html
        assert html.index("</table>") < html.index("node2 is lost")  # a long line in it would move the columns apart

    def test_refused_connections_are_counted_by_host(self) -> None:
        view = replace(mesh_view(rank_view(0)), refused_connections=(("", 2), ("node2", 1480)))
        said = "refused 1,482 connections without the keys of this session: 1,480 at node2, 2 here"
        assert mesh_text(view).split("\n")[-1] == said
        assert said in mesh_html(view)
        one = mesh_text(replace(view, refused_connections=(("", 1),)))
        assert one.endswith("refused 1 connection without the keys of this session: 1 here")
        many = mesh_text(replace(view, refused_connections=tuple((f"node{i}", 10 - i) for i in range(6))))
        assert many.endswith("10 at node0, 9 at node1, 8 at node2, 7 at node3, others at 2 more hosts")
        assert "refused" not in mesh_text(mesh_view(rank_view(0)))

    def test_waits_that_last_are_below_the_table(self) -> None:
        view = replace(
            mesh_view(rank_view(0)), waits=(WaitView("[0] waits for 10 s in barrier #1; [1] <is> late", (0,), (1,)),)
        )
        assert mesh_text(view).endswith("\n[0] waits for 10 s in barrier #1; [1] <is> late")
        assert "[1] &lt;is&gt; late" in mesh_html(view)

    def test_an_error_takes_one_line_and_no_terminal_controls(self) -> None:
        error = "RuntimeError: \x1b[31mred\x1b[0m\rand\tlong " + "x" * 200 + "\nsecond line"
        line = mesh_text(mesh_view(rank_view(0, "failed", last_error=error))).split("\n")[2]
        assert "\x1b" not in line
        assert "RuntimeError: redand long xxx" in line
        assert line.endswith("x…")
        assert len(line) < 130

    def test_above_32_ranks_only_those_that_need_attention_are_listed(self) -> None:
        lines = mesh_text(big_view()).split("\n")
        assert "863 idle, 100 running, 60 failed, 1 dead" in lines[0]
        listed = [int(line.split()[0]) for line in lines[2:-1]]
        assert listed == [7, *range(100, 111), 296, 297, 298, 299]
        assert lines[-1] == "and 1,008 more: 863 idle, 96 running, 49 failed; dead or failed: [111-159]"

    def test_32_ranks_are_all_listed(self) -> None:
        assert len(mesh_text(mesh_view(*(rank_view(rank) for rank in range(32)))).split("\n")) == 34

    def test_many_ranks_without_trouble_are_a_summary(self) -> None:
        text = mesh_text(mesh_view(*(rank_view(rank) for rank in range(64))))
        assert text.split("\n")[1:] == ["and 64 more: 64 idle"]

    def test_a_mesh_without_ranks(self) -> None:
        assert mesh_text(MeshView("m", (), ())) == "m: 0 ranks, local, up for 0.0 s"

    def test_a_stopped_mesh_is_not_up(self) -> None:
        stopped = mesh_view(*(rank_view(rank, "stopped") for rank in range(2)))
        assert mesh_line(stopped).split("\n")[0] == "trainers: gpus=2, 2 ranks (2 stopped), local"
        assert "12 s" not in meshes_text([stopped])
        assert "12 s" in meshes_text([mesh_view(rank_view(0, "stopped"), rank_view(1))])


class TestMeshesText:
    def test_one_mesh_per_line(self) -> None:
        assert meshes_text([FOUR, mesh_view(rank_view(0), name="b")]).split("\n") == [
            "name      axes    ranks                                where  up for",
            "trainers  gpus=4  1 idle, 1 running, 1 failed, 1 dead  local    12 s",
            "b         gpus=1  1 idle                               local    12 s",
        ]

    def test_no_mesh_says_how_to_bring_one_up(self) -> None:
        assert meshes_text([]) == "No mesh is up. Bring one up with: %mesh up NAME -n 4"


class Elements(HTMLParser):
    """Checks that elements are well nested, and records them with their attributes and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


class TestMeshHtml:
    def test_it_is_a_table_that_a_screen_reader_can_read(self) -> None:
        elements = Elements(mesh_html(FOUR))
        tags = [tag for tag, _ in elements.found]
        assert tags.count("tr") == 5
        assert tags.count("caption") == 1
        scopes = [attrs.get("scope") for tag, attrs in elements.found if tag == "th"]
        assert scopes == ["col"] * 6 + ["row"] * 4
        assert "trainers: gpus=4, 4 ranks" in elements.text
        for word in ("running", "idle", "failed", "dead"):
            assert word in elements.text

    def test_it_needs_no_script_and_every_theme_variable_has_a_fallback(self) -> None:
        html = mesh_html(FOUR)
        assert "<script" not in html
        assert html.count("class=") == html.count('class="mk-static"') == 1  # a live view hides it by this class
        assert html.count("var(--jp-") == html.count("var(--jp-ui-font-color1, inherit)") + sum(
            html.count(f"{variable}, ")
            for variable in ("var(--jp-success-color1", "var(--jp-error-color1", "var(--jp-border-color2")
        )

    def test_text_is_escaped(self) -> None:
        evil = '<img src=x onerror="alert(1)">'
        view = mesh_view(rank_view(0, "failed", activity=evil, last_error=evil, device=evil), name=evil)
        elements = Elements(mesh_html(view))
        assert not any(tag == "img" for tag, _ in elements.found)
        assert elements.text.count(evil) == 4

    def test_a_table_that_is_read_later_has_its_time(self) -> None:
        caption = mesh_html(FOUR, 1_800_000_000.0).partition("</caption>")[0]
        assert re.search(r"up for 12 s \(as of 2027-01-1\d \d\d:\d\d:\d\d \S+\)$", caption)

    def test_many_ranks_are_summarised(self) -> None:
        elements = Elements(mesh_html(big_view()))
        assert [tag for tag, _ in elements.found].count("tr") == 1 + 16
        assert "and 1,008 more" in elements.text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (10 * 1024 - 1, "10 KiB"),
        (12.4 * MIB, "12 MiB"),
        (1024 * MIB - 1, "1.0 GiB"),
        (141 * 1024 * MIB, "141 GiB"),
        (2**70, "1,048,576 PiB"),
    ],
)
def test_format_nbytes(nbytes: float, text: str) -> None:
    assert format_nbytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (0.31, "0.3 s"),
        (9.96, "10 s"),
        (12.4, "12 s"),
        (59.6, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7380, "2 h 03 min"),
        (86_400 * 3 + 4 * 3600, "3 d 04 h"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nb\n", "b"),
        ("real\n\n   \n", "real"),
        ("\r10%|#\r20%|##", "20%|##"),
        ("20%|##\r", "20%|##"),
        ("\x1b[31m" + "y" * 300, "y" * 200),
        ("START " + "y" * 400, "START " + "y" * 194),
        ("x\n" + "\x1b[2K\r", "x"),
        ("", ""),
    ],
)
def test_the_last_line_is_what_a_terminal_shows_last(text: str, line: str) -> None:
    assert last_line(text) == line


def test_plain_drops_terminal_controls_only() -> None:
    assert plain("\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x07\tα\nβ\x07") == "red link\tα\nβ"


def test_detached_meshes_and_meshes_of_other_kernels() -> None:
    views = [
        DetachedView("trainers", (("dp", 2), ("tp", 2)), ("cell [5]", "cell [5]", "", None), 75.0, 0),
        DetachedView("eval", (("gpus", 1),), ("",), 1.0, 4711),
    ]
    assert detached_text(views).splitlines()[1:] == [
        "name      axes       ranks                               kernel",
        "trainers  dp=2 tp=2  2 running cell [5], 1 idle, 1 dead  none for 1 min 15 s",
        "eval      gpus=1     1 idle                              pid 4711",
    ]
