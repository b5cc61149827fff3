"""Finds the kernels of this user that run on this machine, by their connection files."""

from __future__ import annotations

import json
import os
import shlex
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_kernel.errors import MonarchError

__all__ = [
    "CHOOSE_KERNEL",
    "GIVE_FILE",
    "NAMES_KERNELS",
    "ClientError",
    "KernelFile",
    "NotPrivate",
    "find_kernels",
    "no_kernel",
    "read_file",
]

_CONNECT_S = 1.0

NAMES_KERNELS = "python -m monarch_kernel mesh list names the kernels that run"
CHOOSE_KERNEL = "name one with --kernel"
GIVE_FILE = "give the connection file of a kernel that runs as --kernel"
"""What to do at a command line; the server for agents has other words for these."""


class ClientError(MonarchError):
    """A client can't do what it was asked; the text is one line that says why and what to do."""


class NotPrivate(ClientError):
    """A connection file is not used, because other users can read it, or it belongs to one.

    Attributes:
        file: the file.
    """

    def __init__(self, text: str, file: KernelFile) -> None:
        super().__init__(text)
        self.file = file


@dataclass(frozen=True)
class KernelFile:
    """The connection file of a kernel.

    Attributes:
        path: the file.
        notebook: the notebook or console that started the kernel, as far as Jupyter knows it.
        transport: ``tcp`` or ``ipc``.
        ip: the address at which the kernel listens; for ``ipc`` the beginning of the names of its sockets.
        control: the port of the control channel.
    """

    path: Path
    notebook: str
    transport: str
    ip: str
    control: int

    @property
    def id(self) -> str:
        """The id that Jupyter has given to the kernel, from the name of the file."""
        return self.path.stem.removeprefix("kernel-")

    def is_listening(self) -> bool:
        """Whether a process listens at the control port; the files of kernels that were killed stay."""
        if self.transport == "ipc":
            return Path(f"{self.ip}-{self.control}").is_socket()
        try:
            with socket.create_connection((self.ip, self.control), _CONNECT_S):
                return True
        except OSError:
            return False

    def is_named(self, name: str) -> bool:
        """Whether a user means this kernel: by the file, the notebook, the beginning of the id, or the end of their paths."""
        paths = [str(self.path), *([self.notebook] if self.notebook else [])]
        is_id = bool(name) and self.id.startswith(name.removeprefix("kernel-"))
        return is_id or any(path == name or path.endswith(f"/{name.lstrip('/')}") for path in paths)


def read_file(path: Path) -> KernelFile:
    """Read a connection file.

    Raises:
        ClientError: there is no such file, or it is no connection file.
        NotPrivate: other users can read it, or it belongs to one.
    """
    try:
        found = path.stat()
        about: Any = json.loads(path.read_text(encoding="utf-8"))
        transport, ip, control = str(about["transport"]), str(about["ip"]), int(about["control_port"])
    except FileNotFoundError:
        raise ClientError(f"there is no kernel {path}: {NAMES_KERNELS}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClientError(
            f"{path} is no connection file of a kernel ({type(error).__name__}: {error}): {NAMES_KERNELS}"
        ) from None
    file = KernelFile(path, str(about.get("jupyter_session") or ""), transport, ip, control)
    if found.st_uid != os.geteuid():
        raise NotPrivate(f"{path} belongs to another user: a kernel is only for the user who started it", file)
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise NotPrivate(
            f"other users have access to {path} (its mode is {stat.S_IMODE(found.st_mode):04o}), so they can run code in the "
            f"kernel: chmod 600 {shlex.quote(str(path))}",
            file,
        )
    return file


def find_kernels(name: str = "") -> tuple[list[KernelFile], list[str]]:
    """List the kernels that listen, the newest first.

    Args:
        name: the kernel that the user means: its connection file, its id or the beginning of that, or its notebook; empty: all.

    Returns:
        The kernels, and why others are left out.

    Raises:
        ClientError: no kernel that listens has this name, or other users can read the files of those that have it.
    """
    if name.endswith(".json") and Path(name).is_file():
        files: list[KernelFile | NotPrivate] = [read_file(Path(name).absolute())]
    else:
        files = [each for each in _files() if not name or _file_of(each).is_named(name)]
    listening = [each for each in files if _file_of(each).is_listening()]
    found = [each for each in listening if isinstance(each, KernelFile)]
    left_out = [str(each) for each in listening if isinstance(each, NotPrivate)]
    if name and not found:
        raise ClientError(
            "; ".join(left_out) or f"the kernel {name} {'has ended' if files else 'is not known'}: {NAMES_KERNELS}"
        )
    return found, left_out


def _file_of(found: KernelFile | NotPrivate) -> KernelFile:
    return found if isinstance(found, KernelFile) else found.file


def no_kernel() -> str:
    """Say that no kernel was found, and where kernels are looked for."""
    from jupyter_core.paths import jupyter_runtime_dir

    return (
        f"no kernel with meshes has a connection file in {jupyter_runtime_dir()}: start a notebook with the kernel Python "
        f"(Monarch), or {GIVE_FILE}"
    )


def _files() -> Iterator[KernelFile | NotPrivate]:
    """Yield the connection files in the runtime directory, or why one is not used, the newest first."""
    from jupyter_core.paths import jupyter_runtime_dir

    for path in sorted(Path(jupyter_runtime_dir()).glob("*.json"), key=_changed_at, reverse=True):
        try:
            yield read_file(path)
        except NotPrivate as error:
            yield error
        except ClientError:  # a file of something else, such as a server
            continue


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # the kernel has just ended
        return 0.0
