"""Changes of one widget that follow each other quickly are merged; the order that matters is kept."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.features.widgets.messages import CommSent
from monarch_kernel.features.widgets.outbox import Outbox


def change(comm: str, **state: Any) -> CommSent:
    return CommSent("comm_msg", comm, {"method": "update", "state": state, "buffer_paths": []}, {})


def test_the_first_change_goes_at_once_and_later_ones_together() -> None:
    outbox = Outbox(1.0)
    assert list(outbox.put(change("a", value=1, max=9), 10.0)) == [change("a", value=1, max=9)]
    assert list(outbox.put(change("a", value=2), 10.1)) == []
    assert list(outbox.put(change("a", value=3, min=1), 10.2)) == []
    assert list(outbox.put(change("b", value=7), 10.3)) == [change("b", value=7)]
    assert not outbox.is_empty
    assert list(outbox.flush(11.0)) == [change("a", value=3, min=1)]
    assert outbox.is_empty
    assert list(outbox.put(change("a", value=4), 11.5)) == []
    assert list(outbox.put(change("b", value=8), 11.5)) == [change("b", value=8)]


def test_other_messages_overtake_no_change() -> None:
    outbox = Outbox(1.0)
    list(outbox.put(change("a", value=1), 0.0))
    list(outbox.put(change("a", children=["b"]), 0.1))
    binary = CommSent("comm_msg", "c", {"method": "update", "state": {}, "buffer_paths": [["x"]]}, {}, (b"1",))
    custom = CommSent("comm_msg", "a", {"method": "custom", "content": {}}, {})
    close = CommSent("comm_close", "a", {}, {})
    assert list(outbox.put(binary, 0.2)) == [change("a", children=["b"]), binary]
    assert list(outbox.put(custom, 0.3)) == [custom]
    assert list(outbox.put(close, 0.4)) == [close]
    assert list(outbox.put(change("a", value=2), 0.5)) == [change("a", value=2)]  # a new one with the same id


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(), st.floats(0, 0.5))))
def test_the_last_state_of_each_model_arrives(changes: list[tuple[str, str, int, float]]) -> None:
    outbox, now = Outbox(1.0), 0.0
    sent: list[CommSent] = []
    expected: dict[str, dict[str, int]] = {}
    for comm, name, value, pause_s in changes:
        now += pause_s
        expected.setdefault(comm, {})[name] = value
        sent += outbox.put(change(comm, **{name: value}), now)
    sent += outbox.flush(now)
    shown: dict[str, dict[str, int]] = {}
    for message in sent:
        shown.setdefault(message.comm, {}).update(message.data["state"])
    assert shown == expected
