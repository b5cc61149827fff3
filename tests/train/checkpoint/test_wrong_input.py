"""`checkpoint` refuses wrong arguments with the reason and what to write, and writes nothing; without ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_kernel.train import checkpoint
from monarch_kernel.train.checkpoint import CheckpointError

NET = torch.nn.Linear(2, 2)

REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    (
        "save",
        (None,),
        {"step": 1},
        "checkpoint.save() takes the path of a directory, such as 'runs/step-100', not a NoneType",
    ),
    ("save", (5,), {"step": 1}, "checkpoint.save() takes the path of a directory, such as 'runs/step-100', not a int"),
    (
        "save",
        (b"a",),
        {"step": 1},
        "checkpoint.save() takes the path of a directory, such as 'runs/step-100', not a bytes",
    ),
    ("save", ("",), {"step": 1}, "checkpoint.save(''): the path of a directory is empty"),
    ("save", ("a" * 300,), {"step": 1}, "was not saved: a name in the path is too long (OSError); "),
    ("save", ("a\0b",), {"step": 1}, "was not saved: ValueError: embedded null byte; "),
    (
        "save",
        ("x", NET),
        {},
        "each object under its name, not a bare Linear: checkpoint.save(path, model=model, optimizer=",
    ),
    ("save", (NET, "x"), {}, "takes the path of a directory, such as 'runs/step-100', not a Linear"),
    ("save", ("x",), {}, "nothing to save: checkpoint.save(path, model=model"),
    ("save", ("x",), {"step": 1, "wait": "no"}, "checkpoint.save(wait=...) takes True or False, not a str"),
    ("save", ("x",), {"step": 1, "wait": None}, "checkpoint.save(wait=...) takes True or False, not a NoneType"),
    ("save", ("x",), {"not a name": 1}, "'not a name' can't be a name in a checkpoint: use an identifier"),
    ("save", ("x",), {"f": lambda: 1}, "f is a function, which can't be saved so that it is safe to load"),
    ("load", (None,), {}, "there is no checkpoint to load: checkpoint.latest(folder) returned None"),
    ("load", (5,), {}, "checkpoint.load() takes the path of a directory, such as 'runs/step-100', not a int"),
    ("load", ("",), {}, "checkpoint.load(''): the path of a directory is empty"),
    ("load", ("nowhere",), {}, "there is no checkpoint at "),
    ("load", ("nowhere", NET), {}, "not a bare Linear: checkpoint.load(path, model=model, optimizer=optimizer)"),
    ("load", ("x",), {"on_resize": None}, "checkpoint.load(on_resize=None): use 'refuse' or 'reseed'"),
    ("load", ("good",), {"model": None}, "model is a NoneType, without load_state_dict(); load() returns values"),
    ("load", ("good",), {"modell": NET}, "has no 'modell'; it has model (module), step (value)"),
    ("describe", (None,), {}, "checkpoint.describe() takes the path of a directory"),
    ("describe", ("",), {}, "checkpoint.describe(''): the path of a directory is empty"),
    ("verify", (7,), {}, "takes the path of a directory, such as 'runs/step-100', not a int"),
    ("latest", (None,), {}, "checkpoint.latest() takes the path of a directory"),
    ("export", ("good", None), {}, "checkpoint.export() takes the path of a file"),
    ("export", ("good", "x", "modle"), {}, "has no module 'modle'; it has model"),
]


@pytest.mark.parametrize(("function", "args", "given", "says"), REFUSED)
def test_a_wrong_argument_is_refused(
    function: str,
    args: tuple[Any, ...],
    given: dict[str, Any],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save("good", model=NET, step=3)
    call: Callable[..., object] = getattr(checkpoint, function)
    with pytest.raises((TypeError, ValueError, CheckpointError)) as caught:
        call(*args, **given)
    assert says in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["good"]


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    checkpoint.save("~/a", step=3)
    assert checkpoint.load("~/a") == {"step": 3}
    assert checkpoint.latest("~") == checkpoint.describe("~/a").path == tmp_path / "home" / "a"
    assert [each.name for each in tmp_path.iterdir()] == ["home"]
