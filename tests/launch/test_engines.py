"""The table of engines: unique options, launchers that take them, missing libraries."""

from __future__ import annotations

import importlib
import inspect
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import agent_command
from monarch_kernel.launch.registry import COMMON, ENGINES, Engine, EngineOption, make_launcher, plan_text

ALL = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


@ALL
def test_options_are_unique_and_have_help(engine: Engine) -> None:
    flags = [flag for option in engine.options for flag in option.flags]
    assert len(flags) == len(set(flags))
    fields = [option.field for option in engine.options]
    assert len(fields) == len(set(fields))
    assert not set(fields) & set(COMMON)
    for option in engine.options:
        assert option.flags[0].startswith("--")
        assert option.help
        assert option.metavar or not option.repeated


@ALL
def test_the_launcher_takes_what_the_table_says(engine: Engine) -> None:
    try:
        make = getattr(importlib.import_module(engine.module), engine.launcher)
    except ImportError as error:
        pytest.skip(f"{error}")
    parameters = inspect.signature(make).parameters
    for field in [*engine.takes, *(option.field for option in engine.options)]:
        assert field in parameters, f"{engine.launcher}() has no {field}"
    needed = [name for name, one in parameters.items() if one.default is inspect.Parameter.empty]
    assert set(needed) <= {"hosts"}, "options that are not given on the command line are not passed to the launcher"
    assert make.name == engine.name


def test_the_table_imports_no_engine() -> None:
    code = (
        "import sys; import monarch_kernel.launch.registry; "
        "print([m for m in ('ray', 'asyncssh', 'kubernetes', 'lightning_sdk', 'torch', 'IPython') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_error_about_a_missing_library_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "an_engine.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    engine = Engine("odd", "Odd", "an odd one", "an_engine", "Launcher", extra="odd")
    with pytest.raises(LaunchError) as caught:
        make_launcher(engine, {})
    assert str(caught.value) == (
        "--on odd: no_such_library is not installed; install it with: pip install 'monarch_kernel[odd]'"
    )


def test_the_error_about_a_missing_own_module_does_not_ask_to_install() -> None:
    with pytest.raises(LaunchError) as caught:
        make_launcher(replace(ENGINES["ray"], module="monarch_kernel.launch.no_such_engine"), {})
    assert "pip install" not in str(caught.value)


def test_a_launcher_gets_only_given_options_that_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_second_engine.py").write_text(
        "class Launcher:\n"
        "    def __init__(self, **given): self.given = given\n"
        "    def plan(self, hosts): return f'{hosts} of {self.given}'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    engine = Engine("odd", "Odd", "an odd one", "a_second_engine", "Launcher", takes=("gpus",))
    launcher = make_launcher(engine, {"queue": "short"}, python="/p", gpus=8, hosts=())
    assert plan_text(engine, launcher, 2, {}) == "2 of {'queue': 'short', 'gpus': 8}"


def test_plan_text_of_launchers_without_a_plan() -> None:
    text = plan_text(ENGINES["ray"], object(), 4, {"address": "auto", "gpus": 8, "python": ""})  # type: ignore[arg-type]
    command = shlex.join(agent_command())
    assert text == f"would ask Ray for 4 hosts with address=auto, gpus=8, and run on each: {command}"
    text = plan_text(ENGINES["ray"], object(), 1, {"python": "/p"})  # type: ignore[arg-type]
    assert text == "would ask Ray for 1 host, and run on each: " + shlex.join(agent_command("/p"))


@pytest.mark.parametrize(
    ("text", "why"), [("0", "a whole number"), ("x", "a whole number"), ("-1", "a whole number"), ("1.5", "a whole")]
)
def test_invalid_values_are_refused_with_a_reason(text: str, why: str) -> None:
    cpus = next(option for option in ENGINES["slurm"].options if option.field == "cpus")
    with pytest.raises(ValueError, match=why):
        cpus.parse(text)
    assert cpus.parse("4") == 4
    assert EngineOption(("--x",), "x", "?").parse("text") == "text"
