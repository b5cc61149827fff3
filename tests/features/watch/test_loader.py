"""The time that a thread waits for batches is summed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from monarch_kernel.features.watch import loader
from monarch_kernel.features.watch.loader import rows_read, time_loaders, waited_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(loader.time, "perf_counter", lambda: now[0])
    return now


def make(clock: list[float]) -> type:
    class Batches:
        """Takes two seconds for each of three batches."""

        def __init__(self) -> None:
            self.left = 3

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            clock[0] += 2.0
            if not self.left:
                raise StopIteration
            self.left -= 1
            return self.left

    time_loaders(Batches)
    return Batches


def test_the_time_of_each_batch_counts(clock: list[float]) -> None:
    before = waited_s()
    assert list(make(clock)()) == [2, 1, 0]
    assert waited_s() - before == 8.0  # the end of the data, too


def test_each_thread_has_its_own_time(clock: list[float]) -> None:
    before, other = waited_s(), []

    def run() -> None:
        list(make(clock)())
        other.append(waited_s() > 0)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert other == [True]
    assert waited_s() == before


def test_an_error_of_the_loader_is_raised(clock: list[float]) -> None:
    class Broken:
        def __next__(self) -> int:
            raise ValueError("row 17")

    time_loaders(Broken)
    with pytest.raises(ValueError, match="row 17"):
        next(Broken())


class Ahead:
    """Asks for the rows of two batches before it returns the first one, as an iterator with workers does."""

    _in_order = True

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = iter(batches)
        self._reset(None)

    def _reset(self, loader: object) -> None:
        self.asked: list[list[int]] = []
        self.asked.append(self._next_index())

    def _next_index(self) -> list[int]:
        return next(self.batches)

    def __next__(self) -> list[int]:
        if not self.asked:
            raise StopIteration
        rows = self.asked.pop(0)
        try:
            self.asked.append(self._next_index())
        except StopIteration:
            pass
        if rows == [13]:
            raise ValueError("row 13 is corrupt")
        return rows


time_loaders(Ahead)


def test_the_rows_of_the_last_batch_are_known() -> None:
    batches = Ahead([[0, 1], [2, 3], [4]])
    assert next(batches) == rows_read() == [0, 1]
    assert next(batches) == rows_read() == [2, 3]
    assert next(batches) == rows_read() == [4]
    with pytest.raises(StopIteration):
        next(batches)
    assert rows_read() is None


def test_the_rows_of_an_earlier_request_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    next(Ahead([[0, 1], [2]]))
    assert rows_read() == [0, 1]
    monkeypatch.setattr("monarch_kernel.features.watch.loader._request", lambda: 7)
    assert rows_read() is None


def test_an_error_in_place_of_a_batch_has_rows_too() -> None:
    batches = Ahead([[0], [13], [2]])
    next(batches)
    with pytest.raises(ValueError, match="corrupt"):
        next(batches)
    assert rows_read() == [13]
    assert next(batches) == rows_read() == [2]


def test_rows_are_unknown_where_batches_come_in_any_order() -> None:
    batches = Ahead([[0], [1]])
    batches._in_order = False
    next(batches)
    assert rows_read() is None
