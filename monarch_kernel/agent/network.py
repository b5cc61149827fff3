"""Where this machine can be reached by others."""

from __future__ import annotations

import socket

import psutil

__all__ = ["interface_of", "own_addresses"]

_ANYWHERE = ("192.0.2.1", 9)  # of a network for documentation: nothing is sent, only the way there is looked up
_LOOPBACK = "127.0.0.1"


def own_addresses(towards: str = "") -> list[str]:
    """IPv4 addresses of this machine, in the order in which others should try them; the loopback's last.

    Args:
        towards: an address that others are known to be near; left out, the way to anywhere.
    """
    found = [_towards(towards or _ANYWHERE[0])]
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        if name in up:
            found += [each.address for each in addresses if each.family == socket.AF_INET]
    return [*(each for each in dict.fromkeys(found) if each and not each.startswith("127.")), _LOOPBACK]


def interface_of(wanted: str) -> str:
    """Name of the network interface that has an address; empty if none has."""
    found = [name for name, addresses in psutil.net_if_addrs().items() if any(a.address == wanted for a in addresses)]
    return str(found[0]) if found else ""


def _towards(other: str) -> str:
    """The address from which packets to another would come."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, _ANYWHERE[1]))
        except OSError:  # no way there
            return ""
        own: str = probe.getsockname()[0]
        return own
