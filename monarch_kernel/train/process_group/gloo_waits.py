"""Ends groups of gloo, and what waits in them.

When a connection ends, gloo raises an error in the sends and receives that have not started. It forgets the one that it is
writing and the one that it is reading (`Pair::signalException`), and what waits for them waits until the timeout of the group.
So an abort first lets messages that are on their way arrive. Where a process has died, its host agent reads what is sent to it
(`runtime.host.connection_holder`), and what it has not sent any more is made up, and refused (`cut_messages`).

Then the connections are shut down for reading. Sometimes gloo does not find out that they have ended: it reads a message into
the buffer of the receive that it is for. If the receive was given up meanwhile, gloo finds no buffer, and reads nothing more
from this connection, not even its end: it looks at the same message again and again, and all later receives from this peer
wait forever (`Pair::prepareRead`, https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/pair.cc). Code gives up a
receive when it drops the ``Work`` of an ``irecv``. gloo itself does so when a collective fails because one connection has
ended, while other peers still send: an abort with many asynchronous collectives pending often comes to that.

gloo closes all connections of a group, and ends what waits for them, when a wait for one of its receives times out.

Receives from any rank belong to no connection, and end last (`any_source`): gloo may be reading a message into them before.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from monarch_kernel.train.process_group.cut_messages import complete, substitutes
from monarch_kernel.train.process_group.native_waits import NativeWaits
from monarch_kernel.train.process_group.sockets import SETTLES_WITHIN_S, Socket, settle, wait_until_closed
from monarch_kernel.train.process_group.strangers import is_lazy

__all__ = ["end_groups", "gloo_of"]

_AT_ONCE = timedelta(milliseconds=1)
_DEAD_SETTLE_WITHIN_S = 0.5
"""How long messages of a dead rank may take to arrive, in seconds; less than its host agent holds its connections."""

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
    of_dead: Collection[Socket],
    waits: NativeWaits,
    waiting: Callable[[], Collection[int]],
) -> None:
    """End groups, and what waits in them; takes up to two seconds, or longer to complete large messages.

    Args:
        dist: torch.distributed.
        backends: the groups, as `gloo_of` returns them.
        connections: the sockets of these groups, and duplicates of them.
        of_dead: those whose peer has died.
        waits: refuses what is received of messages that were cut, and ends receives from any rank.
        waiting: returns the threads that may wait for a message in native code.
    """
    is_quiet = settle(connections.values(), _DEAD_SETTLE_WITHIN_S if of_dead else SETTLES_WITHIN_S)
    # A substitute ends only when gloo closes it, and that takes a receive, which would connect first.
    replaced = substitutes([] if is_lazy() else [each for each in connections if each in of_dead])
    others = {each: copy for each, copy in connections.items() if each not in replaced}
    if not is_quiet and of_dead:
        settle(others.values(), SETTLES_WITHIN_S - _DEAD_SETTLE_WITHIN_S)
    for each in others.values():
        with suppress(OSError):  # the peer has reset it
            each.shutdown(socket.SHUT_RD)
    is_closed = wait_until_closed(others)
    isolated = substitutes(others) if replaced and not is_closed else {}
    try:
        if replaced:
            complete(replaced.values(), isolated.values(), waits.received, waiting)
        if not is_lazy() and (replaced or not is_closed):
            _end_waits(dist, backends)
    finally:
        waits.any_source.end()
        for substitute in (*replaced.values(), *isolated.values()):
            substitute.close()


def _end_waits(dist: Any, backends: Iterable[Any]) -> None:
    """Make gloo close the connections of groups that it does not close itself."""
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
