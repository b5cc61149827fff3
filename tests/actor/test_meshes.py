"""Handles of the controller: ways to call, futures, values, mesh algebra, and misuse that raises before anything is sent."""

from __future__ import annotations

import asyncio
import pickle
import re
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    Extent,
    Future,
    HostMesh,
    ProcMesh,
    SupervisionError,
    ValueMesh,
    endpoint,
    this_host,
)
from monarch_kernel.base.mesh import Region
from monarch_kernel.errors import RemoteError
from tests.support.actors import Worker
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until

PROCS = {"dp": 2, "tp": 2}


class ScalingWorker(Worker):
    """Takes arguments of all kinds.

    Args:
        base: the value to count from.
        step: the factor of each count.
    """

    def __init__(self, base: int = 0, *, step: int = 1) -> None:
        super().__init__(base)
        self.step = step

    @endpoint
    def add(self, amount: int, /, times: int = 1, *, scale: int = 1) -> int:  # type: ignore[override]
        self.count += amount * times * scale * self.step
        return self.count

    @endpoint
    def collect(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs


@pytest.fixture(scope="module")
def workers(procs: ProcMesh) -> ScalingWorker:
    return procs.spawn("workers", ScalingWorker)


@pytest.fixture
def one(procs: ProcMesh) -> Iterator[Any]:
    """A fresh actor on one rank."""
    mesh: Any = procs.slice(dp=0, tp=0).spawn("one", ScalingWorker)
    yield mesh
    mesh.stop().get(LONG_S)


# -- ways to call


def test_call_gives_a_value_for_each_rank_in_the_shape_of_the_mesh(workers: Worker) -> None:
    values = workers.rank.call().get()
    assert isinstance(values, ValueMesh)
    assert dict(values.extent) == {"dp": 2, "tp": 2}
    assert values.values() == (0, 1, 2, 3)
    assert values.item(dp=1, tp=0) == 2
    part = workers.slice(tp=1).rank.call().get()  # type: ignore[attr-defined]
    assert (dict(part.extent), part.values()) == ({"dp": 2}, (1, 3))


def test_a_mesh_of_values_behaves_like_a_mesh_and_like_a_container(workers: Worker) -> None:
    values = workers.rank.call().get()
    assert len(values) == 4
    assert [(dict(point), value) for point, value in values][3] == ({"dp": 1, "tp": 1}, 3)
    assert list(values.items()) == list(values)
    assert values.slice(dp=1).values() == (2, 3)
    assert values.flatten("rank").item(rank=2) == 2
    assert values.rename(tp="model").item(dp=0, model=1) == 1
    assert pickle.loads(pickle.dumps(values)) == values == workers.rank.call().get()
    with pytest.raises(KeyError):
        values.item(dp=0)
    for tp in (2, -1):
        with pytest.raises(IndexError):
            values.item(dp=0, tp=tp)


def test_call_one_needs_a_mesh_of_one_actor(workers: Worker) -> None:
    some: Any = workers
    assert some.slice(dp=1, tp=1).rank.call_one().get() == 3
    assert some.slice(dp=slice(1, 2), tp=0).rank.call_one().get() == 2
    with pytest.raises(ValueError, match=r"needs a mesh of one actor, but this one has 4"):
        some.rank.call_one()


def test_choose_calls_one_actor(workers: Worker) -> None:
    chosen = {workers.rank.choose().get() for _ in range(200)}
    assert chosen == {0, 1, 2, 3}  # that 200 draws miss one has a probability of 4e-25
    future = workers.rank.choose()
    assert future.get() == future.rank


def test_stream_yields_answers_in_the_order_of_arrival(workers: Worker, tmp_path: Path) -> None:
    order = [2, 0, 3, 1]
    seen = []
    answers = workers.wait_by_rank.stream(str(tmp_path))
    for rank in order:
        (tmp_path / str(rank)).touch()
        future = next(answers)
        assert future.done()
        seen.append((future.rank, future.get()))
    assert seen == [(rank, rank) for rank in order]
    with pytest.raises(StopIteration):
        next(answers)


def test_stream_yields_the_error_of_each_rank(workers: Worker) -> None:
    ranks = []
    for future in workers.fail.stream():
        error = future.exception()
        assert isinstance(error, ActorError)
        assert error.ranks == (future.rank,)
        ranks.append(future.rank)
    assert sorted(ranks) == [0, 1, 2, 3]  # type: ignore[type-var]


def test_broadcast_returns_nothing_and_comes_before_the_next_call(one: Any) -> None:
    assert one.add.broadcast(5) is None
    assert one.add.call_one(1).get() == 6


def test_arguments_of_all_kinds_arrive(one: Any) -> None:
    assert one.add.call_one(1, 2, scale=3).get() == 6
    assert one.add.call_one(1, times=2).get() == 8
    assert one.collect.call_one(1, "b", c=None, d=[2.5]).get() == ((1, "b"), {"c": None, "d": [2.5]})
    assert one.collect.call_one().get() == ((), {})


def test_constructor_arguments_arrive(procs: ProcMesh) -> None:
    assert procs.spawn("worker", ScalingWorker, 10, step=2).add.call(1).get().values() == (12,) * 4


def test_actors_of_one_mesh_may_have_the_same_name(procs: ProcMesh) -> None:
    first, second = procs.spawn("same", Worker, 1), procs.spawn("same", Worker, 2)
    assert first.value.call().get(LONG_S).values() == (1,) * 4
    assert second.value.call().get(LONG_S).values() == (2,) * 4


# -- misuse that raises before anything is sent


def test_an_endpoint_is_not_called_directly(workers: Worker) -> None:
    with pytest.raises(TypeError, match=r"workers\.add is an endpoint.*\.call\(\)"):
        workers.add(1)  # type: ignore[operator]


def test_arguments_are_checked_at_the_call(workers: Worker) -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'amount'"):
        workers.add.call()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="too many positional arguments"):
        workers.rank.call(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'scales'"):
        workers.add.broadcast(1, scales=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="amount"):
        workers.add.stream(amount=2)  # type: ignore[call-arg]


def test_no_way_to_call_sends_arguments_that_do_not_match(one: Any) -> None:
    for args, kwargs in (((), {}), ((1, 2, 3), {}), ((1,), {"nope": 2})):
        for adverb in ("call", "call_one", "choose", "stream", "broadcast"):
            with pytest.raises(TypeError, match="add"):
                getattr(one.add, adverb)(*args, **kwargs)
    assert one.value.call_one().get(LONG_S) == 0


def test_constructor_arguments_are_checked_at_the_spawn(procs: ProcMesh) -> None:
    class Plain(Actor):
        pass

    with pytest.raises(TypeError, match=r"ScalingWorker\(.*step.*\): too many positional arguments"):
        procs.spawn("worker", ScalingWorker, 1, 2)
    with pytest.raises(TypeError, match="steps"):
        procs.spawn("worker", ScalingWorker, steps=2)
    with pytest.raises(TypeError, match=r"Plain\(\) takes no arguments"):
        procs.spawn("plain", Plain, 1)


def test_only_actors_are_spawned(procs: ProcMesh) -> None:
    class Lonely:
        pass

    for impostor in (Lonely, Lonely(), "Worker", dict):
        with pytest.raises(ValueError, match="is not an Actor"):
            procs.spawn("impostor", impostor)  # type: ignore[type-var]


def test_endpoints_are_no_generators(procs: ProcMesh) -> None:
    class Rows(Actor):
        @endpoint
        def rows(self) -> Iterator[int]:
            yield 1

        @endpoint
        async def later(self) -> AsyncIterator[int]:
            yield 1

    with pytest.raises(
        ValueError, match=r"Rows: an endpoint can't be a generator \(rows, later\).* a list, or .* Channel"
    ):
        procs.spawn("rows", Rows)


def test_sync_and_async_endpoints_do_not_mix(procs: ProcMesh) -> None:
    class Mixed(Actor):
        @endpoint
        def left(self) -> None: ...

        @endpoint
        async def right(self) -> None: ...

    with pytest.raises(ValueError, match=r"Mixed mixes sync endpoints \(left\)"):
        procs.spawn("mixed", Mixed)


@pytest.mark.parametrize(
    "name", ["slice", "stop", "size", "sizes", "extent", "flatten", "split", "rename", "initialized"]
)
def test_endpoints_cannot_have_names_of_meshes(procs: ProcMesh, name: str) -> None:
    def method(self: object) -> None: ...

    method.__name__ = name
    cls = type("Clash", (Actor,), {name: endpoint(method)})
    with pytest.raises(ValueError, match=rf"Clash: an endpoint can't be called {name}"):
        procs.spawn("clash", cls)


def test_an_unknown_endpoint_is_an_attribute_error_that_lists_the_endpoints(workers: Any) -> None:
    with pytest.raises(AttributeError, match="ScalingWorker has no endpoint 'rnak'; it has: add, collect"):
        workers.rnak  # noqa: B018
    assert {"rank", "add", "slice"} <= set(dir(workers))
    assert workers.rank.__doc__ == "The flat rank in the mesh as spawned."


# -- algebra


@pytest.fixture(params=["hosts", "procs", "actors", "values"])
def mesh(request: pytest.FixtureRequest, procs: ProcMesh, workers: Any) -> Any:
    if request.param == "hosts":
        host = this_host()
        return HostMesh(host._session, Region.whole(Extent({"dp": 2, "tp": 2})), tuple(host._hosts) * 4)
    return {"procs": procs, "actors": workers, "values": workers.rank.call().get(LONG_S)}[request.param]


def test_sizes(mesh: Any) -> None:
    assert (mesh.size(), len(mesh), mesh.size("dp")) == (4, 4, 2)
    assert dict(mesh.sizes) == dict(mesh.extent) == {"dp": 2, "tp": 2}


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
    assert dict(line.split(rank=("a", "b"), a=1).extent) == {"a": 1, "b": 4}
    assert dict(mesh.rename(tp="model").extent) == {"dp": 2, "model": 2}
    with pytest.raises(ValueError, match=r"rank.*4.*3|3.*rank.*4"):
        line.split(rank=("a", "b"), b=3)
    with pytest.raises(ValueError, match=r"a.*b"):
        line.split(rank=("a", "b"))


def test_reshaped_meshes_address_the_same_actors(procs: ProcMesh, workers: Any) -> None:
    line = workers.flatten("rank")
    assert line.slice(rank=slice(1, 4, 2)).rank.call().get().values() == (1, 3)
    back = line.split(rank=("dp", "tp"), tp=2)
    assert back.slice(tp=1).rank.call().get().values() == (1, 3)
    on_half = procs.slice(tp=1).spawn("half", Worker)
    assert on_half.rank.call().get().values() == (0, 1)  # a separate mesh
    pids = procs.run("import os; os.getpid()").get()
    assert procs.slice(tp=1).run("os.getpid()").get().values() == (pids.item(dp=0, tp=1), pids.item(dp=1, tp=1))


def test_axes_of_hosts_and_processes_do_not_clash() -> None:
    with pytest.raises(ValueError, match="size"):
        this_host().spawn_procs({"r": -1}, device="cpu")


# -- variables and cells of processes


def test_variables_are_pushed_and_pulled(procs: ProcMesh) -> None:
    procs["x"] = {"a": [1]}
    procs.slice(dp=1)["x"] = "other"
    assert procs["x"].values() == ({"a": [1]}, {"a": [1]}, "other", "other")
    assert procs.slice(tp=0)["x"].values() == ({"a": [1]}, "other")
    with pytest.raises(ValueError, match="is no variable name"):
        procs["not a name"]
    with pytest.raises(ValueError, match="'class' is a keyword of Python"):
        procs["class"]
    assert procs["__name__"].values() == ("__main__",) * 4
    with pytest.raises(TypeError, match=r"the value for 'x' \(a lock\)"):
        procs["x"] = threading.Lock()
    with pytest.raises(RemoteError, match="name 'y_' is not defined on this rank"):
        procs["y_"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("class", "'class' is a keyword of Python, and no variable name; choose another one, such as class_"),
        ("None", "'None' is a keyword of Python"),
        ("x.y", "'x.y' is no variable name"),
        ("", "'' is no variable name"),
        (b"x", "b'x' is no variable name"),
        (None, "None is no variable name"),
        ("__builtins__", "'__builtins__' belongs to Python, and can't be pushed"),
        ("rank", "'rank' has a meaning on each rank, which other cells use, and can't be pushed"),
        ("mesh", "choose another name, such as my_mesh, or assign it in a cell on the ranks"),
    ],
)
def test_a_name_that_has_a_meaning_is_not_pushed(procs: ProcMesh, name: Any, says: str) -> None:
    ranks = procs.run("rank").get().values()
    with pytest.raises(ValueError, match=re.escape(says)):
        procs[name] = 1
    with pytest.raises(ValueError, match=re.escape(says)):
        procs[name] = procs.per_rank([1, 2, 3, 4])
    assert procs.run("rank").get().values() == ranks


def test_names_of_builtins_and_soft_keywords_are_pushed(procs: ProcMesh) -> None:
    for name in ("len", "match", "type", "rank_"):
        procs[name] = name
        assert procs[name].values() == (name,) * 4
    procs.run("del len, match, type, rank_").get()


def test_a_failed_cell_keeps_the_values_of_other_ranks(procs: ProcMesh) -> None:
    with pytest.raises(RemoteError, match="ZeroDivisionError") as caught:
        procs.run("1 / (rank - 2)").get()
    assert caught.value.ranks == (2,)
    assert {point.rank: value for point, value in caught.value.results.items()} == {0: -0.5, 1: -1.0, 3: 1.0}


# -- futures


def test_many_threads_can_read_a_future_many_times(workers: Worker, tmp_path: Path) -> None:
    go = tmp_path / "go"
    future = workers.wait_for.call(str(go))
    read: list[object] = []
    threads = [threading.Thread(target=lambda: read.append(future.get(LONG_S))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert not future.done()
    go.touch()
    for thread in threads:
        thread.join(LONG_S)
    assert read == [future.get()] * 4 == [future.result(1)] * 4
    assert future.done()
    assert future.exception() is None


def test_a_timeout_does_not_consume_a_future(one: Any, tmp_path: Path, bar: Bar) -> None:
    go = tmp_path / "go"
    future = one.wait_for.call_one(str(go))
    for wait in (future.get, future.result, future.exception):
        with bar.below(5, "a timeout of 0.02 s"), pytest.raises(TimeoutError, match=r"no answer within 0\.02 s"):
            wait(timeout=0.02)
    with pytest.raises(TimeoutError):
        future.get(0)
    assert not future.wait(0.01)
    go.touch()
    assert future.get(LONG_S) == 0


def test_an_error_can_be_read_many_times(one: Any) -> None:
    future = one.fail.call_one()
    first = future.exception(LONG_S)
    assert isinstance(first, ActorError)
    for read in (future.get, future.result):
        with pytest.raises(ActorError) as caught:
            read()
        assert caught.value is first


def test_reading_a_future_within_a_loop_gives_no_warning(one: Any) -> None:
    async def read() -> int:
        return one.add.call_one(1).get(LONG_S)  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(read()) == 1


def test_a_timeout_error_of_a_rank_is_not_a_timeout_of_the_wait(procs: ProcMesh) -> None:
    future = procs.run("raise TimeoutError('theirs')")
    assert isinstance(future.exception(LONG_S), RemoteError)


def test_await(workers: Worker, one: Any) -> None:
    async def main() -> list[Any]:
        gathered = await asyncio.gather(
            workers.rank.call(), one.add.call_one(3), asyncio.wait_for(one.rank.call_one().as_asyncio(), LONG_S)
        )
        with pytest.raises(ActorError):
            await one.fail.call_one()
        with pytest.raises(ActorError):
            await one.fail.call_one().as_asyncio()
        done = one.rank.call_one()
        done.get()
        return [*gathered, await done, await done.as_asyncio()]

    values, *rest = asyncio.run(main())
    assert values.values() == (0, 1, 2, 3)
    assert rest == [3, 0, 0, 0]


def test_awaiting_does_not_block_the_loop(one: Any, tmp_path: Path) -> None:
    async def main() -> int:
        future = one.wait_for.call_one(str(tmp_path / "go"))
        waiting = asyncio.ensure_future(future.as_asyncio())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.02)
        (tmp_path / "go").touch()
        return await waiting  # type: ignore[no-any-return]

    assert asyncio.run(main()) == 0


def test_cancelling_an_await_interrupts_the_ranks(one: Any) -> None:
    async def wait(future: Future[int]) -> int:
        return await future

    async def main() -> Future[int]:
        future: Future[int] = one.wait_for.call_one("/nowhere/at/all")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(future), 0.05)
        return future

    future = asyncio.run(main())
    error = future.exception(LONG_S)
    assert isinstance(error, ActorError)
    assert error.primary.kind == "interrupted"


def test_cancel_ends_all_waits(one: Any) -> None:
    future = one.wait_for.call_one("/nowhere/at/all")
    future.cancel()
    error = future.exception(LONG_S)
    assert isinstance(error, ActorError)
    assert "cancelled by the caller" in str(error)
    assert one.rank.call_one().get(LONG_S) == 0


def test_callbacks_are_called_once_even_if_added_after_the_answer(one: Any) -> None:
    called: list[str] = []
    future = one.rank.call_one()
    future.add_done_callback(lambda: called.append("early"))
    future.get(LONG_S)
    future.add_done_callback(lambda: called.append("late"))
    assert called == ["early", "late"]


def test_spawn_and_calls_return_before_init_is_over(procs: ProcMesh, tmp_path: Path, bar: Bar) -> None:
    class Slow(Actor):
        def __init__(self, path: str) -> None:
            wait_until(Path(path).exists, path)

        @endpoint
        def ok(self) -> bool:
            return True

    with bar.below(1, "spawning and calling"):
        slow = procs.spawn("slow", Slow, str(tmp_path / "go"))
        answer = slow.ok.call()
    assert not slow.initialized.done()  # type: ignore[attr-defined]
    (tmp_path / "go").touch()
    assert answer.get(LONG_S).values() == (True,) * 4
    assert slow.initialized.get() is True  # type: ignore[attr-defined]


# -- stopping


def test_a_stopped_actor_says_why(procs: ProcMesh) -> None:
    worker: Any = procs.spawn("worker", ScalingWorker)
    before = worker.add.call(1)
    assert worker.stop("the experiment is over").get(LONG_S) is None
    assert before.get().values() == (1,) * 4  # the call before the stop has run
    with pytest.raises(SupervisionError, match="the experiment is over"):
        worker.add.call(1).get(LONG_S)
    worker.stop("again").get(LONG_S)
    assert procs.spawn("worker", ScalingWorker).add.call(1).get().values() == (1,) * 4


def test_errors_survive_pickling(workers: Worker) -> None:
    error: Any = workers.fail.call().exception(LONG_S)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.ranks, type(copy.exception)) == (error.ranks, ValueError)


def test_reprs_are_short(procs: ProcMesh, workers: Any) -> None:
    texts: list[Callable[[], str]] = [procs.__repr__, workers.__repr__, workers.add.__repr__, this_host().__repr__]
    for text in texts:
        assert len(text()) < 120
    assert "workers.add" in repr(workers.add)
