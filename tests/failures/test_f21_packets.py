"""F21: packets between hosts are late, lost, doubled or reordered; every message arrives once and in order, only later."""

from __future__ import annotations

import hashlib

import pytest

from monarch_kernel.actor import Actor, endpoint
from tests.failures.machines import LONG_S, CallLog, Machines, Stream, hosts_on

pytestmark = pytest.mark.slow

LOST_AFTER_S = 5.0
BIG_NBYTES = 400_000


class Echo(Actor):
    """Returns its argument."""

    @endpoint
    def echo(self, value: bytes) -> bytes:
        return value


def pattern(nbytes: int, salt: int) -> bytes:
    """Bytes without repeated pieces."""
    block = hashlib.shake_256(b"%d" % salt).digest(1 << 12)
    return b"".join(b"%012d" % i + block for i in range(nbytes >> 12))


@pytest.mark.parametrize(
    "faults",
    [
        {"delay_s": 0.03},
        {"delay_s": 0.005, "jitter_s": 0.02},
        {"loss": 0.08},
        {"doubled": 0.2},
        {"delay_s": 0.002, "jitter_s": 0.005, "loss": 0.03, "doubled": 0.05},
    ],
    ids=["late", "overtaken", "lost", "doubled", "all at once"],
)
def test_all_messages_arrive_once_and_in_order(cabled: Machines, faults: dict[str, float]) -> None:
    hosts = hosts_on(cabled, 2, lost_after_s=LOST_AFTER_S, is_light=True)
    mesh = hosts.spawn_procs({"gpus": 2}, device="cpu")
    cabled.await_up(mesh)
    stream = Stream(mesh)
    echoes = mesh.spawn("echoes", Echo)
    near, far = stream.call_logs.slice(hosts=0, gpus=0), stream.call_logs.slice(hosts=1, gpus=1)
    asked = mesh.spawn("asked", CallLog)
    near.ask.call_one(asked.slice(hosts=1, gpus=0), [-1]).get(LONG_S)  # lets both agents learn each other's address
    for host in cabled.hosts:
        host.suffer(**faults)
    # calls, some with large values
    bigs = []
    for i in range(3):
        stream.flow(0.4)
        bigs.append((pattern(BIG_NBYTES, i), echoes.echo.call(pattern(BIG_NBYTES, i))))
    # calls between actors of two hosts
    between = near.ask.call_one(asked.slice(hosts=1, gpus=0), range(30))
    # broadcasts, which have no answer
    for number in range(200):
        asked.slice(hosts=1, gpus=1).take.broadcast(number)
    assert asked.slice(hosts=1, gpus=1).all.call_one().get(LONG_S) == list(range(200))
    assert between.get(LONG_S) == list(range(30))
    for value, answers in bigs:
        assert set(answers.get(LONG_S).values()) == {value}
    stream.check(at_least=20)
    assert far.all.call_one().get(LONG_S) == list(range(len(stream.futures)))
    assert not mesh.deaths()
