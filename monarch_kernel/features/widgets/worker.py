"""The rank's part of widgets: comms whose other end is the page of the notebook."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import comm
from comm.base_comm import BaseComm

from monarch_kernel.base.after_import import after_import
from monarch_kernel.errors import ForkedError
from monarch_kernel.features.widgets.bars import use_text_bars
from monarch_kernel.features.widgets.captures import capture_in_this_process
from monarch_kernel.features.widgets.messages import CommReceived, CommSent
from monarch_kernel.features.widgets.outbox import Outbox
from monarch_kernel.net.wire.codec import Frame, pack
from monarch_kernel.runtime.diagnostics.mime import structure_problem, with_text_keys
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["EVERY_S", "MAX_COMMS", "Comms"]

EVERY_S = 0.05
"""Minimum interval between two changes of one widget that are sent, in seconds."""

MAX_COMMS = 5_000
"""Number of comms that a rank may have open; a slider has three."""


@register
class Comms:
    """Connects the comms of a rank with the page.

    Args:
        rank: the rank; libraries that make a comm here get one of this rank from now on.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._outbox = Outbox(EVERY_S)
        self._lock = threading.Lock()
        self._is_flushing = False
        rank.extend({CommReceived: self._received}, on_main=True)
        comm.create_comm = self._make
        after_import("ipywidgets.widgets.widget_output", capture_in_this_process)
        after_import("tqdm.notebook", use_text_bars)

    def send(self, message: CommSent) -> None:
        """Send a message to the page, in order; for any thread. Without a controller it is dropped."""
        with self._lock:
            for each in self._outbox.put(message, time.monotonic()):
                self._submit(each)
            must_start = not (self._outbox.is_empty or self._is_flushing)
            self._is_flushing |= must_start
        if must_start:
            threading.Thread(target=self._flush, name="monarch-widgets", daemon=True).start()
        with contextlib.suppress(ForkedError):
            self._rank.displays.wait()

    def _make(self, *args: Any, **options: Any) -> BaseComm:
        return RankComm(self, *args, **options)

    def _flush(self) -> None:
        while True:
            time.sleep(EVERY_S)
            with self._lock:
                if self._outbox.is_empty:
                    self._is_flushing = False
                    return
                for each in self._outbox.flush(time.monotonic()):
                    self._submit(each)

    def _submit(self, message: CommSent) -> None:
        if not self._rank.is_detached():
            with contextlib.suppress(ForkedError):
                self._rank.displays.send(pack(message))

    def _received(self, message: CommReceived, _: Sequence[Frame]) -> None:
        """Deliver a message of the page; an error of a callback is printed, as in a kernel."""
        self._deliver(message)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self._rank.reply(message.id, output=True)

    def _deliver(self, message: CommReceived) -> None:
        manager: Any = comm.get_comm_manager()
        there = manager.comms.get(message.comm)
        if there is None:  # the rank has closed it meanwhile
            return
        content = {"comm_id": message.comm, "data": message.data}
        delivered: Any = {
            "header": {"msg_type": message.kind},
            "metadata": message.metadata,
            "content": content,
            "buffers": [memoryview(buffer) for buffer in message.buffers],
        }
        try:
            with self._rank.main.user_code():
                if message.kind == "comm_close":
                    manager.comm_close(None, None, delivered)
                else:
                    there.handle_msg(delivered)
        except SystemExit as error:
            if self._rank.termination.has_started:
                raise
            print(f"SystemExit: {error.code} (a callback cannot end its rank; use %mesh down)", file=sys.stderr)
        except (Exception, KeyboardInterrupt):
            traceback.print_exc()
        _print_kept_errors()


def _print_kept_errors() -> None:
    """Print errors that libraries have given to IPython to show, as ipywidgets does: the shell of a rank keeps them."""
    from monarch_kernel.runtime.worker.ipython_shell import current_shell  # light ranks do without IPython

    shell = current_shell()
    if shell is not None:
        for error in shell.shown:
            traceback.print_exception(error)
        shell.shown.clear()


class RankComm(BaseComm):
    """A comm of a rank.

    Args:
        comms: sends its messages.
        args: as for every comm, with ``options``.
    """

    def __init__(self, comms: Comms, *args: Any, **options: Any) -> None:
        self._comms = comms
        super().__init__(*args, **options)

    def publish_msg(
        self,
        msg_type: str,
        data: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        buffers: Sequence[Any] | None = None,
        target_name: str = "",
        **keys: Any,
    ) -> None:
        """Send a message to the page.

        Raises:
            RuntimeError: the rank has too many open comms.
            ValueError: the data is too large, too deep, or contains itself.
        """
        for part in (data, metadata):
            if problem := structure_problem(part or {}):
                raise ValueError(f"a message of a widget can't be sent to the page: {problem}")
        if msg_type == "comm_open" and len(comm.get_comm_manager().comms) > MAX_COMMS:
            raise RuntimeError(
                f"this rank has {MAX_COMMS:,} open widget models: close widgets that are not used any more, "
                "with w.close() or ipywidgets.Widget.close_all()"
            )
        self._comms.send(
            CommSent(
                msg_type,
                self.comm_id,
                dict(with_text_keys(data or {})),
                dict(with_text_keys(metadata or {})),
                tuple(bytes(buffer) for buffer in buffers or ()),
                target_name,
            )
        )
