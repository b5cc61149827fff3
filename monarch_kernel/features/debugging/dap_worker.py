"""The rank's part of debugging from an editor: debugpy, which talks to the editor through the mesh's own connections.

Theory of operation. debugpy would listen at a port, or connect to one. Here it gets one end of a pair of sockets instead; two
threads carry bytes between the other end and messages. So the rank has no port that others could connect to, and an editor
reaches ranks on other machines, too.

At a breakpoint debugpy stops all threads of the process. The threads of this package must run, as they carry the commands of
the editor; they are marked as debugpy marks its own threads, and code in this package is not traced at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from monarch_kernel.errors import ForkedError
from monarch_kernel.features.debugging import dap_stops
from monarch_kernel.features.debugging.dap_messages import DapBytes, StartDap
from monarch_kernel.features.debugging.dap_stops import (
    Stops,
    answer_continue_at_once,
    drop_late_steps,
    explain_interrupts,
    is_our_thread,
)
from monarch_kernel.features.debugging.worker import RankDebugger
from monarch_kernel.net.wire.codec import Frame, pack
from monarch_kernel.net.wire.messages import Failed, Payload, Result
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.imports import TRACERS, WAITS
from monarch_kernel.runtime.worker.rank import Rank
from monarch_kernel.runtime.worker.timers import hide

__all__ = ["DapServer"]

_log = logging.getLogger(__name__)

_CHUNK = 1 << 16
_LEAVE_S = 5.0
"""debugpy does within this time what a debugger has asked for before it left."""


@register
class DapServer:
    """Lets one debugger at a time debug this rank.

    Args:
        rank: the rank.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._sessions: dict[int, SimpleQueue[bytes]] = {}
        self._debugger: _Debugger | None = None
        self._serving = threading.Lock()
        rank.extend({StartDap: self._start, DapBytes: self._received})

    def _start(self, message: StartDap, _: Sequence[Frame]) -> None:
        queue: SimpleQueue[bytes] = SimpleQueue()
        if message.session:
            for former in self._sessions.values():
                former.put(b"")
            self._sessions = {message.session: queue}
        threading.Thread(target=self._serve, args=(message, queue), name="monarch-dap", daemon=True).start()

    def _received(self, message: DapBytes, _: Sequence[Frame]) -> None:
        queue = self._sessions.get(message.session)
        if queue is not None:
            queue.put(message.data)
            if not message.data:
                self._sessions.pop(message.session, None)

    def _serve(self, message: StartDap, queue: SimpleQueue[bytes]) -> None:
        """Import debugpy, and carry bytes until the debugger leaves."""
        try:
            debugger = self._debugger = self._debugger or _load(self._rank)
        except Exception as error:
            why = (
                ModuleNotFoundError("this needs debugpy on the rank: pip install debugpy")
                if _is_missing(error)
                else error
            )
            self._rank.send_answer(message.id, pack(Failed(message.id, describe(why))))
            return
        if not message.session:
            self._rank.send_answer(message.id, pack(Result(message.id, Payload())))
            return
        with self._serving:  # what the former debugger leaves behind is gone
            self._carry(debugger, message, queue)

    def _carry(self, debugger: _Debugger, message: StartDap, queue: SimpleQueue[bytes]) -> None:
        ours, theirs = socket.socketpair()
        begin = threading.Thread(target=self._attach, args=(debugger, theirs), name="monarch-dap-attach", daemon=True)
        reader = threading.Thread(target=self._read, args=(ours, message.session), name="monarch-dap-read", daemon=True)
        _hide_our_threads(threading.current_thread(), begin, reader)
        begin.start()
        reader.start()
        self._rank.send_answer(message.id, pack(Result(message.id, Payload())))
        begin.join()  # code that runs after an answer to the editor is traced
        with contextlib.suppress(OSError):  # debugpy has closed its end
            while data := queue.get():
                ours.sendall(data)
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_WR)
        debugger.leave()
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)

    def _attach(self, debugger: _Debugger, connection: socket.socket) -> None:
        try:
            debugger.attach(connection)
        except Exception:  # the rank goes on without a debugger
            _log.exception("debugpy could not be started")
            connection.close()

    def _read(self, connection: socket.socket, session: int) -> None:
        proc = self._rank.spec.proc
        with contextlib.suppress(OSError, ForkedError), connection:
            while data := connection.recv(_CHUNK):
                self._rank.driver.submit(pack(DapBytes(proc, session, data)))
            self._rank.driver.submit(pack(DapBytes(proc, session, b"")))


class _Debugger:
    """debugpy's debugger in this process, which has no public way to take a connection that exists.

    Args:
        pydevd: the module.
        api: its class `PyDevdAPI`.
        folders: folders whose code is not traced.
    """

    def __init__(self, pydevd: Any, api: Any, folders: Sequence[str]) -> None:
        self._pydevd = pydevd
        self._api = api
        self._folders = tuple(folders)
        self._is_made = False

    def attach(self, connection: socket.socket) -> None:
        """Serve a debugger, and trace all threads."""
        pydevd = self._pydevd
        if self._is_made:
            pydevd.get_global_debugger().initialize_network(connection, terminate_on_socket_close=False)
            return

        def connect(debugger: Any, host: str, port: int) -> None:
            debugger.initialize_network(connection, terminate_on_socket_close=False)
            self._is_made = True

        was, pydevd.PyDB.connect = pydevd.PyDB.connect, connect
        try:
            pydevd.settrace(
                host="127.0.0.1",
                port=1,  # nothing listens there, and nothing connects
                suspend=False,
                wait_for_ready_to_run=False,  # else this returns only after the breakpoints are set
                patch_multiprocessing=False,
                notify_stdin=False,
                dont_trace_start_patterns=self._folders,
                protocol="dap",
            )
        finally:
            pydevd.PyDB.connect = was
        self._pydevd.pydevd_tracing.restore_sys_set_trace_func()  # else it warns on stderr of pdb

    def trace_again(self) -> None:
        """Trace this thread after another debugger."""
        known = self._pydevd.get_global_debugger()
        if self._is_made and known is not None:
            known.enable_tracing()

    def leave(self) -> None:
        """Remove the breakpoints of a debugger that has left, and let stopped threads go on."""
        known = self._pydevd.get_global_debugger()
        if self._is_made and known is not None:
            known.reader.join(_LEAVE_S)  # it may still set breakpoints, or disconnect
            self._api().request_disconnect(known, resume_threads=True)


def _load(rank: Rank) -> _Debugger:
    """Import debugpy; ``breakpoint()`` stays that of `RankDebugger`."""
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else it warns on stderr of frozen modules
    hook = sys.breakpointhook
    try:
        import debugpy.server.api
        import pydevd
        from _pydevd_bundle.pydevd_api import PyDevdAPI
        from _pydevd_bundle.pydevd_net_command_factory_json import NetCommandFactoryJson
        from _pydevd_bundle.pydevd_thread_lifecycle import pydevd_find_thread_by_id
    finally:
        sys.breakpointhook = hook
    folder, package = Path(debugpy.__file__).parent, Path(__file__).parents[2]
    debugger = _Debugger(pydevd, PyDevdAPI, [str(folder), str(package)])
    stops = Stops(rank, lambda: PyDevdAPI().request_resume_thread("*"))
    stops.install(pydevd.PyDB)
    answer_continue_at_once(pydevd.ThreadsSuspendedSingleNotification)
    drop_late_steps(PyDevdAPI, pydevd_find_thread_by_id)
    explain_interrupts(NetCommandFactoryJson)
    TRACERS.append(str(folder))
    WAITS.append(dap_stops.__file__)
    if isinstance(rank.debugger, RankDebugger):
        rank.debugger.at_interrupt.append(stops.interrupt)
        rank.debugger.at_trace_end.append(debugger.trace_again)
    return debugger


def _is_missing(error: Exception) -> bool:
    return isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "debugpy"


def _hide_our_threads(*more: threading.Thread) -> None:
    """Mark the threads of this package, which the debugger must neither stop nor list."""
    for thread in (*threading.enumerate(), *more):
        if is_our_thread(thread):
            hide(thread)
