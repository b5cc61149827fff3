"""Test beds: several hosts on one machine, each with its own network, address and cable.

Each host is a network namespace, with a cable to another namespace that works as a router. The controller's machine is also a
host, and the test itself is there (`Bed.entered`). Other processes of the machine see nothing of a bed, so several beds don't
conflict; all of a bed ends with the process that has made it.

A cable is a pair of `veth`, as fast as the machine, or a `Wire`, which can lose, delay or cut off frames.
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
        namespace: network namespace of its processes.
        address: IP address of the host.
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
        """Give the command that runs a program on this host."""
        return self.namespace.command(argv)

    def suffer(self, **faults: Any) -> None:
        """Set the `Faults` of the cable, in place of earlier ones."""
        assert self._wire is not None, "this cable has no faults"
        self._faults = Faults(**faults)
        self._wire.set(self._faults)

    def cut(self) -> None:
        """Drop all frames, without closing any connection."""
        assert self._wire is not None, "this cable has no faults"
        self._wire.set(replace(self._faults, is_cut=True))

    def restore(self) -> None:
        """Undo `cut`, and keep the other faults."""
        assert self._wire is not None
        self._wire.set(self._faults)

    def close(self) -> None:
        """Remove the host."""
        if self._wire is not None:
            self._wire.close()
        self.namespace.close()


class Bed:
    """A controller's machine, and hosts.

    Attributes:
        router: forwards packets between all of them.
        controller: the machine of the test.
        hosts: the other hosts, in the order in which they were added.
    """

    def __init__(self) -> None:
        self.router = Namespace()
        self.router.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self.controller = BedHost(self.router, 1, has_faults=False)
        self.hosts: list[BedHost] = []

    def add(self, *, has_faults: bool = True) -> BedHost:
        """Add a host; ``has_faults`` gives it a cable with faults."""
        self.hosts.append(BedHost(self.router, 2 + len(self.hosts), has_faults=has_faults))
        return self.hosts[-1]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move this thread, and all that it starts meanwhile, to the controller's machine."""
        with self.controller.namespace.entered():
            yield

    def close(self) -> None:
        """Remove all of it."""
        for host in (*self.hosts, self.controller):
            host.close()
        self.router.close()
