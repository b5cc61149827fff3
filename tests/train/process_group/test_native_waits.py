"""Waits in native code of torch: interrupts and failures of other ranks end them, and the mesh can be used afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch_kernel.actor import Future
from monarch_kernel.errors import RemoteError
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.diagnostics.waits import collective_text
from tests.support.ranks import Ranks
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until

SUM = "x = torch.ones(1) * (rank + 1); dist.all_reduce(x); x.item()"
IMPORTS = "import time, torch, torch.distributed as dist\nfrom datetime import timedelta"


@pytest.fixture(scope="module")
def module_ranks(session: None) -> Iterator[Ranks]:
    ranks = Ranks(4, IMPORTS)
    yield ranks
    ranks.store.form(ranks.mesh).get(LONG_S)
    ranks.close()


@pytest.fixture
def ranks(module_ranks: Ranks) -> Ranks:
    """Four ranks with a fresh group, whatever the last test did to it."""
    module_ranks.store.form(module_ranks.mesh).get(LONG_S)
    return module_ranks


def wait_until_at(ranks: Ranks, which: set[int], line: int) -> None:
    """Wait until some ranks run a line of the cell."""

    def is_there(answer: object) -> bool:
        frames = [each.user_frame for each in answer.activities] if isinstance(answer, Doing) else []
        return any(frame is not None and frame.line == line for frame in frames)

    def are_there() -> bool:
        return all(is_there(answer) for rank, answer in ranks.mesh.doing().get(LONG_S).items() if rank in which)

    wait_until(are_there, f"ranks {which} to run line {line}")


def outcome(future: Future[object]) -> dict[int, str]:
    """How a request ended on each rank that did not succeed."""
    error = future.exception(LONG_S)
    assert isinstance(error, RemoteError)
    return {point.rank: report.kind for point, report in error.reports.items()}


SERVER = "store = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)"
SILENT = "import socket\nother = socket.create_server(('127.0.0.1', 0))\nport = other.getsockname()[1]"
ANOTHER = f"""{SILENT}
def answer():
    while True:
        with other.accept()[0] as client: client.recv(9); client.sendall(b"HTTP/1.1 400 Bad Request")
__import__("threading").Thread(target=answer, daemon=True).start()"""
OF_MESH = "dist.PrefixStore('p', dist.distributed_c10d._get_default_store())"
GROUP = "group = dist.new_group([0, 1, 2], use_local_synchronization=True)"
WAITS = {
    "receive": "dist.recv(torch.ones(1), 3)",
    "receive from any rank": "dist.recv(torch.ones(1))",
    "receive in a group": f"{GROUP}\ndist.recv(torch.ones(1), group=group)",
    "receive in the background": "dist.irecv(torch.ones(1)).wait()",
    "monitored barrier": "dist.monitored_barrier()",
    "new group": "dist.new_group([0, 1, 2, 3])",
    "group of others": "dist.new_group([rank, 3])",
    "device mesh": "dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('a', 'b'))",
    "group by its class": f"{SERVER}\ndist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=600))",
    "group in a file": "dist.ProcessGroupGloo(dist.FileStore('FILE', 2), 0, 2, timedelta(seconds=600))",
    "init of some ranks": "dist.destroy_process_group()\ndist.init_process_group('gloo')",
    "keys": f"{SERVER}\nstore.wait(['none'])",
    "value of a key": f"{SERVER}\ndist.PrefixStore('some', store).get('none')",
    "key of the mesh": f"{OF_MESH}.wait(['never'])",
    "keys in this process": "dist.HashStore().wait(['none'])",
    "server that is missing": "dist.TCPStore('127.0.0.1', 1, None, False)",
    "server that does not answer": f"{SILENT}\ndist.TCPStore('127.0.0.1', port, None, False)",
    "server of another kind": f"{ANOTHER}\ndist.TCPStore('127.0.0.1', port, None, False)",
    "clients that are missing": "dist.TCPStore('127.0.0.1', 0, 2, True)",
}


@pytest.mark.parametrize("code", WAITS.values(), ids=WAITS.keys())
def test_an_interrupt_ends_a_wait(ranks: Ranks, code: str, tmp_path: object, bar: Bar) -> None:
    code = code.replace("FILE", f"{tmp_path}/store")
    pids = [rank.pid for rank in ranks.mesh.view().ranks]
    future = ranks.mesh.run(f"kept = 7\nif rank == 3: time.sleep(1000)\n{code}")
    wait_until_at(ranks, {0, 1, 2}, 3 + code.count("\n"))
    wait_until_at(ranks, {3}, 2)
    with bar.below(2, "the interrupt"):
        future.interrupt()
        assert outcome(future) == dict.fromkeys(range(4), "interrupted")
    if not future.in_step:
        ranks.store.form(ranks.mesh).get(LONG_S)
    assert ranks.run(SUM) == (10.0,) * 4
    assert ranks.run("groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]; groups = None; kept") == (7,) * 4
    assert [rank.pid for rank in ranks.mesh.view().ranks] == pids


STORE = f"""
{SERVER.replace(" = ", " = rank == 0 and ")}
port = [store.port if rank == 0 else 0]
dist.broadcast_object_list(port)
store = store or dist.TCPStore("127.0.0.1", port[0], None, False)
"""
LINEAR = "torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))"
DESCRIBED = {
    "keys": (f"{STORE}if rank != 3: store.wait(['a', 'b'])", "TCPStore.wait for keys 'a', 'b'"),
    "key below a prefix": (
        f"{STORE}if rank != 3: dist.PrefixStore('p', store).wait(['never'])",
        "TCPStore.wait for key 'never'",
    ),
    "key of the mesh": (f"if rank != 3: {OF_MESH}.wait(['never'])", "PrefixStore.wait for key 'never'"),
    "value of a key of the mesh": (f"if rank != 3: {OF_MESH}.get('never')", "PrefixStore.get for key 'never'"),
    "server": (
        "if rank != 3: dist.TCPStore('127.0.0.1', 1, None, False)",
        "TCPStore for its server at 127.0.0.1 port 1",
    ),
    "server that does not answer": (
        f"{SILENT}\nif rank != 3: dist.TCPStore('127.0.0.1', port, None, False)",
        "TCPStore for its server at 127.0.0.1 port ",
    ),
    "clients": (
        "if rank != 3: dist.TCPStore('127.0.0.1', 0, 2, True)",
        "TCPStore for 2 processes to connect",
    ),
    "objects": ("if rank != 3: dist.all_gather_object([None] * 4, 1)", "all_gather_object: all_gather #1 (shape 1)"),
    "init of some ranks": (
        "if rank != 3: dist.destroy_process_group(); dist.init_process_group('gloo')",
        "init_process_group",
    ),
    "device mesh": ("if rank != 3: dist.init_device_mesh('cpu', (2, 2))", "init_device_mesh: new_group #"),
    "gradients of DDP": (
        f"model = torch.nn.parallel.DistributedDataParallel({LINEAR})\n"
        "if rank != 3: model(torch.ones(4)).sum().backward()",
        "(shape 76, DDP's gradients of 0.weight, 0.bias and 2 more)",
    ),
    "parameters of FSDP": (
        "from torch.distributed.fsdp import fully_shard\n"
        f"model = {LINEAR}\n"
        "everyone = dist.init_device_mesh('cpu', (4,))\n"
        "for each in (*model, model): fully_shard(each, mesh=everyone)\n"
        "if rank != 3: model(torch.ones(4))",
        "FSDP's all-gather of 0)",
    ),
}


# These import FSDP, or torch._dynamo, in each rank, which takes 4 s.
SLOW = ("parameters of FSDP", "gradients of DDP")


@pytest.mark.parametrize(
    ("code", "expected"),
    [pytest.param(*each, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, each in DESCRIBED.items()],
)
def test_a_wait_is_described(ranks: Ranks, code: str, expected: str) -> None:
    future = ranks.mesh.run(code)

    def texts() -> dict[int, list[str]]:
        found = ranks.mesh.doing().get(LONG_S)
        return {
            rank: [collective_text(each) for each in one.collectives]
            for rank, one in found.items()
            if isinstance(one, Doing) and one.collectives
        }

    def are_there() -> bool:
        said = texts()
        return set(said) == {0, 1, 2} and all(any(expected in text for text in each) for each in said.values())

    try:
        wait_until(are_there, f"{expected!r} in {texts()}", 30.0)
    finally:
        future.interrupt()
        assert {"interrupted"} == set(outcome(future).values())


@pytest.mark.parametrize(
    "wait",
    [
        "receive",
        "receive from any rank",
        "monitored barrier",
        "new group",
        "keys",
        "key of the mesh",
        "server that is missing",
        "server that does not answer",
        "clients that are missing",
    ],
)
def test_the_failure_of_another_rank_ends_a_wait(ranks: Ranks, wait: str) -> None:
    future = ranks.mesh.run(f"if rank == 3: raise ValueError('no data')\n{WAITS[wait]}")
    assert outcome(future) == {0: "released", 1: "released", 2: "released", 3: "exception"}
    if not future.in_step:
        ranks.store.form(ranks.mesh).get(LONG_S)
    assert ranks.run(SUM) == (10.0,) * 4


FROM_ANY = """
said = []
works = [dist.irecv(torch.ones(1), tag=tag) for tag in (1, 2)]
if rank == 3: raise ValueError("no data")
for receive in (works[0].wait, works[0].wait, works[1].wait, lambda: dist.recv(torch.ones(1))):
    try: receive()
    except RuntimeError as error: said.append(str(error))
said
"""
EXCHANGE = """
x = torch.zeros(1)
for sender in range(1, 4):
    if rank == 0: found = dist.recv(x); assert found == x.item()
    elif rank == sender: dist.send(torch.ones(1) * rank, 0)
    dist.barrier()
"""


def test_an_ended_group_ends_all_receives_from_any_rank(ranks: Ranks) -> None:
    """Also another wait for the same receive, one that nothing waited for, and a further one."""
    error = ranks.mesh.run(FROM_ANY).exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert {point.rank: len(set(said)) for point, said in error.results.items()} == dict.fromkeys(range(3), 1)
    assert {len(said) for said in error.results.values()} == {4}
    ranks.store.form(ranks.mesh).get(LONG_S)
    ranks.run(EXCHANGE)


def test_a_store_can_be_used_after_an_interrupt(ranks: Ranks) -> None:
    future = ranks.mesh.run(f"{SERVER}\nstore.wait(['none'])")
    wait_until_at(ranks, {0, 1, 2, 3}, 2)
    future.interrupt()
    assert set(outcome(future).values()) == {"interrupted"}
    assert future.in_step
    code = "store.set('a', '1')\nstore.wait(['a'])\nstore.get('a'), store.multi_get(['a']), store.check(['none'])"
    assert ranks.run(code) == ((b"1", [b"1"], False),) * 4


def test_waits_keep_their_time_limits(ranks: Ranks) -> None:
    code = f"""
{SERVER}
said = []
for wait in (
    lambda: store.wait(["a", "b"], timedelta(seconds=0.2)),
    lambda: dist.TCPStore("127.0.0.1", 1, None, False, timedelta(seconds=0.2)),
):
    try: wait()
    except dist.DistError as error: said.append((type(error).__name__, str(error)))
said
"""
    (said,) = {tuple(map(tuple, each)) for each in ranks.run(code)}
    (kind, text), (other, refused) = said
    assert (kind, text) == ("DistStoreError", "wait timeout after 200ms, keys: a, b")
    assert other == "DistNetworkError"
    assert refused.startswith("The client socket has timed out after 200ms while trying to connect to (127.0.0.1, 1): ")
