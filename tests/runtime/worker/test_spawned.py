"""What a process that a cell starts by ``spawn`` or ``forkserver`` has of the cells."""

from __future__ import annotations

import json
import multiprocessing.process
import multiprocessing.spawn
import pickle
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_kernel.actor import ProcMesh
from monarch_kernel.runtime.worker import spawned
from monarch_kernel.runtime.worker.script import run_script
from monarch_kernel.runtime.worker.spawned import fill, give_definitions, missing
from tests.support.waiting import LONG_S

CELL = """
import math
from enum import Enum
K = 10
class Mode(Enum):
    FAST = 1
class Base:
    def size(self): return helper(2)
class Child(Base):
    pass
def helper(x): return math.floor(x) * K
def twice(x, times=Mode.FAST): return [helper(x), times]
def change():
    global K
    K = 11
made = Child()
"""

Fill = Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, str]]]


@pytest.fixture
def names() -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(CELL, found)
    return found


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> Fill:
    """Copies variables as for another process."""
    monkeypatch.setattr(spawned, "_main", {})
    return lambda names: fill(spawned._definitions(names))


def test_functions_find_the_variables_of_the_copy(names: dict[str, Any], filled: Fill) -> None:
    copied, absent = filled(names)
    assert not absent
    assert copied["twice"](3.5)[0] == 30
    assert copied["made"].size() == 20
    copied["change"]()
    assert copied["helper"](1) == 11
    assert names["helper"](1) == 10


def test_classes_are_one_class_in_the_copy(names: dict[str, Any], filled: Fill) -> None:
    copied, _ = filled(names)
    assert isinstance(copied["made"], copied["Child"])
    assert issubclass(copied["Child"], copied["Base"])
    assert copied["twice"](1)[1] is copied["Mode"].FAST


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), torch.zeros(100_000), torch.zeros(3, device="meta"), list(range(100_000))],
    ids=["lock", "large", "device", "list"],
)
def test_what_is_large_or_belongs_to_the_process_is_left_out(
    names: dict[str, Any], filled: Fill, value: object
) -> None:
    copied, absent = filled(names | {"value": value, "small": torch.ones(3)})
    assert list(absent) == ["value"]
    assert "value" not in copied
    assert copied["small"].tolist() == [1, 1, 1]


def test_a_placeholder_can_be_unpickled_but_not_used() -> None:
    late = missing("late", {})
    instance = late.__new__(late)
    instance.__setstate__({"a": 1})
    uses: list[Callable[[], object]] = [lambda: late(3), lambda: instance(), lambda: instance[0], lambda: instance.a]
    for use in uses:
        with pytest.raises(AttributeError, match="does not have 'late' of a cell: it was defined after that process"):
            use()
    with pytest.raises(AttributeError, match="it can't be sent to it \\(it is too large\\)"):
        missing("big", {"big": "it is too large"})()
    with pytest.raises(AttributeError, match="no attribute '__file__'"):
        missing("__file__", {})


def test_definitions_are_carried_without_an_import_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.process, spawned.ATTRIBUTE, b"", raising=False)
    data = pickle.dumps(spawned._Carried(b"x"))
    assert b"monarch_kernel." not in data
    assert pickle.loads(data) is None
    assert getattr(multiprocessing.process, spawned.ATTRIBUTE) == b"x"


def test_a_process_that_a_script_starts_imports_the_script(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = types.ModuleType("__main__")
    vars(main).update(names)
    monkeypatch.setitem(sys.modules, "__main__", main)
    prepare = multiprocessing.spawn.get_preparation_data
    monkeypatch.setattr(multiprocessing.spawn, "get_preparation_data", prepare)
    give_definitions(lambda: vars(main))
    assert multiprocessing.spawn.get_preparation_data("worker")["init_main_from_name"] == spawned.MAIN

    script = tmp_path / "train.py"
    script.write_text(
        "import json, multiprocessing.spawn, pathlib, sys\n"
        "data = multiprocessing.spawn.get_preparation_data('worker')\n"
        "found = {name: data[name] for name in data if name.startswith('init_main')}\n"
        "pathlib.Path(sys.argv[1]).write_text(json.dumps(found))\n"
    )
    run_script(str(script), [str(tmp_path / "found.json")])
    assert json.loads((tmp_path / "found.json").read_text()) == {"init_main_from_path": str(script)}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_pool_runs_functions_of_cells(procs: ProcMesh, method: str) -> None:
    one = procs[0]
    one.run(f"{CELL}\nimport multiprocessing as mp\ndef make(n): return [Child() for _ in range(n)]").get(LONG_S)
    one.run(
        f"with mp.get_context({method!r}).Pool(1) as pool:\n"
        "    results = [child.size() for child in pool.map(make, [2])[0]], pool.map(helper, [1, 2])\n"
        "    def late(x): return x\n"
        "    try: pool.map(late, [1])\n"
        "    except AttributeError as error: told = str(error)"
    ).get(LONG_S)
    one.run("import multiprocessing.forkserver; multiprocessing.forkserver._forkserver._stop()").get(LONG_S)
    results, told = one.run("(results, told)").get(LONG_S).item()
    assert results == ([20, 20], [10, 20])
    assert "does not have 'late' of a cell: it was defined after that process started" in told
