"""Counts are exact when many threads count at the same time, and each change is reported once."""

from __future__ import annotations

import threading

from monarch_kernel.net.memory.counters import SHARED_MEMORY, SOCKET, CollectiveKind, Meters, Piece
from monarch_kernel.net.memory.shared_blocks import Blocks
from monarch_kernel.net.wire.messages import Carried, Collected


def test_changes_are_reported_once_with_current_values() -> None:
    meters = Meters(1)
    meters.count(2, 1, "memory", 100, seconds=0.5)
    meters.count(2, 1, "memory", 20, operations=0, seconds=0.25)
    meters.count(1, 2, "memory", 7)
    rows, over_s, *_ = meters.changes()
    assert rows == (Carried(2, 1, "memory", 120, 1, 0.75), Carried(1, 2, "memory", 7, 1, 0.0))
    assert over_s >= 0.5  # at least as long as the first one took
    assert meters.changes()[0] == ()
    meters.count(1, 2, "memory", 1)
    assert meters.changes()[0] == (Carried(1, 2, "memory", 8, 2, 0.0),)
    meters.tell_all()
    again = meters.changes()
    assert set(again.carried) == {Carried(2, 1, "memory", 120, 1, 0.75), Carried(1, 2, "memory", 8, 2, 0.0)}
    assert again.is_repeat
    assert not meters.changes().is_repeat


def test_collectives_are_counted_by_kind_and_their_durations_are_added() -> None:
    meters, kind = Meters(1), CollectiveKind("dp", "all_reduce", "gloo", 4)
    meters.collect(kind, 100, 150, 150, seconds=0.25)
    meters.collect(kind, operations=0, seconds=0.5, timed_nbytes=100, timed_s=0.75)
    meters.collect(kind._replace(path="nccl"), 7)
    assert meters.changes().collected == (
        Collected("dp", "all_reduce", 100, 1, 0.75, "gloo", 4, 150, 150, 100, 0.75),
        Collected("dp", "all_reduce", 7, 1, 0.0, "nccl", 4),
    )
    assert meters.changes().collected == ()


def test_news_are_reported_once_until_there_are_none() -> None:
    meters, calls = Meters(1), []
    meters.on_news = lambda: calls.append(len(calls))
    for _ in range(3):
        meters.count(1, 2, "memory", 1)
    assert calls == [0]
    assert meters.changes(is_last=True)[0]
    meters.count(1, 2, "memory", 1)
    assert calls == [0]  # there were some, so the caller asks again
    meters.changes(is_last=True)
    assert meters.changes()[0] == ()  # another caller has read them
    meters.count(1, 2, "memory", 1)
    assert calls == [0]
    meters.changes(is_last=True)
    assert meters.changes(is_last=True)[0] == ()
    meters.count(1, 2, "memory", 1)
    assert calls == [0, 1]


def test_counts_of_many_threads_are_exact() -> None:
    meters = Meters(1)
    begin = threading.Barrier(4)

    def work() -> None:
        begin.wait()
        for _ in range(2_000):
            meters.count(1, 2, "memory", 3)
            meters.changes()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    meters.tell_all()
    (row,) = meters.changes()[0]
    assert (row.nbytes, row.operations) == (24_000, 8_000)


def test_frames_of_a_message_are_counted_by_data_path() -> None:
    meters = Meters(1)
    header, small, large = b"header", memoryview(bytes(10)), memoryview(bytes(1000))
    meters.sent(2, [header, small, large], [header, small, large])
    meters.sent(3, [header, small, large, b""], [b"references", header, small, b"", b""])
    common = Blocks().store([bytes(700)], is_for_all=True)
    meters.sent(3, [header, common], [b"references", header, b""])  # no process has copied it
    meters.sent(3, [header, memoryview(Piece(500))], [header, memoryview(Piece(500))])  # another process counts it
    assert set(meters.changes()[0]) == {
        Carried(1, 2, SOCKET, 1010, 2, 0.0),
        Carried(1, 3, SOCKET, 10, 1, 0.0),
        Carried(1, 3, SHARED_MEMORY, 1000, 1, 0.0),
    }
