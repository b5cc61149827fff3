"""Keeps connections of strangers out of process groups of gloo.

Theory of operation
===================

gloo listens at a separate port for each group. It takes the first connection that begins with the number of a peer for this
peer's, and keeps every other connection until the group is destroyed. So a process that reaches the port while a group is
formed could take the place of a rank, and send pickles that other ranks load. Later, it could open connections until no
descriptor is left, and then gloo ends the process. gloo's traffic has no authentication that could prevent this; its addresses
have, because ranks exchange them in the store of the session (`runtime.worker.store_client`).

- gloo connects ranks once all have published their addresses. While a rank waits for late ranks, its port is closed
  (`closed_ports`), so that nothing can fill its descriptors. The ranks open their ports, and wait until all have, before gloo
  connects them: a packet to a closed port would be sent again only after a second.
- When gloo has connected a rank to all its peers, the rank publishes which connections its listener has accepted, and which it
  has made itself (`Ends`). A connection that a listener has accepted, and that no rank of the group has made, belongs to a
  stranger. Both ends of a connection are compared: another user can connect from the same port as a rank, but not to the same
  port from there.
- The rank cuts these connections, and discards what they have sent, before anything has used the group (`admit`). If gloo may
  have taken one for a peer's, all ranks refuse the group. Most strangers mean no harm, such as a client that connects again and
  again to a program that has ended, and whose port gloo has got. gloo has read no number of a peer from these, or one that it
  does not know, and nothing that follows it: so the group is used. Even if this judgement were wrong, the cut connection could
  not deliver anything: the first use of the group would fail.
- When all ranks have published theirs, each closes its port to all further packets (`close_port`). The listener itself must
  stay: gloo ends the process if it fails.

If connections are made at the first use of the group (``TORCH_GLOO_LAZY_INIT``), the port stays open, and nothing is compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import pwd
import socket
import struct
import termios
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from monarch_kernel.base.text import one_line
from monarch_kernel.train.process_group.sockets import FILTER, NO_FILTER, Socket, duplicate

__all__ = [
    "Ends",
    "admit",
    "close_port",
    "close_ports",
    "closed_ports",
    "ends_of",
    "has_gloo",
    "is_lazy",
    "open_port",
    "strangers_among",
]

_log = logging.getLogger(__name__)

_MOST_NAMED = 3
_MOST_CHARS = 60
"""Of the command of a process."""

_NUMBER_NBYTES = 8
"""A connection begins with the number of the peer that it is for."""

_BYTES_RECEIVED = 128
"""Where ``struct tcp_info`` of Linux has ``tcpi_bytes_received``, which also counts the end of a connection as one."""

_RETURN = 0x06  # BPF_RET | BPF_K: accept so many bytes of the packet, here none


class Ends(NamedTuple):
    """Connections of a rank of a group.

    Attributes:
        host: the name of its host.
        accepted: the connections that gloo's listener has accepted, each as the two ends of the side that made it: from where,
            and to where, as ``address port``.
        made: other connections, in the same form; more than those of gloo.
    """

    host: str
    accepted: Sequence[Sequence[str]]
    made: Sequence[Sequence[str]]


def is_lazy() -> bool:
    """Whether gloo connects ranks at the first use of a group."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in ("1", "true", "yes", "on", "y", "t")


def has_gloo(dist: Any, group: Any) -> bool:
    """Whether gloo connects the ranks of a group, at least for one kind of device.

    With ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, it does so also for groups of other backends, whose wrapper compares the calls of
    ranks.
    """
    with_gloo = tuple(
        found
        for name in ("ProcessGroupGloo", "_ProcessGroupWrapper")
        if (found := getattr(dist.distributed_c10d, name, None)) is not None
    )
    backends = map(group._get_backend, group._device_types)
    return any(isinstance(each, with_gloo) for each in backends)


def admit(group: Any, store: Any, members: Sequence[int], opened: Iterable[Socket], published: Sequence[bytes]) -> None:
    """Compare the connections of a new group of gloo, and cut those of strangers; all its ranks call this.

    Args:
        group: the group.
        store: a store with a prefix that only this group has.
        members: global rank of each rank of the group; all ranks if empty.
        opened: sockets that were opened while the group was made.
        published: what gloo has written to the store.

    Raises:
        ConnectionError: a stranger may have taken the place of a rank; raised on all ranks.
    """
    if is_lazy():
        return
    size, opened = group.size(), list(opened)
    if size == 1:  # gloo listens all the same
        close_ports(opened, published)
        return
    ours = ends_of(opened, published)
    try:
        ends = [Ends(*each) for each in _exchange(store, "ends", group.rank(), range(size), lambda: ours)]
    finally:  # not before: a peer whose place a stranger has taken would wait for the port
        close_ports(opened, published)
    if found := strangers_among(ends):
        judged = _exchange(store, "feared", group.rank(), found, lambda: _cut(opened, published, found[group.rank()]))
        feared = {rank: texts for rank, texts in zip(found, judged, strict=True) if texts}
        if feared:
            places = [(members[rank] if members else rank, ends[rank].host) for rank in feared]
            raise _refusal(places, feared.values())


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


@contextlib.contextmanager
def closed_ports(opened: Callable[[], Iterable[Socket]], published: Sequence[bytes]) -> Iterator[None]:
    """Context in which nothing connects to gloo's listeners; the arguments are those of `close_ports`."""
    with contextlib.ExitStack() as stack:
        for each in () if is_lazy() else opened():
            if (listener := duplicate(each)) is not None:
                stack.enter_context(listener)
                if _is_published(listener, published):
                    close_port(listener)
                    stack.callback(open_port, listener)
        yield


def open_port(listener: socket.socket) -> None:
    """Undo `close_port`."""
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, NO_FILTER, 0)


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
    listeners: set[str] = set()
    connections: list[tuple[str, str]] = []
    for copy, is_listener in _duplicates(opened, published):
        with copy:
            here = _text(copy.getsockname())
            if is_listener:
                listeners.add(here)
            else:
                connections.append((here, _peer_of(copy)))
    accepted = [(there, here) for here, there in connections if here in listeners]
    made = [(here, there) for here, there in connections if here not in listeners]
    return Ends(socket.gethostname(), accepted, made)


def _duplicates(opened: Iterable[Socket], published: Sequence[bytes]) -> Iterator[tuple[socket.socket, bool]]:
    """Duplicate TCP sockets; gives whether each is a listener of gloo. The caller closes the duplicates."""
    for each in opened:
        if (copy := duplicate(each)) is not None:
            yield copy, _is_published(copy, published)


def _accepted(opened: Iterable[Socket], published: Sequence[bytes]) -> Iterator[tuple[socket.socket, str]]:
    """Duplicate the connections that gloo's listeners have accepted; gives where each comes from. The caller closes them."""
    kept = list(_duplicates(opened, published))
    listeners = {_text(copy.getsockname()) for copy, is_listener in kept if is_listener}
    for copy, is_listener in kept:
        if is_listener or _text(copy.getsockname()) not in listeners:
            copy.close()
        else:
            yield copy, _peer_of(copy)


def strangers_among(ends: Sequence[Ends]) -> dict[int, list[str]]:
    """From where connections come that no rank has made, by the rank that accepted them; ``ends`` has those of all ranks."""
    made = {tuple(each) for theirs in ends for each in theirs.made}
    found = {rank: [each[0] for each in theirs.accepted if tuple(each) not in made] for rank, theirs in enumerate(ends)}
    return {rank: theirs for rank, theirs in found.items() if theirs}


def _cut(opened: Iterable[Socket], published: Sequence[bytes], strangers: Sequence[str]) -> list[str]:
    """Cut the connections of strangers; returns those that gloo may have taken for a peer's, each as a text.

    Args:
        opened: as for `close_ports`.
        published: as for `close_ports`.
        strangers: from where the connections come.
    """
    owners = _owners(strangers)
    feared = []
    for connection, there in _accepted(opened, published):
        with connection:
            if there not in strangers:
                continue
            owner = f" ({owners[there]})" if there in owners else ""
            text = (there or "a connection that has ended") + owner
            if _is_a_peers(connection):
                feared.append(text)
            else:
                _log.info("cut a connection to gloo that is no rank's: %s", text)
            _discard(connection)
    return feared


def _is_a_peers(connection: socket.socket) -> bool:
    """Whether gloo may have taken a connection for a peer's.

    If not, gloo has read less than a whole number of a peer, or nothing that follows it.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        (n_received,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED)
        (n_unread,) = struct.unpack("=i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))
    except (OSError, struct.error):  # an operating system without these
        return True
    return n_received >= _NUMBER_NBYTES and not (n_unread and n_received - n_unread <= _NUMBER_NBYTES + 1)  # 1: its end


def _discard(connection: socket.socket) -> None:
    """Shut down a connection, and drop what it has sent, so that no code reads it."""
    with contextlib.suppress(OSError):  # the peer has reset it
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16, socket.MSG_DONTWAIT):
            pass


def _refusal(places: Sequence[tuple[int, str]], strangers: Iterable[Sequence[str]]) -> ConnectionError:
    """The error about strangers; ``places`` has the global ranks and hosts that they have connected to."""
    named = [
        f"rank {rank} on {host} from {each}"
        for (rank, host), theirs in zip(places, strangers, strict=True)
        for each in theirs
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


def _owners(ends: Sequence[str]) -> dict[str, str]:
    """Describe the owners of ends of connections on this machine: the process, or another user.

    An end without an owner is on another machine, or its process has ended.
    """
    wanted = {_in_table(*end.split()): end for end in ends if end and ":" not in end}
    found = {}
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/net/tcp", encoding="ascii") as table:
        for line in list(table)[1:]:
            fields = line.split()
            uid, inode = int(fields[7]), fields[9]
            if (end := wanted.get(fields[1])) is None or inode == "0":  # 0: closed by its process
                continue
            if uid != os.getuid():
                found[end] = f"user {_name_of(uid)}"
            elif process := _process_with(f"socket:[{inode}]"):
                found[end] = process
    return found


def _process_with(inode: str) -> str:
    """Describe the process of this user that has a socket; empty if none has it."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):  # it belongs to another user, or has ended
            if any(_link(f"{folder}/{fd}") == inode for fd in os.listdir(folder)):
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    command = one_line(file.read().replace(b"\0", b" ").decode(errors="replace")).strip()
                return f"pid {pid}, {command[:_MOST_CHARS]}{'…' if len(command) > _MOST_CHARS else ''}"
    return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def _in_table(address: str, port: str) -> str:
    (number,) = struct.unpack("=I", socket.inet_aton(address))
    return f"{number:08X}:{int(port):04X}"


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"with uid {uid}"
