"""A session: the runtime of this process, its private directory, and the hosts it has launched."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
import threading
from pathlib import Path

from monarch_kernel.agent.logs import LogRecord, read_log
from monarch_kernel.asking.future import Future
from monarch_kernel.controller.runtime import Runtime
from monarch_kernel.launch.local import LocalLauncher
from monarch_kernel.transport.zmq import ZmqRouter

__all__ = ["Session", "close_session", "current_session"]


OUTPUT_WAIT_S = 0.5


class Session:
    """All that one controller owns; the directory (mode 0700) holds its socket and logs.

    Args:
        directory: an empty one, if not a new one.
        token: what ranks and agents must present, if not a new one.
        epoch: how many controllers they have had.
    """

    def __init__(self, directory: Path | None = None, token: str = "", epoch: int = 0) -> None:
        self.pid = os.getpid()
        self.directory = directory or Path(tempfile.mkdtemp(prefix="monarch-"))
        address = f"ipc://{self.directory}/controller"
        self.token = token or secrets.token_hex(16)
        self.runtime = Runtime(ZmqRouter(address), self.token, OUTPUT_WAIT_S, epoch)
        self.runtime.session = self
        self._launcher = LocalLauncher(address, self.directory)
        self._local_host: int | None = None
        self._lock = threading.Lock()

    def local_host(self) -> int:
        """Number of this machine's agent, which is launched if it is not there, or no more."""
        with self._lock:
            if self._local_host is None or self.runtime.host_is_gone(self._local_host):
                self._local_host = self.runtime.add_host(self._launcher)
            return self._local_host

    def record_of(self, proc: int) -> str:
        """The file in which a rank keeps a record of what it runs; empty for none."""
        return ""

    def log(self, proc: int) -> list[LogRecord]:
        """What is kept of a rank's output. Its host is this machine; one elsewhere would have to be asked."""
        return read_log(self.directory, proc)

    def close(self) -> None:
        """End everything; takes as long as the processes take to end."""
        if os.getpid() == self.pid:  # a fork of the controller owns nothing
            self.runtime.close()
            shutil.rmtree(self.directory, ignore_errors=True)


class _Current:
    """The session of this process: what ``this_host()`` means needs no handle, so it is kept here, and only here."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.lock = threading.Lock()


_current = _Current()


def current_session() -> Session:
    """The session of this process; made when it is first asked for."""
    with _current.lock:
        if _current.session is None or _current.session.pid != os.getpid():
            _current.session = Session()
            atexit.register(_current.session.close)
        return _current.session


def close_session() -> Future[None]:
    """End the session of this process, if there is one."""
    with _current.lock:
        session, _current.session = _current.session, None
    if session is not None:
        atexit.unregister(session.close)
        session.close()
    return Future.resolved(None)
