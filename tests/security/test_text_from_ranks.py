"""Text of ranks is text: it ends nothing, moves nothing on a terminal and becomes no markup, whatever it contains."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.actor.replica_check import ReplicaCheck
from monarch_kernel.base.events import HostView, LoopView, MeshView, RankView, TrajectoryView, WaitView
from monarch_kernel.base.failure_reports import Cause
from monarch_kernel.base.mesh import Extent, Point
from monarch_kernel.base.text import aligned, html_table, one_line, plain, printable
from monarch_kernel.errors import Failure, ForkedError, Frame, MeshFailure, MonarchError, RanksError, RemoteError
from monarch_kernel.features.profiling.analysis import analyse
from monarch_kernel.features.profiling.handle import Profile
from monarch_kernel.features.profiling.recording import Recording
from monarch_kernel.features.profiling.timeline import timeline_of
from monarch_kernel.features.replicas.compare import Comparison, Copy, Difference
from monarch_kernel.features.traffic.table import CollectiveRow, End, Traffic, TrafficRow
from monarch_kernel.features.watch.findings import Trouble
from monarch_kernel.features.watch.values import NOT_FINITE, SPIKE
from monarch_kernel.net.wire.messages import LoopAlarm
from monarch_kernel.notebook.output.folding import OutputFolder, render
from monarch_kernel.notebook.output.logs import log_lines
from monarch_kernel.notebook.view.errors import error_block
from monarch_kernel.notebook.view.text import mesh_html, mesh_text
from monarch_kernel.notebook.view.trajectories import trajectories_message
from monarch_kernel.runtime.diagnostics.call_waits import call_waits
from monarch_kernel.runtime.diagnostics.source_names import describe_line
from monarch_kernel.runtime.diagnostics.stacks import Activity, AwaitedCall, Collective, Doing
from monarch_kernel.runtime.diagnostics.waits import stalls
from monarch_kernel.runtime.host.logs import LogRecord

TITLE = "\x1b]0;a title\x07"
CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x1b\\"
HOSTILE = {
    "title": TITLE,
    "clipboard": CLIPBOARD,
    "8-bit title": "\x9d0;a title\x9c",
    "clear": "\x1b[2J\x1b[H",
    "8-bit clear": "\x9b2J",
    "lines up": "\x1b[9A",
    "answer": "\x1b[6n\x1b[c\x05",
    "macro": "\x1bP1;1|17/41\x1b\\",
    "privacy": "\x1b^text\x1b\\\x1b_text\x1b\\\x1bXtext\x1b\\",
    "reset": "\x1bc",
    "charset": "\x0e\x1b(0",
    "keys": "\x1b[>4;2m",
    "split by NUL": "\x1b\0[2J",
    "split by a control": "\x1b\x01[2J",
    "nested": "\x1b[\x1b[2J2J",
    "doubled": "\x1b\x1b[2J",
    "unfinished": "\x1b[12;",
    "unfinished title": "\x1b]0;a title",
    "at the end": "\x1b",
    "form feed": "\x0b\x0c",
    "bell": "\x07",
    "backspaces": "\b" * 40,
    "order": "\u202ereverse\u2066",
}
REORDERS = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
COLOR = re.compile(r"\x1b\[[0-9;:]*m")
hostile = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
texts = st.text(st.sampled_from("\x1b[]P0;m2J\x07\x9b\\\b\r\n\0 a")) | st.text()


def executes(shown: str) -> bool:
    """Whether a terminal does more with a text than to show it in colours."""
    return any((ord(char) < 32 and char not in "\0\n\t") or 127 <= ord(char) < 160 for char in COLOR.sub("", shown))


@given(texts)
def test_no_control_is_left_in_any_text(text: str) -> None:
    assert not executes(printable(text))
    assert printable(printable(text)) == printable(text)
    assert not executes(plain(text))
    assert "\x1b" not in plain(text)
    assert "\n" not in one_line(text)


@given(st.text(st.characters(exclude_categories=("Cc", "Cs"))))
def test_text_without_controls_is_unchanged(text: str) -> None:
    assert printable(f"\x1b[1;31m{text}\x1b[0m\t\n\0") == f"\x1b[1;31m{text}\x1b[0m\t\n\0"


def test_an_unfinished_sequence_takes_no_line_with_it() -> None:
    assert printable("\x1b]0;one\ntwo\nthree") == "0;one\ntwo\nthree"
    assert printable("\x1b[1;\ntwo").endswith("\ntwo")


def test_text_in_another_direction_can_not_change_a_name() -> None:
    assert plain("trainer\u202e\u2066gnp.exe") == "trainergnp.exe"


@hostile
def test_output_of_ranks_executes_nothing(text: str) -> None:
    for raw in (False, True):
        folder = OutputFolder([0, 1], raw=raw)
        folder.feed(0, "stdout", f"before {text} after\n{text}", 0.0)
        folder.feed(1, "stderr", f"{text}\n", 0.0)
        shown = "".join(part for _, part in render([*folder.drain(0.0), *folder.finish(1.0)]))  # type: ignore[list-item]
        assert not executes(shown)
        assert all(re.match(r"\[[01]\]", line) for line in shown.splitlines())
        assert "[0]" in shown
        assert "[1]" in shown


def test_backspaces_of_a_rank_delete_its_own_text_only() -> None:
    folder = OutputFolder([0], raw=True)
    folder.feed(0, "stdout", "one\n" + "\b" * 20 + "[7] two\b\b\bx\n50%", 0.0)
    folder.feed(0, "stdout", "\b\b\b51%\n", 0.0)
    shown = "".join(part for _, part in render(folder.finish(0.0)))  # type: ignore[arg-type]
    assert shown == "[0] one\n[0] [7] x\n[0] 51%\n"


@hostile
def test_progress_bars_execute_nothing(text: str) -> None:
    folder = OutputFolder([0])
    for now in range(5):
        folder.feed(0, "stderr", f"\r{text} {20 * now}%|", float(now))
        folder.drain(float(now))
        assert not any(executes(block.text) for block in folder.bars(float(now)))
    shown = "".join(part for _, part in render(folder.finish(9.0)))  # type: ignore[arg-type]
    assert not executes(shown)
    assert not any(executes(block.text) for block in folder.bars(9.0, last=True))


@hostile
def test_logs_execute_nothing(text: str) -> None:
    logs = {rank: [LogRecord(1.0, "stdout", f"{text}line {text}\nthe end")] for rank in range(2)}
    for raw in (False, True):
        shown = "".join(part for _, part in render(log_lines(logs, (), n_lines=9, raw=raw)))
        assert not executes(shown)
        assert "the end" in shown


@hostile
def test_errors_execute_nothing(text: str) -> None:
    frame = Frame(f"/tmp/{text}/a.py", 1, f"f{text}", (f"x = {text!s}",), 1, True, ((f"name{text}", f"value{text}"),))
    failure = Failure(
        kind="exception",
        etype=f"Error{text}",
        message=f"message {text}\n{text}",
        host=f"host{text}",
        pid=1,
        python=f"3.12{text}",
        traceback=f"Traceback (most recent call last):\n  File {text}\n{text}",
        frames=(frame, replace(frame, user=False)),
        notes=(text,),
        added_notes=(text,),
        last_lines=(text,),
    )
    error = RemoteError(f"cell failed on {text}", {Point(0, Extent({"r": 1})): failure})
    for color in (False, True):
        for verbose in (False, True):
            lines = error_block(error, color=color, verbose=verbose)
            assert not any(executes(line) or "\n" in line for line in lines)
    assert not executes(str(error))
    assert not REORDERS & set(str(error))


def test_no_name_or_text_begins_a_line_of_a_report() -> None:
    """A fake line would name another rank, or another cause."""
    fake = "\n[7] RankDied: killed\ncaused by workers[7] failed: RankDied"
    frame = Frame(f"a.py{fake}", 1, f"f{fake}", (f"x{fake}",), 1, True)
    cause = Cause("caused by", f"Error{fake}", fake, (fake,), frame)
    names = dict.fromkeys(("etype", "message", "host", "python"), f"x{fake}")
    failure = Failure("exception", **names, pid=1, frames=(frame,), notes=(fake,), added_notes=(fake,), chain=(cause,))
    cell = RemoteError("cell failed", {Point(0, Extent({"r": 1})): failure})
    assert [line for line in str(cell).splitlines() if line[0] != " "] == ["cell failed", "[0] x (a.py"]
    actors = MeshFailure("actors", {0: failure})
    assert [line for line in str(actors).splitlines() if line[0] != " "] == ["actors[0] failed: x"]


def all_errors() -> list[type[MonarchError]]:
    found, left = [], [MonarchError]
    while left:
        kind = left.pop()
        found.append(kind)
        left += kind.__subclasses__()
    return [kind for kind in found if kind.__module__ == "monarch_kernel.errors" and kind is not ForkedError]


@pytest.mark.parametrize("kind", all_errors())
def test_no_error_passes_on_controls_of_a_host_or_a_file(kind: type[MonarchError]) -> None:
    """Such as the banner of a host, the name of a file, or a key of a checkpoint."""
    text = "".join([*HOSTILE.values(), *REORDERS]) + "good"
    error = kind(text, {}) if issubclass(kind, RanksError) else kind(text)
    assert not executes(str(error))
    assert "good" in str(error)
    assert not executes(str(pickle.loads(pickle.dumps(error))))
    assert not REORDERS & set(str(error))


@hostile
def test_tables_execute_nothing(text: str) -> None:
    name = f"<script>{text}\n&\"'>"
    rank = RankView(0, (), "running", name, 1.0, name, 1, device=name, last_error=name)
    view = MeshView(
        name,
        (("r", 2),),
        (rank, rank._replace(rank=1, host="other")),
        name,
        lost_hosts=(HostView(1, name, "lost", name),),
        loops=(LoopView((1, 1), "t", name, 1, None, "running", 1.0, 0.0),),
        waits=(WaitView(name, (0,)),),
        trajectories=(TrajectoryView(0, name, name),),
        trajectory_count=1,
    )
    assert not any(map(executes, trajectories_message(view)["samples"][0][3:]))
    shown, markup = mesh_text(view), mesh_html(view)
    assert not executes(shown)
    assert not executes(markup)
    assert "<script>" not in markup
    assert shown.count("\n") == mesh_text(replace(view, name="plain")).count("\n")
    assert len(set(map(len, aligned([("a", [name, "x"], False), ("b", ["1", "2"], True)])))) == 1
    assert "<script>" not in html_table(name, [(name, [name], False)], [name])


@hostile
def test_results_of_checks_execute_nothing(text: str) -> None:
    """Names of parameters may come from the keys of a file, and names of links and machines from another host."""
    copy = Copy(f"net.{text}", "gradient", None, (2,), f"float{text}", b"x")
    difference = Difference(copy, ((0, 1), (2,)), shapes=(text, "[3]"), found=text)
    comparison = Comparison(3, 1, 0, (difference,), (difference,), 1)
    check = ReplicaCheck(f"t{text}", 3, (text,), comparison, skipped={text: text})
    assert "net." in repr(check)
    assert not executes(repr(check))
    links = {0: ((f"eth{text}", 1e9),)}
    end = End(f"t{text}", 0, 1)
    traffic = Traffic(
        text, (TrafficRow(end, end, text, 1, 1, 1.0),), (CollectiveRow(end, text, text, 1, 1, 1.0),), 0, links
    )
    assert "eth" in str(traffic)
    assert not executes(str(traffic))
    timelines = {0: timeline_of(Recording(1, "here", 0.0, 1.0, problem=text), None, 5, name=lambda end, is_rank: text)}
    findings, failure = analyse(timelines), Failure("lost", "Lost", text)
    profile = Profile(f"t{text}", {0: Recording(1, "here", 0.0, 1.0, problem=text)}, {1: failure}, {}, findings, {}, {})
    assert not executes(str(profile))


@hostile
def test_reports_of_ranks_are_one_line_each(text: str) -> None:
    """Else the rest of a name would look like another report, such as that of a death."""
    name = f"loss{text}\n[1] died: killed"
    trouble = Trouble()
    trouble.alarmed(0, LoopAlarm(NOT_FINITE, name, 3, float("nan"), about=name, module=name))
    trouble.alarmed(0, LoopAlarm(NOT_FINITE, f"{name} too", 4, float("nan")))
    trouble.alarmed(0, LoopAlarm(SPIKE, name, 5, 9.0, 1.0, about=name))
    ranks = tuple(RankView(rank, (("r", rank),), "running", name) for rank in range(3))
    frame = Frame(f"/tmp/{name}.py", 1, name, (name,), 1, user=True)
    collective = Collective(name, 1, name, (0, 1, 2), name, 12.0, 1)
    waits = Doing((Activity(7, "main", (frame,), thread=1),), (collective,), {name: 1})
    answers = {0: waits, 1: waits, 2: Doing((Activity(7, "main", (frame,), thread=1),), (), {name: 0})}
    calls = {0: replace(waits, calls=(AwaitedCall(name, (2,), 12.0, 1),))}
    view = MeshView("t", (("r", 3),), ranks)
    found = [
        *trouble.texts().values(),
        *(stall.text for stall in stalls(view, answers, (), 10.0)),
        *(stall.text for stall in call_waits(view, calls, lambda procs: [("t", proc) for proc in procs], 10.0)),
        *(describe_line(each) for each in (frame, replace(frame, function="<module>"))),
    ]
    assert len(found) == 7
    assert not any(executes(each) or "\n" in each for each in found)
