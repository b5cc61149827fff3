"""What may be written after ``%mesh up`` and ``%%remote``, and what Tab offers there; no processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.notebook.complete import candidates
from monarch_kernel.syntax.options import (
    COMMANDS,
    RemoteOptions,
    UpOptions,
    UsageProblem,
    one_name,
    option_names,
    parse_remote,
    parse_up,
    parser_of,
    split_options,
    tokens,
)
from monarch_kernel.syntax.selector import root_name
from monarch_kernel.syntax.usage import command_help, mesh_help, options_help


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
        ("t --wrong 2", 0, "unknown option '--wrong'; the options are --axes, --detach"),
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
        ("t -o v", RemoteOptions("t", out="v")),
        ("--mesh t[0:2]", RemoteOptions("t[0:2]")),
        ("-t 0,2 t", RemoteOptions("t", targets="0,2")),
        ("t --targets 0:4:2", RemoteOptions("t", targets="0:4:2")),
        ("t --ranks 1-3", RemoteOptions("t", targets="1-3")),
        ("t --targets all", RemoteOptions("t")),
        ("t -a", RemoteOptions("t", background=True)),
        ("t --noblock", RemoteOptions("t", background=True)),
        ("t --background", RemoteOptions("t", background=True)),
        ("t -b --stream", RemoteOptions("t")),
        ("t --no-stream", RemoteOptions("t", stream=False)),
        ("t --local", RemoteOptions("t", local=True)),
        ("t --out v # not --raw", RemoteOptions("t", out="v")),
        ("# nothing but a comment, isn't it", RemoteOptions()),
    ],
)
def test_remote_is_read(line: str, expected: RemoteOptions) -> None:
    assert parse_remote(line) == expected


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--wrong", "unknown option '--wrong'; the options are --background, --block, --local, --mesh"),
        ("t u", "unknown argument 'u'"),
        ("t --mesh u", "--mesh u and t both name a mesh"),
        ("t -a -b", "give --background or --block, not both"),
        ("t --stream --no-stream", "give --stream or --no-stream, not both"),
        ("t --group-outputs engine", "no --group-outputs: equal lines of several ranks are shown once here"),
        ("t --group-outputs=type", "no --group-outputs: equal lines"),
        ("t --progress-after 5", "no --progress-after: the table of the mesh"),
        ("t --signal-on-interrupt 9", "no --signal-on-interrupt: Kernel > Interrupt"),
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
    of_up, of_remote = (set(option_names(magic, aliases=True)) for magic in ("%mesh up", "%%remote"))
    assert {"--targets", "--ranks", "-t", "--noblock"} <= of_remote
    assert words("%mesh ") == set(COMMANDS)
    assert words("%mesh u") == set(COMMANDS)
    assert words("%mesh up ") == of_up
    assert words("%mesh up t -n 2 --") == of_up - {"-n"}
    assert words("%mesh up --env A=1 ") == of_up
    assert words("%mesh up --device ") == {"auto", "cpu", "cuda"}
    assert words("%mesh show ") == words("%mesh stacks ") == {"t", "other"}
    assert words("%mesh interrupt ") == {"t", "other", "--abort"}
    assert words("%mesh interrupt t ") == {"--abort"}
    assert words("%mesh down ") == {"t", "other", "--all"}
    assert words("%mesh help ") == set(COMMANDS)
    assert words("%%remote ") == {"t", "other", *of_remote}
    assert words("%%remote t --") == of_remote
    assert words("%%remote t --raw ") == of_remote - {"--raw"}
    assert words("%%remote --mesh ") == {"t", "other"}
    assert words("%remote ") == {"t", "other"}
    assert {name for name in of_remote if name.startswith("--")} - {"--local"} <= words("%remote t --")
    assert words("%autoremote ") == {"t", "other", "off", *of_remote} - {"--local"}


@pytest.mark.parametrize("text", ["", "x", "%mesh", "%%remote", "%time ", "mesh ", "%mesh nonsense "])
def test_nothing_is_offered_where_nothing_of_ours_may_come(text: str) -> None:
    assert candidates(text, ["t"]) == []


def test_what_is_for_cells_is_not_offered_elsewhere() -> None:
    for magic in ("%remote", "%autoremote"):
        assert "--local" not in words(f"{magic} t --") | set(option_names(magic)) | set(options_help(magic).split())
        assert parse_remote("--local", magic).local  # to be refused in words of its own


@pytest.mark.parametrize("magic", ["%mesh up", "%%remote"])
def test_what_is_parsed_is_what_help_completion_and_errors_list(magic: str) -> None:
    parser = parser_of(magic)
    assert parser is not None
    spellings = {name for action in parser._actions for name in action.option_strings}
    shown = options_help(magic)
    assert spellings == set(option_names(magic, aliases=True))
    assert all(name in shown and action.help for action in parser._actions for name in action.option_strings)
    with pytest.raises(UsageProblem) as caught:
        parse_up("t --wrong", 2) if magic == "%mesh up" else parse_remote("--wrong", magic)
    assert str(caught.value).startswith(f"{magic}: ")
    assert str(caught.value).endswith(", ".join(option_names(magic)))


def test_help_lists_every_command() -> None:
    assert all(f"%mesh {command}" in mesh_help() for command in COMMANDS)
    assert options_help("%mesh up") in mesh_help()
    assert command_help("down") == "%mesh down NAME | --all\n    end a mesh, or all of them"
    assert "--axes A=N,B=M" in command_help("up")
    with pytest.raises(UsageProblem, match="no command 'fly'; one of up, show"):
        command_help("fly")


def test_a_comment_ends_a_line_and_a_hash_in_a_word_or_quotation_does_not() -> None:
    assert tokens("t --out v # x") == ["t", "--out", "v"]
    assert tokens("up --env A=#1 --env 'B=x #y'") == ["up", "--env", "A=#1", "--env", "B=x #y"]
    assert tokens("#") == []


@pytest.mark.parametrize(
    ("line", "options", "expression"),
    [
        ("rank + 1", "", "rank + 1"),
        ("--raw rank", "--raw", "rank"),
        ("--targets 0,2 --raw rank --raw", "--targets 0,2 --raw", "rank --raw"),
        ("--out=v rank", "--out=v", "rank"),
        ("-t", "", "-t"),
        ("--x", "", "--x"),
        ("--timeout", "--timeout", ""),
        ("", "", ""),
    ],
)
def test_options_before_an_expression(line: str, options: str, expression: str) -> None:
    assert split_options(line, "%remote") == (options, expression)


def test_names_of_detached_meshes_are_offered_where_they_can_stand() -> None:
    def offered(text: str) -> list[str]:
        return [word for word, _ in candidates(text, ["t"], lambda: ["left", "t"])]

    assert offered("%mesh attach ") == ["left", "t"]
    assert offered("%mesh down ") == ["t", "left", "--all"]
    assert offered("%mesh show ") == ["t"]
