"""Values per rank: push and pull on slices, different values for the ranks, and functions that get them."""

from __future__ import annotations

import functools
import os
import threading
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch_kernel.actor import ProcMesh, SupervisionError, ValueMesh, this_host
from monarch_kernel.errors import PayloadError, RemoteError, RemoteInterrupt
from tests.support.actors import Worker
from tests.support.waiting import LONG_S, wait_for_files

PROCS = {"dp": 2, "tp": 2}


# -- push and pull


def test_a_slice_is_pushed_to_and_pulled_from_alone(procs: ProcMesh) -> None:
    procs["x"] = 0
    procs[1]["x"] = 5
    assert procs["x"].values() == (0, 0, 5, 5)
    procs.slice(tp=0)["x"] = 7
    assert procs["x"].values() == (7, 0, 7, 5)
    assert procs[0]["x"] == ValueMesh({"tp": 2}, [7, 0])
    assert procs[[0, 3]]["x"].values() == (7, 5)
    assert procs[1, 1]["x"].item() == 5


def test_a_point_gives_the_rank_there(procs: ProcMesh) -> None:
    procs["x"] = procs.per_rank(list("abcd"))
    for point, value in procs["x"]:
        assert procs[point]["x"].item() == value
        assert procs[point].ranks == (point.rank,)


def test_every_rank_gets_its_own_value_of_a_value_mesh(procs: ProcMesh) -> None:
    procs["mine"] = procs.per_rank([10, 11, 12, 13])
    assert procs.run("mine - rank").get(LONG_S).values() == (10, 10, 10, 10)
    procs["mine"] = procs["mine"]
    assert procs["mine"].values() == (10, 11, 12, 13)
    procs.slice(dp=1)["mine"] = procs["mine"].slice(dp=0)
    assert procs["mine"].values() == (10, 11, 10, 11)


def test_a_list_is_a_value(procs: ProcMesh) -> None:
    procs["x"] = [1, 2, 3, 4]
    assert procs["x"].values() == ([1, 2, 3, 4],) * 4
    procs["x"] = [procs.per_rank(range(4))]
    assert procs.run("x[0].values()").get(LONG_S).values() == ((0, 1, 2, 3),) * 4


def test_values_can_be_sent_before_the_ranks_are_up(procs: ProcMesh) -> None:
    mesh = this_host().spawn_procs({"r": 3}, device="cpu")
    try:
        doubled = mesh.map(lambda x: 2 * x, [1, 2, 3])
        mesh["x"] = mesh.per_rank([7, 8, 9])
        assert doubled.get(LONG_S).values() == (2, 4, 6)
        assert mesh["x"].values() == (7, 8, 9)
    finally:
        mesh.stop(grace_s=0).get(LONG_S)


def test_every_rank_gets_its_own_large_value(procs: ProcMesh) -> None:
    arrays = [np.full(1 << 18, rank) for rank in range(4)]
    procs["big"] = procs.per_rank(arrays)
    assert procs.run("(int(big[0]), int(big.sum()))").get(LONG_S).values() == tuple((r, r << 18) for r in range(4))


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ([1, 2], ValueError, "t.per_rank(): {'dp': 2, 'tp': 2} has 4 ranks and needs as many values, but 2 were given"),
        ([], ValueError, "but 0 were given"),
        (count(), ValueError, "but more were given"),
        ("abcd", TypeError, "t.per_rank(): pass one value for each rank, such as a list, not a str"),
        ({1, 2, 3, 4}, TypeError, "not a set"),
        ({0: 1, 1: 2}, TypeError, "not a dict"),
        (5, TypeError, "t.per_rank(): pass one value for each rank, such as a list, not a int"),
        (
            ValueMesh({"r": 4}, range(4)),
            ValueError,
            "a ValueMesh of extent {'r': 4} has no value for each rank of {'dp'",
        ),
    ],
)
def test_there_must_be_one_value_per_rank(procs: ProcMesh, values: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        procs.per_rank(values)
    assert says in str(caught.value)


def test_the_error_names_the_value_that_cannot_be_pushed(procs: ProcMesh) -> None:
    procs["x"] = "before"
    with pytest.raises(ValueError, match=r"t\['x'\]: a ValueMesh of extent {'r': 2} has no value for each rank"):
        procs["x"] = ValueMesh({"r": 2}, [1, 2])
    with pytest.raises(PayloadError, match="the value for 'x' on rank 2 "):
        procs["x"] = procs.per_rank([1, 2, threading.Lock(), 4])
    with pytest.raises(ValueError, match="0 is no variable name"):
        procs[0] = 1  # type: ignore[index]
    with pytest.raises(TypeError, match=r"a slice or a name, not both; such as t\[0:2\]\['x'\]"):
        procs["x", 0:1]
    assert procs["x"].values() == ("before",) * 4


# -- map


def test_a_function_is_called_with_each_ranks_own_values(procs: ProcMesh) -> None:
    future = procs.map(
        lambda a, b, c: (a, b, c), [1, 2, 3, 4], procs.per_rank(tuple("wxyz")), (n * n for n in range(4))
    )
    assert future.get(LONG_S) == ValueMesh(procs.extent, [(1, "w", 0), (2, "x", 1), (3, "y", 4), (4, "z", 9)])
    assert procs.map(os.getpid).get(LONG_S).values() == procs.run("__import__('os').getpid()").get(LONG_S).values()
    assert procs[1].map(pow, [2, 3], [3, 2]).get(LONG_S).values() == (8, 9)
    assert procs.map(functools.partial(max, 2), range(4)).get(LONG_S).values() == (2, 2, 2, 3)


def test_a_function_runs_on_the_main_thread_after_earlier_messages(procs: ProcMesh) -> None:
    procs["n"] = 1
    first = procs.run("n += 1")
    second = procs.map(_namespace_value, ["n"] * 4)
    assert second.get(LONG_S).values() == (2, 2, 2, 2)
    first.get(LONG_S)
    assert procs.map(_is_main_thread).get(LONG_S).values() == (True,) * 4


def _namespace_value(name: str) -> Any:
    import __main__

    return vars(__main__)[name]


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _of_main(source: str) -> Any:
    """Return a function that is defined in ``__main__``, as in a notebook or script."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(source, scope)
    return scope["f"]


def test_a_function_finds_undefined_names_on_the_rank(procs: ProcMesh) -> None:
    procs["theirs"] = procs.per_rank([0, 1, 2, 3])
    procs["shadowed"] = "rank"
    f = _of_main("shadowed = 'here'\ndef g(): return theirs\ndef f(x): return g() + x, rank, shadowed")
    assert procs.map(f, [10] * 4).get(LONG_S).values() == tuple((10 + r, r, "here") for r in range(4))
    with pytest.raises(RemoteError, match="nowhere"):
        procs.map(_of_main("def f(): return nowhere")).get(LONG_S)


def test_globals_that_a_function_sets_do_not_reach_the_rank(procs: ProcMesh) -> None:
    f = _of_main("def f():\n global leaked\n leaked = 1\n return leaked")
    assert procs.map(f).get(LONG_S).values() == (1,) * 4
    assert procs.run("'leaked' in globals()").get(LONG_S).values() == (False,) * 4


def test_an_error_names_the_rank_and_shows_the_users_line(procs: ProcMesh) -> None:
    with pytest.raises(RemoteError, match=r"_inverse\(\) failed on t") as caught:
        procs.map(_inverse, [1, 0, 2, 0]).get(LONG_S)
    error = caught.value
    assert [point.rank for point in error.reports] == [1, 3]
    assert {point.rank: value for point, value in error.results.items()} == {0: 1.0, 2: 0.5}
    (failure, _), *others = error.groups()
    assert others == []
    assert failure.etype == "ZeroDivisionError"
    frame = failure.user_frame
    assert frame is not None
    assert (frame.function, frame.file) == ("_inverse", __file__)
    assert frame.source[frame.line - frame.first_line].strip() == "return 1 / x"
    assert procs.run("1").get(LONG_S).values() == (1,) * 4


def _inverse(x: int) -> float:
    return 1 / x


def test_an_exit_in_a_function_is_an_error_and_ends_no_rank(procs: ProcMesh) -> None:
    pids = procs.map(os.getpid).get(LONG_S)
    with pytest.raises(RemoteError, match="SystemExit"):
        procs.map(_leave).get(LONG_S)
    assert procs.map(_fork).get(LONG_S).values() == (0,) * 4
    assert procs.map(os.getpid).get(LONG_S) == pids


def _leave() -> None:
    raise SystemExit(3)


def _fork() -> int:
    if (child := os.fork()) == 0:
        return -1  # the forked child reaches the end of the call, too, and must not answer
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_an_interrupt_ends_a_function_and_the_rank_keeps_its_state(procs: ProcMesh, tmp_path: Path) -> None:
    procs["kept"] = 3
    future = procs.map(_touch_and_spin, [str(tmp_path / str(rank)) for rank in range(4)])
    wait_for_files(tmp_path, "0", "1", "2", "3")
    future.interrupt()
    with pytest.raises((RemoteError, RemoteInterrupt)) as caught:
        future.get(LONG_S)
    assert "KeyboardInterrupt" in str(caught.value)
    assert procs["kept"].values() == (3,) * 4


def _touch_and_spin(path: str) -> None:
    Path(path).touch()
    while True:
        pass


async def _is_async() -> None:
    pass


@pytest.mark.parametrize(
    ("function", "values", "error", "says"),
    [
        (5, [], TypeError, "map() calls a function, not a int"),
        (_is_async, [], TypeError, "_is_async is async; await in a cell or in an actor"),
        (_inverse, [], TypeError, "map() calls _inverse with 0 values: missing a required argument: 'x'"),
        (_inverse, [[1, 2, 3, 4]] * 2, TypeError, "map() calls _inverse with 2 values: too many positional arguments"),
        (_inverse, [[1, 2]], ValueError, "t.map(): values 1: {'dp': 2, 'tp': 2} has 4 ranks"),
        (_inverse, [7], TypeError, "t.map(): values 1: pass one value for each rank, such as a list, not a int"),
        (_inverse, [[1, 2, 3, threading.Lock()]], PayloadError, "what _inverse is called with on rank 3"),
    ],
)
def test_a_misuse_of_map_is_refused_before_anything_is_sent(
    procs: ProcMesh, function: Any, values: list[Any], error: type[Exception], says: str
) -> None:
    before = next(procs.runtime._ids)
    with pytest.raises(error) as caught:
        procs.map(function, *values)
    assert says in str(caught.value)
    assert next(procs.runtime._ids) == before + 1


@pytest.mark.parametrize(
    ("code", "args", "error", "says"),
    [
        (5, [], TypeError, "code must be a str or a function, not 5 (of type int)"),
        ("1 + 1", [2], TypeError, "run() takes arguments for a function, and none for code"),
        (_is_async, [], TypeError, "run() calls plain functions, and _is_async is async"),
        (_inverse, [1, 2], TypeError, "run() calls _inverse with 2 values: too many positional arguments"),
        (_inverse, [{"a": [threading.Lock()]}], PayloadError, "args[0]['a'][0]"),
    ],
)
def test_a_misuse_of_run_is_refused_before_anything_is_sent(
    procs: ProcMesh, code: Any, args: list[Any], error: type[Exception], says: str
) -> None:
    before = next(procs.runtime._ids)
    with pytest.raises(error) as caught:
        procs.run(code, *args)
    assert says in str(caught.value)
    assert next(procs.runtime._ids) == before + 1


def test_run_calls_a_function_with_the_same_arguments_on_every_rank(procs: ProcMesh) -> None:
    assert procs.run(_inverse, 4).get(LONG_S).values() == (0.25,) * 4
    assert procs.run(lambda x, *, scale: x * scale, 2, scale=10).get(LONG_S).values() == (20,) * 4
    with pytest.raises(RemoteError, match=r"_inverse\(\) failed on t"):
        procs.run(_inverse, 0).get(LONG_S)


def test_a_result_that_cannot_be_sent_is_an_error(procs: ProcMesh) -> None:
    with pytest.raises(RemoteError, match="the result can't be pickled"):
        procs.map(threading.Lock).get(LONG_S)


def test_output_has_arrived_when_the_future_resolves(procs: ProcMesh, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (lambda: procs.map(print, ["hello"] * 4), lambda: procs.run("print('hello')")):
        run().get(LONG_S)
        out = capsys.readouterr().out
        # Equal lines may be merged, depending on their timing.
        assert out.count(" hello\n") == len(out.splitlines()) >= 1
        assert sum(map(_ranks_named, out.splitlines())) == 4


def _ranks_named(line: str) -> int:
    spans = line[len("t[") : line.index("]")].split(",")
    return sum(
        int(span.partition("-")[2] or span.partition("-")[0]) - int(span.partition("-")[0]) + 1 for span in spans
    )


# -- a stopped mesh


def test_spawning_on_a_stopped_mesh_says_so_at_once(procs: ProcMesh) -> None:
    mesh = this_host().spawn_procs({"r": 2}, name="gone", device="cpu")
    mesh.initialized.get(LONG_S)
    mesh.stop("out of budget", grace_s=0).get(LONG_S)
    with pytest.raises(SupervisionError, match="out of budget") as caught:
        mesh.spawn("worker", Worker)
    assert "spawning worker on gone failed" in str(caught.value)
    assert [point.rank for point in caught.value.reports] == [0, 1]


def test_deleting_a_variable_through_the_mesh_raises(procs: ProcMesh) -> None:
    with pytest.raises(TypeError, match=r"with a cell on the ranks: %remote t del x"):
        del procs["x"]
