"""The names of the actor API, and what each gives or refuses: meshes, their algebra, endpoints, futures, values, context."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import monarch_kernel.actor as api
from monarch_kernel.actor import (
    Actor,
    ActorError,
    Extent,
    Future,
    HostMesh,
    Point,
    ProcMesh,
    SupervisionError,
    ValueMesh,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    this_host,
)
from monarch_kernel.mesh import Region
from tests.waiting import undisturbed_s

LONG_S = 60.0
"""For what takes a moment: a failure, not a measure."""

NAMES = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMesh",
    "Channel",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "Point",
    "Port",
    "PortReceiver",
    "ProcMesh",
    "SupervisionError",
    "ValueMesh",
    "as_endpoint",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "endpoint",
    "get_or_spawn_controller",
    "send",
    "shutdown_context",
    "this_host",
    "this_proc",
    "unhandled_fault_hook",
]


class Worker(Actor):
    """Does as it is told."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    @endpoint
    def rank(self) -> int:
        return context().actor_instance.rank.rank

    @endpoint
    def add(self, amount: int, *, times: int = 1) -> int:
        self.value += amount * times
        return self.value

    @endpoint
    def wait_for(self, path: str) -> int:
        deadline = time.monotonic() + LONG_S
        while not os.path.exists(path):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return current_rank().rank

    @endpoint
    def wait_by_rank(self, folder: str) -> int:
        return self.wait_for(f"{folder}/{context().actor_instance.rank.rank}")  # type: ignore[operator,no-any-return]

    @endpoint
    def places(self) -> tuple[int, str, int, str, str, int]:
        here = context().actor_instance
        message, size = current_rank(), current_size()
        return message.rank, str(dict(size)), here.rank.rank, current_actor_name(), here.name, here.actor_id

    @endpoint
    def meshes(self) -> tuple[dict[str, int], dict[str, int]]:
        here: Any = context().actor_instance
        return dict(here.proc.extent), dict(here.proc_mesh.extent)

    @endpoint
    def process(self) -> tuple[int, int]:
        return os.getpid(), threading.get_ident()

    @endpoint
    def grow(self, values: list[int]) -> int:
        values.append(1)
        return len(values)

    @endpoint
    def environment(self, name: str) -> str:
        return os.environ.get(name, "")

    def plain(self, factor: int) -> int:
        return self.value * factor


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    """Four processes; ranks can't import tests, so the classes of this module travel by value."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    mesh = this_host().spawn_procs({"dp": 2, "tp": 2}, device="cpu")
    mesh.initialized.get(LONG_S)
    yield mesh
    mesh.stop().get()  # the session is the folder's
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def workers(procs: ProcMesh) -> Worker:
    return procs.spawn("workers", Worker)


@pytest.fixture(scope="module")
def counters(procs: ProcMesh) -> tuple[Any, ...]:
    """Actors of the controller; they live as long as the session."""
    futures = [
        api.get_or_spawn_controller(name, Worker, start)
        for name, start in (("counter", 10), ("counter", 99), ("another", 99))
    ]
    assert all(isinstance(future, Future) for future in futures)
    return tuple(future.get(LONG_S) for future in futures)


@pytest.fixture
def one(procs: ProcMesh) -> Iterator[Any]:
    mesh: Any = procs.slice(dp=0, tp=0).spawn("one", Worker, 7)
    yield mesh
    mesh.stop().get(LONG_S)


# -- names


@pytest.mark.parametrize("name", NAMES)
def test_the_name_is_there_and_public(name: str) -> None:
    assert hasattr(api, name)
    assert name in api.__all__


def test_spmd_sets_the_environment_of_torchrun(procs: ProcMesh) -> None:
    from monarch_kernel.spmd import setup_torch_elastic_env

    setup_torch_elastic_env(procs)
    wanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = procs.run(f"import os; [os.environ[name] for name in {wanted!r}]").get(LONG_S).values()
    assert [each[:4] for each in found] == [[str(rank), "4", str(rank), "4"] for rank in range(4)]
    assert len({tuple(each[4:]) for each in found}) == 1


# -- meshes of hosts and processes


def test_this_host_is_one_host_without_axes() -> None:
    hosts = this_host()
    assert isinstance(hosts, HostMesh)
    assert (dict(hosts.extent), hosts.size(), len(hosts)) == ({}, 1, 1)


def test_this_proc_is_the_callers_process_without_axes() -> None:
    here = api.this_proc()  # type: ignore[attr-defined,unused-ignore]
    assert isinstance(here, ProcMesh)
    assert (dict(here.extent), len(here)) == ({}, 1)


def test_actors_live_in_the_controllers_process_on_threads_of_their_own_and_get_copies() -> None:
    here = api.this_proc().spawn("here", Worker, 3)  # type: ignore[attr-defined,unused-ignore]
    pid, thread = here.process.call_one().get(LONG_S)
    assert pid == os.getpid()
    assert thread != threading.get_ident()
    mine: list[int] = []
    assert here.grow.call_one(mine).get(LONG_S) == 1
    assert mine == []
    assert here.add.call_one(2).get(LONG_S) == 5
    here.stop().get(LONG_S)


def test_a_controller_actor_is_one_per_name(counters: tuple[Any, ...]) -> None:
    first, same, another = counters
    assert first.add.call_one(1).get(LONG_S) == 11
    assert same.add.call_one(1).get(LONG_S) == 12
    assert another.add.call_one(1).get(LONG_S) == 100
    assert first.process.call_one().get(LONG_S)[0] == os.getpid()


def test_spawn_procs_gives_host_axes_then_per_host_axes_in_order() -> None:
    hosts = this_host()._with_region(Region.whole(Extent({"hosts": 1})))
    mesh = hosts.spawn_procs(per_host={"tp": 1, "dp": 2}, name="ordered", env={"SPEC_X": "7"}, device="cpu")
    assert list(mesh.extent.items()) == [("hosts", 1), ("tp", 1), ("dp", 2)]
    assert mesh.name == "ordered"
    assert mesh.run("import os; os.environ['SPEC_X']").get(LONG_S).values() == ("7", "7")
    with pytest.raises(ValueError, match="hosts"):
        hosts.spawn_procs(per_host={"hosts": 2}, device="cpu")
    mesh.stop(grace_s=0).get(LONG_S)


def test_spawn_procs_and_spawn_return_at_once(procs: ProcMesh) -> None:
    begun = undisturbed_s()
    mesh = this_host().spawn_procs(per_host={"r": 2}, device="cpu")
    workers = mesh.spawn("workers", Worker)
    future = workers.rank.call()
    took_s = undisturbed_s() - begun
    assert not future.done() or took_s < 0.01
    assert took_s < 0.25
    assert future.get(LONG_S).values() == (0, 1)
    assert mesh.initialized.get(LONG_S) is True
    assert workers.initialized.get(LONG_S) is True  # type: ignore[attr-defined]
    mesh.stop(grace_s=0).get(LONG_S)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_bootstrap_runs_in_each_process_before_any_actor(procs: ProcMesh, kind: str) -> None:
    def prepare() -> None:
        os.environ["SPEC_PREPARED"] = f"by {os.environ['RANK'] if 'RANK' in os.environ else os.getpid()}"

    async def prepare_async() -> None:
        await asyncio.sleep(0)
        prepare()

    spawn: Any = this_host().spawn_procs
    mesh = spawn({"r": 2}, bootstrap=prepare if kind == "sync" else prepare_async, device="cpu")
    found = mesh.spawn("workers", Worker).environment.call("SPEC_PREPARED").get(LONG_S).values()
    assert all(each.startswith("by ") for each in found)
    assert len(set(found)) == 2
    mesh.stop(grace_s=0).get(LONG_S)


def test_hosts_say_when_they_are_up(procs: ProcMesh) -> None:
    assert this_host().initialized.get(LONG_S) is True  # type: ignore[attr-defined,unused-ignore]
    assert callable(this_host().stop)  # type: ignore[attr-defined,unused-ignore]
    assert callable(this_host().shutdown)


# -- spawning actors


def test_constructor_arguments_are_checked_where_spawn_is_called(procs: ProcMesh) -> None:
    with pytest.raises(TypeError, match="start"):
        procs.spawn("w", Worker, nope=1)
    with pytest.raises(TypeError, match="too many"):
        procs.spawn("w", Worker, 1, 2)
    with pytest.raises(ValueError, match="no Actor"):
        procs.spawn("w", dict)  # type: ignore[type-var]


def test_names_of_actors_need_not_be_unique(procs: ProcMesh) -> None:
    first, second = procs.spawn("same", Worker, 1), procs.spawn("same", Worker, 2)
    assert first.add.call(0).get(LONG_S).values() == (1,) * 4
    assert second.add.call(0).get(LONG_S).values() == (2,) * 4


def test_stop_of_an_actor_mesh_is_a_future_of_none(procs: ProcMesh) -> None:
    mesh: Any = procs.spawn("short", Worker)
    assert mesh.stop("done with it").get(LONG_S) is None
    with pytest.raises(SupervisionError, match="done with it"):
        mesh.rank.call().get(LONG_S)


def test_endpoints_of_one_class_are_all_sync_or_all_async(procs: ProcMesh) -> None:
    class Mixed(Actor):
        @endpoint
        def one(self) -> None: ...

        @endpoint
        async def other(self) -> None: ...

    with pytest.raises(ValueError, match=r"Mixed.*one"):
        procs.spawn("mixed", Mixed)


@pytest.mark.parametrize("name", ["slice", "split", "flatten", "rename", "stop", "size", "initialized"])
def test_an_endpoint_may_not_be_called_like_an_attribute_of_meshes(procs: ProcMesh, name: str) -> None:
    def method(self: object) -> None: ...

    method.__name__ = name
    with pytest.raises(ValueError, match=name):
        procs.spawn("clash", type("Clash", (Actor,), {name: endpoint(method)}))


# -- algebra, the same for all meshes


@pytest.fixture(params=["hosts", "procs", "actors", "values"])
def mesh(request: pytest.FixtureRequest, procs: ProcMesh, workers: Any) -> Any:
    if request.param == "hosts":
        host = this_host()
        return HostMesh(host._session, Region.whole(Extent({"dp": 2, "tp": 2})), tuple(host._hosts) * 4)
    return {"procs": procs, "actors": workers, "values": workers.rank.call().get(LONG_S)}[request.param]


def test_an_int_drops_an_axis_and_a_slice_keeps_it(mesh: Any) -> None:
    assert dict(mesh.slice(dp=1).extent) == {"tp": 2}
    assert dict(mesh.slice(dp=1, tp=0).extent) == {}
    assert dict(mesh.slice(dp=slice(1, 2)).extent) == {"dp": 1, "tp": 2}
    assert dict(mesh.slice(tp=slice(0, 2, 2)).extent) == {"dp": 2, "tp": 1}


def test_bad_slices(mesh: Any) -> None:
    with pytest.raises(TypeError, match="pp"):
        mesh.slice(pp=0)
    for index in (2, -1):
        with pytest.raises(IndexError):
            mesh.slice(dp=index)


def test_split_flatten_rename(mesh: Any) -> None:
    line = mesh.flatten("rank")
    assert dict(line.extent) == {"rank": 4}
    assert dict(line.split(rank=("a", "b"), b=2).extent) == {"a": 2, "b": 2}
    assert dict(mesh.rename(tp="model").extent) == {"dp": 2, "model": 2}
    with pytest.raises(ValueError, match=r"rank.*4.*3|3.*rank.*4"):
        line.split(rank=("a", "b"), b=3)
    with pytest.raises(ValueError, match=r"a.*b"):
        line.split(rank=("a", "b"))


def test_sizes(mesh: Any) -> None:
    assert (mesh.size(), len(mesh), mesh.size("dp")) == (4, 4, 2)
    assert dict(mesh.sizes) == dict(mesh.extent) == {"dp": 2, "tp": 2}


def test_reshaped_meshes_address_the_same_ranks(workers: Worker) -> None:
    line: Any = workers.flatten("rank")  # type: ignore[attr-defined]
    assert line.slice(rank=slice(1, 4, 2)).rank.call().get(LONG_S).values() == (1, 3)
    assert line.split(rank=("x", "y"), y=2).slice(y=1).rank.call().get(LONG_S).values() == (1, 3)


def test_a_point_is_a_mapping_with_a_rank_and_an_extent() -> None:
    point = Extent({"gpus": 4}).point(1)
    assert isinstance(point, Point)
    assert (dict(point), point["gpus"], point.rank, dict(point.extent)) == ({"gpus": 1}, 1, 1, {"gpus": 4})
    assert str(point) == "{'gpus': 1/4}"


# -- adverbs


def test_call_keeps_the_shape_of_the_mesh(workers: Any) -> None:
    values = workers.rank.call().get(LONG_S)
    assert (values.extent, values.values()) == (workers.extent, (0, 1, 2, 3))
    part = workers.slice(dp=1).rank.call().get(LONG_S)
    assert (dict(part.extent), part.values()) == ({"tp": 2}, (2, 3))


def test_call_one_needs_exactly_one_actor(workers: Any) -> None:
    with pytest.raises(ValueError, match="4"):
        workers.rank.call_one()
    assert workers.slice(dp=1, tp=0).rank.call_one().get(LONG_S) == 2


def test_choose_asks_one(workers: Any) -> None:
    futures = [workers.rank.choose() for _ in range(64)]
    assert {future.get(LONG_S) for future in futures} == {0, 1, 2, 3}


def test_stream_gives_a_future_per_rank_in_order_of_arrival(workers: Any, tmp_path: Path) -> None:
    order = []
    stream = workers.wait_by_rank.stream(str(tmp_path))
    for rank in (2, 0, 3, 1):
        (tmp_path / str(rank)).touch()
        order.append(next(stream).get(LONG_S))
    assert order == [2, 0, 3, 1]
    with pytest.raises(StopIteration):
        next(stream)


def test_broadcast_gives_nothing_and_comes_before_the_next_call(one: Any) -> None:
    assert one.add.broadcast(3, times=2) is None
    assert one.add.call_one(0).get(LONG_S) == 13


def test_an_endpoint_that_is_called_bare_says_to_use_an_adverb(workers: Any) -> None:
    with pytest.raises(TypeError, match=r"\.call\(\)"):
        workers.rank()


def test_arguments_are_bound_before_anything_is_sent(one: Any) -> None:
    for args, kwargs in (((), {}), ((1, 2), {}), ((1,), {"nope": 2})):
        for adverb in ("call", "call_one", "choose", "stream", "broadcast"):
            with pytest.raises(TypeError, match="add"):
                getattr(one.add, adverb)(*args, **kwargs)
    assert one.add.call_one(0).get(LONG_S) == 7


def test_an_argument_that_cannot_be_pickled_is_named(one: Any) -> None:
    with pytest.raises(TypeError, match="'amount'"):
        one.add.call(threading.Lock())
    with pytest.raises(TypeError, match="'times'"):
        one.add.broadcast(1, times=threading.Lock())


def test_the_decorator_takes_options() -> None:
    parameters = inspect.signature(endpoint).parameters
    marked: Any = endpoint()
    assert callable(marked)
    assert len(parameters) >= 1


def test_the_decorator_takes_propagate_and_explicit_response_port() -> None:
    mark: Any = endpoint
    mark(propagate=None, explicit_response_port=False)(lambda self: None)
    mark(explicit_response_port=True)(lambda self, port: None)


def test_an_explicit_response_port_is_answered_when_the_actor_likes(procs: ProcMesh) -> None:
    mark: Any = endpoint

    class Later(Actor):
        def __init__(self) -> None:
            self.waiting: list[Any] = []

        @mark(explicit_response_port=True)
        def ask(self, port: Any, question: str) -> None:
            self.waiting.append((port, question))

        @endpoint
        def answer(self) -> int:
            for port, question in self.waiting:
                if question == "bad":
                    port.exception(ValueError("a bad question"))
                else:
                    port.send(question.upper())
            return len(self.waiting)

    later: Any = procs.spawn("later", Later)
    good, bad = later.ask.call("why"), later.ask.call("bad")
    with pytest.raises(TimeoutError):
        good.get(0.05)
    assert later.answer.call().get(LONG_S).values() == (2,) * 4
    assert good.get(LONG_S).values() == ("WHY",) * 4
    with pytest.raises(ActorError, match="a bad question"):
        bad.get(LONG_S)


def test_concurrent_endpoints_start_in_order_and_overlap(procs: ProcMesh) -> None:
    class Gate(Actor):
        def __init__(self) -> None:
            self.began: list[int] = []
            self.open = asyncio.Event()

        @api.concurrent_endpoint  # type: ignore[attr-defined,untyped-decorator,unused-ignore]
        async def enter(self, number: int) -> list[int]:
            self.began.append(number)
            await self.open.wait()
            return self.began

        @endpoint
        async def unlock(self) -> list[int]:
            self.open.set()
            return self.began

    gate: Any = procs.slice(dp=0, tp=0).spawn("gate", Gate)
    entering = [gate.enter.call_one(number) for number in range(5)]
    assert gate.unlock.call_one().get(LONG_S) == [0, 1, 2, 3, 4]
    assert [future.get(LONG_S) for future in entering] == [[0, 1, 2, 3, 4]] * 5


def test_concurrent_endpoints_are_async(procs: ProcMesh) -> None:
    with pytest.raises((TypeError, ValueError), match="async"):

        class Bad(Actor):
            @api.concurrent_endpoint  # type: ignore[attr-defined,untyped-decorator,unused-ignore]
            def sync(self) -> None: ...


def test_a_plain_method_can_be_called_as_an_endpoint(one: Any) -> None:
    assert api.as_endpoint(one.plain).call_one(6).get(LONG_S) == 42  # type: ignore[attr-defined,unused-ignore]


def test_send_delivers_to_a_port(workers: Any) -> None:
    port, receiver = api.Channel.open()  # type: ignore[attr-defined,unused-ignore]
    api.send(workers.rank, (), {}, port=port)  # type: ignore[attr-defined,unused-ignore]
    assert sorted(receiver.recv().get(LONG_S) for _ in range(4)) == [0, 1, 2, 3]


# -- futures


def test_futures_are_read_by_get_result_exception_and_await(one: Any) -> None:
    future = one.add.call_one(1)
    assert (future.get(timeout=LONG_S), future.result(LONG_S), future.exception(LONG_S)) == (8, 8, None)

    async def wait() -> tuple[int, int]:
        return await one.add.call_one(1), await one.add.call_one(1).as_asyncio()

    assert asyncio.run(wait()) == (9, 10)


def test_futures_may_be_read_by_many_threads(one: Any, tmp_path: Path) -> None:
    future = one.wait_for.call_one(str(tmp_path / "go"))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(future.get(LONG_S))) for _ in range(4)]
    for thread in threads:
        thread.start()
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join(LONG_S)
    assert found == [0, 0, 0, 0]
    assert future.get() == 0


def test_a_timeout_does_not_consume_a_future(one: Any, tmp_path: Path) -> None:
    future = one.wait_for.call_one(str(tmp_path / "go"))
    for read in (future.get, future.result):
        with pytest.raises(TimeoutError):
            read(0.01)
    (tmp_path / "go").touch()
    assert future.get(LONG_S) == 0


# -- context


def test_a_call_on_a_slice_counts_ranks_within_the_slice(workers: Any) -> None:
    whole = [(each[0], each[1], each[2]) for each in workers.places.call().get(LONG_S).values()]
    assert whole == [(rank, "{'dp': 2, 'tp': 2}", rank) for rank in range(4)]
    part = [each[:3] for each in workers.slice(dp=1).places.call().get(LONG_S).values()]
    assert part == [(0, "{'tp': 2}", 2), (1, "{'tp': 2}", 3)]
    assert workers.slice(dp=1, tp=1).places.call_one().get(LONG_S)[:3] == (0, "{}", 3)


def test_the_context_knows_the_actor(workers: Any) -> None:
    found = workers.places.call().get(LONG_S).values()
    assert {each[3:5] for each in found} == {("workers", "workers")}
    assert len({each[5] for each in found}) == 1


def test_the_context_knows_the_process_and_the_mesh_of_processes(procs: ProcMesh, workers: Any) -> None:
    assert workers.meshes.call().get(LONG_S).values() == (({}, {"dp": 2, "tp": 2}),) * 4
    half: Any = procs.slice(dp=1).spawn("half", Worker)
    assert half.meshes.call().get(LONG_S).values() == (({}, {"tp": 2}),) * 2


def test_the_context_of_the_program_is_the_clients() -> None:
    assert (current_rank().rank, dict(current_size())) == (0, {})
    assert isinstance(current_actor_name(), str)


# -- values


def test_values_by_point(workers: Any) -> None:
    values = workers.rank.call().get(LONG_S)
    assert values.item(dp=1, tp=0) == 2
    with pytest.raises(KeyError):
        values.item(dp=1)
    for tp in (2, -1):
        with pytest.raises(IndexError):
            values.item(dp=0, tp=tp)


def test_values_are_containers(workers: Any) -> None:
    values: ValueMesh[int] = workers.rank.call().get(LONG_S)
    assert [(dict(point), value) for point, value in values][2] == ({"dp": 1, "tp": 0}, 2)
    assert [point.rank for point, _ in values.items()] == [0, 1, 2, 3]
    assert (values.values(), len(values)) == ((0, 1, 2, 3), 4)
    assert values == workers.rank.call().get(LONG_S)
    assert pickle.loads(pickle.dumps(values)) == values
    assert values.slice(dp=1).values() == (2, 3)
    assert values.flatten("r").item(r=3) == 3
    assert values.rename(tp="x").item(dp=0, x=1) == 1


def test_equal_values_are_stored_once(workers: Any) -> None:
    values = ValueMesh(Extent({"r": 64}), ["x" * 1000 for _ in range(64)])
    assert len(pickle.dumps(values)) < 4000
