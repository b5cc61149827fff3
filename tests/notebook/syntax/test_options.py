"""Tests the options of ``%mesh up`` and ``%%remote``, and their completions, without processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.launch.registry import ENGINES
from monarch_kernel.notebook.magics.complete import candidates
from monarch_kernel.notebook.syntax.arguments import Known
from monarch_kernel.notebook.syntax.lines import UsageProblem, tokens
from monarch_kernel.notebook.syntax.options import (
    COMMANDS,
    LoopOptions,
    RemoteOptions,
    one_name,
    option_names,
    parse_doctor,
    parse_loop,
    parse_record,
    parse_remote,
    parse_tensorboard,
    parser_of,
    split_options,
)
from monarch_kernel.notebook.syntax.selector import root_name
from monarch_kernel.notebook.syntax.up_arguments import UpOptions, parse_up
from monarch_kernel.notebook.syntax.usage import command_help, mesh_help, options_help


@pytest.mark.parametrize(
    ("line", "gpus", "expected"),
    [
        ("-n 2", 0, UpOptions("mesh", {"gpus": 2}, False, "auto")),
        ("t -n 4 --device cpu", 0, UpOptions("t", {"gpus": 4}, False, "cpu")),
        ("t -n 4 --fail-fast", 0, UpOptions("t", {"gpus": 4}, False, "auto", fail_fast=True)),
        ("t -n 4 --warn-after 60", 0, UpOptions("t", {"gpus": 4}, False, "auto", warn_after_s=60.0)),
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


def test_gpus_that_the_line_names_count_instead_of_those_of_the_machine() -> None:
    shared = parse_up("t -n 2 --env CUDA_VISIBLE_DEVICES=0,0", 1)
    assert (shared.axes, shared.device) == ({"gpus": 2}, "auto")
    assert parse_up("t --env CUDA_VISIBLE_DEVICES=2,3", 8).axes == {"gpus": 2}
    with pytest.raises(UsageProblem, match="this machine has 1 with CUDA_VISIBLE_DEVICES=0,99; add --device cpu"):
        parse_up("t -n 2 --env CUDA_VISIBLE_DEVICES=0,99", 8, count_named=lambda visible: 1)
    with pytest.raises(UsageProblem, match="this machine has 0 with CUDA_VISIBLE_DEVICES=NoDevFiles; ask for fewer"):
        parse_up("t --gpus 1", 0, visible="NoDevFiles")


@pytest.mark.parametrize(("text", "seconds"), [("45", 45), ("0.5s", 0.5), ("30m", 1800), ("1.5h", 5400)])
def test_keep_for_is_read(text: str, seconds: float) -> None:
    assert parse_up(f"t -n 1 --detach --keep-for {text}", 0).keep_s == seconds


KNOWN = Known(["t"])

FILES = {"hosts.txt": "a  # the first\n\nb slots=8 max_slots=8, c\n", "./empty": "# none\n", "twice": "a\nb\na\n"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "t --on ray --hosts 4 --gpus 8",
            UpOptions("t", {"hosts": 4, "gpus": 8}, True, "cuda", engine="ray", hosts=4),
        ),
        (
            "t --on local --hosts 2 -n 3 --device cpu",
            UpOptions("t", {"hosts": 2, "gpus": 3}, False, "cpu", hosts=2),
        ),
        ("t --hosts 1 -n 2", UpOptions("t", {"hosts": 1, "gpus": 2}, False, "auto", hosts=1)),
        (
            "t --on=ssh --hosts a,b:2222 -n 1 --user me --forward-agent",
            UpOptions(
                "t",
                {"hosts": 2, "gpus": 1},
                False,
                "auto",
                engine="ssh",
                hosts=2,
                host_names=("a", "b:2222"),
                of_engine={"user": "me", "forward_agent": True},
            ),
        ),
        (
            "t --on ssh --hosts hosts.txt --axes dp=3,tp=2",
            UpOptions("t", {"dp": 3, "tp": 2}, False, "auto", engine="ssh", hosts=3, host_names=("a", "b", "c")),
        ),
        (
            "t --on ssh --hosts a -n 1",
            UpOptions("t", {"hosts": 1, "gpus": 1}, False, "auto", engine="ssh", hosts=1, host_names=("a",)),
        ),
        (
            "t --on slurm -p debug --hosts 2 -n 2 --cpus 4 --sbatch=--exclusive --sbatch=--nice=1 --env A=1 --wait 60 "
            "--lost-after 2.5 --python /opt/python --dry-run --restart rank",
            UpOptions(
                "t",
                {"hosts": 2, "gpus": 2},
                False,
                "auto",
                {"A": "1"},
                restart="rank",
                engine="slurm",
                hosts=2,
                python="/opt/python",
                wait_s=60.0,
                lost_after_s=2.5,
                dry_run=True,
                of_engine={"partition": "debug", "cpus": 4, "sbatch": ("--exclusive", "--nice=1")},
            ),
        ),
        (
            "t --on ray --hosts 2 --gpus 4 --axes pp=2,dp=2,tp=2 --resource tpu=1",
            UpOptions(
                "t",
                {"pp": 2, "dp": 2, "tp": 2},
                True,
                "cuda",
                engine="ray",
                hosts=2,
                of_engine={"resources": (("tpu", "1"),)},
            ),
        ),
    ],
)
def test_up_on_hosts_does_not_depend_on_this_machine(line: str, expected: UpOptions) -> None:
    for gpus_here in (0, 1):
        assert parse_up(line, gpus_here, FILES.get) == expected


def test_axes_determine_the_ranks_per_host() -> None:
    assert parse_up("t --on ray --hosts 4 --axes dp=8,tp=2", 0).per_host == 4
    assert parse_up("t --on ray --hosts 4 -n 3", 0).per_host == 3
    assert parse_up("t -n 3", 0).per_host == 3


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("t --on ray -n 2", "--on ray requires --hosts, such as --hosts 4"),
        ("t --on ssh -n 2", "--on ssh requires --hosts, such as --hosts a,b,c"),
        ("t --on ray --hosts 2", "specify the number of ranks of each host: -n N, or --gpus N"),
        ("t --on ray --hosts 0 -n 1", "--hosts must be at least 1, not 0"),
        (
            "t --on ray --hosts a,b -n 1",
            "--on ray takes a number of hosts, such as --hosts 4, and chooses them; not 'a,b'",
        ),
        (
            "t --on ssh --hosts 4 -n 1",
            "--on ssh takes the names of the hosts, such as --hosts a,b,c, or a file; not '4'",
        ),
        ("t --on ssh --hosts ./none -n 1", "--hosts ./none: there is no such file"),
        ("t --on ssh --hosts ./empty -n 1", "there is no host in ./empty"),
        ("t --on ssh --hosts , -n 1", "there is no host in --hosts"),
        ("t --on ssh --hosts twice -n 1", "host 'a' is listed twice in twice"),
        ("t --on ssh --hosts=-oProxyCommand=x,b -n 1", "'-oProxyCommand=x' in --hosts is not a host name"),
        ("t --on ray --hosts 2 -n 2 --axes dp=3", "--axes dp=3 makes 3 ranks, but 2 hosts with 2 each have 4"),
        ("t --on ray --hosts 2 --axes dp=3", "makes 3 ranks, which 2 hosts can't share evenly"),
        ("t --on ray --hosts 2 -n 2 --gpus 2", "not both"),
        ("t --on ray --hosts 2 --gpus 2 --device cpu", "use -n with --device cpu"),
        (
            "t --on kubernetes --hosts 2 -n 1 --detach",
            "--detach with --on kubernetes is not possible: the connection to pods may go through the kernel",
        ),
        ("t --on ray --hosts 2 -n 1 --dial --detach", "hosts that connect to this machine; remove --dial"),
        ("t --on ssh --hosts a,b -n 1 --detach", "--detach with --on ssh needs --tunnel never"),
        ("t --on ray --hosts 2 -n 1 --wait 1e300", "--wait must be at most 100,000,000 seconds, not 1e300"),
        ("t --on ray --hosts 2 -n 999999", "999,999 ranks are more than one host can run"),
        ("t --on ray --hosts 2 -n 1 --wait soon", "--wait takes seconds, not 'soon'"),
        ("t --on ray --hosts 2 -n 1 --lost-after 0", "--lost-after must be more than 0 seconds, not 0"),
        (
            "t --on ray --hosts 2 -n 1 --lost-after 0.01",
            "--lost-after must be at least 0.5 seconds, not 0.01: hosts send",
        ),
        ("t --on ray --hosts 2 -n 1 --lost-after inf", "--lost-after must be a finite number of seconds, not inf"),
        (
            "t --on ray --hosts 99999999 -n 1 --dry-run",
            "--hosts 99999999 is more than a mesh can have, which is 100,000",
        ),
        (
            "t --on ssh --hosts a,b -n 1 --port 99999 --dry-run",
            "--port takes a port number, 1 to 65535, not '99999'",
        ),
        (
            "t --on ray --hosts 2 -n 1 -p debug",
            "-p is an option of --on slurm; those of --on ray are --address, --cpus",
        ),
        ("t --hosts 2 -n 1 --address auto", "--address is an option of --on ray; add --on ENGINE"),
        ("t --on local --hosts 2 -n 1 --address auto", "--address is an option of --on ray; --on local has none"),
        ("t -n 1 --cpus 2", "--cpus is an option of --on ray and --on slurm and --on kubernetes; add --on ENGINE"),
        ("t --on slurm --hosts 2 -n 1 --wrong", "unknown option '--wrong'; the options are --account, --axes"),
        ("t --on slurm --hosts 2 -n 1 --cpus two", "--cpus takes a whole number, such as 4, not 'two'"),
        ("t --on ray --hosts 2 -n 1 --resource tpu", "--resource takes NAME=VALUE, not"),
        ("t -n 2 --lost-after 3", "--lost-after applies to hosts of an engine; add --on ENGINE --hosts N"),
        ("t -n 2 --dry-run", "--dry-run applies to hosts of an engine"),
        ("t -n 2 --python /p", "--on ENGINE --hosts N, or --on local --hosts 1 for this machine"),
    ],
)
def test_a_misuse_of_up_on_hosts_is_one_line_that_says_what_to_write(line: str, says: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        parse_up(line, 0, FILES.get)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "gpus", "says"),
    [
        ("-n 0", 0, "-n must be at least 1, not 0"),
        ("-n -3", 0, "-n"),
        ("-n two", 0, "takes a whole number, such as 4, not 'two'"),
        ("-n", 0, "-n"),
        ("t -n 2.5", 0, "not '2.5'"),
        ("t -n 999999999", 0, "999,999,999 ranks are more than one host can run; these are at most 10,000"),
        (f"{'a' * 201} -n 2", 0, "the name of a mesh has at most 200 characters; aaaaaaaaaaaaaaaaaaaa… has 201"),
        (f"t -n 2 --detach --keep-for {'9' * 400}h", 0, "--keep-for takes a time, such as 45 (seconds), 30m or 2h"),
        ("t --wrong 2", 0, "unknown option '--wrong'; the options are --axes, --detach"),
        ("t -n 2 --keep-for 2h", 0, "--keep-for says how long a detached mesh is kept; add --detach"),
        ("t -n 2 --detach --keep-for 2d", 0, "--keep-for takes a time, such as 45 (seconds), 30m or 2h, not '2d'"),
        ("t -n 2 --detach --keep-for 0", 0, "--keep-for takes a time, such as 45 (seconds), 30m or 2h, not '0'"),
        ("t u -n 2", 0, "unknown argument 'u'"),
        ("2t -n 2", 0, "must be a Python variable name, not '2t'"),
        ("class -n 2", 0, "must be a Python variable name, not 'class'"),
        ("a-b -n 2", 0, "must be a Python variable name, not 'a-b'"),
        ("t", 0, "specify the number of ranks: -n N"),
        ("t --device cpu", 4, "specify the number of ranks: -n N"),
        ("t -n 2 --gpus 2", 4, "not both"),
        ("t --gpus 2 --device cpu", 4, "use -n with --device cpu"),
        ("t --gpus 5", 4, "5 GPUs were asked for, this machine has 4"),
        ("t -n 5", 4, "this machine has 4; add --device cpu"),
        ("t --gpus 1", 0, "this machine has 0"),
        ("t -n 2 --device tpu", 0, "--device"),
        ("t -n 2 --on moon", 0, "--on"),
        ("t --axes dp", 0, "such as --axes dp=2,tp=4, not 'dp'"),
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
        ("t --fail-fast", RemoteOptions("t", fail_fast=True)),
        ("t --warn-after 0", RemoteOptions("t", warn_after_s=0.0)),
        ("t --out v # not --raw", RemoteOptions("t", out="v")),
        ("# nothing but a comment, isn't it", RemoteOptions()),
    ],
)
def test_remote_is_read(line: str, expected: RemoteOptions) -> None:
    assert parse_remote(line) == expected


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--wrong", "unknown option '--wrong'; the options are --background, --block, --fail-fast, --local, --mesh"),
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
        ("--warn-after soon", "--warn-after takes seconds, or 0 for never, not 'soon'"),
        ("--warn-after=-1", "--warn-after takes seconds, or 0 for never"),
        ("--timeout=-1", "must be more than 0 seconds"),
    ],
)
def test_a_misuse_of_remote_is_one_line_that_says_what_to_write(line: str, says: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        parse_remote(line)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40))
def test_any_line_is_read_or_refused_with_a_message(line: str) -> None:
    for parse in (parse_remote, lambda text: parse_up(text, 2)):
        try:
            parse(line)
        except UsageProblem as problem:
            assert str(problem)


@given(st.lists(st.from_regex(r"[a-z]+(\[[0-9]( ?, ?[0-9])*\])?", fullmatch=True), max_size=5))
def test_white_space_inside_brackets_does_not_split(words: list[str]) -> None:
    assert tokens("  ".join(words)) == words


def test_one_known_name_is_required() -> None:
    assert one_name(["t"], "down", ["s", "t"], optional=False) == "t"
    assert one_name([], "show", ["t"], optional=True) == ""
    for rest, says in (([], "name a mesh (s, t)"), (["x"], "no mesh 'x'; available: s, t"), (["s", "t"], "name one")):
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
        ("t[", "t"),
        ("t[dp=0]", "t"),
        ("for[", None),
        ("x if[", None),
        ("", None),
        ("\0", None),
    ],
)
def test_the_variable_that_a_selector_starts_with(selector: str, name: str | None) -> None:
    assert root_name(selector) == name


def words(text: str, meshes: tuple[str, ...] = ("t", "other")) -> set[str]:
    return {word for word, _ in candidates(text, meshes)}


def test_completions() -> None:
    of_up, of_remote = (set(option_names(magic, aliases=True)) for magic in ("%mesh up", "%%remote"))
    assert {"--targets", "--ranks", "-t", "--noblock"} <= of_remote
    assert words("%mesh ") == set(COMMANDS)
    assert words("%mesh u") == set(COMMANDS)
    assert words("%mesh up ") == of_up
    assert words("%mesh up t -n 2 --") == of_up - {"-n"}
    assert words("%mesh up --env A=1 ") == of_up
    assert words("%mesh up --device ") == {"auto", "cpu", "cuda"}
    assert words("%mesh up --on ") == set(ENGINES)
    assert "--partition" not in of_up
    assert words("%mesh up t --on slurm ") - of_up >= {"--partition", "-p", "--sbatch"}
    assert words("%mesh up t --on slurm -p x --sbatch y ") >= {"--sbatch", "--env"}
    assert "-p" not in words("%mesh up t --on slurm -p x ")
    assert "--partition" not in words("%mesh up t --on ray ")
    assert words("%mesh show ") == words("%mesh stacks ") == {"t", "other"}
    assert words("%mesh interrupt ") == {"t", "other", "--abort"}
    assert words("%mesh interrupt t ") == {"--abort"}
    assert words("%mesh loop ") == {"t", "other", "pause", "resume", "step", "stop"}
    assert words("%mesh loop t ") == {"pause", "resume", "step", "stop"}
    assert words("%mesh loop t pause ") == set()
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
def test_nothing_is_offered_outside_of_mesh_commands(text: str) -> None:
    assert candidates(text, ["t"]) == []


def test_options_for_cells_are_not_offered_elsewhere() -> None:
    for magic in ("%remote", "%autoremote"):
        assert "--local" not in words(f"{magic} t --") | set(option_names(magic)) | set(options_help(magic).split())
        assert parse_remote("--local", magic).local  # a later check refuses it with a specific message


@pytest.mark.parametrize("engine", ENGINES)
def test_options_of_engines_are_in_help_completion_and_errors(engine: str) -> None:
    parser = parser_of("%mesh up", engine)  # no option of an engine collides with a common one
    assert parser is not None
    spellings = {name for action in parser._actions for name in action.option_strings}
    assert spellings == set(option_names("%mesh up", aliases=True, engine=engine))
    assert all(f"{name} " in f"{command_help('up')} ".replace(",", " ") for name in spellings)
    assert f"--on {engine} --hosts" in command_help("up")
    with pytest.raises(UsageProblem) as caught:
        parse_up(f"t --on {engine} --hosts 1 -n 1 --wrong", 0)
    assert str(caught.value).endswith(", ".join(option_names("%mesh up", engine=engine)))


@pytest.mark.parametrize("magic", ["%mesh up", "%%remote"])
def test_help_completion_and_errors_list_the_parsed_options(magic: str) -> None:
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


def test_doctor_is_read() -> None:
    assert (parse_doctor(""), parse_doctor("--quick")) == (False, True)
    with pytest.raises(UsageProblem, match="%mesh doctor: .*--slow"):
        parse_doctor("--slow")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", LoopOptions()),
        ("t", LoopOptions("t")),
        ("t[0:2] pause", LoopOptions("t[0:2]", "pause")),
        ("stop", LoopOptions("", "stop")),
        ("step", LoopOptions("", "step")),
        ("t step 12", LoopOptions("t", "step", 12)),
        ("lr=1e-4", LoopOptions(knobs={"lr": 1e-4})),
        ("t.slice(dp=0) lr=3 on=False x=None", LoopOptions("t.slice(dp=0)", knobs={"lr": 3, "on": False, "x": None})),
        ("schedule=cosine name='a-b'", LoopOptions(knobs={"schedule": "cosine", "name": "a-b"})),
        ("x=", LoopOptions(knobs={"x": ""})),
    ],
)
def test_loop_is_read(line: str, expected: LoopOptions) -> None:
    assert parse_loop(line, KNOWN) == expected


@pytest.mark.parametrize(
    "line", ["t go", "t pause now", "step 0", "step -1", "step x", "t lr", "t lr==3", "lr=3 pause"]
)
def test_an_unknown_loop_command_is_refused(line: str) -> None:
    with pytest.raises(UsageProblem, match=r"^%mesh loop: .* (is neither|takes) "):
        parse_loop(line, KNOWN)


def test_help_lists_every_command() -> None:
    assert all(f"%mesh {command}" in mesh_help() for command in COMMANDS)
    assert options_help("%mesh up") in mesh_help()
    assert command_help("down") == "%mesh down NAME | --all\n    end a mesh, or all of them"
    assert "--axes A=N,B=M" in command_help("up")
    with pytest.raises(UsageProblem, match="no command 'fly'; one of up, show"):
        command_help("fly")


def test_a_comment_ends_a_line_but_not_a_hash_in_a_word_or_quotation() -> None:
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


def test_names_of_detached_meshes_are_offered_where_they_fit() -> None:
    def offered(text: str) -> list[str]:
        return [word for word, _ in candidates(text, ["t"], lambda: ["left", "t"])]

    assert offered("%mesh attach ") == ["left", "t"]
    assert offered("%mesh down ") == ["t", "left", "--all"]
    assert offered("%mesh show ") == ["t"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("runs/gpt", ("", "runs/gpt")),
        ("t runs/gpt  # as before", ("t", "runs/gpt")),
        ("t.slice(dp=0) '/my runs/gpt'", ("t.slice(dp=0)", "/my runs/gpt")),
        ("off", ("", None)),
        ("t off", ("t", None)),
    ],
)
def test_tensorboard_is_read(line: str, expected: tuple[str, str | None]) -> None:
    assert parse_tensorboard(line, KNOWN) == expected


@pytest.mark.parametrize(
    ("line", "word"), [("", ""), ("runs/gpt", "runs/gpt"), ("'a b'", "a b"), ("close", "close"), ("off", "close")]
)
def test_a_record_takes_a_folder_or_close(line: str, word: str) -> None:
    assert parse_record(line) == word


@pytest.mark.parametrize("line", ["", "t runs gpt"])
def test_tensorboard_without_a_folder_is_refused(line: str) -> None:
    with pytest.raises(UsageProblem, match=r"^%mesh tensorboard: takes a folder, such as runs/gpt"):
        parse_tensorboard(line, KNOWN)


def test_the_toolbar_of_jupyterlab_knows_the_options_that_take_a_word() -> None:
    source = (Path(__file__).parents[3] / "labextension" / "src" / "remote.ts").read_text()
    known = re.search(r"TAKES_A_WORD = new Set\(\[([^]]*)\]", source)
    assert known is not None
    parser = parser_of("%%remote")
    assert parser is not None
    taken = {name for action in parser._actions if action.nargs is None for name in action.option_strings}
    assert set(re.findall(r"'([^']+)'", known[1])) == taken
