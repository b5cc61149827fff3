"""Decisions about hosts: silence, the tree, introductions."""

from __future__ import annotations

from monarch_kernel.net.wire.messages import ConnectHost, ForgetHost, UseParent
from monarch_kernel.runtime.controller.host_tree import FAN_OUT, RETURN_S, Hosts
from monarch_kernel.runtime.controller.process_records import HostRecord


def table(count: int, *, elsewhere: bool = True) -> Hosts:
    hosts = Hosts()
    for host in range(1, count + 1):
        hosts[host] = HostRecord(host, up=True, addresses=(f"tcp://h{host}:1",) if elsewhere else ())
        hosts[host].is_elsewhere, hosts[host].lost_after_s = elsewhere, 1.0 if elsewhere else float("inf")
    return hosts


def test_a_host_is_lost_after_too_much_silence() -> None:
    hosts = table(2)
    for _ in range(3):
        assert hosts.listened({1, 2}, 0.3) == []
    for _ in range(3):
        assert hosts.listened({1}, 0.3) == []
    assert hosts.listened({1}, 0.3) == [hosts[2]]


def test_one_message_ends_the_silence_of_a_host() -> None:
    hosts = table(1)
    for i in range(20):
        assert hosts.listened({1} if i % 3 == 2 else set(), 0.4) == []


def test_hosts_on_this_machine_may_be_silent() -> None:
    assert table(1, elsewhere=False).listened(set(), 1e6) == []


def test_hosts_beyond_the_fan_out_are_spread_evenly_over_parents() -> None:
    hosts = Hosts()
    joins = []
    for host in range(1, 3 * FAN_OUT + 1):
        hosts[host] = HostRecord(host, is_elsewhere=True, up=True, addresses=(f"tcp://h{host}:1",))
        joins.append(hosts.place(hosts[host]))
    assert joins[:FAN_OUT] == [None] * FAN_OUT
    assert joins[FAN_OUT] == UseParent(1, ("tcp://h1:1",))
    parents = [record.parent for record in hosts.values() if record.parent]
    assert {parents.count(parent) for parent in parents} == {2}


def test_no_host_of_a_thousand_has_more_followers_than_the_fan_out() -> None:
    hosts = Hosts()
    for host in range(1, 1001):
        hosts[host] = HostRecord(host, is_elsewhere=True, up=True, addresses=("tcp://x:1",))
        hosts.place(hosts[host])
    followers = [sum(record.parent == host for record in hosts.values()) for host in range(1001)]
    assert max(followers) <= FAN_OUT
    assert max(hosts._depth(record) for record in hosts.values()) == 2


def test_followers_of_a_lost_host_get_time_to_come_back() -> None:
    hosts = table(2)
    hosts[2].parent = 1
    lost: list[int] = []
    heard_s = 0.0
    while len(lost) < 2:
        for record in hosts.listened(set(), 0.2):
            record.gone = True
            lost.append(record.host)
            if record.host == 2:
                assert heard_s > 1.0 + RETURN_S - 0.3
        heard_s += 0.2
    assert lost == [1, 2]


def test_two_hosts_are_introduced_once() -> None:
    hosts = table(2)
    assert hosts.introduce(1, 2, b"R9") == [(1, ConnectHost(2, ("tcp://h2:1",), (b"R9",)))]
    assert hosts.introduce(1, 2, b"R10") == [(1, ConnectHost(2, (), (b"R10",)))]
    assert hosts.introduce(2, 1, b"R1") == [(2, ConnectHost(1, (), (b"R1",)))]


def test_introductions_dial_the_host_with_an_address() -> None:
    hosts = table(1)
    hosts[2] = HostRecord(2, up=True)  # this machine, which others can't connect to
    assert hosts.introduce(1, 2, b"R9") == [(1, ConnectHost(2, (), (b"R9",))), (2, ConnectHost(1, ("tcp://h1:1",), ()))]


def test_introduced_hosts_get_a_message_when_a_host_is_gone() -> None:
    hosts = table(5)
    hosts.introduce(1, 2, b"R9")
    hosts.introduce(3, 1, b"R1")
    hosts.introduce(2, 4, b"R4")
    hosts[1].parent = 5
    hosts[1].gone = hosts[3].gone = True
    assert hosts.part(1) == [(2, ForgetHost(1)), (5, ForgetHost(1))]
    hosts[4].gone = True
    assert hosts.part(4) == [(2, ForgetHost(4))]
    assert hosts.part(2) == []
