"""Clients find the kernels that run by their connection files, and use only files that no other user can read."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel import cli
from monarch_kernel.notebook.clients.command_line import add_mesh, run_mesh
from monarch_kernel.notebook.clients.connection import connect
from monarch_kernel.notebook.clients.kernels import ClientError, find_kernels, read_file

PORTS = {"shell_port": 1, "iopub_port": 1, "stdin_port": 1, "hb_port": 1}  # nothing listens there


@pytest.fixture
def listener() -> Iterator[int]:
    """The port of a process that listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime directory of Jupyter."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def write(folder: Path, id: str, port: int, mode: int = 0o600, **more: object) -> Path:
    path = folder / f"kernel-{id}.json"
    path.write_text(json.dumps({"transport": "tcp", "ip": "127.0.0.1", "control_port": port, "key": "k", **more}))
    path.chmod(mode)
    return path


def free_port() -> int:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return int(closed.getsockname()[1])


def test_kernels_that_have_ended_and_other_files_are_left_out(runtime: Path, listener: int) -> None:
    running = write(runtime, "aaa-1", listener, jupyter_session="/home/u/a.ipynb")
    write(runtime, "bbb-2", free_port())
    (runtime / "jpserver-7.json").write_text(json.dumps({"port": 8888, "token": "t"}))
    (runtime / "broken.json").write_text("{")
    assert [(file.path, file.id, file.notebook) for file in find_kernels()[0]] == [
        (running, "aaa-1", "/home/u/a.ipynb")
    ]


@pytest.mark.parametrize(
    "name", ["aaa-1", "aa", "kernel-aaa-1", "a.ipynb", "u/a.ipynb", "/home/u/a.ipynb", "kernel-aaa-1.json"]
)
def test_a_kernel_is_named_by_its_id_its_notebook_or_its_file(runtime: Path, listener: int, name: str) -> None:
    write(runtime, "aaa-1", listener, jupyter_session="/home/u/a.ipynb")
    write(runtime, "bbb-2", listener, jupyter_session="/home/u/b.ipynb")
    assert [file.id for file in find_kernels(name)[0]] == ["aaa-1"]
    assert [file.id for file in find_kernels(str(runtime / "kernel-bbb-2.json"))[0]] == ["bbb-2"]


def test_without_a_kernel_the_error_names_the_folder_and_the_option(runtime: Path) -> None:
    with pytest.raises(
        ClientError, match=rf"^no kernel with meshes has a connection file in {runtime}: .* as --kernel$"
    ):
        connect("", "t")


def test_errors_tell_an_unknown_kernel_from_one_that_has_ended(runtime: Path) -> None:
    write(runtime, "aaa-1", free_port())
    with pytest.raises(ClientError, match="the kernel aaa has ended: python -m monarch_kernel mesh list"):
        find_kernels("aaa")
    with pytest.raises(ClientError, match=r"the kernel other\.ipynb is not known"):
        find_kernels("other.ipynb")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_file_that_others_can_read_or_write_is_refused(runtime: Path, listener: int, mode: int) -> None:
    path = write(runtime, "aaa-1", listener, mode)
    why = f"(its mode is {mode:04o}), so they can run code in the kernel: chmod 600 {path}"
    refused = f"other users have access to {path} {why}"
    with pytest.raises(ClientError, match=f"^{re.escape(refused)}$"):
        read_file(path)
    assert find_kernels() == ([], [refused])
    with pytest.raises(ClientError, match=f"^{re.escape(refused)}$"):
        find_kernels("aaa")
    write(runtime, "bbb-2", free_port(), mode)  # it has ended
    assert find_kernels() == ([], [refused])


def test_a_list_says_on_stderr_which_kernel_is_left_out_and_why(
    runtime: Path, listener: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(runtime, "aaa-1", listener, 0o644)
    more = {"mesh": cli.Command(add_mesh, run_mesh)}
    assert cli.main(["mesh", "list"], more) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"monarch_kernel: left out: other users have access to {path} (its mode is 0644)")
    assert shown.err.endswith(f": chmod 600 {path}\n")
    assert cli.main(["mesh", "list", "--json"], more) == 1
    shown = capsys.readouterr()
    assert shown.err == ""
    (problem,) = json.loads(shown.out)["problems"]
    assert problem.endswith(f": chmod 600 {path}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(runtime: Path, listener: int) -> None:
    path = write(runtime, "aaa-1", listener)
    os.chown(path, 65534, 65534)
    with pytest.raises(ClientError, match="belongs to another user"):
        read_file(path)


def test_a_file_that_is_none_and_a_missing_one_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="there is no kernel"):
        read_file(tmp_path / "no.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ClientError, match="is no connection file of a kernel"):
        read_file(tmp_path / "list.json")


def test_each_kernel_that_does_not_answer_is_named_with_the_reason(runtime: Path, listener: int) -> None:
    paths = [write(runtime, id, listener, **PORTS) for id in ("aaa-1", "bbb-2")]
    with pytest.raises(ClientError, match="^no kernel can be used; ") as refused:
        connect("", "t", answer_s=0.2)
    for path in paths:
        assert f"the kernel {path} does not answer: it has hung in native code" in str(refused.value)
