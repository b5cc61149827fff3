"""Invalid messages of a faulty host that has the keys: they are dropped and counted, and harm no other host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.net.hosts.relay import Relay
from monarch_kernel.net.wire.codec import Frame, WireError
from monarch_kernel.net.wire.envelope import MAX_HOST, MAX_NAME_NBYTES, Beat, Entry, Envelope, Hop, open_envelope, seal

C = b"C"


def good() -> Envelope:
    return Envelope([Entry([Hop(1, 0, 1, 0, [b"H1"], [C])], 1)], [Beat(1, 0, 0, 1, 0)])


def test_a_sealed_envelope_can_be_opened() -> None:
    assert open_envelope(seal(good(), [b"frame"])) == good()


@pytest.mark.parametrize(
    "garbage",
    [[], [b""], [b"\x00"], [b"\xc1" * 100], [b"\x91" * 5000], [b"GET / HTTP/1.1\r\n\r\n"], [b"\x92\x90\x90", b"x"]],
)
def test_garbage_is_not_an_envelope(garbage: list[bytes]) -> None:
    with pytest.raises(WireError):
        open_envelope(garbage)


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("hop", {"source": -1}),
        ("hop", {"source": MAX_HOST + 1}),
        ("hop", {"target": 2**64 - 1}),
        ("hop", {"number": 0}),
        ("hop", {"epoch": -1}),
        ("hop", {"senders": []}),
        ("hop", {"receivers": []}),
        ("hop", {"senders": [b""]}),
        ("hop", {"receivers": [b"R" * (MAX_NAME_NBYTES + 1)]}),
        ("hop", {"number": "one"}),
        ("entry", {"hops": []}),
        ("entry", {"nframes": 0}),
        ("entry", {"nframes": -1}),
        ("entry", {"nframes": 2}),
        ("entry", {"nframes": 2**63}),
        ("entry", {"is_cut": True}),
        ("envelope", {"given": -1}),
        ("envelope", {"taken": -1}),
        ("beat", {"source": -1}),
        ("beat", {"target": MAX_HOST + 1}),
        ("beat", {"epoch": -1}),
        ("beat", {"sent": -1}),
        ("beat", {"received": -1}),
    ],
)
def test_an_envelope_with_an_impossible_number_or_name_is_refused(where: str, what: dict[str, Any]) -> None:
    envelope = good()
    if where == "hop":
        envelope.entries[0].hops[0] = msgspec.structs.replace(envelope.entries[0].hops[0], **what)
    elif where == "entry":
        envelope.entries[0] = msgspec.structs.replace(envelope.entries[0], **what)
    elif where == "envelope":
        envelope = msgspec.structs.replace(envelope, **what)
    else:
        envelope.beats[0] = msgspec.structs.replace(envelope.beats[0], **what)
    with pytest.raises(WireError):
        open_envelope(seal(envelope, [b"frame"]))


def hear(relay: Relay, neighbour: int, parts: Sequence[Frame]) -> list[list[bytes]]:
    """Return the messages that a relay delivers; a message that it can't read counts as dropped."""
    try:
        return [[bytes(frame) for frame in delivery.frames] for delivery in relay.receive(neighbour, parts)]
    except WireError:
        relay.dropped += 1
        return []


def pair() -> tuple[Relay, Relay]:
    """Make a controller that knows only host 1, and that host."""
    controller, agent = Relay(0, members={1}), Relay(1, default=0)
    agent.greet(0)
    agent.beat()
    exchange(controller, agent)
    assert controller.dropped == agent.dropped == 0
    return controller, agent


def exchange(controller: Relay, agent: Relay) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """Deliver all waiting messages until there are none; returns what the two have received."""
    got: tuple[list[list[bytes]], list[list[bytes]]] = ([], [])
    for _ in range(50):
        for _, parts in (to_controller := agent.flush()):
            got[0].extend(hear(controller, 1, parts))
        for neighbour, parts in (to_agent := controller.flush()):
            if neighbour == 1:
                got[1].extend(hear(agent, 0, parts))
        if not to_controller and not to_agent:
            break
    return got


def assert_unharmed(controller: Relay, agent: Relay) -> None:
    """Check that messages between the two arrive, once and in order."""
    for i in range(3):
        agent.send(b"R1", C, 0, [b"up %d" % i])
        controller.send(C, b"R1", 1, [b"down %d" % i])
        agent.beat()
        controller.beat()
        up, down = exchange(controller, agent)
        assert (up, down) == ([[b"up %d" % i]], [[b"down %d" % i]])
    assert not agent.is_given_up


def test_messages_of_an_unknown_host_are_dropped_and_leave_nothing() -> None:
    controller, agent = pair()
    for host in range(2, 1000):
        said = Envelope([Entry([Hop(host, 0, 1, 0, [b"R9"], [C])], 1)], [Beat(host, 0, 0, 1, 0)])
        assert hear(controller, host, seal(said, [b"let me in"])) == []
        assert hear(controller, 1, seal(said, [b"let him in"])) == []
    assert controller.dropped == 3 * 998
    assert controller.flush() == []
    assert 2 not in controller.active
    assert set(controller._sessions) == set(controller._outboxes) == {1}
    assert_unharmed(controller, agent)


def test_numbers_far_ahead_are_requested_once_and_take_no_memory() -> None:
    controller, agent = pair()
    for i in range(100):
        said = Envelope([Entry([Hop(1, 0, 10**12 + i, 0, [b"R1"], [C])], 1)], [])
        assert hear(controller, 1, seal(said, [b"x" * 1000])) == []
    ((neighbour, parts),) = controller.flush()
    assert neighbour == 1
    (asks,) = open_envelope(parts).beats
    assert asks.again
    assert controller.flush() == []
    hear(agent, 0, parts)
    assert_unharmed(controller, agent)


def test_an_acknowledgement_of_unsent_messages_is_dropped() -> None:
    controller, agent = pair()
    controller.send(C, b"R1", 1, [b"lost on its way"])
    controller.flush()
    before = controller.dropped
    hear(controller, 1, seal(Envelope([], [Beat(1, 0, 0, 0, 10**6)]), []))
    assert controller.dropped == before + 1
    agent.beat()
    controller.beat()
    _, down = exchange(controller, agent)
    assert down == [[b"lost on its way"]]
    assert_unharmed(controller, agent)


@pytest.mark.parametrize(
    "said",
    [
        Envelope([], [Beat(0, 1, 0, 0, 0, over=True)]),
        Envelope([], [Beat(0, 1, 7, 0, 0)]),
        Envelope([Entry([Hop(0, 1, 1, 7, [C], [b"H1"])], 1)], []),
        Envelope([Entry([Hop(0, 1, 1, 0, [C], [b"H1"])], 1)], []),
    ],
    ids=["end", "a new epoch", "words of a new epoch", "words"],
)
def test_no_other_host_can_impersonate_the_controller(said: Envelope) -> None:
    controller, agent = pair()
    assert hear(agent, 2, seal(said, [b"do it"] if said.entries else [])) == []
    assert agent.dropped == 1
    assert_unharmed(controller, agent)


def test_messages_of_the_controller_may_come_through_the_chosen_parent() -> None:
    agent = Relay(3, default=0)
    agent.greet(0)
    agent.lead_by(0, 2)
    said = Envelope([Entry([Hop(0, 3, 1, 0, [C], [b"H3"])], 1)], [])
    assert hear(agent, 2, seal(said, [b"do it"])) == [[b"do it"]]
    assert agent.dropped == 0


hosts = st.sampled_from([0, 1, 1, 2, 2, 3, -1, MAX_HOST, 2**64 - 1])
counts = st.sampled_from([0, 1, 1, 2, 2, 3, -1, 2**64 - 1])
names = st.lists(st.sampled_from([C, b"H1", b"R1", b"R2", b"R" * 100]), max_size=3)
hops = st.builds(Hop, hosts, hosts, counts, st.sampled_from([0, 0, 1]), names, names)
entries = st.builds(Entry, st.lists(hops, max_size=3), st.integers(0, 2), st.booleans(), st.booleans())
beats = st.builds(Beat, hosts, hosts, counts, counts, counts, st.booleans(), st.booleans())
sums = st.sampled_from([0, 1, 100, 2**40, 2**64 - 1, -1])
envelopes = st.builds(Envelope, st.lists(entries, max_size=3), st.lists(beats, max_size=3), sums, sums)


@given(st.lists(st.tuples(envelopes, st.lists(st.binary(max_size=4), max_size=4)), max_size=6))
def test_messages_of_a_host_that_is_no_member_harm_no_other_host(said: list[tuple[Envelope, list[bytes]]]) -> None:
    """The host has the keys, but is no member. It does not use the name of a member, since it could then be that host."""
    controller, agent = pair()
    for envelope, frames in said:
        for each in [hop for entry in envelope.entries for hop in entry.hops]:
            each.source = each.source if each.source != 1 else 2
        envelope.beats = [beat for beat in envelope.beats if beat.source != 1]
        for neighbour in (1, 2):
            hear(controller, neighbour, seal(envelope, frames))
        hear(agent, 2, seal(envelope, frames))
    assert_unharmed(controller, agent)


@given(st.lists(st.tuples(envelopes, st.lists(st.binary(max_size=4), max_size=4)), max_size=6), st.integers(0, 3))
def test_only_wire_errors_are_raised_for_any_message(said: list[tuple[Envelope, list[bytes]]], neighbour: int) -> None:
    for relay in pair():
        for envelope, frames in said:
            with suppress(WireError):
                list(relay.receive(neighbour, seal(envelope, frames)))
            for _, parts in relay.flush():
                open_envelope(parts)  # and what it sends to others can be read
