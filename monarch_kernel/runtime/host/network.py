"""Finds the network interface and the address at which other hosts reach this one."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal
from urllib.parse import urlsplit

import psutil

from monarch_kernel.net.wire.config import EVERYWHERE

__all__ = [
    "AddressKind",
    "Interfaces",
    "address_of",
    "interface_among",
    "interface_to",
    "interfaces",
    "listening_addresses",
    "own_addresses",
]

AddressKind = Literal["ipv4", "ipv6"]
Interfaces = Mapping[str, Sequence[str]]
"""Name of an interface -> its addresses, IPv4 first."""

_ELSEWHERE = ("198.51.100.1", "2001:db8::1")
"""Addresses that are never assigned (RFC 5737, RFC 3849); they stand for all remote networks."""

_FAMILIES: dict[AddressKind, socket.AddressFamily] = {"ipv4": socket.AF_INET, "ipv6": socket.AF_INET6}


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine, in the order in which others should try them; the loopback's last."""
    having = interfaces()
    first = interface_to(())
    found = [each for name in (first, *having) for each in having.get(name, ()) if "." in each]
    return [*(each for each in dict.fromkeys(found) if not each.startswith("127.")), "127.0.0.1"]


def listening_addresses(at: str, port: int) -> tuple[str, ...]:
    """Return the addresses at which others reach a port of this machine, the best first; none for port 0.

    Args:
        at: the address of the interface where this machine listens, or `EVERYWHERE`.
        port: the port.
    """
    if not port:
        return ()
    return tuple(f"tcp://{address}:{port}" for address in (own_addresses() if at == EVERYWHERE else [at]))


def interfaces() -> dict[str, list[str]]:
    """Return the interfaces of this machine that are up, without link-local addresses, which are not valid elsewhere."""
    found: dict[str, list[str]] = {}
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, entries in psutil.net_if_addrs().items():
        if name not in up:
            continue
        for family in _FAMILIES.values():
            addresses = [entry.address for entry in entries if entry.family == family]
            found.setdefault(name, []).extend(
                each for each in addresses if not ipaddress.ip_address(each).is_link_local
            )
    return {name: addresses for name, addresses in found.items() if addresses}


def interface_to(addresses: Iterable[str]) -> str:
    """Return the interface by which this machine reaches others; empty if it has none.

    This is the interface to the first of these addresses, such as ``tcp://10.0.0.5:1234``, that is not on this machine itself,
    as the end of a tunnel is. If there is no such address, it is the interface of the default route, else the loopback.
    """
    hosts = [(urlsplit(address).hostname or "") for address in addresses]
    return interface_among(interfaces(), [local for each in (*hosts, *_ELSEWHERE) if (local := _local_address(each))])


def interface_among(having: Interfaces, addresses: Iterable[str]) -> str:
    """Return the interface with the first of these addresses that is not a loopback address; else the loopback."""
    names = {address: name for name, theirs in having.items() for address in theirs}
    named = [address for address in addresses if address in names]
    outward = [address for address in named if not ipaddress.ip_address(address).is_loopback]
    return next((names[address] for address in (*outward, *named, "127.0.0.1", "::1") if address in names), "")


def address_of(interface: str, kind: AddressKind | None = None) -> str:
    """Return the address of an interface that others use; empty if it has none.

    Args:
        interface: its name; the first of several names separated by commas; empty for the interface of the default route.
        kind: kind of the address; by default IPv4 if there is one, as gloo uses it.
    """
    having = interfaces()
    name = interface.partition(",")[0].removeprefix("=") or interface_to(())
    addresses = having.get(name) or next((theirs for each, theirs in having.items() if each.startswith(name)), ())
    wanted = None if kind is None else int(kind[3:])
    return next((each for each in addresses if wanted in (None, ipaddress.ip_address(each).version)), "")


def _local_address(address: str) -> str:
    """Return the source address of packets to another address, without sending any; empty if there is no route."""
    if not address:
        return ""
    try:
        found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""
