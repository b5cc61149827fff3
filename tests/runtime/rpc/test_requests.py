"""The table of requests: each resolves once, messages keep their order, and ranks that wait for a failed one are released."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import rank_peer
from monarch_kernel.net.wire.codec import join, pack, split
from monarch_kernel.net.wire.messages import Forget, Interrupt, Payload, Ping, Release
from monarch_kernel.runtime.rpc.answers import Value
from monarch_kernel.runtime.rpc.requests import RELEASE_AFTER_S, Pending, Recipient, Requests, Resolve, Send

DEATH = Failure("lost", "RankDied", "killed by SIGKILL")
ERROR = Failure("exception", "ValueError", "no")
DONE = Value(Payload(), (), {})


def table(up: int, coming: int = 0) -> tuple[Requests, dict[int, Recipient]]:
    """Processes from 1 on, of which the first ones are up."""
    recipients = {proc: Recipient(peer=rank_peer(proc), up=proc <= up) for proc in range(1, up + coming + 1)}
    return Requests(recipients), recipients


def sent(effects: Sequence[object] | None) -> list[tuple[bytes, Any]]:
    return [(e.peer, next(split(join([e.packed])))[0]) for e in effects or () if isinstance(e, Send)]


def test_messages_wait_in_order_for_a_process_that_is_not_up() -> None:
    requests, recipients = table(up=1, coming=1)
    assert sent(requests.request(10, [1, 2], pack(Ping(10)), "a cell", 5.0)) == [(rank_peer(1), Ping(10))]
    assert requests.tell([2], pack(Ping(0))) == []
    assert requests.interrupt(10)[1:] == []
    assert sent([Send(b"", packed) for packed in recipients[2].held]) == [
        (b"", Ping(10)),
        (b"", Ping(0)),
        (b"", Interrupt(10)),
    ]
    assert recipients[2].open_requests == {10: "a cell"}
    assert recipients[2].busy_since == 5.0


def test_a_request_to_a_process_that_has_ended_is_sent_to_no_process() -> None:
    requests, recipients = table(up=2)
    recipients[2].death = DEATH
    requests.dead.add(2)
    (resolve,) = requests.request(10, [1, 2], pack(Ping(10)), "", 0.0)
    assert isinstance(resolve, Resolve)
    assert [answer.etype for answer in resolve.answers if isinstance(answer, Failure)] == ["NotSent", "RankDied"]
    assert recipients[1].open_requests == {}
    assert requests.tell([2], pack(Ping(0))) == []


def test_ranks_that_keep_their_answers_forget_them_when_all_are_in() -> None:
    requests, _ = table(up=2)
    requests.request(10, [1, 2], pack(Ping(10)), "", 0.0, keepers=(1, 2))
    assert requests.answer(10, 1, DONE, 0.0) == []
    assert sent(requests.answer(10, 2, DONE, 0.0)) == [(rank_peer(1), Forget(10)), (rank_peer(2), Forget(10))]


def test_the_others_are_released_once_a_second_after_a_failure() -> None:
    requests, _ = table(up=3)
    requests.request(10, [1, 2, 3], pack(Ping(10)), "", 0.0)
    assert not requests.has_failed
    requests.answer(10, 2, ERROR, 4.0)
    assert requests.has_failed
    assert requests.release_waiting(4.0 + RELEASE_AFTER_S / 2) == []
    released = [(rank_peer(1), Release(10)), (rank_peer(3), Release(10))]
    assert sent(requests.release_waiting(4.0 + RELEASE_AFTER_S)) == released
    assert requests.release_waiting(4.0 + RELEASE_AFTER_S * 1.5) == []
    requests.answer(10, 1, DONE, 6.0)
    assert sent(requests.release_waiting(4.0 + RELEASE_AFTER_S * 2)) == released[1:]


def test_ranks_are_in_step_if_they_count_the_same_collectives() -> None:
    for counts, in_step in (((3, 3), True), ((3, 4), False), ((-2, -2), False)):
        pending = Pending([1, 2])
        for proc, count in zip((1, 2), counts, strict=True):
            pending.compare([proc], count, 0)
        pending.compare([9], 100, 0)
        assert pending.in_step is in_step


def test_messages_without_their_other_ends_matter_after_a_failure_only() -> None:
    for unmatched, answer, in_step in (
        ((5, (1 << 64) - 5), ERROR, True),
        ((5, 0), ERROR, False),
        ((5, 0), DONE, True),
        ((0, 0), ERROR, True),
    ):
        requests, _ = table(up=3)
        requests.request(10, [1, 2], pack(Ping(10)), "", 0.0)
        pending = requests.get(10)
        assert pending is not None
        for proc, each in zip((1, 2), unmatched, strict=True):
            pending.compare([proc], 0, each)
            pending.compare([9], 0, 77)
            resolved = requests.answer(10, proc, answer if proc == 1 else DONE, 1.0)
        assert resolved is not None
        assert [effect.in_step for effect in resolved if isinstance(effect, Resolve)] == [in_step]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans()), max_size=40))
def test_every_request_resolves_once_when_its_last_answer_is_in(answers: list[tuple[int, int, bool]]) -> None:
    requests, _ = table(up=3)
    waiting = {id: set(range(1, id + 1)) for id in range(1, 4)}
    for id, procs in waiting.items():
        requests.request(id, sorted(procs), pack(Ping(id)), "", 0.0)
    for id, proc, fails in answers:
        effects = requests.answer(id, proc, ERROR if fails else DONE, 0.0)
        if proc not in waiting.get(id, ()):
            assert effects is None
            continue
        waiting[id].discard(proc)
        assert [effect.id for effect in effects or () if isinstance(effect, Resolve)] == [id] * (not waiting[id])
    assert sorted(requests) == [id for id, procs in waiting.items() if procs]
    assert all(set(requests.waiting_for(id)) == procs for id, procs in waiting.items())
