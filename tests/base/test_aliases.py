"""Public modules have a second, shorter name; both names give the same module."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

ALIASES = {
    "monarch_kernel.actor.hosts": "monarch_kernel.actor.host_mesh",
    "monarch_kernel.checkpoint": "monarch_kernel.train.checkpoint",
    "monarch_kernel.checkpoint.saving": "monarch_kernel.train.checkpoint.saving",
    "monarch_kernel.lightning": "monarch_kernel.integrations.lightning",
    "monarch_kernel.parallel": "monarch_kernel.train.parallel",
    "monarch_kernel.snapshots.rewind": "monarch_kernel.train.snapshots.rewind",
    "monarch_kernel.spmd": "monarch_kernel.train.spmd",
    "monarch_kernel.vllm": "monarch_kernel.integrations.vllm",
}


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_gives_the_module_itself(alias: str, name: str) -> None:
    sys.modules.pop(alias, None)
    module = importlib.import_module(alias)
    assert module is importlib.import_module(name)
    assert module.__spec__ is not None
    assert (module.__name__, module.__spec__.name) == (name, name)


def test_from_imports_work() -> None:
    from monarch_kernel.parallel import parallelize

    from monarch_kernel import checkpoint
    from monarch_kernel.train import checkpoint as by_its_name

    assert checkpoint is by_its_name
    assert parallelize.__module__ == "monarch_kernel.train.parallel.parallelize"


def test_an_alias_of_a_module_that_does_not_exist_is_not_found() -> None:
    assert importlib.util.find_spec("monarch_kernel.checkpoint.nope") is None
    with pytest.raises(ModuleNotFoundError, match=r"monarch_kernel\.parallel\.nope"):
        importlib.import_module("monarch_kernel.parallel.nope")
