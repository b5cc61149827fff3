"""A cached value is created once, shared, and dropped a while after its last use."""

from __future__ import annotations

import threading
import weakref

from monarch_kernel.runtime.buffers.idle_cache import Kept
from tests.support.waiting import LONG_S, wait_until


class Thing:
    pass


def threads(name: str) -> int:
    return sum(each.name == name for each in threading.enumerate())


def test_a_value_is_made_once_and_let_go_when_nobody_has_used_it_for_a_while() -> None:
    long: Kept[str, Thing] = Kept("stays", 60.0)
    with long.held("a", Thing) as first, long.held("a", Thing) as second:
        assert first is second
    with long.held("a", Thing) as third:
        assert third is first
    there = weakref.ref(first)
    del first, second, third
    assert there() is not None
    long.close()
    kept: Kept[str, Thing] = Kept("keeps", 0.2)
    with kept.held("a", Thing) as value:
        gone = weakref.ref(value)
    del value
    wait_until(lambda: gone() is None, "the value to be dropped")
    wait_until(lambda: not threads("keeps"), "the end of the thread")
    with kept.held("a", Thing):
        assert threads("keeps") == 1
    kept.close()
    wait_until(lambda: not threads("keeps"), "the end of the thread")


def test_what_is_used_stays_however_long_and_what_is_not_wanted_goes_at_once() -> None:
    wanted = True
    kept: Kept[str, Thing] = Kept("keeps", 0.0, lambda key: wanted)
    value = kept.take("a", Thing)
    there = weakref.ref(value)
    del value
    threading.Event().wait(1.2)  # two rounds of the thread that drops values
    assert there() is not None
    long: Kept[str, Thing] = Kept("keeps", 60.0, lambda key: wanted)
    with long.held("b", Thing) as other:
        seen = weakref.ref(other)
    del other
    assert seen() is not None
    wanted = False
    wait_until(lambda: seen() is None, "the second value to be dropped")
    value = there()
    assert value is not None
    kept.give("a", value)
    del value
    wait_until(lambda: there() is None, "the first value to be dropped")


def test_who_has_a_value_that_was_dropped_goes_on_with_it() -> None:
    kept: Kept[str, Thing] = Kept("keeps", 60.0)
    old = kept.take("a", Thing)
    kept.drop("a")
    new = kept.take("a", Thing)
    assert new is not old
    kept.give("a", old)
    threading.Event().wait(0.7)
    assert kept.take("a", Thing) is new  # still in use
    kept.close()


def test_threads_that_come_at_the_same_time_get_the_same() -> None:
    kept: Kept[str, Thing] = Kept("keeps", 60.0)
    both = threading.Barrier(2)
    got: list[Thing] = []

    def make() -> Thing:
        both.wait(LONG_S)
        return Thing()

    makers = [threading.Thread(target=lambda: got.append(kept.take("a", make))) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(got) == 2
    assert got[0] is got[1]
    kept.close()
