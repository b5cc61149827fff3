"""Keeps connections of strangers out of process groups of gloo.

Theory of operation
===================

gloo listens at a separate port for each group. It takes the first connection that begins with the number of a peer for this
peer's, and keeps every other connection until the group is destroyed. So a process that reaches the port while a group is
formed could take the place of a rank, and send pickles that other ranks load. Later, it could open connections until no
descriptor is left, and then gloo ends the process. gloo's traffic has no authentication that could prevent this; its addresses
have, because ranks exchange them in the store of the session (`runtime.worker.store`).

- When gloo has connected a rank to all its peers, the rank publishes which connections its listener has accepted, and from
  where it has connected itself (`Ends`). A connection that a listener has accepted, and that no rank of the group has made,
  belongs to a stranger. In this case all ranks refuse the group (`admit`), before anything has used it.
- When all ranks have published theirs, each closes its port to all further packets (`close_port`). The listener itself must
  stay: gloo ends the process if it fails.

If connections are made at the first use of the group (``TORCH_GLOO_LAZY_INIT``), the port stays open, and nothing is compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pwd
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from monarch_kernel.train.process_group.sockets import FILTER, Socket, duplicate

__all__ = ["Ends", "admit", "close_port", "close_ports", "ends_of", "has_gloo", "is_lazy", "strangers_among"]

_MOST_NAMED = 3
_RETURN = 0x06  # BPF_RET | BPF_K: accept so many bytes of the packet, here none


class Ends(NamedTuple):
    """Connections of a rank of a group.

    Attributes:
        host: the name of its host.
        accepted: the other ends of the connections that gloo's listener has accepted, as ``address port``.
        made: this rank's ends of other connections, as ``address port``; more than those of gloo.
    """

    host: str
    accepted: Sequence[str]
    made: Sequence[str]


def is_lazy() -> bool:
    """Whether gloo connects ranks at the first use of a group."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in ("1", "true", "yes", "on", "y", "t")


def has_gloo(dist: Any, group: Any) -> bool:
    """Whether gloo connects the ranks of a group, at least for one kind of device."""
    backends = map(group._get_backend, group._device_types)
    return any(isinstance(each, dist.ProcessGroupGloo) for each in backends)


def admit(group: Any, store: Any, members: Sequence[int], opened: Iterable[Socket], published: Sequence[bytes]) -> None:
    """Compare the connections of a new group of gloo; all its ranks call this.

    Args:
        group: the group.
        store: a store with a prefix that only this group has.
        members: global rank of each rank of the group; all ranks if empty.
        opened: sockets that were opened while the group was made.
        published: what gloo has written to the store.

    Raises:
        ConnectionError: a stranger has connected to a rank; raised on all ranks.
    """
    size = group.size()
    if size == 1 or is_lazy():
        return
    opened = list(opened)
    ours = ends_of(opened, published)
    try:
        ends = [Ends(*each) for each in _exchange(store, "ends", group.rank(), range(size), lambda: ours)]
    finally:  # not before: a peer whose place a stranger has taken would wait for the port
        close_ports(opened, published)
    if found := strangers_among(ends):
        users = _exchange(store, "users", group.rank(), found, lambda: _other_users(found[group.rank()]))
        raise _refusal([(members[rank] if members else rank, ends[rank].host) for rank in found], found.values(), users)


def _exchange(store: Any, kind: str, rank: int, ranks: Iterable[int], ours: Callable[[], Any]) -> list[Any]:
    """Publish a value, if this rank is one of those that have one, and return the values of all these ranks."""
    ranks = list(ranks)
    if rank in ranks:
        store.set(f"monarch/{kind}/{rank}", json.dumps(ours()))
    return [json.loads(bytes(each)) for each in store.multi_get([f"monarch/{kind}/{each}" for each in ranks])]


def close_ports(opened: Iterable[Socket], published: Sequence[bytes]) -> None:
    """Close the ports of gloo's listeners, if gloo has connected this rank to all its peers.

    Args:
        opened: sockets that were opened while the group was made, by gloo or by other threads.
        published: what gloo has written to the store; its listeners are those whose addresses are in there.
    """
    if is_lazy():
        return
    for each in opened:
        if (listener := duplicate(each)) is None:
            continue
        with listener:
            if _is_published(listener, published):
                close_port(listener)


def _is_published(listener: socket.socket, published: Sequence[bytes]) -> bool:
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    name = _in_c(listener.family, listener.getsockname())
    return any(name in value for value in published)


def close_port(listener: socket.socket) -> None:
    """Drop all further packets to a listener; connections that it has accepted stay.

    A filter does this, because gloo ends the process when a listener fails, as it does after ``shutdown``. It has no effect
    where the operating system has no such filters.
    """
    code = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, FILTER, struct.pack("HP", 1, ctypes.addressof(code)))


def ends_of(opened: Iterable[Socket], published: Sequence[bytes]) -> Ends:
    """Return the connections among some sockets; the arguments are those of `close_ports`."""
    listeners: list[str] = []
    connections: list[tuple[str, str]] = []
    for each in opened:
        if (copy := duplicate(each)) is None:
            continue
        with copy:
            here = _text(copy.getsockname())
            if _is_published(copy, published):
                listeners.append(here)
            else:
                connections.append((here, _peer_of(copy)))
    accepted = [there for here, there in connections if here in listeners]
    made = [here for here, _ in connections if here not in listeners]
    return Ends(socket.gethostname(), accepted, made)


def strangers_among(ends: Sequence[Ends]) -> dict[int, list[str]]:
    """The connections that no rank has made, by the rank that has accepted them; ``ends`` has those of all ranks."""
    made = {each for theirs in ends for each in theirs.made}
    found = {rank: [each for each in theirs.accepted if each not in made] for rank, theirs in enumerate(ends)}
    return {rank: theirs for rank, theirs in found.items() if theirs}


def _refusal(
    places: Sequence[tuple[int, str]], strangers: Iterable[Sequence[str]], users: Sequence[Mapping[str, str]]
) -> ConnectionError:
    """The error about strangers; ``places`` has the global ranks and hosts that they have connected to."""
    named = [
        f"rank {rank} on {host} from {each or 'a connection that has ended'}" + (f" (user {user})" if user else "")
        for (rank, host), theirs, known in zip(places, strangers, users, strict=True)
        for each in theirs
        for user in [known.get(each)]
    ]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return ConnectionError(
        "the process group was not used, because a process outside of it connected to a port of gloo while the group was "
        f"formed: {', '.join(named[:_MOST_NAMED])}{more}. It could take the place of a rank. Run the cell again; if this "
        "repeats, find that process (a scanner of ports, or another user of the machine), or use a network that only your "
        "hosts can reach, without NAT between them"
    )


def _peer_of(connection: socket.socket) -> str:
    try:
        return _text(connection.getpeername())
    except OSError:  # reset
        return ""


def _text(name: Sequence[object]) -> str:
    return f"{name[0]} {name[1]}"


def _in_c(family: int, name: Sequence[object]) -> bytes:
    """The address and port of a socket, as ``struct sockaddr`` begins."""
    address, port = str(name[0]), int(str(name[1]))
    flow = bytes(4) if family == socket.AF_INET6 else b""
    return (
        struct.pack("=H", family) + struct.pack("!H", port) + flow + socket.inet_pton(family, address.partition("%")[0])
    )


def _other_users(ends: Sequence[str]) -> dict[str, str]:
    """Find the users of the ends of connections on this machine, other than the own user."""
    wanted = {_in_table(*end.split()): end for end in ends if end and ":" not in end}
    found = {}
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/net/tcp", encoding="ascii") as table:
        for line in list(table)[1:]:
            fields = line.split()
            uid = int(fields[7])
            if (end := wanted.get(fields[1])) and uid != os.getuid() and fields[9] != "0":  # 0: closed by its process
                found[end] = _name_of(uid)
    return found


def _in_table(address: str, port: str) -> str:
    (number,) = struct.unpack("=I", socket.inet_aton(address))
    return f"{number:08X}:{int(port):04X}"


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"with uid {uid}"
