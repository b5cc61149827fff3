"""The method of C++ that aborts a receive from any rank: what it is called with, and that nothing else is called."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from monarch_kernel.train.process_group import any_source
from tests.support.waiting import LONG_S


def group_of_one() -> Any:
    """Make a group of this process only."""
    import torch.distributed as dist

    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=LONG_S))


@pytest.fixture
def another_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let the method be looked up again, and forget what was found."""
    any_source._methods.cache_clear()
    yield monkeypatch
    any_source._methods.cache_clear()


def test_an_abort_ends_the_wait_of_another_thread() -> None:
    import torch

    group = group_of_one()
    work = group.recv_anysource([torch.ones(1)], 1)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(work.wait()))
    thread.start()
    any_source._abort(work)
    thread.join(LONG_S)
    assert results == [False]


def test_an_abort_before_the_wait_ends_it() -> None:
    import torch

    group = group_of_one()
    work = group.recv_anysource([torch.ones(1)], 1)
    any_source._abort(work)
    assert work.wait() is False


def test_another_operation_is_not_aborted() -> None:
    import torch

    aborted: list[int] = []
    methods = any_source._methods()
    assert methods is not None
    ours = methods._replace(abort=aborted.append)
    group = group_of_one()
    receive, other = group.recv_anysource([torch.ones(1)], 1), group.allreduce([torch.ones(1)])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(any_source, "_methods", lambda: ours)
        for each in (other, object(), None, torch.ones(1)):
            any_source._abort(each)
        assert aborted == []
        any_source._abort(receive)
        assert len(aborted) == 1
    assert other.wait()
    any_source._abort(receive)


def test_another_torch_has_no_such_method(another_torch: pytest.MonkeyPatch) -> None:
    import torch

    another_torch.setattr(any_source, "_CLASS", "N4c10d16ProcessGroupGloo9OtherWorkE")
    assert any_source._methods() is None
    group = group_of_one()
    work = group.recv_anysource([torch.ones(1)], 1)
    any_source._abort(work)
    with pytest.raises(RuntimeError, match="[Tt]imed out"):
        work.wait(timedelta(milliseconds=1))


def test_torch_without_its_library_has_no_such_method(another_torch: pytest.MonkeyPatch) -> None:
    import torch

    another_torch.setattr(torch, "__file__", "/nowhere/torch/__init__.py")
    assert any_source._methods() is None
