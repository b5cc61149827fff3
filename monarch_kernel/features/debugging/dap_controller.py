"""The controller's part of debugging from an editor: a port of this machine, behind which is a rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from monarch_kernel.errors import Failure, MonarchError
from monarch_kernel.features.debugging.dap_messages import DapBytes, StartDap
from monarch_kernel.launch.port_forward import Tunnel
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Message
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.extensions import Core, Extension, register
from monarch_kernel.runtime.controller.process_records import RankRecord
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.rpc.answers import Answer

__all__ = ["DapExtension", "DapPort"]

_START_S = 60.0
"""debugpy is imported within this time; the first import takes a second."""

_sessions = itertools.count(1)


@register
class DapExtension(Extension):
    """Passes bytes from ranks to the connections of debuggers."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.handlers = {DapBytes: self._received}
        self._sinks: dict[tuple[int, int], Callable[[bytes], object]] = {}

    def open(self, proc: int, session: int, sink: Callable[[bytes], object]) -> None:
        """Pass the bytes of a session on, and no bytes when it ends."""
        self._sinks[proc, session] = sink

    def close(self, proc: int, session: int) -> None:
        """End a session."""
        sink = self._sinks.pop((proc, session), None)
        if sink is not None:
            sink(b"")

    def may_send(self, proc: int, message: Message) -> bool:
        return isinstance(message, DapBytes) and message.proc == proc

    def process_lost(self, proc: int) -> list[Effect]:
        for key in [key for key in list(self._sinks) if key[0] == proc]:
            self.close(*key)
        return []

    def closed(self) -> None:
        for key in list(self._sinks):
            self.close(*key)

    def _received(self, record: RankRecord, message: DapBytes, now: float) -> list[Effect]:
        sink = self._sinks.get((record.spec.proc, message.session))
        if sink is None:
            self.core.dropped_messages += 1
        elif message.data:
            sink(message.data)
        else:
            self.close(record.spec.proc, message.session)
        return []


class DapPort:
    """A port of the loopback interface at which debuggers of this user find a rank, one at a time.

    Args:
        runtime: the controller.
        proc: the process of the rank.

    Attributes:
        port: the port.

    Raises:
        RuntimeError: the rank can't be debugged; the text says why.
    """

    def __init__(self, runtime: Runtime, proc: int) -> None:
        self._runtime = runtime
        self._proc = proc
        self._extension = runtime.extension(DapExtension)
        self._ask(0)
        self._tunnel = Tunnel(self._connect, "monarch-dap", only_one=True)
        self.port = int(self._tunnel.address.rpartition(":")[2])

    @property
    def is_over(self) -> bool:
        """Whether the session has been shut down."""
        return self._runtime.closed

    def close(self) -> None:
        """End the connection, and close the port."""
        self._tunnel.close()

    def _connect(self) -> _RankConnection:
        """Start a session on the rank.

        Raises:
            OSError: the rank can't be debugged.
        """
        session = next(_sessions)
        connection = _RankConnection(self._runtime, self._extension, self._proc, session)
        try:
            self._ask(session)
        except (MonarchError, RuntimeError) as error:
            connection.close()
            raise ConnectionRefusedError(str(error)) from None
        return connection

    def _ask(self, session: int) -> None:
        """Make the rank serve a session; 0 for none.

        Raises:
            RuntimeError: the rank can't be debugged.
        """
        future = self._runtime.ask((self._proc,), lambda id: pack(StartDap(id, session)), _first)
        if not future.wait(_START_S):
            future.cancel()
            raise RuntimeError(f"the rank has not answered within {_START_S:.0f} s: native code holds its interpreter")
        answer = future.get()
        if isinstance(answer, Failure):
            raise RuntimeError(answer.message)


class _RankConnection:
    """A session on a rank, with the methods of a socket."""

    def __init__(self, runtime: Runtime, extension: DapExtension, proc: int, session: int) -> None:
        self._runtime = runtime
        self._extension = extension
        self._key = proc, session
        self._received: SimpleQueue[bytes] = SimpleQueue()
        self._is_over = False
        extension.open(proc, session, self._received.put)

    def recv(self, nbytes: int, /) -> bytes:
        """Wait for bytes of the rank; none at the end."""
        return self._received.get()

    def sendall(self, data: bytes, /) -> None:
        """Send bytes to the rank."""
        proc, session = self._key
        self._runtime.tell((proc,), pack(DapBytes(proc, session, data)))

    def shutdown(self, how: int, /) -> None:
        """End the session on both sides."""
        if not self._is_over:
            self._is_over = True
            if not self._runtime.closed:
                self.sendall(b"")
        self._extension.close(*self._key)

    def close(self) -> None:
        """End the session."""
        self.shutdown(2)


def _first(answers: Sequence[Answer]) -> Answer:
    return answers[0]
