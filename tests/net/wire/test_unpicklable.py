"""An error about a value that can't be sent has the path to the part of it that can't be pickled."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from monarch_kernel.errors import PayloadError
from monarch_kernel.net.wire.codec import dump, dump_call, load, trace
from monarch_kernel.net.wire.unpicklable import find_culprit, traced

LOCK = threading.Lock()


class Config:
    def __init__(self) -> None:
        self.opt = {"a": [1, {"lock": threading.Lock()}]}


class Slotted:
    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner = (0, threading.Lock())


@dataclasses.dataclass
class Data:
    rows: Any


class Pair(NamedTuple):
    left: Any
    right: Any


class Hooked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        self.body[1].guard = threading.Lock()


class Made:
    """Its state has a lock that it does not have itself."""

    def __getstate__(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


def closure() -> Callable[[], Any]:
    held = {"door": threading.Lock()}
    return lambda: held


def of_class_with_lock() -> object:
    class Cached:
        cache: ClassVar[dict[str, Any]] = {"door": threading.Lock()}

    return Cached()


def uses_global() -> Callable[[], Any]:
    names: dict[str, Any] = {"__name__": "__main__", "door": [threading.Lock()]}
    exec("def enter():\n    return [d for d in (lambda: door)()]", names)
    function: Callable[[], Any] = names["enter"]
    return function


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Config(), "v.opt['a'][1]['lock']"),
        (Slotted(), "v.inner[1]"),
        (Data([Pair(1, threading.Lock())]), "v.rows[0].right"),
        ({(1, 2): threading.Lock()}, "v[<tuple>]"),
        (Hooked(), "v.body.1.guard"),
        ([Made(), Made()], "v[0]"),
        (closure(), "held['door'], where held is in the closure of v"),
        ([of_class_with_lock()], "v[0].__class__.cache['door']"),
        ([uses_global()], "door[0], where door is a global of v[0]"),
        (partial(print, threading.Lock()), "v.args[0]"),
        ({"f": Config().opt["a"].append}, "v['f'].__self__[1]['lock']"),
        ((x for x in "ab"), "v"),
        ([(x for x in "ab")], "v[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_path_leads_to_the_part_that_cannot_be_pickled(value: object, path: str) -> None:
    culprit = find_culprit({"v": value}, trace)
    assert culprit is not None
    assert culprit.path == path
    with pytest.raises(PayloadError, match="can't be pickled") as caught:
        dump(value, "the value for 'v'", roots={"v": value})
    assert culprit.is_root or f", at {path}" in str(caught.value)


def test_values_that_can_be_pickled_have_no_culprit() -> None:
    assert find_culprit({"a": [1], "b": lambda: 1}, trace) is None


def test_nesting_that_is_too_deep_has_no_path() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(PayloadError) as caught:
        dump(deep)
    assert ", at " not in str(caught.value)


def test_an_argument_is_named_with_its_path() -> None:
    with pytest.raises(PayloadError) as caught:
        dump_call((1, Config()), {}, ("n", "config"))
    assert str(caught.value) == (
        "argument 'config' (a Config) can't be pickled: TypeError: cannot pickle '_thread.lock' object, "
        "at config.opt['a'][1]['lock']"
    )


def test_a_generator_says_what_to_send_instead() -> None:
    with pytest.raises(PayloadError, match="; send a list of its items, or each item through a Channel$"):
        dump({"rows": (x for x in "ab")}, "the result")


async def _later() -> None: ...


@pytest.mark.parametrize("mode", ["r", "w", "rb", "r+b", "ab"])
def test_an_open_file_is_refused_with_its_path_and_says_what_to_send_instead(mode: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("1,2")
    with (tmp_path / "rows.csv").open(mode) as file:
        with pytest.raises(PayloadError) as caught:
            dump({"rows": [file]}, "the value", roots={"data": {"rows": [file]}})
        assert str(caught.value) == (
            f"the value can't be pickled: TypeError: cannot pickle '_io.{type(file).__name__}' object, "
            "at data['rows'][0]; send its path or its content, and open it there"
        )


def test_text_in_memory_and_standard_streams_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)  # pytest puts a stream of another kind in its place
    text, out = load(*dump((io.StringIO("a"), sys.stdout)))
    assert text.read() == "a"
    assert out is sys.stdout


def test_a_coroutine_says_what_to_send_instead() -> None:
    with (
        contextlib.closing(_later()) as coroutine,
        pytest.raises(PayloadError, match="; await it, and send its result$"),
    ):
        dump(coroutine, "the result")


def test_the_path_for_a_plain_pickler_leads_to_a_lambda() -> None:
    culprit = find_culprit({"rows": [1, {"key": lambda: 1}]}, traced(pickle.Pickler))
    assert culprit is not None
    assert culprit.path == "rows[1]['key']"


def test_the_walk_calls_no_code_of_the_user() -> None:
    class Odd:
        def __init__(self) -> None:
            self.inner = [LOCK]

        @property
        def loud(self) -> None:
            raise AssertionError("a property was read")

        def __getattr__(self, name: str) -> None:
            raise AssertionError(f"{name} was read")

        def __reduce_ex__(self, protocol: Any) -> Any:
            return Odd, (), {"inner": self.inner}

    culprit = find_culprit({"odd": Odd()}, trace)
    assert culprit is not None
    assert culprit.path == "odd.inner[0]"
