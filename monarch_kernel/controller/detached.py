"""Meshes that outlive the process that brought them up: where they are found, who has them, how they are taken up.

Theory of operation
===================

Such a mesh has a session of its own, in a directory with a stable place: ``ROOT/NAME``. There are

- ``controller``: the socket. The ranks connect to it again when another controller binds it;
- ``manifest``: what that controller must know, the token too. Written when the mesh is up; before, it ends with its kernel;
- ``lock``: held by the living controller. It is a record lock, which the Linux kernel drops when the process ends, however it
  does, and which a fork of the process does not inherit; ``holder`` has its pid, for messages;
- ``detached``: written by the host agent while there is no controller;
- ``rank-N``: what each rank runs.

Of a mesh on hosts of an engine these last two are in the directories of its agents. They go on trying to connect to the TCP
port in the manifest, with the keys there, which the next controller listens at; whether they still live is known when it
does. The engine is not asked again: hosts whose agents have ended are its affair, and it gives no others in their places.

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from monarch_kernel.agent.processes import open_process, start_ticks
from monarch_kernel.controller.session import Origin, Session
from monarch_kernel.errors import AttachError, LaunchError
from monarch_kernel.launch.base import HostHandle
from monarch_kernel.launch.local import AdoptedHost
from monarch_kernel.wire.config import DETACHED, AgentConfig, Elsewhere, Manifest
from monarch_kernel.wire.messages import RankSpec

__all__ = ["Found", "Home", "KeptSession", "default_root", "end", "find", "home_of"]

ATTACH_S = 8.0
GRACE_S = 2.0
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
        ranks: of each rank whether it lives, and the cell it runs; empty if none.
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
            _check_private(self.path.parent)
            with contextlib.suppress(
                FileNotFoundError
            ):  # the last mesh there has just ended, and the directory with it
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
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
        self._lock = fd
        _write(self.path / "holder", f"{os.getpid()} {start_ticks(os.getpid())}".encode())

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
            return not (self.path / "manifest").exists() and self._is_ours()
        if manifest.elsewhere is not None:
            return False  # who knows
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

    def write(self, manifest: Manifest) -> None:
        """Say what is there."""
        _write(self.path / "manifest", manifest.encode())

    def look(self) -> Found:
        """What the files say.

        Raises:
            AttachError: they can't be trusted or read.
        """
        manifest = self.manifest()
        since = _read(self.path / DETACHED).get("since", time.time())
        ranks = []
        for spec in manifest.specs:
            if manifest.elsewhere is not None:
                ranks.append((True, ""))
                continue
            record = _read(Path(spec.record))
            ranks.append((start_ticks(int(record.get("pid", 0))) > 0, str(record.get("runs", ""))))
        return Found(self, manifest, float(since), tuple(ranks))

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


class KeptSession(Session):
    """The session of one mesh that outlives this process.

    Args:
        home: its place, which this process has locked.
        manifest: what is there; None for a new mesh.
    """

    def __init__(self, home: Home, manifest: Manifest | None = None) -> None:
        self.home = home
        self._adopted: AdoptedHost | None = None
        self._manifest = manifest
        epoch = 0 if manifest is None else manifest.epoch + 1
        keys = manifest.elsewhere.keys if manifest is not None and manifest.elsewhere is not None else None
        super().__init__(home.path, "" if manifest is None else manifest.token, epoch, keys)
        os.chmod(home.path / "controller", 0o600)

    def _look_after(self) -> None:
        """Nothing: what is left here when we are killed is there for the next controller."""

    def record_of(self, proc: int, *, is_here: bool) -> str:
        """The file in which a rank keeps a record of what it runs, elsewhere its name there."""
        return str(self.directory / f"rank-{proc}") if is_here else f"rank-{proc}"

    def keep(self, name: str, specs: tuple[RankSpec, ...], gpus: bool, device: str, env: dict[str, str]) -> None:
        """Have the mesh, which is up, outlive this process."""
        if self._origins:
            places = self.runtime.places([spec.proc for spec in specs])
            origin = self._origins[places[0]]
            place = Elsewhere(
                origin.launcher.name, self._keys, self._port, origin.lost_after_s, places, max(self._origins) + 1
            )
            here, now = version("monarch_kernel"), time.time()
            self._keep(Manifest(here, name, self.token, now, 0, 0, 0, 0, specs, gpus, device, env, place))
            return
        host = self.local_host()
        pid = self.runtime.agent_pid(host)
        token = self.token
        started = start_ticks(pid)
        here = version("monarch_kernel")
        self.home.write(Manifest(here, name, token, time.time(), 0, host, pid, started, specs, gpus, device, env))
        self.runtime.outlive(host)

    def _keep(self, manifest: Manifest) -> None:
        """Write down where the hosts are, and have those that are there outlive us."""
        assert manifest.elsewhere is not None
        self._manifest = manifest
        self.home.write(manifest)
        for host in dict.fromkeys(manifest.elsewhere.places):
            self.runtime.outlive(host)

    def replace_hosts(self, gone: Collection[int]) -> dict[int, int]:
        """Have others take the places of hosts that are gone, and outlive this process, too.

        Raises:
            LaunchError: the engine has none, or was asked by an earlier controller.
        """
        found = super().replace_hosts(gone)
        if self._manifest is not None and (elsewhere := self._manifest.elsewhere) is not None:
            places = tuple(found.get(host, host) for host in elsewhere.places)
            self._keep(self._manifest.placed(places, max(self._origins) + 1))
        return found

    @classmethod
    def attach(cls, home: Home) -> tuple[KeptSession, Manifest]:
        """Take up the mesh of a place.

        Raises:
            AttachError: it can't be; nothing has changed then.
        """
        home.lock()
        session: KeptSession | None = None
        try:
            manifest = home.manifest()
            here = version("monarch_kernel")
            if manifest.version != here:
                raise AttachError(
                    f"mesh {home.name!r} was brought up by monarch_kernel {manifest.version}, this is {here}; attach it "
                    f"from there, or end it with %mesh down {home.name}"
                )
            if manifest.elsewhere is not None:
                session = cls(home, manifest)
                session._attach_elsewhere(manifest, manifest.elsewhere)
                return session, manifest
            pidfd = open_process(manifest.agent_pid, manifest.agent_started)
            if pidfd < 0:
                raise AttachError(f"mesh {home.name!r} is gone: its host agent (pid {manifest.agent_pid}) has ended")
            session = cls(home, manifest)
            home.write(manifest.at_epoch(manifest.epoch + 1))
            handle = AdoptedHost(manifest.agent_pid, pidfd, home.path / f"agent-{manifest.host}.log")
            session._adopted = handle
            session._local_host = manifest.host
            if not session.runtime.attach({manifest.host: manifest.specs}, {manifest.host: handle}, ATTACH_S):
                raise AttachError(
                    f"the host agent of mesh {home.name!r} (pid {manifest.agent_pid}) does not answer; attach it again when "
                    f"the machine is less busy, or end it with %mesh down {home.name}"
                )
        except BaseException:
            if session is not None:
                session.leave()
            home.unlock()
            raise
        return session, manifest

    def _attach_elsewhere(self, manifest: Manifest, elsewhere: Elsewhere) -> None:
        """Listen where the hosts look for us, and take up those that come."""
        name, port = manifest.name, elsewhere.port
        try:
            self._port = self.runtime.with_baton(lambda: self._transport.listen(port))
        except OSError as error:
            raise AttachError(
                f"mesh {name!r} can't be attached: its hosts look for a controller at port {port} of this machine, and "
                f"another program listens there ({error.strerror})"
            ) from None
        self.home.write(manifest.at_epoch(manifest.epoch + 1))
        hosts: dict[int, list[RankSpec]] = {}
        for place, spec in zip(elsewhere.places, manifest.specs, strict=True):
            hosts.setdefault(place, []).append(spec)
        config = AgentConfig(0, self.token, (), self._keys)
        origin = Origin(_Earlier(elsewhere.engine), config, 0.0, elsewhere.lost_after_s)
        self._origins.update(dict.fromkeys(hosts, origin))
        if not self.runtime.attach(hosts, {}, ATTACH_S, lost_after_s=elsewhere.lost_after_s, known=elsewhere.known):
            raise AttachError(
                f"none of the {len(hosts)} hosts of mesh {name!r} has come to port {port} of this machine within "
                f"{ATTACH_S:g} s; if they still run, see whether they can reach it; %mesh down {name} forgets the mesh"
            )

    def leave(self) -> None:
        """End this process's part; the mesh goes on."""
        if os.getpid() == self.pid:
            if self._origins:
                _write(self.home.path / DETACHED, json.dumps({"since": time.time()}).encode())
            self.runtime.leave()
            if self._adopted is not None:
                self._adopted.release()
            self.home.unlock()

    def close(self) -> None:
        """End the mesh; takes as long as its processes take to end."""
        if os.getpid() == self.pid:
            self.runtime.close(GRACE_S + 3.0, GRACE_S)
            for launcher in self._launchers:
                launcher.close(GRACE_S + 3.0)
            self.home.remove()


class _Earlier:
    """Stands for the launcher of an earlier controller."""

    def __init__(self, name: str) -> None:
        self.name = name

    def launch(self, configs: Sequence[AgentConfig]) -> Sequence[HostHandle]:
        raise LaunchError(
            f"the hosts of this mesh were asked of {self.name} by an earlier kernel, and this one can't ask for another in the "
            "place of one that is lost; slice it out, or end the mesh and bring it up again"
        )

    def progress(self) -> str:
        return ""

    def close(self, timeout_s: float) -> None:
        pass


def end(home: Home) -> int:
    """End a mesh that no kernel has; gives the number of its ranks.

    Raises:
        AttachError: it can't be.
    """
    try:
        session, manifest = KeptSession.attach(home)
        session.close()
    except AttachError:  # it does not answer, or speaks otherwise
        home.lock()
        manifest = home.manifest()
        if (
            manifest.elsewhere is not None
        ):  # should they come back, nobody lets them in, and they can be ended by the engine only
            home.remove()
            return len(manifest.specs)
        pidfd = open_process(manifest.agent_pid, manifest.agent_started)
        AdoptedHost(manifest.agent_pid, pidfd, home.path / f"agent-{manifest.host}.log").close(0.0)
        home.remove()
    return len(manifest.specs)


def _check_private(path: Path) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        raise AttachError(f"{path} is not there") from None
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
