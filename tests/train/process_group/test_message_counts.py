"""The sum by which the controller knows that a message between two ranks lacks an end."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.train.process_group.message_counts import MessageCounts

MODULUS = 1 << 64
MESSAGES = st.tuples(st.sampled_from(["0", "dp"]), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2))


def total(ranks: list[MessageCounts]) -> int:
    return sum(rank.take() for rank in ranks) % MODULUS


@given(st.lists(MESSAGES, max_size=20), st.randoms())
def test_the_sum_is_zero_if_each_message_has_both_ends_in_any_order(messages: list, random) -> None:
    ranks = [MessageCounts() for _ in range(4)]
    ends = [(message, is_sent) for message in messages for is_sent in (True, False)]
    random.shuffle(ends)
    for (group, source, target, tag), is_sent in ends:
        if is_sent:
            ranks[source].sent(group, source, target, tag)
        else:
            ranks[target].received(group, target, source, tag)
    assert total(ranks) == 0


@given(st.lists(MESSAGES, min_size=1, max_size=6))
def test_messages_without_their_other_ends_do_not_cancel_out(messages: list) -> None:
    ranks = [MessageCounts() for _ in range(4)]
    for group, source, target, tag in messages:
        ranks[source].sent(group, source, target, tag)
    assert total(ranks) != 0
    for group, source, target, tag in messages:
        ranks[target].received(group, target, source, tag + 3)
    assert total(ranks) != 0


def test_what_was_taken_is_not_counted_again() -> None:
    counts = MessageCounts()
    assert counts.take() == 0
    counts.sent("0", 0, 1, 0)
    assert 0 < counts.take() < MODULUS
    assert counts.take() == 0


def test_each_thread_has_its_own_last_message() -> None:
    counts = MessageCounts()
    assert not counts.since(0.0)
    counts.begins(5.0)
    assert counts.since(5.0)
    assert not counts.since(5.1)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(counts.since(0.0)))
    thread.start()
    thread.join()
    assert found == [False]
