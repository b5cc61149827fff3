"""Ends groups of gloo, and what waits in them.

Theory of operation
===================

When a connection ends, gloo raises an error in the sends and receives that have not started. It forgets the one that it is
writing and the one that it is reading (``Pair::signalException``), and what waits for them waits until the timeout of the
group. Nothing tells from outside whether it is in the middle of a message: the peer may wait for a processor, or for memory.

So no connection ends while gloo may use it. Another socket takes the place of each, takes all that gloo still writes, and
completes what gloo reads (`cut_messages`). The other end stays open meanwhile (`RankGroup.abort`), so that the peers can do the
same. Before, messages that are on their way may arrive; where a process has died, its host agent reads what is sent to it
(`runtime.host.connection_holder`).

gloo then closes all connections of a group, and ends what waits for them, when a wait for one of its receives times out. This
also ends what waits on a connection from which gloo reads nothing more, not even its end. gloo reads a message into the buffer
of the receive that it is for. If the receive was given up meanwhile, gloo finds no buffer, and looks at the same message again
and again (``Pair::prepareRead``, https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/pair.cc). Code gives up a receive
when it drops the ``Work`` of an ``irecv``. gloo itself does so when a collective fails because one connection has ended, while
other peers still send.

Receives from any rank belong to no connection, and end last (`any_source`): gloo may be reading a message into them before.
So do sends and receives that still wait, as of connections that are made at first use, which are only shut down for reading
(`NativeWaits.end_messages`).
"""

from __future__ import annotations

import inspect
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from monarch_kernel.train.process_group.cut_messages import complete, substitutes
from monarch_kernel.train.process_group.native_waits import NativeWaits
from monarch_kernel.train.process_group.sockets import SETTLES_WITHIN_S, Socket, settle
from monarch_kernel.train.process_group.strangers import is_lazy

__all__ = ["end_groups", "gloo_of"]

_AT_ONCE = timedelta(milliseconds=1)
_SOME_SETTLE_WITHIN_S = 0.5
"""How long messages may take to arrive that are of a dead rank, or in a group that is given up, in seconds; less than the host
agent of a dead rank holds its connections.
"""

_TAG = 2**31 - 1
"""The tag of the receives that time out; code that counts its tags up does not come to it."""


def gloo_of(dist: Any, groups: Iterable[Any]) -> list[Any]:
    """Return what is part of gloo in process groups."""
    return [
        backend
        for group in groups
        for backend in map(group._get_backend, group._device_types)
        if isinstance(backend, dist.ProcessGroupGloo)
    ]


def end_groups(
    dist: Any,
    backends: Collection[Any],
    connections: Mapping[Socket, socket.socket],
    waits: NativeWaits,
    waiting: Callable[[], Collection[int]],
    *,
    are_all: bool,
) -> None:
    """End groups, and what waits in them; takes up to two seconds, or longer to complete large messages.

    Args:
        dist: torch.distributed.
        backends: the groups, as `gloo_of` returns them.
        connections: the sockets of these groups, and duplicates of them.
        waits: refuses what is received of messages that were cut, and ends receives from any rank.
        waiting: returns the threads that may wait for a message in native code.
        are_all: whether these are all groups that this process has; else those of a rank that has died, or of a collective that
            was refused.
    """
    began_at = time.monotonic()
    settle(connections.values(), SETTLES_WITHIN_S if are_all else _SOME_SETTLE_WITHIN_S)
    # gloo closes a substitute only when a receive has timed out, and the receive would connect first.
    replaced = {} if is_lazy() else substitutes(connections)
    for each, copy in connections.items():
        if each not in replaced:
            with suppress(OSError):  # the peer has reset it
                copy.shutdown(socket.SHUT_RD)
    try:
        if replaced:
            complete(replaced.values(), waits.received, waiting)
            waits.close(began_at)
            _end_waits(dist, backends)
    finally:
        waits.any_source.end()
        if are_all:
            waits.end_messages(began_at)
        for substitute in replaced.values():
            substitute.close()


def _end_waits(dist: Any, backends: Iterable[Any]) -> None:
    """Make gloo close the connections of groups."""
    wait = inspect.unwrap(dist.Work.wait)
    for backend in backends:
        # Each network interface has its own connections, and the tag chooses among them.
        interfaces = range(len(backend.options._devices))
        for peer in set(range(backend.size())) - {backend.rank()}:
            for context in interfaces:
                with suppress(RuntimeError):  # the connection is closed, or the receive has timed out
                    wait(_receive(backend, peer, _TAG - context), _AT_ONCE)


def _receive(backend: Any, peer: int, tag: int) -> Any:
    import torch

    return backend.recv([torch.empty(1, dtype=torch.uint8)], peer, tag)
