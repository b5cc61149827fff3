"""Where meshes that outlive their kernels are found, and who has them: a directory for each.

Theory of operation
===================

The place of a mesh is stable: ``ROOT/NAME``. There are

- ``controller``: the socket. The ranks connect to it again when another controller binds it;
- ``manifest``: what that controller must know, the token too. Written when the mesh is up; before, it ends with its kernel;
- ``lock``: held by the living controller. It is a record lock, which the Linux kernel drops when the process ends, however it
  does, and which a fork of the process does not inherit; ``holder`` has its pid, for messages;
- ``detached``: says since when there is no controller; written by the host agent, or, where that is elsewhere, by a controller
  that takes its leave;
- ``alive``: when its controller lived last, by the time of the file, where the host agents are elsewhere: who is killed does
  not take its leave;
- ``rank-N``: what each rank runs.

A mesh may be kept for a limited time. An agent that is here and ends because of that leaves the ``manifest`` and ``detached``,
from which one who looks for the mesh is told why it is gone. One whose agents are elsewhere is gone when its time is over and
its controller took its leave, or hosts were looked for in vain. As long as it is only known when the controller lived last,
which may have been silent before it was killed, the mesh is not removed, but said to be over.

The directories are of mode 0700, the files of 0600. A directory that belongs to another user, or that others may enter, is
not trusted: it may have been put there to be talked to.
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

from monarch_kernel.errors import AttachError
from monarch_kernel.net.wire.config import DETACHED, Manifest
from monarch_kernel.runtime.host.processes import open_process, start_ticks

__all__ = ["Found", "Home", "default_root", "find", "home_of", "span"]

_ALIVE = "alive"
_ENDING_S = 10.0  # of agents whose time is over; twice `lost_after_s` if that is longer: they may not have heard of it
_MAX_SOCKET_PATH = 100  # the limit is 107 bytes
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


def default_root(environment: Mapping[str, str], temporary: str) -> Path:
    """Where a user's meshes are found: what the login gives to each user for such things, or a place in ``temporary``."""
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isdir(runtime):
        return Path(runtime) / "monarch-kernel"
    return Path(temporary) / f"monarch-{os.getuid()}"


@dataclass(frozen=True)
class Found:
    """A mesh that has a kernel no more, as its files tell.

    Attributes:
        home: its place.
        manifest: what it is.
        since: when it was left, in seconds since the epoch of the clock.
        ranks: of each rank whether it lives, and the cell it runs, empty if none; none at all where that is not known.
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

    # -- who has it

    def create(self) -> None:
        """Make the directory, locked.

        Raises:
            AttachError: there is one, or it can't be trusted.
        """
        if len(os.fsencode(self.path / "controller")) > _MAX_SOCKET_PATH:
            raise AttachError(
                f"the path of a socket in {self.path} would be too long; choose a shorter name, or set XDG_RUNTIME_DIR"
            )
        draft = Home(self.path.parent, f".{self.name}.{secrets.token_hex(4)}")
        for _ in range(100):
            with contextlib.suppress(FileExistsError):
                self.path.parent.mkdir(0o700, parents=True)
            with contextlib.suppress(FileNotFoundError):  # the last mesh there has just ended, with the directory
                _check_trusted(self.path.parent)
                draft.path.mkdir(0o700)
                break
        draft.lock()
        try:
            os.rename(draft.path, self.path)
        except OSError:
            draft.remove()
            raise AttachError(f"there is a mesh in {self.path} already") from None
        self._lock = draft._lock

    def lock(self) -> None:
        """Be the one who has the mesh, until `unlock` or the end of the process.

        Raises:
            AttachError: another living process has it, or the directory can't be trusted.
        """
        _check_private(self.path.parent)
        _check_private(self.path)
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # another process has just removed the directory
            raise AttachError(f"mesh {self.name!r} is gone") from None
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = _locked_by(fd) or self._holder()
            os.close(fd)
            raise AttachError(
                f"mesh {self.name!r} is attached to another kernel, pid {owner}, which is alive; "
                "end that kernel first, or use the mesh there"
            ) from None
        if not _is_same(fd, self.path / "lock"):  # another process has just removed what was there
            os.close(fd)
            raise AttachError(f"mesh {self.name!r} is gone")
        try:
            _write(self.path / "holder", f"{os.getpid()} {start_ticks(os.getpid())}".encode())
        except FileNotFoundError:  # the host agent has just ended the mesh
            os.close(fd)
            raise AttachError(f"mesh {self.name!r} is gone") from None
        self._lock = fd

    def unlock(self) -> None:
        """Leave it to others."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.path / "holder")
            os.close(self._lock)
            self._lock = -1

    def owner(self) -> int:
        """Pid of the living process that has it; 0 if none has."""
        if self._holder() == os.getpid():
            return os.getpid()  # closing any descriptor of the file would drop our own lock
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return 0
        try:
            return _locked_by(fd)
        finally:
            os.close(fd)

    def _holder(self) -> int:
        """Who says to have it, and lives."""
        try:
            pid, started = map(int, (self.path / "holder").read_bytes().split())
        except (OSError, ValueError):
            return 0
        return pid if start_ticks(pid) == started else 0

    # -- what is in it

    def manifest(self) -> Manifest:
        """What is there.

        Raises:
            AttachError: it can't be trusted or read.
        """
        _check_private(self.path.parent)
        _check_private(self.path)
        try:
            return Manifest.decode((self.path / "manifest").read_bytes())
        except (OSError, ValueError) as error:
            raise AttachError(
                f"{self.path} holds no mesh that can be attached: {error}; to remove it ends what is left of the mesh"
            ) from None

    def is_gone(self) -> bool:
        """Whether what was there has ended: its agent, or its kernel before the mesh was up."""
        if self._lock < 0 and self.owner():
            return False
        try:
            manifest = self.manifest()
        except AttachError:
            return not (self.path / "manifest").exists() and (self._is_ours() or not os.path.lexists(self.path))
        if manifest.elsewhere is not None:
            left, ending_s = self._left_at(), max(_ENDING_S, 2 * manifest.elsewhere.lost_after_s)
            return left is not None and 0 < manifest.keep_s < time.time() - left - ending_s  # else who knows
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
        """That it was kept without a kernel for as long as it was to be, in words; empty if it was not, or is not known."""
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
        return (
            f"its time is over: it was to be kept for {span(manifest.keep_s)} without a kernel, which was until {clock}"
        )

    def since(self) -> float | None:
        """Since when it has no controller, by the clock (seconds since 1970); None if it has one, or that is not known.

        For one that was killed it is when it lived last. It is for who has not taken the mesh up.
        """
        left = self._left_at()
        with contextlib.suppress(FileNotFoundError):
            return (self.path / _ALIVE).stat().st_mtime if left is None else left
        return None

    def _left_at(self) -> float | None:
        """When its controller took its leave; None if it has one, or that was killed."""
        since = _read(self.path / DETACHED).get("since")
        return None if since is None else float(since)

    def write(self, manifest: Manifest) -> None:
        """Say what is there."""
        _write(self.path / "manifest", manifest.encode())

    def is_left(self, since: float) -> None:
        """Say that it has no controller since then."""
        _write(self.path / DETACHED, json.dumps({"since": since}).encode())

    def is_taken_up(self) -> None:
        """It has one again."""
        self.lives()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / DETACHED)

    def lives(self) -> None:
        """Its controller lives now."""
        with contextlib.suppress(OSError):  # it is being removed
            fd = os.open(self.path / _ALIVE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.utime(fd)
            finally:
                os.close(fd)

    def look(self) -> Found:
        """What the files say.

        Raises:
            AttachError: they can't be trusted or read.
        """
        manifest = self.manifest()
        since = self.since()
        ranks = []
        for spec in manifest.specs if manifest.elsewhere is None else ():
            record = _read(Path(spec.record))
            ticks = start_ticks(int(record.get("pid", 0)))
            is_it = ticks == record.get("started", ticks)  # else another process has the pid by now
            ranks.append((ticks > 0 and is_it, str(record.get("runs", ""))))
        return Found(self, manifest, time.time() if since is None else since, tuple(ranks))

    def remove(self) -> None:
        """Remove it, which must be locked: at once for others, who may bring up another under this name."""
        trash = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            os.rename(self.path, trash)
        self.unlock()
        shutil.rmtree(trash, ignore_errors=True)
        with contextlib.suppress(OSError):  # others are there
            self.path.parent.rmdir()


def home_of(root: Path, name: str) -> Home | None:
    """The place of a mesh that has one; what is left of one that has ended is removed."""
    home = Home(root, name)
    if not os.path.lexists(home.path):
        return None
    if home.is_gone():
        with contextlib.suppress(AttachError):  # somebody else was quicker
            home.lock()
            if home.is_gone():
                home.remove()
        return None
    return home


def find(root: Path) -> Iterator[Home]:
    """The places where meshes are, or were."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(root)):
            if name.isidentifier():
                yield Home(root, name)


def span(seconds: float) -> str:
    """A time as it is written on a command line: ``45 s``, ``30 m``, ``2 h``."""
    for unit, size in (("h", 3600.0), ("m", 60.0)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def _check_private(path: Path) -> None:
    try:
        _check_trusted(path)
    except FileNotFoundError:
        raise AttachError(f"{path} is not there") from None


def _check_trusted(path: Path) -> None:
    """See that a directory is one of ours alone.

    Raises:
        AttachError: it is not.
        FileNotFoundError: it is not there.
    """
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise AttachError(f"{path} is no directory; remove it")
    if found.st_uid != os.geteuid():
        raise AttachError(
            f"{path} belongs to another user (uid {found.st_uid}), and is not used; it must be yours alone"
        )
    if found.st_mode & 0o077:
        raise AttachError(
            f"{path} can be entered by other users (mode {stat.S_IMODE(found.st_mode):04o}), and is not used; "
            f"if nobody has tampered with it: chmod 700 {path}"
        )


def _locked_by(fd: int) -> int:
    """Pid of the other process that has a record lock on a file; 0 if none has. It is asked for, and not tried."""
    kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)))
    return 0 if kind == fcntl.F_UNLCK else int(pid) or -1  # it may be in a container that we can't look into


def _is_same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _write(path: Path, data: bytes) -> None:
    """Write a file whole, or not at all."""
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
