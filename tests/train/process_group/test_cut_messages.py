"""Waits for messages of which a dead rank has sent only a part: none returns, and their error is torch's on other processes."""

from __future__ import annotations

import pickle
import threading

import cloudpickle
import pytest
import torch.distributed as dist

from monarch_kernel.train.process_group.cut_messages import Received


@pytest.fixture
def received() -> Received:
    return Received()


class Wait(threading.Thread):
    """Waits for a message that may have been cut."""

    def __init__(self, received: Received) -> None:
        super().__init__()
        self.outcome = ""
        self._received = received
        self._is_there = threading.Event()
        received.doubt()
        self.start()
        self._is_there.wait()

    def run(self) -> None:
        self._is_there.set()
        try:
            self._received.check()
        except dist.DistNetworkError as error:
            self.outcome = str(error)
        else:
            self.outcome = "received"

    def ended(self) -> str:
        """What the thread got, now that it is known whether the message was cut."""
        self._received.believe()
        self.join()
        return self.outcome


@pytest.fixture
def wait(received: Received) -> Wait:
    return Wait(received)


def test_a_wait_returns_if_no_message_was_cut(received: Received, wait: Wait) -> None:
    assert not wait.outcome
    assert wait.ended() == "received"
    received.check()


def test_no_wait_returns_after_a_message_was_cut_until_the_group_is_formed_again(
    received: Received, wait: Wait
) -> None:
    received.refuse(())
    assert not wait.outcome, "other messages may still be completed"
    assert "the received tensor is incomplete" in wait.ended()
    with pytest.raises(dist.DistNetworkError):
        received.check()
    received.forget()
    received.check()


def test_two_aborts_at_once_are_both_awaited(received: Received, wait: Wait) -> None:
    received.doubt()
    received.believe()
    assert not wait.outcome
    received.refuse(())
    assert "incomplete" in wait.ended()


def test_the_error_is_that_of_torch_on_other_processes(received: Received) -> None:
    received.doubt()
    received.refuse(())
    received.believe()
    with pytest.raises(dist.DistNetworkError) as raised:
        received.check()
    copy = pickle.loads(cloudpickle.dumps(raised.value))
    assert type(copy) is dist.DistNetworkError
    assert copy.args == raised.value.args
