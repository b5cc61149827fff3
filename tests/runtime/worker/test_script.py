"""A script runs in a process that is up, as often as asked, and leaves the process as it was."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monarch_kernel.errors import Failure
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.diagnostics.stacks import Activity, describe_thread
from monarch_kernel.runtime.worker.script import run_script

SCRIPT = """
import json, logging, os, random, sys
import torch
import beside_the_script

class Net: ...

logging.basicConfig(level=logging.INFO)
found = {
    "argv": sys.argv[1:], "name": __name__, "file": __file__, "main": sys.modules["__main__"].Net is Net,
    "beside": beside_the_script.VALUE, "handlers": len(logging.root.handlers), "random": torch.rand(1).item(),
    "variable": os.environ.get("SET_BY_SCRIPT"),
}
os.environ["SET_BY_SCRIPT"] = "1"
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
os.chdir("/")
if len(sys.argv) > 2:
    sys.exit(json.loads(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside_the_script.py").write_text("VALUE = 1\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(script: Path, *more: str) -> dict[str, Any]:
    out = script.parent / "out.json"
    run_script(str(script), [str(out), *more])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_script_is_the_program_and_runs_twice_alike(script: Path) -> None:
    first = run(script)
    (script.parent / "beside_the_script.py").write_text("VALUE = 22\n")
    second = run(script)
    assert first["argv"] == [str(script.parent / "out.json")]
    assert (first["name"], first["file"], first["main"]) == ("__main__", str(script), True)
    assert (first["beside"], second["beside"]) == (1, 22)
    assert {**first, "beside": 0} == {**second, "beside": 0}


def test_its_random_numbers_are_those_of_a_new_process(script: Path) -> None:
    generator = torch.Generator()
    assert run(script)["random"] == torch.rand(1, generator=generator.manual_seed(generator.initial_seed())).item()


def test_the_process_is_as_before(script: Path) -> None:
    def state() -> tuple[object, ...]:
        main = sys.modules["__main__"]
        return list(sys.argv), list(sys.path), dict(os.environ), os.getcwd(), main, list(logging.root.handlers)

    before, generator = state(), torch.get_rng_state()
    run(script)
    assert state() == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert "beside_the_script" not in sys.modules


@pytest.mark.parametrize(("gpus", "seen"), [(0, "3"), (1, "0"), (4, "3")])
def test_a_rank_with_one_gpu_finds_it_as_that_of_its_local_rank(
    script: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, seen: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    script.write_text("import os, sys, pathlib\npathlib.Path(sys.argv[1]).write_text(os.environ['LOCAL_RANK'])\n")
    run_script(str(script), [str(script.parent / "out")])
    assert ((script.parent / "out").read_text(), os.environ["LOCAL_RANK"]) == (seen, "3")


def test_the_end_of_a_script_is_success_or_an_error(script: Path) -> None:
    run(script, "0")
    run(script, "null")
    with pytest.raises(RuntimeError, match=r"train\.py ended by sys\.exit with exit code 3"):
        run(script, "3")
    with pytest.raises(RuntimeError, match="with the message 'no data'"):
        run(script, '"no data"')


def test_an_error_of_a_script_keeps_its_line(script: Path) -> None:
    script.write_text("x = 1\nx / 0\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_script(str(script), [])
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno) == (str(script), 1)


def test_a_report_has_only_frames_of_the_script_and_of_libraries(script: Path) -> None:
    call = f"__import__('monarch_kernel.runtime.worker.script', fromlist=['run_script']).run_script({str(script)!r}, ['3'])"

    def report() -> Failure:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - of several kinds
            exec(compile(call, "<remote cell [1]>", "exec"), {})
        return describe(caught.value)

    script.write_text("import sys\ndef check():\n    raise ValueError(sys.argv[1])\ncheck()\n")
    raised = report()
    assert [(Path(frame.file).name, frame.line) for frame in raised.frames] == [("train.py", 4), ("train.py", 3)]
    assert "run_script" not in raised.traceback
    script.write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    ended = report()
    assert ended.frames == ()
    assert ended.traceback == f"RuntimeError: {script} ended by sys.exit with exit code 3\n"


def test_the_stack_of_a_script_starts_in_the_script(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script.write_text("import json\njson.JSONEncoder(default=json.look).encode(object())\n")
    found: list[Activity] = []
    look = lambda value: found.extend(describe_thread(threading.get_ident(), 1, "main"))  # noqa: E731 - returns None
    monkeypatch.setattr(json, "look", look, raising=False)
    exec(compile(f"run_script({str(script)!r}, [])", "<remote cell [1]>", "exec"), {"run_script": run_script})
    (activity,) = found
    assert [Path(frame.file).name for frame in activity.frames if frame.user][:1] == ["train.py"]


def test_a_missing_script_says_where_it_must_be(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="at the same path on all hosts"):
        run_script(str(tmp_path / "none.py"), [])
    with pytest.raises(ModuleNotFoundError, match=r"no module no_such\.thing|No module named 'no_such'"):
        run_script("no_such.thing", [], is_module=True)


def test_a_module_runs_by_its_name(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    package = script.parent / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import pathlib, sys\nfrom . import beside\npathlib.Path(sys.argv[1]).write_text(__package__)\n"
    )
    (package / "beside.py").write_text("")
    run_script("a_package", [str(script.parent / "out")], is_module=True)
    assert (script.parent / "out").read_text() == "a_package"


def test_what_accelerate_has_found_is_that_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator of a second run would use the process group of the first one, which that has destroyed."""
    shared = {"found by": "a cell"}
    kind = SimpleNamespace(_shared_state=shared)
    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(PartialState=kind))
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "state = sys.modules['accelerate.state'].PartialState._shared_state\n"
        "assert not state, state\n"
        "state['found by'] = 'a script'\n"
    )
    for _ in range(2):
        run_script(str(script), [])
        assert kind._shared_state is shared
        assert shared == {"found by": "a cell"}
