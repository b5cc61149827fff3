"""F12: a value can't be pickled; the error has the path to the part that can't, whichever way the value goes."""

from __future__ import annotations

import threading

import pytest

from monarch_kernel.errors import PayloadError, RemoteError
from tests.failures.cells import Cells, shown


class Config:
    def __init__(self) -> None:
        self.opt = {"a": [1, {"lock": threading.Lock()}]}


def test_the_path_in_a_pushed_value_is_named(cells: Cells) -> None:
    with pytest.raises(
        PayloadError, match=r"'cfg' \(a Config\) can't be pickled: .*, at cfg\.opt\['a'\]\[1\]\['lock'\]"
    ):
        cells.mesh["cfg"] = Config()


def test_the_path_in_a_pulled_value_is_named(cells: Cells) -> None:
    cells.ok("import threading, types\nh = types.SimpleNamespace(inner={'deep': [threading.Lock()]})")
    with pytest.raises(RemoteError) as caught:
        cells.mesh["h"]
    assert "cannot pickle '_thread.lock' object, at h.inner['deep'][0]" in shown(caught.value)


def test_the_path_in_a_collective_of_objects_is_named(cells: Cells) -> None:
    text = cells.fails("dist.all_gather_object([None] * 2, {'step': [lambda: 1]})")
    assert "obj['step'][0] (a function) can't be pickled" in text
