"""Comparison of the clocks of hosts with the controller's."""

from __future__ import annotations

from collections.abc import Iterable

from monarch_kernel.net.transport.base import Peer, host_peer
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import ClockRead, ReadClock
from monarch_kernel.runtime.controller.host_compatibility import Clock
from monarch_kernel.runtime.controller.process_records import HostRecord
from monarch_kernel.runtime.rpc.requests import Send

__all__ = ["note_clock", "read_clock"]


def read_clock(record: HostRecord | None, time_s: float) -> list[Send]:
    """Ask a host agent on another machine for its time; ``time_s`` is ours, in seconds since the epoch."""
    if record is None or not record.is_elsewhere or record.gone:
        return []
    return [Send(host_peer(record.host), pack(ReadClock(time_s)))]


def note_clock(hosts: Iterable[HostRecord], peer: Peer, message: ClockRead, time_s: float) -> None:
    """Note the time that a host agent has answered, at our time ``time_s``."""
    for record in hosts:
        if host_peer(record.host) == peer:
            record.clock = Clock.read(message.sent, message.at, time_s)
