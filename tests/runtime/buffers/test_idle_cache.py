"""A cached value is created once, shared, and dropped a while after its last use."""

from __future__ import annotations

import threading
import weakref

from monarch_kernel.runtime.buffers.idle_cache import IdleCache
from tests.support.waiting import LONG_S, wait_until


class Thing:
    pass


def threads(name: str) -> int:
    return sum(each.name == name for each in threading.enumerate())


def test_a_value_is_created_once_and_dropped_after_it_was_idle() -> None:
    long: IdleCache[str, Thing] = IdleCache("stays", 60.0)
    with long.held("a", Thing) as first, long.held("a", Thing) as second:
        assert first is second
    with long.held("a", Thing) as third:
        assert third is first
    there = weakref.ref(first)
    del first, second, third
    assert there() is not None
    long.close()
    cache: IdleCache[str, Thing] = IdleCache("keeps", 0.2)
    with cache.held("a", Thing) as value:
        gone = weakref.ref(value)
    del value
    wait_until(lambda: gone() is None, "the value to be dropped")
    wait_until(lambda: not threads("keeps"), "the end of the thread")
    with cache.held("a", Thing):
        assert threads("keeps") == 1
    cache.close()
    wait_until(lambda: not threads("keeps"), "the end of the thread")


def test_a_value_in_use_stays_and_an_unwanted_value_is_dropped_at_once() -> None:
    wanted = True
    cache: IdleCache[str, Thing] = IdleCache("keeps", 0.0, lambda key: wanted)
    value = cache.take("a", Thing)
    there = weakref.ref(value)
    del value
    threading.Event().wait(1.2)  # two rounds of the thread that drops values
    assert there() is not None
    long: IdleCache[str, Thing] = IdleCache("keeps", 60.0, lambda key: wanted)
    with long.held("b", Thing) as other:
        seen = weakref.ref(other)
    del other
    assert seen() is not None
    wanted = False
    wait_until(lambda: seen() is None, "the second value to be dropped")
    value = there()
    assert value is not None
    cache.give("a", value)
    del value
    wait_until(lambda: there() is None, "the first value to be dropped")


def test_a_dropped_value_stays_usable_for_its_user() -> None:
    cache: IdleCache[str, Thing] = IdleCache("keeps", 60.0)
    old = cache.take("a", Thing)
    cache.drop("a")
    new = cache.take("a", Thing)
    assert new is not old
    cache.give("a", old)
    threading.Event().wait(0.7)
    assert cache.take("a", Thing) is new  # still in use
    cache.close()


def test_concurrent_threads_get_the_same_value() -> None:
    cache: IdleCache[str, Thing] = IdleCache("keeps", 60.0)
    both = threading.Barrier(2)
    got: list[Thing] = []

    def make() -> Thing:
        both.wait(LONG_S)
        return Thing()

    makers = [threading.Thread(target=lambda: got.append(cache.take("a", make))) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(got) == 2
    assert got[0] is got[1]
    cache.close()
