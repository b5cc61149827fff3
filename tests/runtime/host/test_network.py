"""The interface to other hosts is chosen among those of a fictitious machine, and found on this one."""

from __future__ import annotations

import socket

import pytest

from monarch_kernel.runtime.host.network import address_of, interface_among, interface_to, interfaces, own_addresses

NODE = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.5", "fd00::5"],
    "ib0": ["192.168.7.5"],
    "docker0": ["172.17.0.1"],
}


@pytest.mark.parametrize(
    ("leaves_from", "name"),
    [
        (["192.168.7.5", "10.0.0.5"], "ib0"),  # the controller is on a local network
        (["127.0.0.1", "10.0.0.5"], "eth0"),  # it is at the other end of a tunnel
        (["::1", "fd00::5"], "eth0"),
        (["172.30.0.1", "10.0.0.5"], "eth0"),  # the first one is not the address of an interface
        (["127.0.0.1"], "lo"),  # there is no route to other hosts
        ([], "lo"),
    ],
)
def test_the_interface_to_the_controller_is_used_unless_it_is_local(leaves_from: list[str], name: str) -> None:
    assert interface_among(NODE, leaves_from) == name


def test_a_machine_without_any_address_has_no_interface() -> None:
    assert interface_among({}, ["10.0.0.5"]) == ""


def test_the_address_of_this_machine_can_be_reached() -> None:
    name = interface_to(["tcp://127.0.0.1:4321"])
    address = address_of(name)
    assert address in interfaces()[name]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        socket.create_connection(listener.getsockname()[:2], 5).close()


def test_interface_names_may_be_spelled_as_for_gloo_and_nccl() -> None:
    assert address_of("lo") == address_of("=lo") == address_of("lo,eth7") == "127.0.0.1"
    assert address_of("nosuch0") == ""
    assert address_of("") == address_of(interface_to(()))


def test_unresolvable_names_are_skipped() -> None:
    assert interface_to(["tcp://nosuch.invalid:1", "tcp://[::1]:2"]) == interface_to(())


def test_own_addresses_start_with_the_default_route_and_end_with_the_loopback() -> None:
    found = own_addresses()
    assert found[-1] == "127.0.0.1"
    assert len(found) == 1 or found[0] == address_of("", "ipv4")
