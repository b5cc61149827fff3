"""``monarch.tools.network``: the addresses of hosts."""

from __future__ import annotations

import enum
import socket
from typing import NoReturn

from monarch_kernel.integrations.monarch.missing import refuse

__all__ = ["AddrType", "get_ipaddr", "get_sockaddr"]


class AddrType(enum.Enum):
    """The kind of an address; ``Default`` is IPv6 where the host has such an address, and else IPv4."""

    Default = 1
    IPv4 = 2
    IPv6 = 3


_FAMILIES = {
    AddrType.Default: (socket.AF_INET6, socket.AF_INET),
    AddrType.IPv4: (socket.AF_INET,),
    AddrType.IPv6: (socket.AF_INET6,),
}


def get_ipaddr(hostname: str, port: int, addr_type: AddrType = AddrType.Default) -> str:
    """Return an address of a host.

    Raises:
        RuntimeError: the host has none of that kind.
    """
    return _find(hostname, port, addr_type)[0]


def get_sockaddr(hostname: str, port: int) -> str:
    """Return an address of a host with a port, such as ``10.0.0.1:8000`` or ``[::1]:8000``.

    Raises:
        RuntimeError: the host has no address.
    """
    address, family = _find(hostname, port, AddrType.Default)
    return f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}"


def _find(hostname: str, port: int, kind: AddrType) -> tuple[str, socket.AddressFamily]:
    for family in _FAMILIES[kind]:
        try:
            found = socket.getaddrinfo(hostname, port, family, socket.SOCK_STREAM)
        except OSError:  # it has none of this family
            continue
        if found:
            return str(found[0][4][0]), family
    raise RuntimeError(f"host {hostname!r} has no address of the kind {kind.name}: check its name, and the network")


def __getattr__(name: str) -> NoReturn:
    refuse("monarch.tools.network", name)
