"""Tests the text of errors of many ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from monarch_kernel.errors import Cause, Failure, Frame, RemoteError
from monarch_kernel.notebook.view.errors import error_block


@dataclass(frozen=True)
class At:
    """A stand-in for a Point, of which only the rank is needed."""

    rank: int


CELL = Frame(
    file="<remote cell [5]>",
    line=3,
    function="<module>",
    source=("x = torch.ones(4, 3)", "for i in range(3):", "    y = model(x)", "print(y)"),
    first_line=1,
    user=True,
    variables=(("i", "int 0"),),
)
MODEL = Frame(
    file="/home/me/model.py",
    line=12,
    function="forward",
    source=("    def forward(self, x):", "", "        return self.fc(x)", ""),
    first_line=10,
    user=True,
    variables=(("x", "Tensor[4, 3] float32 cpu"),),
)
MODULE = Frame("/env/lib/python3.11/site-packages/torch/nn/modules/module.py", 1700, "_call_impl")
LINEAR = Frame("/env/lib/python3.11/site-packages/torch/nn/functional.py", 22, "linear")

SHAPES = Failure(
    kind="exception",
    etype="RuntimeError",
    message="mat1 and mat2 shapes cannot be multiplied",
    frames=(CELL, MODULE, MODEL, MODULE, LINEAR),
    traceback="Traceback (most recent call last):\n  ...\nRuntimeError: mat1 and mat2 shapes cannot be multiplied\n",
    host="node1",
    pid=41,
)
LOST = Failure(
    kind="lost",
    etype="RankLost",
    message="killed by SIGKILL: likely the out-of-memory killer",
    host="node1",
    pid=42,
    last_lines=("step 41", "step 42"),
)
RELEASED = Failure("released", "RuntimeError", "aborted", (CELL,), host="node1", pid=43)


WORKER = """Caught ValueError in DataLoader worker process 1.
Original Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)  # type: ignore[possibly-undefined]
           ^^^^^^^^^^^^^^^^^^^^
  File "/env/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py", line 54, in fetch
    data = [self.dataset[idx] for idx in possibly_batched_index]
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/env/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py", line 54, in <listcomp>
    data = [self.dataset[idx] for idx in possibly_batched_index]
            ~~~~~~~~~~~~^^^^^
  File "<remote cell [3]>", line 4, in __getitem__
    if i == 7: raise ValueError(f"row {i} is corrupt")
               ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
ValueError: row 7 is corrupt
"""


def block_of(reports: dict[int, Failure], results: dict[int, object] | None = None, **options: bool) -> list[str]:
    error = RemoteError(
        "cell [5] failed",
        {At(rank): failure for rank, failure in reports.items()},
        {At(rank): value for rank, value in (results or {}).items()},
    )
    return error_block(error, color=options.pop("color", False), **options)


def test_a_block_shows_user_frames_and_folds_library_frames() -> None:
    assert block_of({1: SHAPES, 3: replace(SHAPES, pid=44)}, {0: 1.0, 2: 2.0}) == [
        "RemoteError: cell [5] failed",
        "",
        "[1,3] RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        "    on node1 (pids 41, 44)",
        "    remote cell [5], line 3",
        "          1 x = torch.ones(4, 3)",
        "          2 for i in range(3):",
        "    ----> 3     y = model(x)",
        "          4 print(y)",
        "    … 1 frame in torch/nn/modules/module.py …",
        "    /home/me/model.py, line 12, in forward",
        "          10     def forward(self, x):",
        "          11",
        "    ----> 12         return self.fc(x)",
        "    where",
        "          x: Tensor[4, 3] float32 cpu",
        "    … 2 frames in torch/nn/modules/module.py, torch/nn/functional.py … (%tb Verbose shows them)",
        "",
        "[0,2] finished; their results are in sys.last_value.results",
    ]


def test_each_distinct_error_has_a_block_and_released_ranks_share_the_last_line() -> None:
    lines = block_of({0: RELEASED, 1: SHAPES, 2: LOST, 3: RELEASED})
    heads = [line for line in lines if line.startswith("[")]
    assert heads == [
        "[2] RankLost: killed by SIGKILL: likely the out-of-memory killer",
        "[1] RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        "[0,3] waited for other ranks at remote cell [5], line 3, and were released",
    ]
    assert lines[-1] == heads[-1]
    assert "aborted" not in "\n".join(lines)


def test_ranks_that_differ_only_in_where_they_were_released_share_a_line() -> None:
    elsewhere = replace(RELEASED, frames=(MODEL,))
    assert block_of({0: RELEASED, 1: elsewhere})[2:] == [
        "[0-1] waited for other ranks and were released: [0] at remote cell [5], line 3; "
        "[1] at /home/me/model.py, line 12, in forward"
    ]
    assert block_of({4: RELEASED})[-1] == "[4] waited for other ranks at remote cell [5], line 3, and was released"
    assert block_of({4: replace(RELEASED, frames=())})[-1] == "[4] waited for other ranks and was released"


def test_of_many_places_at_which_ranks_were_released_only_some_are_named() -> None:
    at_lines = {rank: replace(RELEASED, frames=(replace(CELL, line=rank),)) for rank in range(1, 9)}
    assert block_of(at_lines)[-1].endswith(
        "were released: [1] at remote cell [5], line 1; [2] at remote cell [5], line 2; "
        "[3] at remote cell [5], line 3; …"
    )


def test_a_lost_rank_shows_how_it_died_and_its_last_lines() -> None:
    lines = block_of({2: LOST}, {0: None})
    assert lines[2:] == [
        "[2] RankLost: killed by SIGKILL: likely the out-of-memory killer",
        "    on node1 (pid 42)",
        "    Last output lines:",
        "    | step 41",
        "    | step 42",
        "",
        "[0] finished; its result is in sys.last_value.results",
    ]


def test_no_host_is_named_if_none_came_up() -> None:
    never = replace(LOST, etype="RankNotStarted", message="the job was refused", host="", pid=0, last_lines=())
    assert block_of({0: never, 1: never})[2:] == ["[0-1] RankNotStarted: the job was refused"]
    error = RemoteError("cell [5] failed", {At(0): never})
    assert str(error) == "cell [5] failed\n[0] RankNotStarted: the job was refused"
    both = block_of({0: never, 1: replace(never, host="node2")})
    assert both[2:] == ["[0-1] RankNotStarted: the job was refused", "    on node2"]


def test_an_interrupted_rank_shows_its_position_in_one_line() -> None:
    lines = block_of({0: Failure("interrupted", "KeyboardInterrupt", "", (CELL, MODULE), host="node1", pid=1)})
    assert lines[2:] == [
        "[0] KeyboardInterrupt: interrupted on request, its state is kept",
        "    on node1 (pid 1)",
        "    remote cell [5], line 3: y = model(x)",
    ]


def test_chained_exceptions_are_named_nearest_first_with_their_lines_and_notes() -> None:
    chain = (
        Cause("caused by", "ValueError", "no weight", ("look at row 17",), replace(CELL, line=1)),
        Cause("raised while handling", "KeyError", "'w'"),
    )
    lines = block_of({0: replace(SHAPES, chain=chain)})
    assert lines[-4:] == [
        "    caused by ValueError: no weight",
        "        look at row 17",
        "        remote cell [5], line 1: x = torch.ones(4, 3)",
        "    raised while handling KeyError: 'w'",
    ]


def caused(message: str, line: int = 2, link: str = "caused by", etype: str = "OSError") -> tuple[Cause, ...]:
    """Make the chain of an error with one cause."""
    return (Cause(link, etype, message, frame=Frame("data.py", line, "load", user=True)),)


def heads(lines: list[str]) -> list[str]:
    """Return the first line of each block."""
    return [line for line in lines if line.startswith("[")]


def test_causes_with_different_texts_are_listed_by_rank_in_one_block() -> None:
    def of(*missing: int) -> list[str]:
        return block_of(
            {rank: replace(SHAPES, chain=caused(f"no shard-{shard}")) for rank, shard in enumerate(missing)}
        )

    assert of(0, 0)[-2:] == ["    caused by OSError: no shard-0", "        data.py, line 2, in load"]
    assert of(0, 1)[-2] == "    caused by, on [0] OSError: no shard-0; on [1] OSError: no shard-1"
    assert of(0, 1, 0)[-2] == "    caused by, on [0,2] OSError: no shard-0; on [1] OSError: no shard-1"
    many = of(*range(1_000))
    assert len(heads(many)) == 1
    assert many[-2].endswith("; on [3] OSError: no shard-3; 996 more on [4-999]")


@pytest.mark.parametrize(
    "other",
    [
        caused("no shard-0", line=3),
        caused("no shard-0", etype="KeyError"),
        caused("no shard-0", link="raised while handling"),
        (),
    ],
    ids=["another line", "another class", "another link", "no cause"],
)
def test_errors_with_different_causes_have_separate_blocks(other: tuple[Cause, ...]) -> None:
    here = caused("no shard-0")
    lines = block_of({0: replace(SHAPES, chain=here), 1: replace(SHAPES, chain=other), 2: SHAPES})
    assert [line.partition(" ")[0] for line in heads(lines)] == (["[0]", "[1]", "[2]"] if other else ["[0]", "[1-2]"])


def test_errors_with_equal_text_from_different_lines_or_calls_have_separate_blocks() -> None:
    other_call, other_line = replace(CELL, line=4), replace(MODEL, line=11)
    lines = block_of(
        {
            0: SHAPES,
            1: replace(SHAPES, frames=(other_call, MODULE, MODEL)),
            2: replace(SHAPES, frames=(CELL, MODULE, other_line)),
            3: replace(SHAPES, frames=(CELL, MODEL)),  # libraries may differ
            4: replace(SHAPES, frames=(MODULE,)),
            5: replace(SHAPES, frames=(LINEAR,)),
        }
    )
    assert [line.partition(" ")[0] for line in heads(lines)] == ["[0,3]", "[1]", "[2]", "[4]", "[5]"]


def test_a_cause_shows_the_lines_of_its_text_and_of_many_the_last() -> None:
    def of(message: str) -> list[str]:
        lines = block_of({0: replace(SHAPES, chain=caused(message))})
        return lines[lines.index(next(line for line in lines if "caused by" in line)) : -1]

    assert of("no shard\nlook at row 17") == ["    caused by OSError: no shard", "        look at row 17"]
    assert of("\n".join(f"line {i}" for i in range(99)))[-1] == "        line 98"
    assert of("\n" + WORKER) == [
        "    caused by OSError: Caught ValueError in DataLoader worker process 1. … ValueError: row 7 is corrupt"
    ]


def test_notes_of_an_error_are_shown_below_its_text_and_by_rank_where_they_differ() -> None:
    noted = replace(SHAPES, added_notes=("look at row 17", "file a.csv"))
    assert block_of({0: noted, 1: noted})[2:5] == [
        "[0-1] RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        "    look at row 17",
        "    file a.csv",
    ]
    assert len(heads(block_of({0: noted, 1: replace(noted, added_notes=("look at row 18",))}))) == 2
    assert "    look at row 17" in str(RemoteError("cell [5] failed", {At(0): noted})).splitlines()


def test_last_lines_and_notes_that_differ_name_their_rank() -> None:
    lines = block_of({0: LOST, 1: replace(LOST, last_lines=("step 40",))})
    assert lines[-3:] == ["    Last output lines of [0]:", "    | step 41", "    | step 42"]
    lines = block_of({1: replace(SHAPES, notes=("in fc",)), 2: replace(SHAPES, notes=("in out",))})
    assert "    On [1]:" in lines
    assert "    On [1]:" not in block_of({1: replace(SHAPES, notes=("in fc",)), 2: replace(SHAPES, notes=("in fc",))})


def test_the_text_of_an_error_names_causes_and_last_lines_by_rank() -> None:
    reports = {At(rank): replace(SHAPES, chain=caused(f"no shard-{rank}")) for rank in range(2)}
    text = str(RemoteError("cell [5] failed", reports))
    assert "    caused by, on [0] OSError: no shard-0; on [1] OSError: no shard-1" in text.splitlines()
    lost = {At(0): LOST, At(1): replace(LOST, last_lines=("step 40",))}
    assert str(RemoteError("cell [5] failed", lost)).splitlines()[-2:] == ["    [0] | step 41", "    [0] | step 42"]


def test_without_a_user_frame_the_innermost_is_shown() -> None:
    lines = block_of({0: replace(SHAPES, frames=(MODULE, LINEAR))})
    assert lines[4:] == [
        "    … 1 frame in torch/nn/modules/module.py … (%tb Verbose shows them)",
        "    torch/nn/functional.py, line 22, in linear",
    ]


def test_without_frames_the_end_of_the_traceback_is_shown() -> None:
    lines = block_of({0: replace(SHAPES, frames=(), traceback="\n".join(f"line {i}" for i in range(50)))})
    assert lines[4:] == [f"    line {i}" for i in range(40, 50)]


def test_deep_recursion_shows_the_entry_and_the_end() -> None:
    again = Frame("<remote cell [6]>", 2, "f", ("def f(n):", "    return f(n - 1)"), 1, True, (("n", "int 3"),))
    lines = block_of({0: replace(SHAPES, frames=(CELL, *[again] * 900))})
    assert "    … 896 frames in remote cell [6] … (%tb Verbose shows them)" in lines
    # A rank reports the first and the last frames, with the number of those between them.
    kept = (CELL, *[again] * 19, replace(again, left_out=923), *[again] * 39)
    cut = replace(SHAPES, frames=kept)
    assert "    … 978 frames in remote cell [6] … (%tb Verbose shows them)" in block_of({0: cut})
    assert "    … 923 frames are not in the report …" in block_of({0: cut}, verbose=True)
    assert sum("remote cell [6], line 2, in f" in line for line in lines) == 4
    assert sum("n: int 3" in line for line in lines) == 1


def test_variables_that_differ_name_their_rank() -> None:
    def of(value: str) -> Failure:
        return replace(SHAPES, frames=(replace(CELL, variables=(("rank", value),)),))

    assert "    where, on [1]" in block_of({1: of("1"), 3: of("3")})
    assert "    where" in block_of({1: of("1"), 3: of("1")})
    assert "    where" in block_of({1: of("1")})


def test_a_block_is_bounded_and_says_what_it_leaves_out() -> None:
    long = replace(
        SHAPES,
        message="\n".join(f"message {i}" for i in range(100)),
        frames=tuple(replace(MODEL, function=f"f{i}", variables=(("x", "int 1"),) * 30) for i in range(5)),
        last_lines=tuple(f"wrote {i}" for i in range(100)),
    )
    lines = block_of({0: long})
    block = lines[2:]
    assert len(block) == 40
    assert "    … 90 more lines of the message" in block
    assert any(re.fullmatch(r"    … \d+ lines left out here …", line) for line in block)
    assert block[-1] == "    | wrote 99"
    whole = "\n".join(block_of({0: long}, verbose=True))
    assert "message 99" in whole
    assert "wrote 0" in whole
    assert "left out" not in whole


def test_a_traceback_in_a_message_keeps_the_users_frames_and_the_last_line() -> None:
    lines = block_of({0: replace(SHAPES, etype="ValueError", message=WORKER)})
    assert lines[2:8] == [
        "[0] ValueError: Caught ValueError in DataLoader worker process 1.",
        "    Original Traceback (most recent call last):",
        "      … 3 frames in torch/utils/data/_utils/worker.py, torch/utils/data/_utils/fetch.py …",
        '      File "<remote cell [3]>", line 4, in __getitem__',
        '        if i == 7: raise ValueError(f"row {i} is corrupt")',
        "    ValueError: row 7 is corrupt",
    ]
    assert "    ValueError: row 7 is corrupt" in block_of({0: replace(SHAPES, message=WORKER)}, verbose=True)
    spawned = f"\n\n-- Process 1 terminated with the following error:\n{WORKER.partition(chr(10))[2].replace('Original ', '')}"
    lines = block_of({0: replace(SHAPES, etype="ProcessRaisedException", message=spawned)})
    assert lines[2] == "[0] ProcessRaisedException: -- Process 1 terminated with the following error:"
    assert lines[7] == "    ValueError: row 7 is corrupt"


def test_a_traceback_of_libraries_only_keeps_its_innermost_frame() -> None:
    library = WORKER.replace("<remote cell [3]>", "/usr/lib/python3.12/json/decoder.py")
    lines = block_of({0: replace(SHAPES, message=library)})
    assert '      File "/usr/lib/python3.12/json/decoder.py", line 4, in __getitem__' in lines
    assert "    ValueError: row 7 is corrupt" in lines


def test_the_end_of_a_long_message_is_kept() -> None:
    advice = "see https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"
    line = block_of({0: replace(SHAPES, message=f"CUDA out of memory. {'Tried to allocate. ' * 200}{advice}")})[2]
    assert line.endswith(advice)
    assert len(line) < 1_100
    many = block_of({0: replace(SHAPES, message="\n".join(f"line {i}" for i in range(500)))})
    assert "    … 490 more lines of the message" in many
    assert "    line 499" in many


def test_many_distinct_errors_are_counted() -> None:
    reports = {rank: replace(SHAPES, message=f"error {rank}") for rank in range(20)}
    lines = block_of(reports)
    assert sum(line.startswith("[") for line in lines) == 8
    assert lines[-1] == "and 12 more distinct errors on [8-19] (%tb Verbose shows them)"
    assert sum(line.startswith("[") for line in block_of(reports, verbose=True)) == 20


def test_many_hosts_and_processes_are_counted() -> None:
    reports = {rank: replace(SHAPES, host=f"node{rank // 8}", pid=100 + rank) for rank in range(48)}
    assert block_of(reports)[3] == (
        "    on node0 (pids 100, 101, 102, 103, …), node1 (pids 108, 109, 110, 111, …), "
        "node2 (pids 116, 117, 118, 119, …), node3 (pids 124, 125, 126, 127, …), and 2 more hosts"
    )


def test_verbose_shows_every_frame_and_the_whole_traceback() -> None:
    lines = block_of({0: SHAPES}, verbose=True)
    assert "    torch/nn/functional.py, line 22, in linear" in lines
    assert "    Traceback (most recent call last):" in lines
    assert not any("frames in" in line for line in lines)


@pytest.mark.parametrize("verbose", [False, True])
def test_colour_is_only_added(verbose: bool) -> None:
    reports = {0: RELEASED, 1: SHAPES, 2: LOST}
    colored = block_of(reports, {3: 1}, color=True, verbose=verbose)
    uncolored = block_of(reports, {3: 1}, verbose=verbose)
    assert any("\x1b[1m" in line for line in colored)
    assert not any("\x1b[1;3" in line for line in colored), "bold colours are too dark on the ground of errors"
    assert [re.sub(r"\x1b\[[\d;]*m", "", line) for line in colored] == uncolored
    assert not any("\x1b" in line for line in uncolored)
    for line in colored:
        assert len(re.findall(r"\x1b\[[1-9]", line)) == line.count("\x1b[0m"), "colours end within their line"


def test_colours_of_the_error_itself_are_dropped() -> None:
    lines = block_of({0: replace(LOST, message="\x1b[31mred", last_lines=("\x1b[32mgreen",))})
    assert not any("\x1b" in line for line in lines)


def test_the_repr_of_an_error_is_one_line() -> None:
    error = RemoteError("cell [5] failed on t", {At(0): SHAPES, At(1): SHAPES, At(3): RELEASED})
    assert repr(error) == (
        "<RemoteError: cell [5] failed on t: [0-1] RuntimeError: mat1 and mat2 shapes cannot be multiplied; "
        "[3] RuntimeError: aborted>"
    )


def test_an_error_of_many_ranks_is_little_longer_than_that_of_one() -> None:
    def text(n_ranks: int) -> str:
        reports = {At(rank): replace(SHAPES, pid=1_000 + rank) for rank in range(n_ranks)}
        return "\n".join(error_block(RemoteError("cell [5] failed on t", reports), color=False))

    assert "[0-63] RuntimeError" in text(64)
    assert len(text(64)) < 2 * len(text(1))
    assert len(text(1024)) < 2 * len(text(1))


CLOSED = Failure(
    "exception",
    "RuntimeError",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:37295. GLHF!",
    (CELL,),
    host="node1",
    pid=50,
)
BARRIER = replace(CLOSED, message="[Rank 0]: Ranks 2 failed to pass monitoredBarrier in 2000 ms", pid=49)


def test_broken_connections_are_one_line_below_the_error_that_broke_them() -> None:
    reached = replace(CLOSED, message="Rank 1 reached it, but received errors while waiting for send/recv from rank 0.")
    lines = block_of({0: BARRIER, 1: reached, 2: CLOSED, 3: CLOSED})
    assert heads(lines) == [
        "[0] RuntimeError: [Rank 0]: Ranks 2 failed to pass monitoredBarrier in 2000 ms",
        "[1-3] waited for other ranks at remote cell [5], line 3, and were released",
    ]
    assert "GLHF" not in "\n".join(lines)
    waited = "waited for other ranks at remote cell [5], line 3, and was released"
    assert heads(block_of({0: BARRIER, 1: CLOSED}))[1] == f"[1] {waited}"
    assert heads(block_of({0: CLOSED, 2: LOST}))[1] == f"[0] {waited}"


@pytest.mark.parametrize(
    "text",
    [
        "the message was aborted: its process group has ended",  # of this package
        "NCCL error: remote process exited or there was a network error",
        "[Rank 1]: Rank 1 reached it, but received errors while waiting for send/recv from rank 0.",
    ],
)
@pytest.mark.parametrize(
    "other", [BARRIER, LOST, replace(RELEASED, kind="interrupted"), RELEASED], ids=lambda other: other.kind
)
def test_each_text_of_an_ended_group_is_a_consequence(text: str, other: Failure) -> None:
    """Also of a rank that begins after another rank's end: no release reaches it."""
    error = RemoteError("cell [5] failed on t", {At(0): other, At(1): replace(CLOSED, message=text)})
    assert error.reports[At(1)].kind == "released"
    alone = RemoteError("cell [5] failed on t", {At(1): replace(CLOSED, message=text)})
    assert alone.reports[At(1)].kind == "exception"


def test_broken_connections_alone_are_one_block_whatever_their_ports() -> None:
    other = replace(CLOSED, message=CLOSED.message.replace("37295", "41001"), pid=51)
    lines = block_of({0: CLOSED, 1: other})
    assert heads(lines) == [f"[0-1] RuntimeError: {CLOSED.message}"]
    assert any("texts differ" in line and "this is [0]'s" in line for line in lines)


OLD = (
    "the group of model was made before the mesh formed its process group again (after an interrupt,",
    "a failure in a collective or a restart): wrap the model again",
)


def test_a_broken_connection_of_an_old_group_is_one_line_below_what_to_do() -> None:
    crash = "This is typically caused by a remote worker crashing. Check the logs of the remote worker before. GLHF! 🏖️"
    closed = replace(CLOSED, message=CLOSED.message.replace("GLHF!", crash), notes=("in the forward of a DDP", *OLD))
    lines = block_of({0: closed, 1: replace(closed, pid=51)})
    assert any("in the forward of a DDP" in line for line in lines)
    assert heads(lines) == [f"[0-1] RuntimeError: {' '.join(OLD)}"]
    assert [line.strip() for line in lines if "torch: " in line] == ["torch: Connection closed by peer"]
    assert "GLHF" not in "\n".join(lines)
    assert sum("wrap the model again" in line for line in lines) == 1
    assert "GLHF" in "\n".join(block_of({0: replace(CLOSED, notes=OLD)}, verbose=True))


def test_broken_connections_among_the_causes_are_one_line() -> None:
    torn = Cause("caused by", "RuntimeError", CLOSED.message, frame=CELL)
    chain = (torn, replace(torn, link="raised while handling"), Cause("caused by", "OSError", "no space"))
    lines = [line.strip() for line in block_of({0: replace(SHAPES, chain=chain)})]
    at = lines.index("caused by RuntimeError: Connection closed by peer, 2 times")
    assert lines[at + 1] == "caused by OSError: no space"
    assert "GLHF" not in "\n".join(lines)
    whole = "\n".join(block_of({0: replace(SHAPES, chain=chain)}, verbose=True))
    assert whole.count("GLHF") == 2


def test_a_connection_that_the_user_opened_is_no_consequence() -> None:
    own = replace(CLOSED, etype="ConnectionResetError", message="[Errno 104] Connection reset by peer")
    assert len(heads(block_of({0: own, 1: SHAPES}))) == 2


@pytest.mark.parametrize(
    "text",
    [
        "cannot pickle <Lock object at 0x7f22aa{rank:04x}>",
        "[rank{rank}]: failed at 12:30:0{rank}.123, rank={rank}, Rank {rank}",
        "DataLoader worker (pid(s) 223{rank:02}) exited unexpectedly",
        "CUDA out of memory. GPU {rank} has 79.15 GiB of which 1{rank}.10 MiB is free. Process 90{rank:02} has 6{rank}.04 GiB",
        "worker of {pid} ended",
    ],
)
def test_texts_that_differ_in_times_addresses_pids_and_own_ranks_share_a_block(text: str) -> None:
    reports = {
        rank: replace(SHAPES, message=text.format(rank=rank, pid=1_000 + rank), pid=1_000 + rank) for rank in range(8)
    }
    lines = block_of(reports)
    assert heads(lines) == [f"[0-7] RuntimeError: {reports[0].message}"]
    assert any("texts differ" in line for line in lines)
    assert len(heads(block_of(reports, verbose=True))) == 8


@pytest.mark.parametrize(
    "text", ["loss is {rank}.5", "row {rank} is corrupt", "waits for rank {other}", "asked for {rank} GiB"]
)
def test_texts_whose_numbers_carry_meaning_have_their_own_blocks(text: str) -> None:
    reports = {rank: replace(SHAPES, message=text.format(rank=rank, other=rank + 1)) for rank in range(3)}
    lines = block_of(reports)
    assert len(heads(lines)) == 3
    assert not any("texts differ" in line for line in lines)
