"""The stream of operations: the order of batches, requests and frees, and how far ranks may be behind."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch_kernel.errors import Failure, MeshDownError, SupervisionError
from monarch_kernel.features.tensors.messages import FetchTensors, PutTensor, RunOps
from monarch_kernel.features.tensors.records import FREE
from monarch_kernel.features.tensors.stream import MAX_BEHIND, MAX_OPS
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Ping
from monarch_kernel.tensor import inspect, no_mesh
from monarch_kernel.tensor.on_mesh import activated
from tests.support.waiting import LONG_S
from tests.tensor.in_process import InProcess


@pytest.fixture
def held() -> InProcess:
    """A rank in this process; what is submitted waits for ``go``."""
    return InProcess(1, is_held=True)


def kinds(session: InProcess) -> list[str]:
    shown = (RunOps, Ping, PutTensor, FetchTensors)
    return [type(message).__name__ for message in session.messages if isinstance(message, shown)]


def test_a_batch_takes_operations_until_it_is_sent(held: InProcess) -> None:
    with activated(held.device):
        x = torch.zeros(1)
        for _ in range(10):
            x = x + 1
        assert len(held.items) == 1
        held.go()
        x = x + 1
        held.go()
    assert kinds(held) == ["RunOps", "RunOps"]


def test_a_batch_knows_whether_anything_came_before_it_since_the_last_one(held: InProcess) -> None:
    def step() -> None:
        x.add_(1)
        held.go()

    with activated(held.device):
        x = torch.zeros(1)
    step()
    step()
    held.tell([0], pack(Ping(5)))
    step()
    step()
    inspect(x)
    step()
    step()
    batches = [message for message in held.messages if isinstance(message, RunOps)]
    assert [each.follows for each in batches] == [False, True, False, True, False, True]


def test_no_batch_comes_right_after_another_one_while_ranks_owe_an_answer(held: InProcess) -> None:
    with activated(held.device):
        x = torch.zeros(1)
    held.go()
    for n_open in (0, 1, 1, 0, 0):
        held.core.n_open = n_open
        x.add_(1)
        held.go()
    batches = [message for message in held.messages if isinstance(message, RunOps)]
    assert [each.follows for each in batches] == [False, True, False, False, False, True]


def test_what_is_submitted_later_comes_later(held: InProcess) -> None:
    with activated(held.device):
        x = torch.zeros(1)
        held.tell([0], pack(Ping(5)))
        x.add_(1)
        with no_mesh.activate():
            y = held.device.put(torch.ones(1))
        x.add_(y)
    held.go()
    assert kinds(held) == ["RunOps", "Ping", "RunOps", "PutTensor", "RunOps"]
    assert inspect(x).item() == 2


def test_a_finalizer_that_sends_in_the_midst_of_a_record_loses_nothing(held: InProcess) -> None:
    """The garbage collector runs a finalizer in ``record``, which makes this thread send all that waits."""
    with activated(held.device):
        x = torch.zeros(1)
        stream = held.stream
        words = stream.batch.words  # type: ignore[union-attr]

        class Words:
            """Sends at the worst moment: before the record is in the batch."""

            def extend(self, record: Any) -> None:
                stream.before_request()
                held.items, waiting = [], held.items
                for item in waiting:
                    assert item(0.0) == []
                words.extend(record)

        stream.batch.words = Words()  # type: ignore[union-attr, assignment]
        x.add_(1)
        assert stream.batch is not None
        stream.batch.words = words
    assert inspect(x).item() == 1


class Frees(deque[int]):
    """Ids to free; the first one that is taken does something else before, at the worst moment."""

    def __init__(self, held: InProcess, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        held.device.frees = held.device.target.frees = self
        self._meanwhile: Callable[[], object] | None = meanwhile

    def popleft(self) -> int:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().popleft()


class NoticingLock:
    """The lock of a stream, which says when another thread than that of the test takes it, or waits for it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._own = threading.get_ident()
        self.is_reached = threading.Event()

    def __enter__(self) -> None:
        if threading.get_ident() != self._own:
            self.is_reached.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_batch_that_is_sent_while_it_is_sealed_frees_what_was_dropped(held: InProcess) -> None:
    """The I/O thread sends the batch while this thread puts the ids to free into it."""
    lock = held.stream.lock = NoticingLock(held.stream.lock)  # type: ignore[assignment]

    def send() -> None:
        held.go()
        lock.is_reached.set()  # if it has not taken the lock

    sender = threading.Thread(target=send)

    def send_meanwhile() -> None:
        sender.start()
        assert lock.is_reached.wait(LONG_S)

    Frees(held, send_meanwhile)
    with activated(held.device):
        x = torch.zeros(1)
    del x
    held.stream.before_request()
    sender.join()
    held.go()
    assert held.interpreters[0].memory().tensors == 0


def test_a_finalizer_that_sends_a_batch_while_it_is_sealed_loses_no_id(held: InProcess) -> None:
    """The garbage collector runs a finalizer in ``seal``, which makes this thread send all that waits."""

    def send() -> None:
        held.items, waiting = [], held.items
        for item in waiting:
            assert item(0.0) == []

    Frees(held, send)
    with activated(held.device):
        x = torch.zeros(1)
    del x
    held.stream.before_request()
    held.go()
    assert held.interpreters[0].memory().tensors == 0


def test_an_interrupt_in_the_midst_of_a_record_leaves_a_sound_stream(held: InProcess) -> None:
    with activated(held.device):
        x = torch.zeros(1)
        batch = held.stream.batch
        assert batch is not None
        words = batch.words

        class Words:
            def extend(self, record: Any) -> None:
                if record[0] == FREE:
                    words.extend(record)
                    return
                raise KeyboardInterrupt

            def __bool__(self) -> bool:
                return bool(words)

            def tobytes(self) -> bytes:
                return words.tobytes()

        batch.words = Words()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            x.add_(1)
        x.add_(2)
    assert inspect(x).item() == 2


def test_threads_share_the_stream(held: InProcess) -> None:
    results: list[Any] = []

    def work(n: int) -> None:
        with activated(held.device):
            x = torch.full((2,), float(n))
            for _ in range(200):
                x = x + n
            results.append((n, x))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: inspect(x).tolist() for n, x in results} == {n: [201.0 * n] * 2 for n in range(4)}


def test_the_program_waits_when_ranks_are_far_behind(held: InProcess) -> None:
    waits: list[int] = []
    target = held.device.target

    def catch_up() -> None:
        waits.append(target.issued)
        held.stream.ops_done(0, target.number, target.issued)

    held.on_wait = catch_up
    with activated(held.device):
        x = torch.zeros(1)
        for _ in range(2 * MAX_BEHIND):
            x.add_(1)
    assert waits == [MAX_BEHIND, 2 * MAX_BEHIND]
    assert MAX_OPS < MAX_BEHIND


def test_a_lost_rank_ends_waits_and_refuses_operations() -> None:
    session = InProcess(2, is_held=True)
    with activated(session.device):
        x = torch.zeros(1)
        session.stream.rank_lost(1, Failure("lost", "RankDied", "killed by SIGKILL"))
        assert session.device.target.has_room()
        with pytest.raises(SupervisionError, match=r"the tensors of t can't be used: \[1\] ended"):
            x + 1


def test_operations_after_the_end_of_the_session_say_so(held: InProcess) -> None:
    with activated(held.device):
        x = torch.zeros(1)
        held.go()
        held.closed = True
        with pytest.raises(MeshDownError, match="the session was shut down"):
            x + 1
