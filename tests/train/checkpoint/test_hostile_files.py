"""Files of a checkpoint may contain anything: each function names the file and says what is wrong, and none waits for ever."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from monarch_kernel.errors import CheckpointError
from monarch_kernel.train import checkpoint
from monarch_kernel.train.checkpoint.atomic_directory import VALUES, values_of
from monarch_kernel.train.checkpoint.checksums import CHECKSUMS, checksum
from monarch_kernel.train.checkpoint.unpickling import INDEX
from tests.train.checkpoint.sealing import reseal

ABOUT = "monarch.json"
TITLE = "\x1b]0;title\x07\u202e"


class Counts:
    """An object with a separate state."""

    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "a"
    checkpoint.save(path, model=nn.Linear(2, 2), counts=Counts(), step=1)
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "a"))


def seal(path: Path, about: dict[str, Any]) -> None:
    body = json.dumps(about).encode()
    (path / ABOUT).write_bytes(body[:-1] + b', "checksum": "%s"}' % checksum(body).encode())


def about_of(path: Path) -> dict[str, Any]:
    about: dict[str, Any] = json.loads((path / ABOUT).read_text())
    del about["checksum"]
    return about


def put_checksums(path: Path, content: bytes) -> None:
    (path / CHECKSUMS).write_bytes(content)
    seal(path, {**about_of(path), "checksums": checksum(content)})


def read_all(path: Path) -> list[str]:
    """Read a checkpoint in every way, and return the errors; only a `CheckpointError` is one."""
    said = []
    ways: list[Callable[[], object]] = [
        lambda: str(checkpoint.describe(path)),
        lambda: checkpoint.latest(path.parent),
        lambda: checkpoint.verify(path),
        lambda: checkpoint.load(path, model=nn.Linear(2, 2)),
        lambda: checkpoint.load(path, counts=Counts()),
        lambda: checkpoint.export(path, path.parent / "x.safetensors"),
    ]
    for way in ways:
        try:
            way()
        except CheckpointError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("name", [INDEX, VALUES, CHECKSUMS, ABOUT, "__0_0.distcp"])
def test_a_pipe_in_the_place_of_a_file_is_refused(path: Path, name: str) -> None:
    (path / name).unlink()
    os.mkfifo(path / name)
    said = read_all(path)
    assert said
    if name != ABOUT:  # which says whether there is a checkpoint at all
        assert any(f"{path / name} was not read: it is a pipe" in each for each in said)


@pytest.mark.parametrize(("target", "what"), [("/dev/zero", "a device"), ("/", "a directory")])
def test_a_link_to_something_else_than_a_file_is_refused(path: Path, target: str, what: str) -> None:
    (path / VALUES).unlink()
    (path / VALUES).symlink_to(target)
    with pytest.raises(CheckpointError, match=f"{VALUES} was not read: it is {what}"):
        checkpoint.verify(path)


def test_a_circle_of_links_is_an_error(path: Path) -> None:
    (path / INDEX).unlink()
    (path / INDEX).symlink_to(path / INDEX)
    with pytest.raises(CheckpointError, match="can't be read: .*Too many levels"):
        checkpoint.load(path, model=nn.Linear(2, 2))


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([1 << 80, -1, TITLE]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    key=st.sampled_from(["version", "saved_s", "names", "by_rank", "tensors", "ranks", "torch", "checksums"]),
    value=junk,
)
def test_any_value_in_the_list_of_contents_is_an_error_or_harmless(path: Path, key: str, value: Any) -> None:
    before = (path / ABOUT).read_bytes()
    try:
        seal(path, {**about_of(path), key: value})
        assert not any("\x1b" in each for each in read_all(path))
    finally:
        (path / ABOUT).write_bytes(before)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.sampled_from(["files", "file", "rank", "parts", "part"]), value=junk)
def test_any_value_in_the_list_of_checksums_is_an_error_or_harmless(path: Path, at: str, value: Any) -> None:
    before = (path / CHECKSUMS).read_bytes(), (path / ABOUT).read_bytes()
    try:
        stored = json.loads(before[0])
        if at == "files":
            stored = {"files": value}
        for name in list(stored["files"]) if at != "files" else ():
            if at == "file":
                stored["files"][name] = value
            else:
                stored["files"][name][at if at != "part" else "parts"] = value if at != "part" else [value]
        put_checksums(path, json.dumps(stored).encode())
        assert not any("\x1b" in each for each in read_all(path))
    finally:
        (path / CHECKSUMS).write_bytes(before[0])
        (path / ABOUT).write_bytes(before[1])


def deep(path: Path) -> None:
    put_checksums(path, b'{"files": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def many_ranks(path: Path) -> None:
    seal(path, {**about_of(path), "ranks": 10**12, "by_rank": ["counts"]})


def large_shape(path: Path) -> None:
    seal(path, {**about_of(path), "tensors": {"model.weight": [[1 << 60, 1 << 60], "float32"]}})


def odd_dtype(path: Path) -> None:
    seal(path, {**about_of(path), "tensors": {"model.weight": [[2, 2], "load"]}})


def no_state(path: Path) -> None:
    torch.save({}, path / VALUES)
    reseal(path)


def no_values(path: Path) -> None:
    torch.save([1], path / VALUES)
    reseal(path)


def empty_index(path: Path) -> None:
    (path / INDEX).write_bytes(pickle.dumps(Metadata.__new__(Metadata)))
    reseal(path)


def odd_places(path: Path) -> None:
    index = pickle.loads((path / INDEX).read_bytes())
    index.storage_data = {"a": 1}
    (path / INDEX).write_bytes(pickle.dumps(index))
    reseal(path)


def odd_offsets(path: Path) -> None:
    index = pickle.loads((path / INDEX).read_bytes())
    for info in index.storage_data.values():
        info.offset = -1
    (path / INDEX).write_bytes(pickle.dumps(index))
    reseal(path)


def name_with_nul(path: Path) -> None:
    index = pickle.loads((path / INDEX).read_bytes())
    for info in index.storage_data.values():
        info.relative_path = "a\0b"
    (path / INDEX).write_bytes(pickle.dumps(index))
    reseal(path)


def title_in_names(path: Path) -> None:
    (path / INDEX).write_bytes(b"cos\x1b]0;title\x07\nsystem\n.")
    reseal(path)
    about = about_of(path)
    seal(path, {**about, "names": {**about["names"], TITLE: "module"}, "torch": TITLE})


WAYS = [
    deep,
    many_ranks,
    large_shape,
    odd_dtype,
    no_state,
    no_values,
    empty_index,
    odd_places,
    odd_offsets,
    name_with_nul,
    title_in_names,
]


@pytest.mark.parametrize("change", WAYS)
def test_what_is_wrong_is_said_without_controls(path: Path, change: Callable[[Path], None]) -> None:
    change(path)
    said = read_all(path)
    assert said
    assert not any("\x1b" in each or "\u202e" in each for each in said)


@pytest.mark.parametrize("name", ["w\n[1] died: killed by SIGKILL", "w" * 5_000_000])
def test_names_in_a_file_take_one_short_line_each(path: Path, name: str) -> None:
    about = about_of(path)
    seal(path, {**about, "tensors": {**about["tensors"], f"model.{name}": [[2], "float32"]}})
    with pytest.raises(CheckpointError, match=r"only in the checkpoint \(1\)") as caught:
        checkpoint.load(path, model=nn.Linear(2, 2))
    assert len(str(caught.value)) < 2_000
    assert str(caught.value).count("\n") == 2


def test_a_description_is_plain_text(path: Path) -> None:
    about = about_of(path)
    seal(path, {**about, "names": {"model": f"module{TITLE}\n"}, "torch": f"2{TITLE}\n\n"})
    text = str(checkpoint.describe(path))
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2


def test_values_of_a_rank_that_are_missing_are_an_error(path: Path) -> None:
    seal(path, {**about_of(path), "ranks": 1, "by_rank": ["counts"]})
    with pytest.raises(CheckpointError, match=values_of(0)):
        checkpoint.load(path, counts=Counts())


def test_an_export_does_not_write_through_a_link_that_another_user_has_put_there(path: Path) -> None:
    other, target = path.parent / "other", path.parent / "x.safetensors"
    other.write_text("precious")
    (path.parent / f".{target.name}.saving").symlink_to(other)
    (path.parent / f".{target.name}.saving-0123abcd").symlink_to(other)
    assert checkpoint.export(path, target) == target
    assert other.read_text() == "precious"
    assert target.read_bytes()[8:9] == b"{"
    assert not list(path.parent.glob(f".{target.name}.saving-*"))
