"""The pure part of the benchmarks: measures, statistics, ratios, bars, and the table when peers are missing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.machine import Machine
from benchmarks.measures import BARS, MEASURES, Bar, row_key, rows_by_ranks, select_measures
from benchmarks.report import Sample, judge, render, summarise, to_json
from benchmarks.runner import parse_figures

MACHINE = Machine(
    processor="Test CPU",
    cores=2,
    memory_gib=24.0,
    system="Linux 6",
    python="3.11.7",
    torch="2.13.0",
    peers={"monarch": "0.7.0"},
    commit="0123456789",
    load=0.1,
    date="2026-01-01T00:00:00+00:00",
)


def samples(peer: str, row: str, *values: float) -> list[Sample]:
    return [Sample(peer, row, value) for value in values]


def table_line(report: str, start: str) -> list[str]:
    """Return the texts of the one line of the table that starts with `start`."""
    (line,) = [line for line in report.splitlines() if line.startswith(f"| {start}")]
    return [text.strip() for text in line.strip("|").split("|")]


def test_every_bar_belongs_to_a_measured_row() -> None:
    rows = {row_key(measure.key, ranks) for measure in MEASURES for ranks in measure.ranks}
    assert {bar.row for bar in BARS} <= rows


def test_measures_are_selected_by_name_and_by_row() -> None:
    chosen = select_measures(["call/16", "start", "call/2"])
    assert [(measure.key, measure.ranks) for measure in chosen] == [("start", (2, 4, 8)), ("call", (2, 16))]
    assert select_measures([]) == MEASURES


@pytest.mark.parametrize("name", ["cal", "call/3", ""])
def test_an_unknown_measure_is_refused_with_a_list_of_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"call_one \(4 ranks\)"):
        select_measures([name])


def test_one_process_takes_all_measures_with_the_same_ranks() -> None:
    assert rows_by_ranks(select_measures(["call", "start/4", "outstanding"])) == {
        2: ["call"],
        4: ["start", "call", "outstanding"],
        8: ["call"],
        16: ["call"],
    }


def test_a_cell_holds_the_median_of_the_runs_that_gave_a_figure() -> None:
    table = summarise([*samples("ours", "call/4", 30.0, 10.0, 20.0), Sample("ours", "call/4", None, "hung")])
    cell = table["call/4"]["ours"]
    assert (cell.median, min(cell.values), max(cell.values)) == (20.0, 10.0, 30.0)
    assert (cell.missed, cell.reasons) == (1, ("hung",))


@pytest.mark.parametrize(
    ("bar", "ours", "monarch", "figure", "met"),
    [
        (Bar("r/4", 0.3, "at most x monarch"), 30.0, 100.0, 0.3, True),
        (Bar("r/4", 0.3, "at most x monarch"), 31.0, 100.0, 0.31, False),
        (Bar("r/4", 0.3, "at most x monarch"), 30.0, None, None, None),
        (Bar("r/4", 0.3, "at most x monarch"), None, 100.0, None, None),
        (Bar("r/4", 90.0, "at most"), 90.0, None, 90.0, True),
        (Bar("r/4", 90.0, "at most"), 90.5, None, 90.5, False),
        (Bar("r/4", 60_000.0, "at least"), 60_000.0, 1.0, 60_000.0, True),
        (Bar("r/4", 60_000.0, "at least"), 59_999.0, 1.0, 59_999.0, False),
    ],
)
def test_bars(bar: Bar, ours: float | None, monarch: float | None, figure: float | None, met: bool | None) -> None:
    table = summarise([Sample("ours", "r/4", ours), Sample("monarch", "r/4", monarch)])
    (verdict,) = judge(table, [bar])
    assert verdict.figure == pytest.approx(figure)
    assert verdict.met is met


@pytest.mark.parametrize(("ours", "met", "text"), [(19.0, True, "0.95 met"), (10.0, False, "0.50 MISSED")])
def test_a_bar_may_compare_two_rows_of_ours(ours: float, met: bool, text: str) -> None:
    taken = [
        *samples("ours", "copy_64/2", 20.0),
        *samples("ours", "read_64/2", ours),
        *samples("monarch", "read_64/2", 1.0),
    ]
    verdicts = [verdict for verdict in judge(summarise(taken)) if verdict.bar.row == "read_64/2"]
    assert [verdict.met for verdict in verdicts] == [met, True]
    report = render(MACHINE, ["ours", "monarch"], select_measures(["copy_64", "read_64"]), taken)
    bars = table_line(report, "64 MiB from rank to rank (")[-1]
    assert bars == f">= 0.8 x copy_64/2, {text}; >= 8 x met"


def test_bars_compare_measured_rows() -> None:
    rows = {row_key(measure.key, ranks) for measure in MEASURES for ranks in measure.ranks}
    assert {bar.than for bar in BARS if bar.kind.endswith("x ours")} <= rows


def test_a_bar_of_an_unmeasured_row_has_no_verdict() -> None:
    assert judge(summarise(samples("ours", "call/2", 1.0))) == []


def test_a_monarch_figure_of_zero_gives_no_ratio() -> None:
    (verdict,) = judge(summarise([*samples("ours", "call/4", 1.0), *samples("monarch", "call/4", 0.0)]))
    assert verdict.met is None


def test_the_table_shows_median_spread_ratio_and_bar() -> None:
    taken = [*samples("ours", "call/4", 200.0, 180.4, 250.0), *samples("monarch", "call/4", 1000.0)]
    report = render(MACHINE, ["ours", "monarch"], select_measures(["call/4"]), taken)
    assert table_line(report, "measure") == ["measure", "unit", "ours", "monarch", "ours / monarch", "bar"]
    assert table_line(report, "call on 4 ranks") == [
        "call on 4 ranks", "us", "200 (180-250)", "1,000", "0.20", "<= 0.35 x met",
    ]  # fmt: skip
    assert "Missing" not in report


def test_all_lines_of_the_table_have_the_same_length() -> None:
    report = render(MACHINE, ["ours", "monarch"], MEASURES, samples("ours", "outstanding/4", 123_456.0))
    assert len({len(line) for line in report.splitlines() if line.startswith("|")}) == 1


def test_a_missed_bar_is_printed_in_capitals() -> None:
    report = render(MACHINE, ["ours"], select_measures(["outstanding"]), samples("ours", "outstanding/4", 41_000.0))
    assert table_line(report, "outstanding calls")[2:] == ["41,000", "–", ">= 60,000 MISSED"]


def test_a_missing_peer_is_a_dash_with_one_reason_below_the_table() -> None:
    reason = "not installed (no module ray)"
    taken = [*samples("ours", "call/2", 1.0), *samples("ours", "call/4", 2.0)]
    taken += [Sample("ray", "call/2", None, reason), Sample("ray", "call/4", None, reason)]
    report = render(MACHINE, ["ours", "ray"], select_measures(["call/2", "call/4"]), taken)
    assert table_line(report, "call on 2 ranks")[2:4] == ["1", "–"]
    assert table_line(report, "call on 4 ranks")[2:4] == ["2", "–"]
    assert [line for line in report.splitlines() if reason in line] == [f"– ray, everything: {reason}"]


def test_a_figure_missing_in_some_runs_is_counted() -> None:
    taken = [
        *samples("ours", "call/2", 1.0, 2.0),
        Sample("ours", "call/2", None, "hung"),
        *samples("ours", "cell/2", 1.0),
    ]
    report = render(MACHINE, ["ours"], select_measures(["call/2", "cell/2"]), taken)
    assert "– ours, call/2 in 1 of 3 runs: hung" in report.splitlines()


def test_the_header_names_machine_versions_and_commit() -> None:
    head = "\n".join(render(MACHINE, [], select_measures(["call/2"]), []).splitlines()[:3])
    for fact in ("Test CPU, 2 cores, 24 GiB", "Python 3.11.7, torch 2.13.0", "monarch 0.7.0", "commit 0123456789"):
        assert fact in head


@pytest.mark.parametrize(("load", "busy"), [(1.0, False), (1.1, True)])
def test_the_header_warns_of_a_busy_machine(load: float, busy: bool) -> None:
    head = render(replace(MACHINE, load=load), [], select_measures(["call/2"]), []).splitlines()[0]
    assert ("BUSY" in head) is busy


def test_the_json_data_have_every_figure() -> None:
    taken = [
        *samples("ours", "call/4", 3.0, 1.0),
        *samples("monarch", "call/4", 10.0),
        Sample("ray", "call/4", None, "no"),
    ]
    data = json.loads(json.dumps(to_json(MACHINE, {"repeat": 2}, select_measures(["call/4"]), taken)))
    row = data["results"]["call/4"]
    assert row["peers"]["ours"] == {"median": 2.0, "min": 1.0, "max": 3.0, "values": [3.0, 1.0], "missing": []}
    assert row["peers"]["ray"] == {"median": None, "min": None, "max": None, "values": [], "missing": ["no"]}
    assert (row["unit"], row["ratio_to_monarch"]) == ("us", pytest.approx(0.2))
    assert [(bar["bar"]["row"], bar["met"]) for bar in data["bars"]] == [("call/4", True)]


def test_figures_are_found_between_output_of_ranks() -> None:
    noise = 'hello\n{"measure": "cut of\n{"other": 1}\n'
    output = '{"measure": "call/4", "value": 1.5}\n' + noise + '{"measure": "cell/4", "error": "E"}'
    assert parse_figures(output) == {
        "call/4": {"measure": "call/4", "value": 1.5},
        "cell/4": {"measure": "cell/4", "error": "E"},
    }
