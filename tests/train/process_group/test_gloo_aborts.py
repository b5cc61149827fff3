"""The methods of C++ that abort messages: what they are called with, that nothing else is called, and which waits they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.train.process_group import gloo_aborts
from monarch_kernel.train.process_group.native_waits import NativeWaits
from tests.support.waiting import LONG_S, wait_until

Start = Callable[[Any, Any], Any]

Wait = Callable[[Any], Any]

START: dict[str, Start] = {
    "send": lambda group, tensor: group.send([tensor], 1, 0),
    "recv": lambda group, tensor: group.recv([tensor], 1, 0),
    "recv from any rank": lambda group, tensor: group.recv_anysource([tensor], 0),
}


def groups(size: int) -> list[Any]:
    """Make a group of several ranks in this process."""
    import torch.distributed as dist

    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        make = lambda rank: dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=LONG_S))  # noqa: E731
        return list(pool.map(make, range(size)))


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Any]]:
    pair = groups(2)
    yield pair
    pair.clear()


@pytest.fixture
def another_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let the methods be looked up again, and forget what was found."""
    gloo_aborts._methods.cache_clear()
    yield monkeypatch
    gloo_aborts._methods.cache_clear()


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except RuntimeError as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.mark.parametrize("start", START.values(), ids=START)
def test_an_abort_ends_the_wait_of_another_thread(pair: list[Any], start: Start) -> None:
    import torch

    work = start(pair[0], torch.ones(1))
    result = in_thread(work.wait)
    assert gloo_aborts.abort(work)
    assert result.result(LONG_S) is False


@pytest.mark.parametrize("start", START.values(), ids=START)
def test_an_abort_before_the_wait_ends_it(pair: list[Any], start: Start) -> None:
    import torch

    work = start(pair[0], torch.ones(1))
    gloo_aborts.abort(work)
    assert work.wait() is False


def test_another_operation_is_not_aborted() -> None:
    import torch

    aborted: list[int] = []
    methods = gloo_aborts._methods()
    assert methods is not None
    ours = methods._replace(aborts=dict.fromkeys(methods.aborts, aborted.append))
    (group,) = groups(1)
    receive, other = group.recv_anysource([torch.ones(1)], 1), group.allreduce([torch.ones(1)])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gloo_aborts, "_methods", lambda: ours)
        for each in (other, object(), None, torch.ones(1)):
            assert not gloo_aborts.abort(each)
        assert aborted == []
        assert gloo_aborts.abort(receive)
        assert len(aborted) == 1
    assert other.wait()
    gloo_aborts.abort(receive)


def test_another_torch_has_no_such_methods(another_torch: pytest.MonkeyPatch) -> None:
    import torch

    another_torch.setattr(gloo_aborts, "_CLASSES", ("N4c10d16ProcessGroupGloo9OtherWorkE",))
    assert gloo_aborts._methods() is None
    (group,) = groups(1)
    work = group.recv_anysource([torch.ones(1)], 1)
    assert not gloo_aborts.abort(work)
    with pytest.raises(RuntimeError, match="[Tt]imed out"):
        work.wait(timedelta(milliseconds=1))


def test_torch_without_its_library_has_no_such_methods(another_torch: pytest.MonkeyPatch) -> None:
    import torch

    another_torch.setattr(torch, "__file__", "/nowhere/torch/__init__.py")
    assert gloo_aborts._methods() is None


# -- waits of ended groups


@pytest.fixture
def waits() -> NativeWaits:
    return NativeWaits()


@pytest.fixture
def wait(waits: NativeWaits) -> Wait:
    """The wait for torch's work, as ranks have it."""
    import torch.distributed as dist

    patched = SimpleNamespace(Work=SimpleNamespace(wait=dist.Work.wait))
    gloo_aborts.install(patched)
    noting: Wait = waits._noting(patched.Work.wait)
    return noting


@pytest.mark.parametrize("start", START.values(), ids=START)
def test_a_message_of_an_ended_group_ends_with_an_error(
    pair: list[Any], waits: NativeWaits, wait: Wait, start: Start
) -> None:
    """Gloo may have forgotten the message, and would never end the wait by itself."""
    import torch

    work = start(pair[0], torch.ones(1))
    result = in_thread(lambda: wait(work))
    wait_until(lambda: waits.oldest_s() > 0, "the wait")
    waits.end_messages(time.monotonic())
    with pytest.raises(RuntimeError, match="the message was aborted: its process group has ended"):
        result.result(LONG_S)
    with pytest.raises(RuntimeError, match="its process group has ended"):
        wait(work)


def test_a_wait_that_begins_after_its_group_has_ended_ends_with_an_error(
    pair: list[Any], waits: NativeWaits, wait: Wait
) -> None:
    import torch

    work = START["send"](pair[0], torch.ones(1))
    waits.end_messages(time.monotonic())
    with pytest.raises(RuntimeError, match="its process group has ended"):
        wait(work)


def test_a_message_of_a_group_that_was_made_later_goes_on(pair: list[Any], waits: NativeWaits, wait: Wait) -> None:
    import torch

    old = START["send"](pair[0], torch.ones(1))
    in_old = in_thread(lambda: wait(old))
    wait_until(lambda: waits.oldest_s() > 0, "the first wait")
    ended_at = time.monotonic()
    waits._making(lambda *args: None, ())(None, None, 0, 1)
    there = torch.zeros(1)
    new = pair[0].recv([there], 1, 7)
    in_new = in_thread(lambda: wait(new))
    wait_until(lambda: len(waits._waits) == 2, "both waits")
    waits.end_messages(ended_at)
    assert "its process group has ended" in str(in_old.exception(LONG_S))
    assert not in_new.done()
    pair[1].send([torch.ones(1)], 0, 7).wait()
    assert in_new.result(LONG_S)
    assert there.tolist() == [1]
