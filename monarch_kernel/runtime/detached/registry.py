"""Registry of meshes that outlive their kernels: a directory for each mesh, locked by the controller that owns it.

Theory of operation
===================

The path of a mesh is stable: ``ROOT/NAME``. The directory contains

- ``controller``: the socket. The ranks connect to it again when another controller binds it;
- ``manifest``: what that controller needs, including the token. It is written when the mesh is up; until then the mesh ends
  with its kernel;
- ``lock``: held by the living controller. It is a record lock, which the Linux kernel releases when the process ends for any
  reason, and which a fork of the process does not inherit; ``holder`` has the pid of the process, for messages;
- ``detached``: the time since when there is no controller; written by the host agent, or by a controller that detaches if the
  agents are on other hosts;
- ``alive``: its modification time is when the controller was last alive. It exists if the agents are on other hosts,
  because a killed controller can't write ``detached``;
- ``rank-N``: what each rank runs.

A mesh may be kept for a limited time. A local agent that ends for that reason leaves ``manifest`` and ``detached`` in place, so
that a process that looks for the mesh learns why it is gone. A mesh with agents on other hosts is gone when its time is over
and either its controller detached, or no host answered an attempt to attach. If the only known time is when the controller was
last alive, the mesh is reported to be over but not removed, because the controller may have been silent before it was killed.

The mode of the directories is 0700, that of the files 0600. A directory that belongs to another user, or that other users may
enter, is not trusted: an attacker may have placed it there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_kernel.base.directories import LONGEST_ROOT, is_replaceable
from monarch_kernel.errors import AttachError
from monarch_kernel.net.wire.config import DETACHED, Manifest
from monarch_kernel.runtime.host.processes import open_process, start_ticks

__all__ = ["FoundMesh", "Home", "default_root", "find", "home_of", "span"]

_ALIVE = "alive"
# How long agents take to end when their time is over; twice `lost_after_s` if that is longer: they may notice the loss late.
_ENDING_S = 10.0
_MAX_SOCKET_PATH = 100  # the limit is 107 bytes
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid


def default_root(environment: Mapping[str, str], temporary: str) -> Path:
    """Return the directory of a user's meshes: in the user's runtime directory if there is one, else in ``temporary``.

    If the path of ``temporary`` is too long for sockets, ``/tmp`` takes its place. A directory in which other users can replace
    that of the meshes is not used. If another user has made a directory of that name there first, the user's home takes its
    place, until the last mesh there ends.
    """
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    if os.path.isdir(runtime) and _is_fit(runtime):
        return Path(runtime) / "monarch-kernel"
    is_other_better = os.access("/tmp", os.W_OK) and not is_replaceable("/tmp")
    is_usable = _is_fit(temporary) or (len(os.fsencode(temporary)) <= LONGEST_ROOT and not is_other_better)
    usual = Path(temporary if is_usable else "/tmp") / f"monarch-{os.getuid()}"
    home = environment.get("HOME", "")
    other = Path(home) / ".monarch" / f"run-{os.uname().nodename[:32]}"  # machines may share the home
    if not os.path.isabs(home) or len(os.fsencode(other)) > LONGEST_ROOT:
        return usual
    return other if _is_of_another_user(usual) or os.path.isdir(other) else usual


def _is_fit(root: str) -> bool:
    return len(os.fsencode(root)) <= LONGEST_ROOT and not is_replaceable(root)


@dataclass(frozen=True)
class FoundMesh:
    """A mesh without a kernel, as described by its files.

    Attributes:
        home: its directory.
        manifest: its manifest.
        since: when it lost its kernel, in seconds since 1970.
        ranks: for each rank whether it is alive, and the cell it runs (empty if none); empty if that is unknown.
    """

    home: Home
    manifest: Manifest
    since: float
    ranks: tuple[tuple[bool, str], ...]


class Home:
    """The directory of one mesh."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.path = root / name
        self._lock = -1

    # -- ownership

    def create(self) -> None:
        """Create the directory and lock it.

        Raises:
            AttachError: the directory exists, or its parent can't be trusted.
        """
        if len(os.fsencode(self.path / "controller")) > _MAX_SOCKET_PATH:
            raise AttachError(
                f"the path of a socket in {self.path} would be too long; choose a shorter name, or set XDG_RUNTIME_DIR"
            )
        draft = Home(self.path.parent, f".{self.name}.{secrets.token_hex(4)}")
        for _ in range(100):
            with contextlib.suppress(FileExistsError):
                self.path.parent.mkdir(0o700, parents=True)
            with contextlib.suppress(FileNotFoundError):  # the end of another mesh has just removed the root
                _check_trusted(self.path.parent)
                draft.path.mkdir(0o700)
                break
        draft.lock()
        try:
            os.rename(draft.path, self.path)
        except OSError:
            draft.remove()
            raise AttachError(f"there is already a mesh in {self.path}") from None
        self._lock = draft._lock

    def lock(self) -> None:
        """Take ownership of the mesh, until `unlock` or the end of the process.

        Raises:
            AttachError: another living process owns it, or the directory can't be trusted.
        """
        _check_private(self.path.parent)
        _check_private(self.path)
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # another process has just removed the directory
            raise self._gone() from None
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = _locked_by(fd) or self._holder()
            os.close(fd)
            raise AttachError(
                f"mesh {self.name!r} is attached to another kernel, pid {owner}, which is alive; "
                "end that kernel first, or use the mesh there"
            ) from None
        if not _is_same(fd, self.path / "lock"):  # another process has just removed the locked file
            os.close(fd)
            raise self._gone()
        try:
            _write(self.path / "holder", f"{os.getpid()} {start_ticks(os.getpid())}".encode())
        except FileNotFoundError:  # the host agent has just ended the mesh
            os.close(fd)
            raise self._gone() from None
        self._lock = fd

    def _gone(self) -> AttachError:
        return AttachError(f"mesh {self.name!r} is gone: its processes have ended; bring up another with %mesh up")

    def unlock(self) -> None:
        """Release ownership of the mesh."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.path / "holder")
            os.close(self._lock)
            self._lock = -1

    def owner(self) -> int:
        """Return the pid of the living process that owns the mesh; 0 if there is none."""
        if self._holder() == os.getpid():
            return os.getpid()  # closing any descriptor of the file would release this process's own lock
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return 0
        try:
            return _locked_by(fd)
        finally:
            os.close(fd)

    def _holder(self) -> int:
        """Return the pid in ``holder`` if that process is alive, else 0."""
        try:
            pid, started = map(int, (self.path / "holder").read_bytes().split())
        except (OSError, ValueError):
            return 0
        return pid if start_ticks(pid) == started else 0

    # -- contents

    def manifest(self) -> Manifest:
        """Read the manifest.

        Raises:
            AttachError: it can't be trusted or read.
        """
        _check_private(self.path.parent)
        _check_private(self.path)
        try:
            return Manifest.decode((self.path / "manifest").read_bytes())
        except (OSError, ValueError) as error:
            raise AttachError(
                f"{self.path} holds no mesh that can be attached: {error}; removing it ends what is left of the mesh"
            ) from None

    def is_gone(self) -> bool:
        """Whether the mesh has ended: its agent has, or its kernel has before the mesh was up."""
        if self._lock < 0 and self.owner():
            return False
        try:
            manifest = self.manifest()
        except AttachError:
            return not (self.path / "manifest").exists() and (self._is_ours() or not os.path.lexists(self.path))
        if manifest.elsewhere is not None:
            left, ending_s = self._left_at(), max(_ENDING_S, 2 * manifest.elsewhere.lost_after_s)
            return left is not None and 0 < manifest.keep_s < time.time() - left - ending_s  # else unknown
        pidfd = open_process(manifest.agent_pid, manifest.agent_started)
        if pidfd >= 0:
            os.close(pidfd)
        return pidfd < 0

    def _is_ours(self) -> bool:
        try:
            _check_private(self.path)
        except AttachError:
            return False
        return True

    def time_over(self) -> str:
        """Return a message if the time limit without a kernel is over; empty if it is not, or if that is unknown."""
        if self._lock < 0 and self.owner():
            return ""
        try:
            manifest = self.manifest()
        except AttachError:
            return ""
        since = self.since()
        until = None if since is None or not manifest.keep_s else since + manifest.keep_s
        if until is None or time.time() < until:
            return ""
        clock = time.strftime("%H:%M:%S", time.localtime(until))
        return f"its time is over: it was kept for {span(manifest.keep_s)} without a kernel, until {clock}"

    def since(self) -> float | None:
        """Return since when it has no controller, in seconds since 1970; None if it has one, or if that is unknown.

        If the controller was killed, this is when it was last alive. Only valid in a process that has not attached to the mesh.
        """
        left = self._left_at()
        with contextlib.suppress(FileNotFoundError):
            return (self.path / _ALIVE).stat().st_mtime if left is None else left
        return None

    def _left_at(self) -> float | None:
        """Return when its controller detached; None if it has a controller, or if that was killed."""
        since = _read(self.path / DETACHED).get("since")
        return None if since is None else float(since)

    def write(self, manifest: Manifest) -> None:
        """Write the manifest."""
        _write(self.path / "manifest", manifest.encode())

    def mark_detached(self, since: float) -> None:
        """Record that it has no controller since then."""
        _write(self.path / DETACHED, json.dumps({"since": since}).encode())

    def mark_attached(self) -> None:
        """Record that it has a controller again."""
        self.mark_alive()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / DETACHED)

    def mark_alive(self) -> None:
        """Record that its controller is alive now."""
        with contextlib.suppress(OSError):  # the directory is being removed
            fd = os.open(self.path / _ALIVE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.utime(fd)
            finally:
                os.close(fd)

    def look(self) -> FoundMesh:
        """Read the files of a mesh without a kernel.

        Raises:
            AttachError: they can't be trusted or read.
        """
        manifest = self.manifest()
        since = self.since()
        ranks = []
        for spec in manifest.specs if manifest.elsewhere is None else ():
            record = _read(Path(spec.record))
            ticks = start_ticks(int(record.get("pid", 0)))
            is_it = ticks == record.get("started", ticks)  # else another process has the pid now
            ranks.append((ticks > 0 and is_it, str(record.get("runs", ""))))
        return FoundMesh(self, manifest, time.time() if since is None else since, tuple(ranks))

    def remove(self) -> None:
        """Remove the directory, which must be locked; other processes may reuse the name immediately."""
        trash = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            os.rename(self.path, trash)
        self.unlock()
        shutil.rmtree(trash, ignore_errors=True)
        with contextlib.suppress(OSError):  # there are other meshes
            self.path.parent.rmdir()


def home_of(root: Path, name: str) -> Home | None:
    """Return the directory of a mesh; None if there is none, or if the mesh has ended, which removes its directory."""
    home = Home(root, name)
    if not os.path.lexists(home.path):
        return None
    if home.is_gone():
        with contextlib.suppress(AttachError):  # another process was faster
            home.lock()
            if home.is_gone():
                home.remove()
        return None
    return home


def find(root: Path) -> Iterator[Home]:
    """Yield the directories of all meshes, including those that have ended."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(root)):
            if name.isidentifier():
                yield Home(root, name)


def span(seconds: float) -> str:
    """Format a duration in the units of the command line: ``45 s``, ``30 m``, ``2 h``."""
    for unit, size in (("h", 3600.0), ("m", 60.0)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def _is_of_another_user(path: Path) -> bool:
    try:
        return os.lstat(path).st_uid != os.geteuid()
    except OSError:
        return False


def _check_private(path: Path) -> None:
    try:
        _check_trusted(path)
    except FileNotFoundError:
        raise AttachError(f"{path} does not exist") from None


def _check_trusted(path: Path) -> None:
    """Check that only this user can access a directory.

    Raises:
        AttachError: it belongs to another user, is accessible to others, or is not a directory.
        FileNotFoundError: it does not exist.
    """
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise AttachError(f"{path} is not a directory; remove it")
    if found.st_uid != os.geteuid():
        raise AttachError(
            f"{path} belongs to another user (uid {found.st_uid}), and is not used; set XDG_RUNTIME_DIR to a "
            "directory that belongs to you alone, and restart the kernel"
        )
    if found.st_mode & 0o077:
        raise AttachError(
            f"{path} can be entered by other users (mode {stat.S_IMODE(found.st_mode):04o}), and is not used; "
            f"if nobody has tampered with it: chmod 700 {path}"
        )


def _locked_by(fd: int) -> int:
    """Return the pid of another process with a record lock on a file, 0 if none; query the lock without trying to take it."""
    kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)))
    return 0 if kind == fcntl.F_UNLCK else int(pid) or -1  # the pid is unknown if it is in another container


def _is_same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
    os.replace(draft, path)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
