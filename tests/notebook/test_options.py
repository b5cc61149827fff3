"""What may be written after ``%mesh up`` and ``%%remote``, and what Tab offers there; no processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.notebook.complete import candidates
from monarch_kernel.notebook.meshes import root_name
from monarch_kernel.notebook.options import (
    COMMANDS,
    RemoteOptions,
    UpOptions,
    UsageProblem,
    one_name,
    option_names,
    parse_remote,
    parse_up,
    tokens,
)


@pytest.mark.parametrize(
    ("line", "gpus", "expected"),
    [
        ("-n 2", 0, UpOptions("mesh", {"gpus": 2}, False, "auto")),
        ("t -n 4 --device cpu", 0, UpOptions("t", {"gpus": 4}, False, "cpu")),
        ("-n 4 t --device cpu", 8, UpOptions("t", {"gpus": 4}, False, "cpu")),
        ("t --gpus 4", 8, UpOptions("t", {"gpus": 4}, True, "cuda")),
        ("t --device cuda", 8, UpOptions("t", {"gpus": 8}, True, "cuda")),
        ("t", 8, UpOptions("t", {"gpus": 8}, False, "auto")),
        ("t --axes dp=2,tp=4", 8, UpOptions("t", {"dp": 2, "tp": 4}, False, "auto")),
        ("t -n 8 --axes dp=2,tp=4 --device cpu", 0, UpOptions("t", {"dp": 2, "tp": 4}, False, "cpu")),
        ("t -n 1 --env A=1 --env B=x=y", 0, UpOptions("t", {"gpus": 1}, False, "auto", {"A": "1", "B": "x=y"})),
        ("t -n 1 --env 'A=two words'", 0, UpOptions("t", {"gpus": 1}, False, "auto", {"A": "two words"})),
    ],
)
def test_up_is_read(line: str, gpus: int, expected: UpOptions) -> None:
    assert parse_up(line, gpus) == expected


@pytest.mark.parametrize(
    ("line", "gpus", "says"),
    [
        ("-n 0", 0, "-n must be at least 1, not 0"),
        ("-n -3", 0, "-n"),
        ("-n two", 0, "takes a whole number, such as 4, not 'two'"),
        ("-n", 0, "-n"),
        ("t -n 2.5", 0, "not '2.5'"),
        ("t --wrong 2", 0, "unknown option '--wrong'; the options are --axes, --device"),
        ("t u -n 2", 0, "unknown argument 'u'"),
        ("2t -n 2", 0, "must be a Python variable name, not '2t'"),
        ("class -n 2", 0, "must be a Python variable name, not 'class'"),
        ("a-b -n 2", 0, "must be a Python variable name, not 'a-b'"),
        ("t", 0, "say how many ranks: -n N"),
        ("t --device cpu", 4, "say how many ranks: -n N"),
        ("t -n 2 --gpus 2", 4, "not both"),
        ("t --gpus 2 --device cpu", 4, "use -n with --device cpu"),
        ("t --gpus 5", 4, "5 GPUs were asked for, this machine has 4"),
        ("t -n 5", 4, "this machine has 4; add --device cpu"),
        ("t --gpus 1", 0, "this machine has 0"),
        ("t -n 2 --device tpu", 0, "--device"),
        ("t -n 2 --on moon", 0, "--on"),
        ("t --axes dp", 0, "such as --axes dp=2,tp=4; 'dp' is not that"),
        ("t --axes dp=0", 0, "the size of axis dp must be at least 1"),
        ("t --axes dp=2,dp=2", 0, "axis 'dp' is named twice"),
        ("t --axes dp=2,tp=2 -n 8", 0, "makes 4 ranks, but 8 were asked for"),
        ("t -n 1 --env A", 0, "--env takes NAME=VALUE, not 'A'"),
        ("t -n 1 --env 'A=1", 0, "No closing quotation"),
    ],
)
def test_a_misuse_of_up_is_one_line_that_says_what_to_write(line: str, gpus: int, says: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        parse_up(line, gpus)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", RemoteOptions("", "", False, None)),
        ("t", RemoteOptions("t", "", False, None)),
        ("t[0, 1:3] --out v", RemoteOptions("t[0, 1:3]", "v", False, None)),
        ("--out v t.slice(dp=0, tp=1)", RemoteOptions("t.slice(dp=0, tp=1)", "v", False, None)),
        ("t[[0, 2]] --raw --timeout 1.5", RemoteOptions("t[[0, 2]]", "", True, 1.5)),
    ],
)
def test_remote_is_read(line: str, expected: RemoteOptions) -> None:
    assert parse_remote(line) == expected


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--wrong", "unknown option '--wrong'; the options are --background, --out, --raw, --timeout"),
        ("t u", "unknown argument 'u'"),
        ("--out 3", "must be a Python variable name, not '3'"),
        ("--out", "--out"),
        ("--timeout soon", "--timeout takes seconds, not 'soon'"),
        ("--timeout 0", "must be more than 0 seconds"),
        ("--timeout nan", "must be more than 0 seconds"),
        ("--timeout=-1", "must be more than 0 seconds"),
    ],
)
def test_a_misuse_of_remote_is_one_line_that_says_what_to_write(line: str, says: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        parse_remote(line)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40))
def test_any_line_is_read_or_refused_in_words(line: str) -> None:
    for parse in (parse_remote, lambda text: parse_up(text, 2)):
        try:
            parse(line)
        except UsageProblem as problem:
            assert str(problem)


@given(st.lists(st.from_regex(r"[a-z]+(\[[0-9]( ?, ?[0-9])*\])?", fullmatch=True), max_size=5))
def test_white_space_inside_brackets_does_not_split(words: list[str]) -> None:
    assert tokens("  ".join(words)) == words


def test_one_known_name_is_asked_for() -> None:
    assert one_name(["t"], "down", ["s", "t"], optional=False) == "t"
    assert one_name([], "show", ["t"], optional=True) == ""
    for rest, says in (([], "name a mesh (s, t)"), (["x"], "no mesh 'x'; there is: s, t"), (["s", "t"], "name one")):
        with pytest.raises(UsageProblem, match=says.replace("(", r"\(").replace(")", r"\)")):
            one_name(rest, "down", ["s", "t"], optional=False)
    with pytest.raises(UsageProblem, match="no mesh is up"):
        one_name(["x"], "down", [], optional=False)


@pytest.mark.parametrize(
    ("selector", "name"),
    [
        ("t", "t"),
        (" t[0] ", "t"),
        ("t.slice(dp=0)[1:2]", "t"),
        ("t[[0, 1]]", "t"),
        ("1 + 1", None),
        ("'t'", None),
        ("t[", None),
        ("", None),
        ("\0", None),
    ],
)
def test_the_variable_that_a_selector_starts_with(selector: str, name: str | None) -> None:
    assert root_name(selector) == name


def words(text: str, meshes: tuple[str, ...] = ("t", "other")) -> set[str]:
    return {word for word, _ in candidates(text, meshes)}


def test_what_may_come_next() -> None:
    assert words("%mesh ") == set(COMMANDS)
    assert words("%mesh u") == set(COMMANDS)
    assert words("%mesh up ") == set(option_names("up"))
    assert words("%mesh up t -n 2 --") == set(option_names("up")) - {"-n"}
    assert words("%mesh up --env A=1 ") == set(option_names("up"))
    assert words("%mesh up --device ") == {"auto", "cpu", "cuda"}
    assert words("%mesh show ") == words("%mesh interrupt ") == {"t", "other"}
    assert words("%mesh down ") == {"t", "other", "--all"}
    assert words("%%remote ") == {"t", "other", *option_names("remote")}
    assert words("%%remote t --") == set(option_names("remote"))
    assert words("%%remote t --raw ") == set(option_names("remote")) - {"--raw"}
    assert words("%remote ") == {"t", "other"}


@pytest.mark.parametrize("text", ["", "x", "%mesh", "%%remote", "%time ", "mesh ", "%mesh nonsense "])
def test_nothing_is_offered_where_nothing_of_ours_may_come(text: str) -> None:
    assert candidates(text, ["t"]) == []
