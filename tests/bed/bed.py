"""Several hosts on one machine, each with a network, an address and a cable of its own.

Each host is a network namespace, with a cable to another namespace that passes on between them, as a router does. The
controller's is one of them: the test itself is there (`Bed.entered`). Nothing of it is seen from outside, so beds do not get in
each other's way; all of it ends with the process that has made it.

A cable is a pair of `veth`, as fast as the machine, or a `Wire`, on which frames are lost, late, or cut off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tests.bed.namespace import Namespace, why_not
from tests.bed.wire import Faults, Wire

__all__ = ["Bed", "BedHost", "why_not"]


class BedHost:
    """A host: its network, its address, and its cable.

    Attributes:
        namespace: in which its processes are.
        address: at which others reach it.
    """

    def __init__(self, router: Namespace, number: int, *, has_faults: bool) -> None:
        self.namespace = Namespace()
        self.address = f"10.0.{number}.2"
        self._faults = Faults()
        self._wire: Wire | None = None
        port, gateway = f"port{number}", f"10.0.{number}.1"
        if has_faults:
            self._wire = Wire((self.namespace.pid, "net0"), (router.pid, port), number)
        else:
            router.ip("link", "add", port, "type", "veth", "peer", "net0", "netns", str(self.namespace.pid))
        for namespace, interface, address in ((self.namespace, "net0", self.address), (router, port, gateway)):
            namespace.ip("address", "add", f"{address}/24", "dev", interface)
            namespace.ip("link", "set", interface, "up")
        self.namespace.ip("route", "add", "default", "via", gateway)

    def command(self, argv: Sequence[str]) -> tuple[str, ...]:
        """What runs a program on this host."""
        return self.namespace.command(argv)

    def suffer(self, **faults: Any) -> None:
        """Have these `Faults` on the cable, and no others."""
        assert self._wire is not None, "this cable has no faults"
        self._faults = Faults(**faults)
        self._wire.set(self._faults)

    def cut(self) -> None:
        """Have nothing pass, and nobody told."""
        assert self._wire is not None, "this cable has no faults"
        self._wire.set(replace(self._faults, is_cut=True))

    def mend(self) -> None:
        """Have pass what did before the cut."""
        assert self._wire is not None
        self._wire.set(self._faults)

    def close(self) -> None:
        """Take it away."""
        if self._wire is not None:
            self._wire.close()
        self.namespace.close()


class Bed:
    """A controller's machine, and hosts.

    Attributes:
        router: passes on between all of them.
        controller: the machine of the test.
        hosts: in the order in which they were added.
    """

    def __init__(self) -> None:
        self.router = Namespace()
        self.router.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self.controller = BedHost(self.router, 1, has_faults=False)
        self.hosts: list[BedHost] = []

    def add(self, *, has_faults: bool = True) -> BedHost:
        """One more host; whether its cable can be made to fail."""
        self.hosts.append(BedHost(self.router, 2 + len(self.hosts), has_faults=has_faults))
        return self.hosts[-1]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and what it starts, are on the controller's machine."""
        with self.controller.namespace.entered():
            yield

    def close(self) -> None:
        """Take all of it away."""
        for host in (*self.hosts, self.controller):
            host.close()
        self.router.close()
